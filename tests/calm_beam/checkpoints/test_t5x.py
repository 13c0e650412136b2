"""T5X's layout, written here independently of the reader."""

import pathlib
import shutil
from typing import Any

import flax.serialization
import ml_dtypes
import numpy as np
import pytest

from calm_beam.checkpoints import Checkpoint, CheckpointError, FloatArrays, fingerprint, load_checkpoint
from tests.builders import build_arrays, build_config, write_t5x

_CONFIG = build_config(num_encoder_layers=1, num_decoder_layers=2, exit_classifier=2)
_ARRAYS = build_arrays(_CONFIG, 0)
_KERNEL = "target.decoder.layers_0.mlp.wo.kernel"


def _assert_holds(checkpoint: Checkpoint, arrays: FloatArrays) -> None:
    assert checkpoint.arrays.keys() == arrays.keys()
    for name, array in arrays.items():
        assert checkpoint.arrays[name].dtype == np.float32
        np.testing.assert_array_equal(checkpoint.arrays[name], array)


def test_what_is_read_is_what_was_written(tmp_path: pathlib.Path) -> None:
    """Names, values and sizes come back; the optimizer's state is left out."""
    folder = write_t5x(tmp_path, _ARRAYS)
    checkpoint = load_checkpoint(tmp_path)
    _assert_holds(checkpoint, _ARRAYS)
    assert checkpoint.config == _CONFIG
    assert checkpoint.layout == "t5x"
    assert checkpoint.directory == folder
    assert checkpoint.vocabulary_path is None
    assert checkpoint.fingerprint() == fingerprint(_ARRAYS)


