"""Widths that prompts are padded to: few, so that XLA compiles rarely."""

from collections.abc import Mapping, Sequence

from .shapes import buffer_bucket

_NARROWEST = 32


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


def joined_widths(members_by_width: Mapping[int, Sequence[int]], *, tokens: int) -> dict[int, list[int]]:
    """Returns prompts by width, the narrowest padded to the next until one of each width fits; one width is left.

    >>> joined_widths({32: [0, 3], 64: [1], 128: [2]}, tokens=200)
    {64: [0, 1, 3], 128: [2]}
    """
    joined = {width: list(members) for width, members in sorted(members_by_width.items())}
    while len(joined) > 1 and sum(joined) > tokens:
        narrowest, wider, *_ = joined
        joined[wider] = sorted(joined[wider] + joined.pop(narrowest))
    return joined


def places_by_width(members_by_width: Mapping[int, Sequence[int]], *, tokens: int, slots: int) -> dict[int, int]:
    """Returns how many prompts of each width are held at a time: one, and equal parts of the tokens beyond that.

    Args:
      members_by_width: As `joined_widths` returns it.
      tokens: Most positions, all widths together; exceeded only where one prompt of one width does.
      slots: Most prompts of a width.
    """
    part = max(0, tokens - sum(members_by_width)) // len(members_by_width)
    return {
        width: min(slots, buffer_bucket(len(members)), 1 + part // width) for width, members in members_by_width.items()
    }
