"""Memory: how much a sweep may hold at a time, how much it needs, and keeping or returning freed memory of XLA."""

import ctypes
import dataclasses
import math
from typing import TYPE_CHECKING, Any

from calm_beam.exits.head_forms import certified_bytes
from calm_beam.model import ModelConfig, architecture_of, parameter_shapes
from calm_beam.model.sharding import Division, values_per_device
from calm_beam.precision import FLOAT32, Precision
from calm_beam.storage.free_memory import available_bytes, has_accelerators

if TYPE_CHECKING:
    import jax

    from .device_groups import DeviceGroup

# Share of the memory that is free when a decoder starts. On an accelerator, the rest is for weights and
# intermediate results; a host may run several decoders.
_DEVICE_SHARE = 0.6
_HOST_SHARE = 0.2
# Prompts at a time if memory allows: more rows per call are not faster, and leave the last calls emptier.
_HOST_SLOTS = 256
_DEVICE_SLOTS = 2048
_FLOAT_BYTES = 4
_UNITS = ((2**30, "GiB"), (2**20, "MiB"), (2**10, "KiB"))
# glibc's parameters, from malloc.h, and the largest value of the last one.
_M_TRIM_THRESHOLD, _M_TOP_PAD, _M_MMAP_THRESHOLD = -1, -2, -3
_LARGEST_MMAP_THRESHOLD = 32 << 20