def test_a_step_folder_itself(tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The step's own folder is accepted too, as a path or as text, absolute or relative."""
    folder = write_t5x(tmp_path / "run", _ARRAYS, step=7)
    _assert_holds(load_checkpoint(folder), _ARRAYS)
    monkeypatch.chdir(tmp_path)
    checkpoint = load_checkpoint("run/checkpoint_7")
    _assert_holds(checkpoint, _ARRAYS)
    assert checkpoint.directory == folder


def test_a_moved_checkpoint(tmp_path: pathlib.Path) -> None:
    """Paths inside are relative: a checkpoint can be moved."""
    folder = write_t5x(tmp_path / "here", _ARRAYS)
    (tmp_path / "there").mkdir()
    moved = shutil.move(folder, tmp_path / "there" / "renamed")
    _assert_holds(load_checkpoint(moved), _ARRAYS)


def test_the_latest_step_is_read(tmp_path: pathlib.Path) -> None:
    """Of several steps the highest number counts, not the last name; unfinished folders are passed over."""
    for step, seed in ((900, 1), (1000, 2), (20, 3)):
        write_t5x(tmp_path, build_arrays(_CONFIG, seed), step=step)
    (tmp_path / "checkpoint_5000").mkdir()
    shutil.copytree(tmp_path / "checkpoint_20", tmp_path / "checkpoint_6000.tmp-1700000000")
    checkpoint = load_checkpoint(tmp_path)
    assert checkpoint.directory.name == "checkpoint_1000"
    _assert_holds(checkpoint, build_arrays(_CONFIG, 2))


def test_arrays_inside_the_msgpack_file(tmp_path: pathlib.Path) -> None:
    """Small arrays may be stored in the file `checkpoint` itself."""
    write_t5x(tmp_path, _ARRAYS, inline=["decoder/meta_cls/bias", "encoder/encoder_norm/scale"])
    assert not (tmp_path / "checkpoint_1000" / "target.decoder.meta_cls.bias").exists()
    _assert_holds(load_checkpoint(tmp_path), _ARRAYS)


def test_bfloat16_weights_become_float32(tmp_path: pathlib.Path) -> None:
    """Weights stored as bfloat16, in zarr or inline, are read as the float32 of the same value."""
    rounded = {name: array.astype(ml_dtypes.bfloat16) for name, array in _ARRAYS.items()}
    write_t5x(tmp_path, {name: array.astype(np.float32) for name, array in rounded.items()} | {
        "decoder/meta_cls/bias": rounded["decoder/meta_cls/bias"]
    }, inline=["decoder/meta_cls/bias"])  # fmt: skip
    _assert_holds(load_checkpoint(tmp_path), {name: array.astype(np.float32) for name, array in rounded.items()})


def test_arrays_of_zeros(tmp_path: pathlib.Path) -> None:
    """An array of zeros, as an untrained bias is, comes back as such."""
    arrays = {**_ARRAYS, "decoder/meta_cls/bias": np.zeros(2, np.float32)}
    write_t5x(tmp_path, arrays)
    _assert_holds(load_checkpoint(tmp_path), arrays)


@pytest.mark.parametrize("kept", [0, 1, 100, -1])
def test_a_truncated_index_is_refused(tmp_path: pathlib.Path, kept: int) -> None:
    """A file `checkpoint` that was cut anywhere is refused by name."""
    path = write_t5x(tmp_path, _ARRAYS) / "checkpoint"
    path.write_bytes(path.read_bytes()[:kept])
    with pytest.raises(CheckpointError, match=r"checkpoint_1000/checkpoint: not a T5X checkpoint \("):
        load_checkpoint(tmp_path)


@pytest.mark.parametrize(
    "tree",
    [
        {"version": 3, "params": {}},
        {"version": 3, "optimizer": {"state": {}}},
        [1, 2, 3],
        {"version": 3, "optimizer": {"target": np.zeros(3, np.float32)}},
        {"version": 3, "optimizer": {"target": {"decoder": 5}}},
        {"version": 3, "optimizer": {"target": {"decoder": {"scale": "text"}}}},
        {"version": 3, "optimizer": {"target": {"decoder": {"scale": None}}}},
        {"version": 3, "optimizer": {"target": {"decoder": {"kvstore": {"path": 5}}}}},
        {"version": 3, "optimizer": {"target": {}}},
    ],
    ids=["params", "no target", "list", "target array", "number", "text", "none", "bad path", "empty"],
)
def test_other_msgpack_files_are_refused(tmp_path: pathlib.Path, tree: Any) -> None:
    """Msgpack that is no tree of T5X's is refused by name, whatever it holds instead."""
    folder = tmp_path / "checkpoint_1"
    folder.mkdir()
    (folder / "checkpoint").write_bytes(flax.serialization.msgpack_serialize(tree))
    with pytest.raises(CheckpointError, match="checkpoint_1"):
        load_checkpoint(tmp_path)


def test_a_missing_array_folder_is_refused(tmp_path: pathlib.Path) -> None:
    """An array whose folder was not copied is refused by file and array."""
    shutil.rmtree(write_t5x(tmp_path, _ARRAYS) / _KERNEL)
    with pytest.raises(CheckpointError, match=rf"checkpoint_1000/checkpoint: cannot read its arrays: .*{_KERNEL}"):
        load_checkpoint(tmp_path)


def test_a_missing_chunk_is_refused(tmp_path: pathlib.Path) -> None:
    """An array whose values were not copied is refused; zarr alone would read zeros."""
    (write_t5x(tmp_path, _ARRAYS) / _KERNEL / "0.0").unlink()
    with pytest.raises(CheckpointError, match=rf"cannot read its arrays: .*{_KERNEL}"):
        load_checkpoint(tmp_path)


@pytest.mark.parametrize("content", [b"", b"garbage", None], ids=["empty", "garbage", "half"])
def test_a_damaged_chunk_is_refused(tmp_path: pathlib.Path, content: bytes | None) -> None:
    """An array whose values do not unpack is refused by name."""
    chunk = write_t5x(tmp_path, _ARRAYS) / _KERNEL / "0.0"
    chunk.write_bytes(chunk.read_bytes()[: chunk.stat().st_size // 2] if content is None else content)
    with pytest.raises(CheckpointError, match=rf"cannot read its arrays: .*{_KERNEL}"):
        load_checkpoint(tmp_path)


def test_another_model_is_refused_in_words(tmp_path: pathlib.Path) -> None:
    """A T5X checkpoint of another architecture is refused with the arrays that differ."""
    write_t5x(tmp_path, {**_ARRAYS, "decoder/extra/scale": np.ones(3, np.float32)})
    with pytest.raises(CheckpointError, match=r"checkpoint_1000: not a T5 1\.1 .*unknown decoder/extra/scale"):
        load_checkpoint(tmp_path)
