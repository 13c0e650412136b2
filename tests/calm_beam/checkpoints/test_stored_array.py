"""Arrays that are read on demand, whole or by parts."""

import os
import pathlib
from collections.abc import Callable

import ml_dtypes
import numpy as np
import pytest
import safetensors.numpy

from calm_beam.checkpoints import (
    CheckpointError,
    StoredArray,
    StoredArrays,
    fingerprint,
    load_checkpoint,
    pieces,
    stored_array,
    write_native,
)
from calm_beam.checkpoints.stored_array import Array, FileStamp, are_equal, stacked
from tests.builders import build_arrays, build_config, write_hugging_face, write_t5x

_CONFIG = build_config()
_ARRAYS = build_arrays(_CONFIG, 0)
_EMBEDDING = "token_embedder/embedding"
_VALUES = np.arange(4 * 6 * 10, dtype=np.float32).reshape(4, 6, 10)


def _stored(values: np.ndarray, chunk: tuple[int, ...] | None = None) -> StoredArray:
    return StoredArray(values.shape, values.dtype, read=lambda slices: values[slices], chunk=chunk)


def _native(folder: pathlib.Path) -> pathlib.Path:
    write_native(folder, _CONFIG, arrays=_ARRAYS, vocabulary_path=None)
    return folder


def _hugging_face(folder: pathlib.Path) -> pathlib.Path:
    return write_hugging_face(folder, _CONFIG, _ARRAYS)


def _t5x(folder: pathlib.Path) -> pathlib.Path:
    return write_t5x(folder, _ARRAYS, inline=["decoder/decoder_norm/scale"])


_WRITERS = (_native, _hugging_face, _t5x)


@pytest.mark.parametrize("make", [_stored, np.asarray], ids=["stored", "in memory"])
def test_matrices_below_each_other(make: Callable[[np.ndarray], Array]) -> None:
    """Any rows and columns of stacked matrices, empty ones too, are those of numpy's, in one matrix or in several."""
    whole = _VALUES.reshape(24, 10)
    array = stacked([make(part) for part in _VALUES])
    assert (array.shape, array.stored_dtype) == ((24, 10), np.float32)
    for first in range(25):
        for end in range(first, 25):
            np.testing.assert_array_equal(array[first:end, 2:7], whole[first:end, 2:7])
    np.testing.assert_array_equal(array.T[3:5], whole.T[3:5])


