"""The native library: which one is loaded, and its calls, which change arrays in place.

Each instruction set has a shared library (`build.py`), which can be used if it was built with the package and the
processor has the instructions. The library for AVX-512 VNNI (Intel's servers since Ice Lake, AMD's since Zen 4) is
preferred, then that for AVX2 (nearly all other x86). Without one, XLA computes instead. The environment variable
`CALM_BEAM_NATIVE` selects another: `avx512_vnni`, `avx2`, `portable` (any x86), `neon` (aarch64) or `none`; tests run
on each of them.

This module calls all sources but `screen.c`, which XLA calls.
"""

import ctypes
import functools
import math
import os
import pathlib
import threading
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from calm_beam.errors import UsageError

from .build import FOLDER, TUNED, file_name, instruction_sets, layouts_name
from .structures import BY_PROMPT as BY_PROMPT
from .structures import MADE, Asked, Measured, Rows, Skipped, Step
from .structures import Entries as Entries
from .structures import Head as Head
from .structures import Layer as Layer
from .structures import Matrix as Matrix
from .structures import Measure as Measure
from .structures import Output as Output
from .structures import Sources as Sources

VARIABLE = "CALM_BEAM_NATIVE"
"""The environment variable that names an instruction set, or `none`."""

_SCREEN = "calm_beam_screen"
_LOCK = threading.Lock()


def is_available() -> bool:
    """Returns whether native code can be used on this machine."""
    return why_unavailable() is None


def why_unavailable() -> str | None:
    """Loads native code, and returns the reason why it cannot be used; None if it can."""
    return _found()[1]


def why_not_loaded() -> str | None:
    """Does the same as `why_unavailable`, without asking on which devices JAX computes.

    It is for processes that start others, which must not initialise JAX.
    """
    with _LOCK:
        return _opened(os.environ.get(VARIABLE, ""))[1]


def loaded() -> ctypes.CDLL:
    """Returns the library, which must be available, for calls that are not XLA's."""
    library, reason = _found()
    assert library is not None, reason
    return library


def instruction_set() -> str | None:
    """Returns the instruction set of the loaded library; None if there is no library.

    Raises:
      UsageError: If the environment variable names an unknown one.
    """
    return None if why_not_loaded() else _taken(os.environ.get(VARIABLE, ""))


def screen_target() -> str:
    """Registers `screen.c` with XLA, and returns the name of the target, which each instruction set has its own."""
    loaded()
    return f"{_SCREEN}_{instruction_set()}"


def instruction_sets_here() -> tuple[str, ...]:
    """Returns the instruction sets that are built and that this processor has, the best first."""
    here = _processor_features()
    return tuple(name for name, features in instruction_sets().items() if here.issuperset(features) and _is_built(name))


def _found() -> tuple[ctypes.CDLL | None, str | None]:
    # The lock prevents a second registration: XLA accepts a target's name once.
    with _LOCK:
        return _searched(os.environ.get(VARIABLE, ""))


@functools.cache
def _searched(wanted: str) -> tuple[ctypes.CDLL | None, str | None]:
    """Returns the library for the instruction set that the variable names, or the reason why there is none."""
    if jax.default_backend() != "cpu":
        return None, f"it is for CPUs, and JAX computes on {jax.default_backend()}"
    library, reason = _opened(wanted)
    taken = _taken(wanted)
    if library is not None and taken in TUNED:
        screen = jax.ffi.pycapsule(getattr(library, _SCREEN))
        try:
            jax.ffi.register_ffi_target(f"{_SCREEN}_{taken}", screen, platform="cpu")
        except jax.errors.JaxRuntimeError as error:
            return None, f"it is for another version of JAX ({error})"
    return library, reason


