"""Compilation: options of XLA's compiler, the cache on disk, the time it takes, and the sizes that are compiled.

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
"""Options of XLA's compiler for decoding on a GPU.

Autotuning is off. By default, XLA times several ways to multiply matrices and keeps the fastest. Two compilations of
one program may then round differently, so that the served model is not the calibrated one; and tuning takes a minute
where compiling takes seconds.

The vendor's library computes matrix products. On an H100, kernels in which XLA fuses a product with its neighbours
rounded a row differently in batches and in sweeps, and were slower. The library chooses by the shapes alone, which are
those of a tile.
"""

compiled = functools.partial(jax.jit, compiler_options=GPU_OPTIONS)
"""`jax.jit` for decoding; devices other than GPUs ignore the options."""


def use_compilation_cache() -> None:
    """Makes JAX keep compiled code in `cache_folder`.

    Each kind of processor has its own folder: code compiled for another may not run. Does nothing if JAX has a cache
    already, or the folder cannot be created.
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
    """Adds up the time that JAX spends tracing, lowering and compiling while the context is open."""

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
        """Returns the seconds so far. Nested spans, as of a function traced inside another, count once."""
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
# Fewest prompts for which a common prefix is prefilled once: for fewer, compiling it costs more than it saves.
_FEWEST_SHARING = 8


def padded(values: np.ndarray, size: int, *, fill: int = 0) -> np.ndarray:
    """Returns int32 values with `fill` added along the first axis up to a size."""
    longer = np.full((size, *values.shape[1:]), fill, np.int32)
    longer[: len(values)] = values
    return longer


def buffer_bucket(count: int) -> int:
    """Returns the next of 1, 2, 3, 4, 6, 8, 12, ...: at most a third of a buffer is unused."""
    power = 1 << (count - 1).bit_length()
    return power * 3 // 4 if power > 2 and count <= power * 3 // 4 else power


def parts_of(count: int, most: int) -> Iterator[slice]:
    """Yields slices of `count` rows, at most `most` in each.

    >>> [(part.start, part.stop) for part in parts_of(150, 64)]
    [(0, 64), (64, 128), (128, 150)]
    """
    for start in range(0, count, most):
        yield slice(start, min(count, start + most))


def encoded_rows(count: int) -> int:
    """Returns how many of `count` admitted prompts one prefill call takes, where all calls have one size.

    Prompts that are admitted together may have several encoded widths. With calls of a quarter, the last call of each
    width has little padding; calls of fewer than 16 prompts cost more per prompt.

    >>> [encoded_rows(count) for count in (2, 16, 32, 256)]
    [2, 16, 16, 64]
    """
    return min(count, max(_FEWEST_ENCODED, count // 4))


def admitted_together(count: int) -> int:
    """Returns how many of `count` prompts the next prefill call takes: 1, 4, 16, 64, ..., so that no row is padding.

    >>> [admitted_together(count) for count in (1, 3, 4, 20, 64)]
    [1, 1, 4, 16, 64]
    """
    return 1 << (count.bit_length() - 1 & ~1)


def bucket_width(length: int, max_input_length: int) -> int:
    """Returns the width that a prompt is padded to: the next of 32, 64, 128, ..., at most `max_input_length`.

    It depends on the prompt alone, not on the others in its batch. Only a budget with no room for every width makes
    some wider (`joined_widths`).

    >>> bucket_width(33, 512), bucket_width(33, 48)
    (64, 48)
    """
    return min(_bucket(length), max_input_length)


def encoded_width(length: int, width: int) -> int:
    """Returns the width at which a prompt is prefilled: 16, or the next of 32, 48, 64, 96, ..., at most `width`.

    The KV cache has few widths, since every step is compiled for each. Prefill is compiled on its own, in half a second
    a width, so its widths may be finer and have less padding. This width too depends on the prompt alone.

    Args:
      length: Tokens of the prompt, at most `width`.
      width: The width that its keys and values are padded to.

    >>> [encoded_width(length, 64) for length in (9, 17, 33, 49)], encoded_width(35, 40)
    ([16, 32, 48, 64], 40)
    """
    bucket = _bucket(length)
    finer = bucket // 2 if bucket == _NARROWEST else bucket * 3 // 4
    return min(finer if length <= finer else bucket, width)


def encoded_widths(width: int, *, above: int = 0) -> tuple[int, ...]:
    """Returns every width at which prompts of more than `above` and at most `width` tokens are prefilled, ascending.

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
    """Returns the common prefix of prompts padded to a width, if prefilling it once saves much; else nothing.

    Its length is a multiple of 32, since each length is compiled separately, and shorter than every prompt.

    Args:
      prompts: At least one.
      width: The width that they are padded to.

    >>> few_shot = [7] * 70
    >>> len(common_prefix([[*few_shot, index] for index in range(20)], width=128))
    64
    """
    if len(prompts) < _FEWEST_SHARING:
        return ()
    # All prompts share the prefix that the first and the last in sorted order share.
    first, last = min(map(tuple, prompts)), max(map(tuple, prompts))
    most = min(len(prompt) for prompt in prompts) - 1
    pairs = zip(first[:most], last, strict=False)
    length = next((place for place, (one, other) in enumerate(pairs) if one != other), most)
    length -= length % _NARROWEST
    return first[:length] if length >= width / 4 else ()


def joined_widths(members_by_width: Mapping[int, Iterable[int]], *, tokens: int) -> dict[int, list[int]]:
    """Returns prompts by width, joining the narrowest width to the next until one prompt of each width fits.

    At least one width is left.

    >>> joined_widths({32: [0, 3], 64: [1], 128: [2]}, tokens=200)
    {64: [0, 1, 3], 128: [2]}
    """
    joined = {width: list(members) for width, members in sorted(members_by_width.items())}
    while len(joined) > 1 and sum(joined) > tokens:
        narrowest, wider, *_ = joined
        joined[wider] = sorted(joined[wider] + joined.pop(narrowest))
    return joined


def places_by_width(counts: Mapping[int, int], *, tokens: int, slots: int) -> dict[int, int]:
    """Returns how many prompts of each width are held at a time: one, and an equal share of the remaining tokens.

    Args:
      counts: How many prompts there are of each width; one of each fits.
      tokens: Most positions of all widths together; exceeded only if a single prompt of the only width exceeds it.
      slots: Most prompts of a width.
    """
    part = max(0, tokens - sum(counts)) // len(counts)
    return {
        width: min(slots, buffer_bucket(max(count, _FEWEST_PLACES)), 1 + part // width)
        for width, count in counts.items()
    }
