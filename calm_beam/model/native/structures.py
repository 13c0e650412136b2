"""Structures that Python and native code share, with the names that they have in C.

It imports the standard library only, since `build.py` makes compilers check sizes and offsets of fields by them.
"""

import ctypes
from collections.abc import Sequence
from typing import Any

BY_PROMPT = ("steps", "positions", "source_of", "places")
"""Fields of entries by prompt."""

CACHED_WEIGHTS = 1 << 18
"""Most weights of a layer that stay in a core's cache."""

MADE = ("tokens", "exit_layers", "confidences", "max_rejected_confidence", "is_finite")
"""Outputs of a step."""

_NUMBER, _FLOAT, _ADDRESS = ctypes.c_int64, ctypes.c_float, ctypes.c_void_p


class Matrix(ctypes.Structure):
    """Packed weights, by which native code multiplies."""

    _fields_ = (("weights", _ADDRESS), ("inputs", _NUMBER), ("columns", _NUMBER), ("stored", _NUMBER))


class Layer(ctypes.Structure):
    """The weights and sizes of a decoder layer."""

    _fields_ = (
        *(
            (name, Matrix)
            for name in ("query", "key", "value", "out", "cross_query", "cross_out", "gate", "wide", "narrow")
        ),
        *((name, _ADDRESS) for name in ("norm", "cross_norm", "mlp_norm", "query_norm", "key_norm")),
        *((name, _ADDRESS) for name in ("query_bias", "key_bias", "value_bias", "biases")),
        *((name, _NUMBER) for name in ("bias_heads", "ages", "heads", "key_heads", "size", "width", "activation")),
        *((name, _NUMBER) for name in ("first", "window")),
        *((name, _FLOAT) for name in ("epsilon", "query_scale")),
    )


class Sources(ctypes.Structure):
    """Keys and values of the sources of one padded width, at one layer."""

    _fields_ = (("keys", _ADDRESS), ("values", _ADDRESS), ("mask", _ADDRESS), ("most", _NUMBER))


class Entries(ctypes.Structure):
    """The arrays that a layer reads and writes, to which it keeps references. See `entries_of`."""

    held: Sequence[Any] = ()

    _fields_ = (
        *((name, _ADDRESS) for name in ("inputs", "outputs", "keys", "values", "paths")),
        *((name, _NUMBER) for name in ("most_steps", "prompt_lanes", "rows_are")),
        *((name, _ADDRESS) for name in ("sources", "turns", *BY_PROMPT)),
    )


class Rows(ctypes.Structure):
    """Rows that run layers. See `Stack.run`."""

    _fields_ = (
        *((name, _ADDRESS) for name in ("below", "lanes", "nodes")),
        *((name, _NUMBER) for name in ("count", "threads")),
    )


class Skipped(ctypes.Structure):
    """States that skipped layers. See `Stack.keep_skipped`."""

    _fields_ = (
        *((name, _NUMBER) for name in ("num_layers", "count", "capacity", "threads")),
        *((name, _ADDRESS) for name in ("states", "which", "nodes", "lanes")),
    )


class Head(ctypes.Structure):
    """The weights of a head, and the norm before it."""

    _fields_ = (("weights", Matrix), ("norm", _ADDRESS), ("epsilon", _FLOAT), ("factor", _FLOAT))


class Measure(ctypes.Structure):
    """A confidence measure. See `measure_of`."""

    held: Sequence[Any] = ()

    _fields_ = (
        ("kind", _NUMBER),
        ("log_tokens", _FLOAT),
        ("scores", _NUMBER),
        *((name, _ADDRESS) for name in ("kernel", "bias", "by_layer")),
    )


class Measured(ctypes.Structure):
    """Rows at some layers whose confidences are measured. See `measure_states`."""

    _fields_ = (
        *((name, _NUMBER) for name in ("first_layer", "num_layers", "count", "entries", "width")),
        *((name, _ADDRESS) for name in ("states", "below", "lanes", "confidences")),
    )


class Asked(ctypes.Structure):
    """States whose logits are computed. See `summarise`."""

    _fields_ = (
        ("count", _NUMBER),
        ("threads", _NUMBER),
        *((name, _ADDRESS) for name in ("measure", "states", "entries", "facts", "tokens")),
    )


class Step(ctypes.Structure):
    """Rows that run layers until they exit. See `Stack.run_step`."""

    held: Sequence[Any] = ()

    _fields_ = (
        ("count", _NUMBER),
        ("threads", _NUMBER),
        *((name, _ADDRESS) for name in ("measure", "heads", "lanes", "nodes", "thresholds", "known_exits")),
        *((name, _ADDRESS) for name in MADE),
        ("asked", _NUMBER),
    )


class Output(ctypes.Structure):
    """The output of a prompt by itself. See `output_of`."""

    held: Sequence[Any] = ()

    _fields_ = (
        *((name, _NUMBER) for name in ("steps", "first_kept_step", "length", "passed_on")),
        *((name, _ADDRESS) for name in ("embedding", "turns", "states", "step", "position", "ends")),
        ("num_ends", _NUMBER),
        ("embedding_factor", _FLOAT),
    )
