"""Weights in memory and their fingerprint."""

import hashlib
import re

import numpy as np
import pytest

from calm_beam.checkpoints import FloatArrays, fingerprint
from calm_beam.model import infer_config
from tests.builders import build_arrays, build_checkpoint, build_config

_ARRAYS = build_arrays(build_config(), 0)
_NAME = "decoder/layers_0/mlp/wo/kernel"


def test_a_fingerprint_is_a_digest() -> None:
    """A fingerprint is `sha256:` and 64 hexadecimal digits, and the checkpoint's is that of its arrays."""
    checkpoint = build_checkpoint()
    assert checkpoint.fingerprint() == fingerprint(checkpoint.arrays)
    assert re.fullmatch("sha256:[0-9a-f]{64}", checkpoint.fingerprint())


def test_fingerprints_are_those_of_the_first_version() -> None:
    """Manifests name models of T5's activations and distance by this digest, which must never change."""
    array = np.arange(6, dtype="<f4").reshape(2, 3)
    content = b"calm-beam model v1, 128\na 2,3\n" + array.tobytes()
    assert fingerprint({"a": array}) == f"sha256:{hashlib.sha256(content).hexdigest()}"
    for config in (build_config(), build_config(gated_mlp=False), build_config(activation="gelu")):
        checkpoint = build_checkpoint(config)
        assert checkpoint.fingerprint() == fingerprint(checkpoint.arrays)
    assert build_checkpoint(build_config(activation="silu")).fingerprint() != fingerprint(_ARRAYS)


def test_order_and_layout_in_memory_do_not_matter() -> None:
    """Neither the order of names, nor strides, nor byte order, nor a wider type changes the fingerprint."""
    expected = fingerprint(_ARRAYS)
    assert fingerprint(dict(reversed(list(_ARRAYS.items())))) == expected
    assert fingerprint({name: np.asfortranarray(array) for name, array in _ARRAYS.items()}) == expected
    assert fingerprint({name: array.astype(">f4") for name, array in _ARRAYS.items()}) == expected
    assert fingerprint({name: array.astype(np.float64) for name, array in _ARRAYS.items()}) == expected


def test_stored_precision_does_not_matter_where_nothing_is_rounded() -> None:
    """Weights that float16 holds exactly have one fingerprint in both types; others change by rounding."""
    halves = {name: array.astype(np.float16) for name, array in _ARRAYS.items()}
    assert fingerprint(halves) == fingerprint({name: array.astype(np.float32) for name, array in halves.items()})
    assert fingerprint(halves) != fingerprint(_ARRAYS)


def _with_one_bit_flipped() -> FloatArrays:
    changed = _ARRAYS[_NAME].copy()
    changed[3, 2] = np.nextafter(changed[3, 2], np.float32(np.inf))
    return {**_ARRAYS, _NAME: changed}


@pytest.mark.parametrize(
    "arrays",
    [
        _with_one_bit_flipped(),
        {name: array for name, array in _ARRAYS.items() if name != _NAME},
        {f"{name}x" if name == _NAME else name: array for name, array in _ARRAYS.items()},
        {**_ARRAYS, _NAME: _ARRAYS[_NAME].T},
        {**_ARRAYS, _NAME: _ARRAYS[_NAME].reshape(16, 32)},
        {**_ARRAYS, _NAME: _ARRAYS[_NAME][::-1]},
        {
            **_ARRAYS,
            _NAME: _ARRAYS[_NAME.replace("layers_0", "layers_1")],
            _NAME.replace("layers_0", "layers_1"): _ARRAYS[_NAME],
        },
    ],
    ids=["value", "missing", "name", "transposed", "reshaped", "reversed", "exchanged"],
)
def test_any_change_changes_the_fingerprint(arrays: FloatArrays) -> None:
    """A last bit of a value, a name, a shape or a place changes the fingerprint."""
    assert fingerprint(arrays) != fingerprint(_ARRAYS)


def test_the_tree_has_the_arrays() -> None:
    """The parameter tree is nested by the slashes of the names; the config is the one of the shapes."""
    checkpoint = build_checkpoint()
    tree = checkpoint.parameters()
    assert tree["decoder"]["layers_0"]["mlp"]["wo"]["kernel"] is checkpoint.arrays[_NAME]
    assert infer_config({name: array.shape for name, array in checkpoint.arrays.items()}) == checkpoint.config
