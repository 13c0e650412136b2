"""Compiled code: how it is made, kept on disk between runs, and what time that takes.

Rows, prompts and buffers are padded to few sizes, so that XLA compiles rarely.
"""

import functools
import hashlib
import pathlib
import platform
from collections.abc import Iterable, Iterator, Mapping, Sequence
from types import TracebackType

import jax
import numpy as np

from calm_beam.storage import cache_folder

_COMPILING = "/jax/core/compile/"

GPU_OPTIONS = {"xla_gpu_autotune_level": 0, "xla_gpu_enable_triton_gemm": False}
"""Options of XLA's compiler for whatever decodes on a GPU.

Nothing is chosen by time. By default, XLA times several ways to multiply matrices and keeps the fastest. Two
compilations of one program may then round differently, so that what was calibrated is not what is served; and it takes
a minute where compiling takes seconds.

Products are the vendor's library's. Kernels that XLA makes of a product together with what stands around it rounded a
row differently in batches and in sweeps, on an H100, and were slower. The library chooses by the shapes alone, which
are those of a tile.
"""

compiled = functools.partial(jax.jit, compiler_options=GPU_OPTIONS)
"""`jax.jit`, for whatever decodes; other devices do not know the options, and take them."""


def use_compilation_cache() -> None:
    """Has JAX keep what it compiles in `cache_folder`.

    A folder is for one kind of processor: code compiled for another may not run. Does nothing if JAX has been given a
    cache already, or there is no place for one.
    """
    if jax.config.values["jax_compilation_cache_dir"]:
        return
    folder = cache_folder() / "compiled" / _processor()
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError:
        return
    jax.config.update("jax_compilation_cache_dir", str(folder))
    # Steps of a decoder compile in a few tenths of a second, but there are dozens.
    jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.05)


class CompileTime:
    """Adds up the time in which JAX traces, lowers or compiles, while the context is open."""

    def __init__(self) -> None:
        self._spans: list[tuple[float, float]] = []

    def __enter__(self) -> "CompileTime":
        jax.monitoring.register_event_time_span_listener(self._add)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        jax.monitoring.unregister_event_time_span_listener(self._add)

    def _add(self, event: str, start_time: float, end_time: float, **_: str | int) -> None:
        if event.startswith(_COMPILING):
            self._spans.append((start_time, end_time))

    def seconds(self) -> float:
        """Returns the seconds so far. Spans within others, as a function traced inside another has, count once."""
        total, reached = 0.0, 0.0
        for start, end in sorted(self._spans):
            total += max(0.0, end - max(start, reached))
            reached = max(reached, end)
        return total


def _processor() -> str:
    """Returns a name that differs between processors with different instructions."""
    try:
        lines = pathlib.Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        lines = []
    features = sorted({line for line in lines if line.startswith(("flags", "Features", "model name"))})
    return hashlib.sha256("\n".join([platform.machine(), *features]).encode()).hexdigest()[:16]


_NARROWEST = 32
_FEWEST_PLACES = 8
_FEWEST_ENCODED = 16
# Prompts for which a common beginning is gone through once: for fewer, that saves less than compiling it takes.
_FEWEST_SHARING = 8


def padded(values: np.ndarray, size: int, *, fill: int = 0) -> np.ndarray:
    """Returns int32 values with `fill` added along the first axis up to a size."""
    longer = np.full((size, *values.shape[1:]), fill, np.int32)
    longer[: len(values)] = values
    return longer


def buffer_bucket(count: int) -> int:
    """Returns the next of 1, 2, 3, 4, 6, 8, 12, ...: at most a third of a buffer is there for nothing."""
    power = 1 << (count - 1).bit_length()
    return power * 3 // 4 if power > 2 and count <= power * 3 // 4 else power


def parts_of(count: int, most: int) -> Iterator[slice]:
    """Yields parts of rows, at most so many in each.

    >>> [(part.start, part.stop) for part in parts_of(150, 64)]
    [(0, 64), (64, 128), (128, 150)]
    """
    for start in range(0, count, most):
        yield slice(start, min(count, start + most))


def encoded_rows(count: int) -> int:
    """Returns how many prompts the encoder takes at once where calls are of one size, of `count` that are admitted.

    Prompts that are admitted together may have several encoded widths. In calls of a quarter, little of the last call
    of each is padding; calls of fewer than 16 prompts take longer for each.

    >>> [encoded_rows(count) for count in (2, 16, 32, 256)]
    [2, 16, 16, 64]
    """
    return min(count, max(_FEWEST_ENCODED, count // 4))


def admitted_together(count: int) -> int:
    """Returns how many of `count` prompts the encoder takes at once: 1, 4, 16, 64, ..., so that none is padding.

    >>> [admitted_together(count) for count in (1, 3, 4, 20, 64)]
    [1, 1, 4, 16, 64]
    """
    return 1 << (count.bit_length() - 1 & ~1)


def bucket_width(length: int, max_input_length: int) -> int:
    """Returns the width that a prompt is padded to: the next of 32, 64, 128, ..., at most `max_input_length`.

    It depends on the prompt alone, so that it does not matter beside which others it is decoded. Only a budget with no
    room for every width makes some wider (`joined_widths`).

    >>> bucket_width(33, 512), bucket_width(33, 48)
    (64, 48)
    """
    return min(_bucket(length), max_input_length)


def encoded_width(length: int, width: int) -> int:
    """Returns the width at which a prompt is gone through: 16, or the next of 32, 48, 64, 96, ..., at most `width`.

    What prompts leave is kept at few widths, since every step is compiled for each; going through prompts is compiled
    for itself, in half a second a width. So a width may be finer here, and less is padding. This one too depends on the
    prompt alone.

    Args:
      length: Tokens of the prompt, at most `width`.
      width: What its keys and values are padded to.

    >>> [encoded_width(length, 64) for length in (9, 17, 33, 49)], encoded_width(35, 40)
    ([16, 32, 48, 64], 40)
    """
    bucket = _bucket(length)
    finer = bucket // 2 if bucket == _NARROWEST else bucket * 3 // 4
    return min(finer if length <= finer else bucket, width)


def encoded_widths(width: int, *, above: int = 0) -> tuple[int, ...]:
    """Returns every width at which prompts of more than `above` and at most `width` tokens are gone through, ascending.

    >>> encoded_widths(32), encoded_widths(100, above=64)
    ((16, 32), (96, 100))
    """
    return tuple(sorted({encoded_width(length, width) for length in range(above + 1, width + 1)}))


def _bucket(length: int) -> int:
    width = _NARROWEST
    while width < length:
        width *= 2
    return width


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


def common_prefix(prompts: Sequence[Sequence[int]], *, width: int) -> Sequence[int]:
    """Returns what prompts that are padded to a width begin with, if going through it once saves much; else nothing.

    It has a multiple of 32 tokens, since each length is compiled for itself, and each prompt goes on after it.

    Args:
      prompts: At least one.
      width: What they are padded to.

    >>> few_shot = [7] * 70
    >>> len(common_prefix([[*few_shot, index] for index in range(20)], width=128))
    64
    """
    if len(prompts) < _FEWEST_SHARING:
        return ()
    # What the first and the last in order share, all share.
    first, last = min(map(tuple, prompts)), max(map(tuple, prompts))
    most = min(len(prompt) for prompt in prompts) - 1
    pairs = zip(first[:most], last, strict=False)
    length = next((place for place, (one, other) in enumerate(pairs) if one != other), most)
    length -= length % _NARROWEST
    return first[:length] if length >= width / 4 else ()


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
