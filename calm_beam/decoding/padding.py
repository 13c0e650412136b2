"""Sizes that rows, prompts and buffers are padded to: few, so that XLA compiles rarely."""

from collections.abc import Iterable, Iterator, Mapping, Sequence

import numpy as np

_NARROWEST = 32
_FEWEST_ROWS = 16
_FEWEST_STEPS = 16
_FEWEST_PLACES = 8


def padded(values: np.ndarray, size: int, *, fill: int = 0) -> np.ndarray:
    """Returns int32 values with `fill` added along the first axis up to a size."""
    longer = np.full((size, *values.shape[1:]), fill, np.int32)
    longer[: len(values)] = values
    return longer


def buffer_bucket(count: int) -> int:
    """Returns the next of 1, 2, 3, 4, 6, 8, 12, ...: at most a third of a buffer is there for nothing."""
    power = 1 << (count - 1).bit_length()
    return power * 3 // 4 if power > 2 and count <= power * 3 // 4 else power


def fewest_rows(most: int) -> int:
    """Returns the smallest size that rows are padded to, where there are never more than `most`."""
    return min(_FEWEST_ROWS, buffer_bucket(most))


def row_parts(count: int, *, most: int, fewest: int = _FEWEST_ROWS) -> Iterator[tuple[slice, int]]:
    """Yields parts of rows that are run together, and the size each is padded to: 16, 64, 256, ..., below 4 * `most`.

    Few sizes, since each is compiled for every step; and little padding, since rows are cut where less than half of a
    size would be filled.

    Args:
      count: Rows, at least 0.
      most: Rows of a part, but for the smallest size.
      fewest: The smallest size, which the others are multiples of.

    >>> [(part.start, part.stop, size) for part, size in row_parts(340, most=256)]
    [(0, 256, 256), (256, 320, 64), (320, 336, 16), (336, 340, 16)]
    """
    start = 0
    while start < count:
        size = fewest
        while size < count - start and 4 * size <= most:
            size *= 4
        if size > fewest and 2 * (count - start) < size:
            size //= 4
        stop = min(count, start + size)
        yield slice(start, stop), size
        start = stop


def path_lengths(steps: np.ndarray) -> np.ndarray:
    """Returns for each row the next of 16, 32, 64, ... above its step: the length of path that it is run with."""
    lengths = np.full(len(steps), _FEWEST_STEPS)
    while (short := lengths <= steps).any():
        lengths[short] *= 2
    return lengths


def bucket_width(length: int, max_input_length: int) -> int:
    """Returns the width that a prompt is padded to: the next of 32, 64, 128, ..., at most `max_input_length`.

    It depends on the prompt alone, so that it does not matter beside which others it is decoded. Only a budget with no
    room for every width makes some wider (`joined_widths`).

    >>> bucket_width(33, 512), bucket_width(33, 48)
    (64, 48)
    """
    width = _NARROWEST
    while width < length:
        width *= 2
    return min(width, max_input_length)


def widths_up_to(max_input_length: int) -> tuple[int, ...]:
    """Returns every width that prompts are padded to, ascending.

    >>> widths_up_to(100)
    (32, 64, 100)
    """
    return tuple(sorted({bucket_width(length, max_input_length) for length in range(1, max_input_length + 1)}))


def members_by_width(prompts: Sequence[Sequence[int]], max_input_length: int) -> dict[int, list[int]]:
    """Returns the indices of the prompts that are padded to each width, ascending in both.

    Raises:
      ValueError: If a prompt is empty or too long.
    """
    buckets: dict[int, list[int]] = {}
    for index, prompt in enumerate(prompts):
        if not 1 <= len(prompt) <= max_input_length:
            raise ValueError(f"prompts must have 1 to {max_input_length} tokens, prompt {index} has {len(prompt)}.")
        buckets.setdefault(bucket_width(len(prompt), max_input_length), []).append(index)
    return dict(sorted(buckets.items()))


def joined_widths(members_by_width: Mapping[int, Iterable[int]], *, tokens: int) -> dict[int, list[int]]:
    """Returns prompts by width, the narrowest padded to the next until one of each width fits; one width is left.

    >>> joined_widths({32: [0, 3], 64: [1], 128: [2]}, tokens=200)
    {64: [0, 1, 3], 128: [2]}
    """
    joined = {width: list(members) for width, members in sorted(members_by_width.items())}
    while len(joined) > 1 and sum(joined) > tokens:
        narrowest, wider, *_ = joined
        joined[wider] = sorted(joined[wider] + joined.pop(narrowest))
    return joined


def places_by_width(counts: Mapping[int, int], *, tokens: int, slots: int) -> dict[int, int]:
    """Returns how many prompts of each width are held at a time: one, and equal parts of the tokens beyond that.

    Args:
      counts: How many prompts there are of each width, of which one each has room.
      tokens: Most positions, all widths together; exceeded only where one prompt of one width does.
      slots: Most prompts of a width.
    """
    part = max(0, tokens - sum(counts)) // len(counts)
    return {
        width: min(slots, buffer_bucket(max(count, _FEWEST_PLACES)), 1 + part // width)
        for width, count in counts.items()
    }