@functools.cache
def _opened(wanted: str) -> tuple[ctypes.CDLL | None, str | None]:
    """Returns the library, or the reason why there is none, without registering it with XLA; see `_searched`."""
    if wanted == "none":
        return None, f"{VARIABLE} is none"
    taken = _taken(wanted)
    if taken is None:
        return None, _lacking(wanted)
    try:
        code = ctypes.CDLL(str(_path(taken)))
        layouts = ctypes.string_at(ctypes.addressof(ctypes.c_char.in_dll(code, "calm_beam_layouts"))).decode()
    except (OSError, ValueError) as error:
        return None, str(error)
    if layouts != layouts_name():
        return None, f"{_path(taken)} was built of other sources; install calm-beam again"
    return code, None


def _taken(wanted: str) -> str | None:
    """Returns the requested instruction set, or the best one; None if there is none."""
    names = tuple(instruction_sets())
    if wanted not in ("", "none", *names):
        raise UsageError(f"{VARIABLE} must be one of {', '.join((*names, 'none'))}; got {wanted!r}.")
    return next((name for name in instruction_sets_here() if name == wanted or (not wanted and name in TUNED)), None)


def _lacking(wanted: str) -> str:
    """Returns the reason why no instruction set can be used."""
    sets = instruction_sets()
    if not sets:
        return f"there is no code for such a machine ({os.uname().machine})"
    built = [name for name in sets if _is_built(name)]
    if not built:
        return (
            "it is not built in, for want of a C compiler that worked when calm-beam was installed; with one, install "
            "calm-beam again"
        )
    if wanted and wanted not in built:
        return f"that for {wanted} is not built in, but that for {', '.join(built)}"
    if wanted:
        missing = [name for name in sets[wanted] if name not in _processor_features()]
        return f"the processor has no {missing[-1]}"
    others = "".join(f" ({VARIABLE}={name} takes portable code)" for name in instruction_sets_here())
    return f"the processor has neither AVX-512 VNNI nor AVX2{others}"


def _path(name: str) -> pathlib.Path:
    return FOLDER / file_name(name)


def _is_built(name: str) -> bool:
    return _path(name).is_file()


def _processor_features() -> set[str]:
    try:
        lines = pathlib.Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        return set()
    return next((set(line.split()) for line in lines if line.startswith("flags")), set())


ACTIVATIONS = ("gelu", "silu", "relu")
"""Activations of a feed-forward layer, by their numbers in C."""

MEASURES = ("softmax", "softmax_max", "entropy", "state", "classifier", "static")
"""Confidence measures of native code, by their numbers in C, from 1 on."""

ROWS = ("of output", "of prompt", "of encoder")
"""What rows are, by their numbers in C: newest tokens of outputs, or tokens of prompts, which attend to those up to
themselves, or to all."""

NO_WINDOW = 1 << 40
"""A window that sees all positions."""

_PANEL = 64
_LINE = 64
# Types of stored weights, by their numbers in C.
_STORED = (np.dtype(np.float32), jnp.dtype(jnp.bfloat16), np.dtype(np.float16))

_NUMBER, _ADDRESS = ctypes.c_int64, ctypes.c_void_p

# Types of the outputs of a step.
_MADE = dict(zip(MADE, (np.int32, np.int32, np.float32, np.float32, np.bool_), strict=True))


def aligned(shape: tuple[int, ...], dtype: np.dtype[Any] = _STORED[0]) -> np.ndarray:
    """Returns an uninitialised array, float32 unless another type is named, that begins at a cache line."""
    size = math.prod(shape) * dtype.itemsize
    memory = np.empty(size + _LINE, np.uint8)
    first = -memory.ctypes.data % _LINE
    return memory[first : first + size].view(dtype).reshape(shape)