@pytest.mark.parametrize("write", _WRITERS)
def test_parts_are_those_of_the_whole(tmp_path: pathlib.Path, write: Callable[[pathlib.Path], pathlib.Path]) -> None:
    """In every layout, halves along each axis of every array are the halves of the written one, in float32."""
    arrays = load_checkpoint(write(tmp_path / "model")).arrays
    assert arrays.keys() == _ARRAYS.keys()
    for name, array in arrays.items():
        for axis, size in enumerate(array.shape):
            half = (slice(None),) * axis + (slice(size // 2, None),)
            np.testing.assert_array_equal(array[half], _ARRAYS[name][half])
            assert array[half].dtype == np.float32


def test_nothing_is_read_before_it_is_asked_for(tmp_path: pathlib.Path) -> None:
    """Each read makes a new array, so that a caller that drops it holds nothing."""
    arrays = load_checkpoint(_native(tmp_path)).arrays
    array = arrays[_EMBEDDING]
    assert isinstance(array, StoredArray)
    assert np.asarray(array) is not np.asarray(array)
    with pytest.raises(ValueError, match="cannot be read without a copy"):
        np.asarray(array, copy=False)


@pytest.mark.parametrize("dtype", [np.float16, ml_dtypes.bfloat16])
def test_what_is_stored_in_half_is_read_as_float32(tmp_path: pathlib.Path, dtype: type) -> None:
    """The stored type is known, and every value is read exactly as float32."""
    _native(tmp_path)
    halves: dict[str, np.ndarray] = {name: array.astype(dtype) for name, array in _ARRAYS.items()}
    safetensors.numpy.save_file(halves, tmp_path / "model.safetensors")
    array = load_checkpoint(tmp_path).arrays[_EMBEDDING]
    assert isinstance(array, StoredArray)
    assert (array.stored_dtype, array.dtype) == (np.dtype(dtype), np.float32)
    np.testing.assert_array_equal(array[3:9], halves[_EMBEDDING][3:9].astype(np.float32))


def test_views_are_views_of_the_whole() -> None:
    """Parts of transposed, indexed and merged views equal numpy's."""
    stored = _stored(_VALUES)
    part = slice(1, 3), slice(2, 5)
    np.testing.assert_array_equal(stored.T[part], _VALUES.T[part])
    np.testing.assert_array_equal(stored.at(2, axis=1)[part], _VALUES[:, 2][part])
    np.testing.assert_array_equal(stored.at(2, axis=0).T[part], _VALUES[2].T[part])
    joined = _VALUES.reshape(4, 60)
    for first, last in ((0, 60), (0, 1), (9, 11), (13, 47), (20, 30), (59, 60)):
        np.testing.assert_array_equal(stored.joined(1)[1:3, first:last], joined[1:3, first:last])
    np.testing.assert_array_equal(stored.joined(0)[5:19], _VALUES.reshape(24, 10)[5:19])


@pytest.mark.parametrize(("axis", "parts", "divides"), [(0, 2, True), (0, 4, False), (1, 3, True), (2, 5, False)])
def test_parts_that_would_be_read_twice_are_known(axis: int, parts: int, divides: bool) -> None:
    """Parts divide an array if their borders are borders of stored chunks, also for views."""
    stored = _stored(_VALUES, chunk=(2, 1, 10))
    assert stored.divides(axis, parts) == divides
    assert stored.T.divides(2 - axis, parts) == divides


def test_pieces_are_the_array(monkeypatch: pytest.MonkeyPatch) -> None:
    """Pieces follow each other in C order, have bounded size and hold whole chunks; no digest depends on them."""
    monkeypatch.setattr(stored_array, "_PIECE_BYTES", 600)
    for chunk, rows in ((None, [2, 2]), ((3, 1, 1), [3, 1])):
        found = list(pieces(_stored(_VALUES, chunk=chunk)))
        assert [len(piece) for piece in found] == rows
        np.testing.assert_array_equal(np.concatenate(found), _VALUES)
    turned = list(pieces(_stored(_VALUES).T))
    assert all(piece.flags.c_contiguous for piece in turned)
    np.testing.assert_array_equal(np.concatenate(turned), _VALUES.T)
    stored = {name: _stored(np.asfortranarray(array)) for name, array in _ARRAYS.items()}
    assert fingerprint(stored) == fingerprint(_ARRAYS)


def test_equality_is_that_of_values(monkeypatch: pytest.MonkeyPatch) -> None:
    """Arrays are equal by values and shape, stored or not; NaN equals nothing."""
    monkeypatch.setattr(stored_array, "_PIECE_BYTES", 600)
    other = _VALUES.copy()
    other[3, 5, 9] += 1
    assert are_equal(_stored(_VALUES), _VALUES)
    assert are_equal(_VALUES, _stored(_VALUES))
    assert not are_equal(_stored(_VALUES), _stored(other))
    assert not are_equal(_stored(_VALUES), _stored(_VALUES.reshape(6, 4, 10)))
    other[3, 5, 9] = np.nan
    assert not are_equal(_stored(other), _stored(other))


@pytest.mark.parametrize(
    ("write", "file"),
    [
        (_native, "model.safetensors"),
        (_hugging_face, "model.safetensors"),
        (_t5x, "target.token_embedder.embedding/0.0"),
    ],
)
def test_a_model_that_changes_is_refused(
    tmp_path: pathlib.Path, write: Callable[[pathlib.Path], pathlib.Path], file: str
) -> None:
    """If a file of the weights has changed or gone, fingerprint and weights raise an error."""
    folder = write(tmp_path / "model")
    checkpoint, path = load_checkpoint(folder), folder / file
    assert checkpoint.fingerprint() == fingerprint(_ARRAYS)
    os.utime(path, ns=(0, path.stat().st_mtime_ns + 1))
    for read in (checkpoint.fingerprint, checkpoint.parameters):
        with pytest.raises(CheckpointError, match=f"{path}: has changed while the model was read"):
            read()
    path.unlink()
    with pytest.raises(CheckpointError, match="has changed while the model was read"):
        checkpoint.check_unchanged()


def test_a_chunk_that_is_lost_later_is_an_error_of_ours(tmp_path: pathlib.Path) -> None:
    """Data that can no longer be read are an error with the name of the checkpoint."""
    folder = _t5x(tmp_path)
    array = load_checkpoint(folder).arrays[_EMBEDDING]
    (folder / "target.token_embedder.embedding" / "0.0").unlink()
    with pytest.raises(CheckpointError, match="checkpoint: cannot read its arrays: "):
        np.asarray(array)


def test_a_loaded_model_is_hashed_already(tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Reading for non-finite values also gives the fingerprint."""
    checkpoint = load_checkpoint(_native(tmp_path))
    monkeypatch.setattr(StoredArray, "__getitem__", None)
    assert checkpoint.fingerprint() == fingerprint(_ARRAYS)


def test_digests_go_where_the_values_go(tmp_path: pathlib.Path) -> None:
    """Copied arrays keep their digest, without a file; derived arrays keep their files only."""
    path = tmp_path / "file"
    path.write_bytes(b"1")
    stored = StoredArrays({"a": _stored(_VALUES)}, [FileStamp.of(path)])
    stored.known["key"] = "digest"
    moved, made = stored.moved({"a": _VALUES}), stored.of({"b": _VALUES})
    assert (moved.known, made.known) == ({"key": "digest"}, {})
    path.write_bytes(b"22")
    moved.check_unchanged()
    for arrays in (stored, made):
        with pytest.raises(CheckpointError, match="has changed"):
            arrays.check_unchanged()