@dataclasses.dataclass(frozen=True, kw_only=True)
class Budget:
    """The most that a sweep may hold at a time.

    Attributes:
      slots: Prompts.
      tokens: Positions of the KV cache, in every layer: those of the sources, padded, and one for every token of every
        group of branches.
    """

    slots: int
    tokens: int

    def source_tokens(self, outputs: int) -> int:
        """Returns how many of the tokens are for sources: a third, or less if one prompt's outputs need more."""
        return min(self.tokens // 3, self.tokens - outputs)

    def halved(self) -> "Budget":
        """Returns half of the budget, at least 1 of each."""
        return Budget(slots=max(1, self.slots // 2), tokens=max(1, self.tokens // 2))


def choose_budget(
    config: ModelConfig,
    group: "DeviceGroup",
    *,
    num_branches: int,
    steps: int,
    source: int,
    batch_size: int | None,
    max_cache_tokens: int | None,
    precision: Precision,
) -> Budget:
    """Returns the budget of a sweep on a group of devices, with defaults where the user gives no numbers.

    Args:
      config: Sizes of the model.
      group: The devices that decode.
      num_branches: Branches of a prompt.
      steps: Most tokens of an output.
      source: Most tokens of a prompt.
      batch_size: Most prompts at a time; None to choose by memory and speed.
      max_cache_tokens: Positions of the KV cache; None for a share of the free memory.
      precision: Its type is that of states, keys and values.

    Raises:
      ValueError: If the KV cache has no room for one prompt that needs the most.
    """
    needed = checked_least_tokens(max_cache_tokens, num_branches=num_branches, steps=steps, source=source)
    device = group.devices[0]
    is_host = device.platform == "cpu"
    free = _free_bytes(device) * (_HOST_SHARE if is_host else _DEVICE_SHARE)
    # Bytes of a position's keys and values at every layer; below, of the states of a slot's branches at every layer.
    position = _position_numbers(config) * precision.number_bytes
    if not is_host and "keys_values" not in group.division.whole:
        # Each accelerator holds its part alone; the devices of a host share one memory.
        position //= group.division.parts
    states = (config.num_decoder_layers + 1) * config.emb_dim * precision.number_bytes * num_branches
    most = batch_size or (_HOST_SLOTS if is_host else _DEVICE_SLOTS)
    # Bookkeeping of a slot's branches on the host: paths at every layer, and outputs.
    outputs = num_branches * steps * (config.num_decoder_layers + 4) * _FLOAT_BYTES
    slots = max(1, min(most, int(free / 4 / states), int(free / 4 / outputs)))
    tokens = max_cache_tokens or max(needed, int(free / 2 / position))
    return Budget(slots=slots, tokens=tokens)


def checked_least_tokens(max_cache_tokens: int | None, *, num_branches: int, steps: int, source: int) -> int:
    """Returns the most positions that one prompt can need, for which the KV cache must have room.

    Arguments and errors are those of `choose_budget`; it needs no device.
    """
    needed = source + num_branches * steps
    if max_cache_tokens is not None and max_cache_tokens < needed:
        raise ValueError(
            f"max_cache_tokens must be at least {needed}, got {max_cache_tokens}: one prompt of {source} tokens and "
            f"its outputs of {steps} in {num_branches} branches can need as many. Raise it, or lower max_input_length, "
            "max_decode_length or the number of thresholds."
        )
    return needed


@dataclasses.dataclass(frozen=True, kw_only=True)
class Need:
    """The least bytes that decoding takes, however few prompts are decoded at a time.

    Attributes:
      weights: The model, and the array that is being read.
      heads: Certified heads, at most.
      packed: The second copy of weights that native code holds.
      outputs: The longest output in all branches: keys and values, and biases by position.
      source: The longest prompt: intermediate results of its prefill, and its keys and values.
    """

    weights: int
    heads: int
    outputs: int
    source: int
    packed: int = 0

    @property
    def total(self) -> int:
        """The sum of all parts."""
        return self.weights + self.heads + self.packed + self.outputs + self.source


@dataclasses.dataclass(frozen=True, kw_only=True)
class Demand:
    """The sizes and settings of decoding that determine its memory.

    Attributes:
      num_branches: Branches of a prompt, the full model's included.
      steps: Most tokens of an output.
      source: Most tokens of a prompt.
      rows: Prompts that are decoded together even if memory is short.
      max_cache_tokens: Positions of the KV cache, if the user gives a number.
      exit_head: One of `EXIT_HEADS`, or the form that decides.
      engine: Name of the engine that decodes: `native` holds a second copy of weights.
      precision: Its type is that of weights, states, keys and values.
    """

    num_branches: int
    steps: int
    source: int
    rows: int = 1
    max_cache_tokens: int | None = None
    exit_head: str = "exact"
    engine: str = "xla"
    precision: Precision = FLOAT32


def least_need(config: ModelConfig, demand: Demand) -> Need:
    """Returns the least bytes that decoding takes.

    Args:
      config: Sizes of the model.
      demand: Sizes and settings of decoding.
    """
    num_branches, steps, source, rows = demand.num_branches, demand.steps, demand.source, demand.rows
    precision = demand.precision
    sizes = [math.prod(shape) for shape in parameter_shapes(config).values()]
    weights = sum(sizes) + max(sizes)
    position, architecture = _position_numbers(config), architecture_of(config)
    by_position = architecture.position_numbers(config, steps=steps)
    # Includes the bookkeeping of the branches.
    others = rows * num_branches * steps * (config.num_decoder_layers + 6) + by_position
    prefill = architecture.prefill_numbers(config, rows=rows, source=source)
    return Need(
        weights=weights * precision.number_bytes,
        heads=_heads_bytes(config, demand.exit_head, precision),
        packed=_packed_bytes(config, demand.exit_head) if demand.engine == "native" else 0,
        outputs=rows * num_branches * steps * position * precision.number_bytes + others * _FLOAT_BYTES,
        source=rows * source * position * precision.number_bytes + prefill * _FLOAT_BYTES,
    )


def check_memory(config: ModelConfig, demand: Demand, *, copies: int = 1) -> None:
    """Checks, before anything is decoded, that decoding can fit into the memory of this machine.

    Does nothing on a machine with accelerators, which hold the model; `check_devices` checks them.

    Args:
      config: Sizes of the model.
      demand: Sizes and settings of decoding.
      copies: Copies of the model that decode at the same time.

    Raises:
      ValueError: If it does not fit; the message says which flag to lower.
    """
    if has_accelerators():
        return
    need = least_need(config, demand)
    free = available_bytes()
    position = _position_numbers(config) * demand.precision.number_bytes
    held = max(0, (demand.max_cache_tokens or 0) * position - need.outputs - need.source)
    wanted = copies * (need.total + held)
    if wanted <= free:
        return
    parts = {
        "--max_decode_length": need.outputs,
        "--max_input_length": need.source,
        "--max_cache_tokens": held,
        "a smaller model, or fewer --model_copies": need.weights,
    }
    largest = max(parts, key=lambda name: parts[name])
    also = " or the number of thresholds" if demand.num_branches > 2 else ""
    if wanted - copies * need.heads <= free:
        advice = "Take --exit_head=exact"
    elif wanted - copies * need.packed <= free:
        advice = "Take --engine=xla, which is slower and holds weights once"
    elif demand.rows > 1:
        advice = "Lower --batch_size"
    else:
        advice = f"Lower {largest}{also}" if largest.startswith("--") else f"Take {largest}"
    heads = f"certified heads {_in_words(need.heads)}, " if need.heads else ""
    heads += f"weights as native code takes them {_in_words(need.packed)}, " if need.packed else ""
    outputs = f"outputs of {demand.steps} tokens {_in_words(need.outputs)}"
    prompts = f"prompts of {demand.source} tokens {_in_words(need.source)}"
    raise ValueError(
        f"decoding needs {_in_words(wanted)} of memory or more (weights {_in_words(need.weights)}, {heads}{outputs}, "
        f"{prompts}), and {_in_words(free)} are free. {advice}, or use a larger machine."
    )


def check_devices(config: ModelConfig, group: "DeviceGroup", precision: Precision = FLOAT32) -> None:
    """Checks, before weights are read, that a model fits into a group's devices.

    Args:
      config: Sizes of the model.
      group: Devices that are to hold the model. CPUs, and devices that do not report their memory, are not checked.
      precision: Its type is that of the weights.

    Raises:
      ValueError: If a device has too little free memory.
    """
    part = values_per_device(parameter_shapes(config), group.division) * precision.number_bytes
    for device in group.devices:
        if device.platform == "cpu" or not device.memory_stats():
            continue
        if part > (free := _free_bytes(device)):
            raise ValueError(
                f"the model's weights take {_in_words(part)} on {device}, of which {_in_words(free)} are free. Divide "
                f"them among more devices (--model_parallelism, now {group.division.parts}), or use devices with more "
                "memory."
            )


def memory_in_words(config: ModelConfig, demand: Demand, *, model_parallelism: int = 1, runs_here: bool = True) -> str:
    """Returns text on the memory that a model takes, and on the room for keys and values of tokens where that is known.

    Args:
      config: Sizes of the model.
      demand: Sizes and settings of decoding.
      model_parallelism: Devices that share one model.
      runs_here: Whether this machine decodes.

    Raises:
      UsageError: If the model cannot be divided among so many devices.
    """
    division, shapes, precision = Division.of(config, model_parallelism), parameter_shapes(config), demand.precision
    position = _position_numbers(config) * precision.number_bytes
    whole = values_per_device(shapes, Division()) * precision.number_bytes
    weights = f"{_in_words(whole)} of weights"
    if model_parallelism > 1:
        part = values_per_device(shapes, division) * precision.number_bytes
        weights += f", {_in_words(part)} on each of {model_parallelism} devices"
        if division.whole:
            weights += f" (each has {division.whole_in_words()} whole, which cannot be shared evenly)"
    if heads := _heads_bytes(config, demand.exit_head, precision):
        weights += f", and up to {_in_words(heads)} of certified heads"
    packed = _packed_bytes(config, demand.exit_head) if demand.engine == "native" else 0
    if packed:
        weights += f", {_in_words(packed)} for a second copy that native code reads"
    if (most := demand.max_cache_tokens) is not None:
        return f"{weights}; room for {most:,} tokens, as asked, takes {_in_words(most * position)}"
    if not runs_here or has_accelerators():
        return f"{weights}; each token of a prompt or an output takes {_in_words(position)}"
    free = max(0, available_bytes() - whole - heads - packed)
    room = max(demand.source + demand.num_branches * demand.steps, int(free * _HOST_SHARE / 2 / position))
    return f"{weights}, {_in_words(free)} left: room for {room:,} tokens of prompts and outputs at a time"


def _heads_bytes(config: ModelConfig, exit_head: str, precision: Precision) -> int:
    """Returns the most bytes that certified heads take."""
    return certified_bytes(
        exit_head,
        precision,
        vocab_size=config.vocab_size,
        width=config.emb_dim,
        is_by_entry=config.tied_head,
        heads=config.num_decoder_layers if config.exit_heads else 1,
    )


def _position_numbers(config: ModelConfig) -> int:
    """Returns how many numbers the keys and values of a position have, at all layers."""
    return config.num_decoder_layers * 2 * config.num_kv_heads * config.head_dim


def _in_words(size: int) -> str:
    unit, name = next(((unit, name) for unit, name in _UNITS if size >= unit // 10), _UNITS[-1])
    return f"{size / unit:,.1f} {name}"


def _free_bytes(device: "jax.Device") -> int:
    if device.platform == "cpu":
        return available_bytes()
    statistics = device.memory_stats() or {}
    # A device that does not report its memory is assumed to have 8 GiB.
    return int(statistics.get("bytes_limit", 8 << 30)) - int(statistics.get("bytes_in_use", 0))


def keep_freed_memory() -> None:
    """Makes this process keep the memory that XLA frees, for XLA's next call.

    On CPU, every call of XLA allocates its intermediate results again. By default glibc returns such blocks to the
    system, and every page faults in again, which makes the large steps of a decoder two to five times slower. Does
    nothing if the C library is not glibc.
    """
    mallopt = _glibc("mallopt")
    if mallopt:
        mallopt(_M_MMAP_THRESHOLD, _LARGEST_MMAP_THRESHOLD)
        mallopt(_M_TRIM_THRESHOLD, 2**31 - 1)
        mallopt(_M_TOP_PAD, 64 << 20)


def return_freed_memory() -> None:
    """Returns memory that this process has freed to the system.

    Call it at the end of a sweep: the next sweep allocates new buffers, and if they do not fit into the gaps that were
    kept, the process would grow with every sweep. Does nothing if the C library is not glibc.
    """
    malloc_trim = _glibc("malloc_trim")
    if malloc_trim:
        malloc_trim(ctypes.c_size_t(0))


def _glibc(name: str) -> Any:
    """Returns a function of the C library; None if it has none of that name."""
    try:
        return getattr(ctypes.CDLL(None), name, None)
    except OSError:
        return None


def _packed_bytes(config: ModelConfig, exit_head: str) -> int:
    """Returns the bytes of the second copy of weights that native code holds."""
    # Imported here, since it imports JAX.
    from calm_beam.model.native_decoder import packed_bytes

    return packed_bytes(config, parameter_shapes(config), has_exact_heads=exit_head == "exact")
