"""How much a sweep may hold at a time, and how memory is kept between calls of XLA and given back after a sweep."""

import ctypes
import dataclasses
import os
from typing import Any

import jax

from calm_beam.model import T5Config

# Share of the memory that is free when a decoder starts. Of an accelerator, the rest is for weights and intermediate
# results; a host may run several decoders.
_DEVICE_SHARE = 0.6
_HOST_SHARE = 0.2
# Prompts at a time where memory is no limit: more rows a call are not faster, and the last calls run emptier.
_HOST_SLOTS = 256
_DEVICE_SLOTS = 2048
_FLOAT_BYTES = 4
# glibc's parameters, of malloc.h, and the largest value it takes for the first.
_M_TRIM_THRESHOLD, _M_TOP_PAD, _M_MMAP_THRESHOLD = -1, -2, -3
_LARGEST_MMAP_THRESHOLD = 32 << 20


@dataclasses.dataclass(frozen=True, kw_only=True)
class Budget:
    """What a sweep may hold at a time.

    Attributes:
      slots: Prompts.
      tokens: Positions whose keys and values are held by every layer: those of the sources, padded, and one for every
        token of every group of lanes.
    """

    slots: int
    tokens: int

    def source_tokens(self, outputs: int) -> int:
        """Returns how many of the tokens sources may take: a third, or what is left by the outputs of one prompt."""
        return min(self.tokens // 3, self.tokens - outputs)

    def halved(self) -> "Budget":
        """Returns half of it, of each at least 1."""
        return Budget(slots=max(1, self.slots // 2), tokens=max(1, self.tokens // 2))


def choose_budget(
    config: T5Config,
    device: jax.Device,
    *,
    lanes: int,
    steps: int,
    source: int,
    batch_size: int | None,
    token_budget: int | None,
) -> Budget:
    """Returns what a sweep may hold on a device, as far as the user leaves it open.

    Args:
      config: Sizes of the model.
      device: Where it runs.
      lanes: Lanes of a prompt.
      steps: Most tokens of an output.
      source: Most tokens of a prompt.
      batch_size: Most prompts at a time; None for as many as memory and speed recommend.
      token_budget: Positions; None for a share of the memory that is free.

    Raises:
      ValueError: If the token budget has no room for one prompt that needs the most.
    """
    needed = checked_least_tokens(token_budget, lanes=lanes, steps=steps, source=source)
    is_host = device.platform == "cpu"
    free = _free_bytes(device) * (_HOST_SHARE if is_host else _DEVICE_SHARE)
    # Keys and values of a position at every layer; states of a slot's lanes before and after every layer.
    position = config.num_decoder_layers * 2 * config.num_heads * config.head_dim * _FLOAT_BYTES
    states = (config.num_decoder_layers + 1) * lanes * config.emb_dim * _FLOAT_BYTES
    most = batch_size or (_HOST_SLOTS if is_host else _DEVICE_SLOTS)
    slots = max(1, min(most, int(free / 4 / states)))
    tokens = token_budget or max(needed, int(free / 2 / position))
    return Budget(slots=slots, tokens=tokens)


def checked_least_tokens(token_budget: int | None, *, lanes: int, steps: int, source: int) -> int:
    """Returns the positions that one prompt can need at most, which a token budget has to have room for.

    Arguments and errors are those of `choose_budget`, but no device is looked for.
    """
    needed = source + lanes * steps
    if token_budget is not None and token_budget < needed:
        raise ValueError(
            f"token_budget must be at least {needed}, got {token_budget}: one prompt of {source} tokens and its "
            f"outputs of {steps} in {lanes} lanes can need as many. Raise it, or lower max_input_length, "
            "max_decode_length or the number of thresholds."
        )
    return needed


def _free_bytes(device: jax.Device) -> int:
    if device.platform == "cpu":
        return os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    statistics = device.memory_stats() or {}
    # Devices that do not tell are taken for small ones.
    return statistics.get("bytes_limit", 8 << 30) - statistics.get("bytes_in_use", 0)


def keep_freed_memory() -> None:
    """Has this process keep what XLA frees, for its next call.

    On CPU, XLA allocates the intermediate results of every call anew. By default glibc returns such blocks to the
    system and has every page faulted in again, which makes the large steps of a decoder two to five times slower. Does
    nothing where the C library is another.
    """
    mallopt = _glibc("mallopt")
    if mallopt:
        mallopt(_M_MMAP_THRESHOLD, _LARGEST_MMAP_THRESHOLD)
        mallopt(_M_TRIM_THRESHOLD, 2**31 - 1)
        mallopt(_M_TOP_PAD, 64 << 20)


def return_freed_memory() -> None:
    """Gives the system back what this process has freed.

    Meant for the end of a sweep: the buffers of the next one are allocated anew, and where they do not fit into the
    gaps that were kept, the process would grow with every sweep. Does nothing where the C library is another than
    glibc.
    """
    malloc_trim = _glibc("malloc_trim")
    if malloc_trim:
        malloc_trim(ctypes.c_size_t(0))


def _glibc(name: str) -> Any:
    """Returns a function of the C library, None where there is none of that name."""
    try:
        return getattr(ctypes.CDLL(None), name, None)
    except OSError:
        return None