def packed(kernel: np.ndarray) -> np.ndarray:
    """Returns a matrix, [inputs, columns], in panels of 64 columns, [panels, inputs, 64], padded with zeros.

    If every weight is a number of a type of two bytes, as in many published models, the panels have that type: a single
    prompt waits for memory, of which they take half, and products with them are the same.
    """
    inputs, columns = kernel.shape
    panels = -(-columns // _PANEL)
    made = aligned((panels, inputs, _PANEL), _stored_type(kernel))
    made[:] = 0
    for panel in range(panels):
        part = kernel[:, panel * _PANEL : (panel + 1) * _PANEL]
        made[panel, :, : part.shape[1]] = part
    return made


def matrix(panels: np.ndarray, columns: int) -> Matrix:
    """Returns the C structure of packed weights."""
    return Matrix(panels.ctypes.data, panels.shape[1], columns, _STORED.index(panels.dtype))


def _stored_type(kernel: np.ndarray) -> np.dtype[Any]:
    """Returns the smallest type that has every number of a float32 kernel, of those that the loaded code multiplies."""
    some = kernel[:1]
    for dtype in _small_types(os.environ.get(VARIABLE, "")):
        # Most kernels are refused by their first row.
        if _has_numbers(dtype, some) and _has_numbers(dtype, kernel):
            return dtype
    return _STORED[0]


@functools.cache
def _small_types(wanted: str) -> tuple[np.dtype[Any], ...]:
    """Returns the types of two bytes that code multiplies, given the name in the variable.

    It is kept, since every matrix of a model asks, and finding the processor's features reads a file.
    """
    return _STORED[1:] if _taken(wanted) in TUNED else _STORED[1:2]


def _has_numbers(dtype: np.dtype[Any], values: np.ndarray) -> bool:
    """Returns whether a type has all these numbers, which then can be converted to it and back."""
    with np.errstate(over="ignore"):
        return bool((values.astype(dtype).astype(np.float32) == values).all())


def threads() -> int:
    """Returns how many threads a call may use."""
    return len(os.sched_getaffinity(0))


def entries_of(
    *,
    inputs: np.ndarray,
    outputs: np.ndarray,
    store: tuple[np.ndarray, np.ndarray],
    paths: np.ndarray,
    prompt_branches: int,
    rows_are: str = "of output",
    **by_prompt: np.ndarray,
) -> Entries:
    """Returns the entries of a layer, without sources or turns.

    Args:
      inputs: float32, shape (entries, width). Outputs of the layer below.
      outputs: float32, shape (entries, width). Outputs of this layer; written.
      store: Keys and values, float32, each (nodes, heads of keys * head_dim); written at the nodes of rows.
      paths: int32, shape (entries, steps). The nodes that each entry attends to. Of prompts, (prompts, positions): the
        node of each position, -1 where there is no token.
      prompt_branches: How many entries each prompt has.
      rows_are: One of `ROWS`. The entries of a prompt's rows are its positions.
      **by_prompt: int32, each of shape (prompts,):
        steps: Step of the prompt, from 0.
        positions: Position of the query, used if there is a window.
        source_of: Index of the sources that it attends to, by padded width.
        places: Its place among these sources.
    """
    numbers, indices = (inputs, outputs, *store), (paths, *(by_prompt[name] for name in BY_PROMPT))
    assert all(array.dtype == np.int32 and array.flags.c_contiguous for array in indices), "read as they stand"
    addresses = [array.ctypes.data for array in (*numbers, *indices)]
    none: list[int | None] = [None] * 2
    entries = Entries(*addresses[:5], paths.shape[1], prompt_branches, ROWS.index(rows_are), *none, *addresses[5:])
    entries.held = numbers + indices
    return entries


class Stack:
    """Layers of a decoder, one above the other, each with its entries."""

    def __init__(self, layers: Sequence[Layer], entries: Sequence[Entries]) -> None:
        """Takes layers, the lowest first, and the entries of each."""
        self._held = tuple(layers), tuple(entries)
        self._layers = (_ADDRESS * len(layers))(*map(ctypes.addressof, layers))
        self._entries = (Entries * len(entries))(*entries)

    def set_sources(self, sources: Sequence[Any]) -> None:
        """Sets the sources that each layer attends to: for each an array of `Sources`, one for each padded width."""
        self._sources = sources
        for entries, of_layer in zip(self._entries, sources, strict=True):
            entries.sources = ctypes.addressof(of_layer)

    def set_turns(self, turns: np.ndarray) -> None:
        """Sets the rotation of queries and keys.

        Args:
          turns: float32, shape (prompts, head_dim). Cosines and sines for each prompt; for rows of prompts, (positions,
            head_dim).
        """
        self._turns = turns
        for entries in self._entries:
            entries.turns = turns.ctypes.data

    def run(self, layers: range, *, below: np.ndarray, branches: np.ndarray, nodes: np.ndarray) -> None:
        """Runs layers for one token of every row, one after the other.

        Args:
          layers: Indices of layers, ascending without gaps; several only if no two rows share a path, or rows are of
            prompts.
          below: int32, shape (rows,). Entry of each row's input of the first layer; the input of others is its own.
          branches: int32, shape (rows,). Entry of each row in outputs and paths.
          nodes: int32, shape (rows,). Node of each row's keys and values in every layer; its path has it at its step.

        Raises:
          MemoryError: If there is not enough memory.
        """
        held = [np.ascontiguousarray(values, np.int32) for values in (below, branches, nodes)]
        rows = Rows(*(values.ctypes.data for values in held), len(branches), threads())
        if not loaded().calm_beam_run_layers(*self._from(layers), _NUMBER(len(layers)), ctypes.byref(rows)):
            raise MemoryError(f"no memory for {len(branches)} rows of a decoder layer")

    def keep_skipped(
        self,
        layers: range,
        *,
        capacity: int,
        states: np.ndarray,
        which: np.ndarray,
        nodes: np.ndarray,
        branches: np.ndarray,
    ) -> None:
        """Computes keys and values of skipped layers from states, and stores them.

        Args:
          layers: Indices of the layers that some may have skipped, ascending without gaps.
          capacity: Number of nodes of each layer's store.
          states: float32, shape (states, width).
          which: shape (rows,). Indices of the states that are propagated.
          nodes: shape (layers, rows). Nodes of their keys and values; `capacity` where a layer was not skipped.
          branches: shape (rows,). An entry of each row's prompt.
        """
        held = [
            np.ascontiguousarray(values, dtype)
            for values, dtype in ((which, np.int64), (nodes, np.int32), (branches, np.int32))
        ]
        numbers = len(layers), len(which), capacity, threads()
        skipped = Skipped(*numbers, states.ctypes.data, *(values.ctypes.data for values in held))
        loaded().calm_beam_keep_skipped(*self._from(layers), ctypes.byref(skipped))

    def run_step(
        self,
        heads: Sequence[Head | None],
        *,
        measure: Measure,
        branches: np.ndarray,
        nodes: np.ndarray,
        thresholds: np.ndarray,
        known_exits: np.ndarray | None,
        new: Mapping[str, np.ndarray],
    ) -> int:
        """Runs layers for rows until they exit, and returns the number of rows that heads were asked about.

        Args:
          heads: The head after each layer, None where no row may exit; the last layer has one.
          measure: The measure that decides.
          branches: int32, shape (rows,). Entry of each row, the only one of its prompt.
          nodes: int32, shape (rows,). See `run`.
          thresholds: float32, shape (entries,). Infinite where no token exits before the last layer.
          known_exits: int32, shape (entries,). Known exit layers, 0 where not known; None if none is known.
          new: The outputs of every row, each of shape (entries,), as in `StepOutputs`: int32 `tokens` and
            `exit_layers`, float32 `confidences` and `max_rejected_confidence`, which must be -inf before the call, and
            bool `is_finite`.

        Raises:
          MemoryError: If there is not enough memory.
        """
        held = [np.ascontiguousarray(values, np.int32) for values in (branches, nodes)]
        step = _step_of(heads, measure, *held, thresholds, known_exits, new=new)
        count = len(self._layers)
        if not loaded().calm_beam_run_step(*self._from(range(count)), _NUMBER(count), ctypes.byref(step)):
            raise MemoryError(f"no memory for {len(branches)} rows of decoder layers")
        return int(step.asked)

    def decode(
        self,
        heads: Sequence[Head | None],
        output: Output,
        *,
        measure: Measure,
        thresholds: np.ndarray,
        new: Mapping[str, np.ndarray],
    ) -> int:
        """Takes all steps of a prompt by itself, in entry 0, and returns the number of tokens of its output.

        Args:
          heads: As in `run_step`.
          output: The prompt, and what ends its output, as `output_of` returns it. Its path must be the nodes 0, 1, 2
            and so on.
          measure: The measure that decides.
          thresholds: float32, shape (steps,). The threshold of each step.
          new: As in `run_step`, each of shape (steps,).

        Raises:
          MemoryError: If there is not enough memory.
        """
        branch = np.zeros(1, np.int32)
        step = _step_of(heads, measure, branch, None, thresholds, None, new=new)
        count = len(self._layers)
        decode = loaded().calm_beam_decode
        decode.restype = _NUMBER
        length = decode(*self._from(range(count)), _NUMBER(count), ctypes.byref(step), ctypes.byref(output))
        if not length:
            raise MemoryError("no memory for a row of decoder layers")
        return int(length)

    def _from(self, layers: range) -> tuple[Any, Any]:
        """Returns the addresses of weights and entries, from the first of some layers on."""
        first = layers.start
        return (
            ctypes.byref(self._layers, first * ctypes.sizeof(_ADDRESS)),
            ctypes.byref(self._entries, first * ctypes.sizeof(Entries)),
        )


def _step_of(
    heads: Sequence[Head | None],
    measure: Measure,
    branches: np.ndarray,
    *by_row_or_entry: np.ndarray | None,
    new: Mapping[str, np.ndarray],
) -> Step:
    """Returns a step, given nodes, thresholds and known exits after the branches; arguments of `Stack.run_step`."""
    assert heads[-1] is not None, "all rows that are left exit there"
    of_heads = (_ADDRESS * len(heads))(*(None if head is None else ctypes.addressof(head) for head in heads))
    arrays = [branches, *by_row_or_entry, *(new[name] for name in _MADE)]
    dtypes = (np.int32, np.int32, np.float32, np.int32, *_MADE.values())
    for array, dtype in zip(arrays, dtypes, strict=True):
        assert array is None or (array.dtype == dtype and array.flags.c_contiguous), "read as they stand"
    step = Step(
        *(len(branches), threads(), ctypes.addressof(measure), ctypes.addressof(of_heads)),
        *(None if array is None else array.ctypes.data for array in arrays),
    )
    step.held = of_heads, arrays
    return step


def output_of(
    *,
    sizes: Mapping[str, float],
    embedding: np.ndarray,
    turns: np.ndarray | None,
    states: np.ndarray,
    ends: Sequence[int],
    **by_prompt: np.ndarray,
) -> Output:
    """Returns a prompt by itself, with what ends its output, for `Stack.decode`.

    Args:
      sizes: By name, the numbers of `Output`:
        steps: Most tokens of the output.
        first_kept_step: First step that later ones attend to.
        length: Tokens of the prompt.
        passed_on: The layer whose state fills skipped layers; 0 for the layer of each exit.
        embedding_factor: Factor of embeddings.
      embedding: float32, shape (vocabulary, width).
      turns: float32, shape (steps, head_dim). Cosines and sines of each step; None without rotary positions.
      states: float32, shape (layers + 1, 1, width). The entries' inputs and outputs; the first input is the embedding
        of the token that the decoder reads in the first step.
      ends: Tokens that end an output.
      **by_prompt: int32, each of shape (1,): `step` and `position`, which the entries read too.
    """
    held = [embedding, turns, states, by_prompt["step"], by_prompt["position"], np.array(ends, np.int32)]
    dtypes = (np.float32, np.float32, np.float32, np.int32, np.int32, np.int32)
    for array, dtype in zip(held, dtypes, strict=True):
        assert array is None or (array.dtype == dtype and array.flags.c_contiguous), "read as they stand"
    names = ("embedding", "turns", "states", "step", "position", "ends")
    addresses = {name: None if array is None else array.ctypes.data for name, array in zip(names, held, strict=True)}
    output = Output(**sizes, **addresses, num_ends=len(ends))
    output.held = held
    return output


def measure_of(
    name: str,
    *,
    vocab_size: int,
    classifier: tuple[np.ndarray, np.ndarray] | None = None,
    by_layer: Sequence[float] = (),
) -> Measure | None:
    """Returns a confidence measure as native code takes it; None if native code does not have it.

    Args:
      name: Name of the measure.
      vocab_size: Entries of the vocabulary.
      classifier: The kernel, (width, 1 or 2), and the bias of the exit classifier, for the measure `classifier`.
      by_layer: The confidence at each layer, for a measure of the layer alone.
    """
    if name not in MEASURES:
        return None
    kernel, bias = classifier or (np.zeros((0, 0)), np.zeros(0))
    held = [np.ascontiguousarray(values, np.float32) for values in (kernel.T, bias, by_layer)]
    addresses = (values.ctypes.data for values in held)
    measure = Measure(1 + MEASURES.index(name), math.log(vocab_size), len(bias), *addresses)
    measure.held = held
    return measure


def measure_states(
    measure: Measure, layers: range, *, states: np.ndarray, below: np.ndarray, branches: np.ndarray
) -> np.ndarray:
    """Returns confidences of rows at layers, float32, shape (layers, rows), by a measure that is not of logits.

    Args:
      measure: The measure.
      layers: The layers, from 1, ascending without gaps.
      states: float32, shape (layers + 1, entries, width). The embedding, and the output of every layer.
      below: shape (rows,). Entry of each row's input of the first layer; the input of others is its own.
      branches: shape (rows,). Entry of each row.
    """
    held = [np.ascontiguousarray(values, np.int32) for values in (below, branches)]
    confidences = np.empty((len(layers), len(branches)), np.float32)
    measured = Measured(
        *(layers.start, *confidences.shape, *states.shape[1:]),
        *(array.ctypes.data for array in (states, *held, confidences)),
    )
    loaded().calm_beam_measure(ctypes.byref(measure), ctypes.byref(measured))
    return confidences


def measure_facts(measure: Measure, facts: np.ndarray) -> np.ndarray:
    """Returns confidences of rows, float32, shape (rows,), by a measure of logits.

    Args:
      measure: The measure.
      facts: float32, shape (4 or more, rows), as `summarise` returns them.
    """
    facts = np.ascontiguousarray(facts[:4])
    confidences = np.empty(facts.shape[1], np.float32)
    loaded().calm_beam_measure_facts(
        ctypes.byref(measure), _ADDRESS(facts.ctypes.data), _NUMBER(facts.shape[1]), _ADDRESS(confidences.ctypes.data)
    )
    return confidences


def summarise(
    head: Head, *, states: np.ndarray, entries: np.ndarray, measure: Measure | None = None
) -> tuple[np.ndarray, np.ndarray]:
    """Returns summaries of a head's logits for states, as in a settled `Summary`, with confidences.

    Args:
      head: The head.
      states: float32, shape (entries, width).
      entries: shape (rows,). Indices of the rows' states.
      measure: The measure of the confidences; None for none.

    Returns:
      int32, shape (rows,): the tokens; and float32, shape (5, rows): largest, second, total and weighted sum, and the
      confidence, 0 without a measure.

    Raises:
      MemoryError: If there is not enough memory.
    """
    entries = np.ascontiguousarray(entries, np.int64)
    facts, tokens = np.empty((5, len(entries)), np.float32), np.empty(len(entries), np.int32)
    asked = Asked(
        *(len(entries), threads(), None if measure is None else ctypes.addressof(measure)),
        *(array.ctypes.data for array in (states, entries, facts, tokens)),
    )
    if not loaded().calm_beam_summarise(ctypes.byref(head), ctypes.byref(asked)):
        raise MemoryError(f"no memory for the logits of {len(entries)} rows")
    return tokens, facts
