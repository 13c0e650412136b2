"""T5X's layout: read as written independently of the reader, and written as T5X does."""

import dataclasses
import hashlib
import json
import os
import pathlib
import shutil
import zlib
from typing import Any

import flax.serialization
import ml_dtypes
import numpy as np
import pytest

from calm_beam.checkpoints import Checkpoint, CheckpointError, FloatArrays, fingerprint, load_checkpoint, write_t5x
from tests.builders import build_arrays, build_config
from tests.builders import write_t5x as write_independently

_CONFIG = build_config(num_encoder_layers=1, num_decoder_layers=2, exit_classifier=2)
_ARRAYS = build_arrays(_CONFIG, 0)
_KERNEL = "target.decoder.layers_0.mlp.wo.kernel"
_NAME = "decoder/layers_0/mlp/wo/kernel"


def _assert_holds(checkpoint: Checkpoint, arrays: FloatArrays) -> None:
    assert checkpoint.arrays.keys() == arrays.keys()
    for name, array in arrays.items():
        assert checkpoint.arrays[name].dtype == np.float32
        np.testing.assert_array_equal(checkpoint.arrays[name], array)


def test_what_is_read_is_what_was_written(tmp_path: pathlib.Path) -> None:
    """Names, values and sizes come back, without the optimizer's state."""
    folder = write_independently(tmp_path, _ARRAYS)
    checkpoint = load_checkpoint(tmp_path)
    _assert_holds(checkpoint, _ARRAYS)
    assert checkpoint.config == _CONFIG
    assert checkpoint.layout == "t5x"
    assert checkpoint.directory == folder
    assert checkpoint.vocabulary_path is None
    assert checkpoint.fingerprint() == fingerprint(_ARRAYS)


def test_a_step_folder_itself(tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The step's own folder is accepted, as a path or as text, absolute or relative."""
    folder = write_independently(tmp_path / "run", _ARRAYS, step=7)
    _assert_holds(load_checkpoint(folder), _ARRAYS)
    monkeypatch.chdir(tmp_path)
    checkpoint = load_checkpoint("run/checkpoint_7")
    _assert_holds(checkpoint, _ARRAYS)
    assert checkpoint.directory == folder


def test_a_moved_checkpoint(tmp_path: pathlib.Path) -> None:
    """A moved checkpoint can be read, since paths inside are relative."""
    folder = write_independently(tmp_path / "here", _ARRAYS)
    (tmp_path / "there").mkdir()
    moved = shutil.move(folder, tmp_path / "there" / "renamed")
    _assert_holds(load_checkpoint(moved), _ARRAYS)


def test_the_latest_step_is_read(tmp_path: pathlib.Path) -> None:
    """The step with the highest number is read, not the last name; unfinished folders are skipped."""
    for step, seed in ((900, 1), (1000, 2), (20, 3)):
        write_independently(tmp_path, build_arrays(_CONFIG, seed), step=step)
    (tmp_path / "checkpoint_5000").mkdir()
    shutil.copytree(tmp_path / "checkpoint_20", tmp_path / "checkpoint_6000.tmp-1700000000")
    checkpoint = load_checkpoint(tmp_path)
    assert checkpoint.directory.name == "checkpoint_1000"
    _assert_holds(checkpoint, build_arrays(_CONFIG, 2))


def test_arrays_inside_the_msgpack_file(tmp_path: pathlib.Path) -> None:
    """Small arrays may be stored in the file `checkpoint` itself."""
    write_independently(tmp_path, _ARRAYS, inline=["decoder/meta_cls/bias", "encoder/encoder_norm/scale"])
    assert not (tmp_path / "checkpoint_1000" / "target.decoder.meta_cls.bias").exists()
    _assert_holds(load_checkpoint(tmp_path), _ARRAYS)


def test_bfloat16_weights_become_float32(tmp_path: pathlib.Path) -> None:
    """Weights stored as bfloat16, in zarr or inline, are read as the float32 of the same value."""
    rounded = {name: array.astype(ml_dtypes.bfloat16) for name, array in _ARRAYS.items()}
    write_independently(tmp_path, {name: array.astype(np.float32) for name, array in rounded.items()} | {
        "decoder/meta_cls/bias": rounded["decoder/meta_cls/bias"]
    }, inline=["decoder/meta_cls/bias"])  # fmt: skip
    _assert_holds(load_checkpoint(tmp_path), {name: array.astype(np.float32) for name, array in rounded.items()})


def test_arrays_of_zeros(tmp_path: pathlib.Path) -> None:
    """An array of zeros, such as an untrained bias, comes back as zeros."""
    arrays = {**_ARRAYS, "decoder/meta_cls/bias": np.zeros(2, np.float32)}
    write_independently(tmp_path, arrays)
    _assert_holds(load_checkpoint(tmp_path), arrays)


@pytest.mark.parametrize("kept", [0, 1, 100, -1])
def test_a_truncated_index_is_refused(tmp_path: pathlib.Path, kept: int) -> None:
    """A file `checkpoint` that was cut anywhere is refused by name."""
    path = write_independently(tmp_path, _ARRAYS) / "checkpoint"
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
    """Msgpack without a tree of T5X's is refused by name, whatever it holds."""
    folder = tmp_path / "checkpoint_1"
    folder.mkdir()
    (folder / "checkpoint").write_bytes(flax.serialization.msgpack_serialize(tree))
    with pytest.raises(CheckpointError, match="checkpoint_1"):
        load_checkpoint(tmp_path)


def test_a_missing_array_folder_is_refused(tmp_path: pathlib.Path) -> None:
    """An array whose folder was not copied is refused by file and array."""
    shutil.rmtree(write_independently(tmp_path, _ARRAYS) / _KERNEL)
    with pytest.raises(CheckpointError, match=rf"checkpoint_1000/checkpoint: cannot read its arrays: .*{_KERNEL}"):
        load_checkpoint(tmp_path)


def test_a_missing_chunk_is_refused(tmp_path: pathlib.Path) -> None:
    """An array whose values were not copied is refused; zarr alone would read zeros."""
    (write_independently(tmp_path, _ARRAYS) / _KERNEL / "0.0").unlink()
    with pytest.raises(CheckpointError, match=rf"cannot read its arrays: .*{_KERNEL}"):
        load_checkpoint(tmp_path)


@pytest.mark.parametrize("content", [b"", b"garbage", None], ids=["empty", "garbage", "half"])
def test_a_damaged_chunk_is_refused(tmp_path: pathlib.Path, content: bytes | None) -> None:
    """An array whose values do not unpack is refused by name."""
    chunk = write_independently(tmp_path, _ARRAYS) / _KERNEL / "0.0"
    chunk.write_bytes(chunk.read_bytes()[: chunk.stat().st_size // 2] if content is None else content)
    with pytest.raises(CheckpointError, match=rf"cannot read its arrays: .*{_KERNEL}"):
        load_checkpoint(tmp_path)


def test_another_model_is_refused_in_words(tmp_path: pathlib.Path) -> None:
    """A T5X checkpoint of another architecture is refused with the arrays that differ."""
    write_independently(tmp_path, {**_ARRAYS, "decoder/extra/scale": np.ones(3, np.float32)})
    with pytest.raises(CheckpointError, match=r"checkpoint_1000: not a T5 .*unknown decoder/extra/scale"):
        load_checkpoint(tmp_path)


def _write(folder: pathlib.Path, *, step: int = 5, vocabulary: bytes | None = b"pieces") -> pathlib.Path:
    path = None
    if vocabulary is not None:
        path = folder.parent / "stand_in.model"
        path.write_bytes(vocabulary)
    return write_t5x(folder, _CONFIG, arrays=_ARRAYS, step=step, vocabulary_path=path)


def _files(folder: pathlib.Path) -> dict[str, str]:
    """Returns the digest of every file below a folder, by its path there."""
    paths = (path for path in folder.rglob("*") if path.is_file())
    return {str(path.relative_to(folder)): hashlib.sha256(path.read_bytes()).hexdigest() for path in paths}


def test_what_is_written_is_read(tmp_path: pathlib.Path) -> None:
    """A written model comes back, with the vocabulary next to its step's folder, and no other files are left."""
    folder = _write(tmp_path / "run")
    assert folder == tmp_path / "run" / "checkpoint_5"
    checkpoint = load_checkpoint(tmp_path / "run")
    _assert_holds(checkpoint, _ARRAYS)
    assert (checkpoint.config, checkpoint.layout, checkpoint.step) == (_CONFIG, "t5x", 5)
    assert checkpoint.vocabulary_path == tmp_path / "run" / "sentencepiece.model"
    assert checkpoint.vocabulary_path.read_bytes() == b"pieces"
    assert sorted(os.listdir(tmp_path / "run")) == ["checkpoint_5", "sentencepiece.model"]


def test_what_t5x_needs_is_written(tmp_path: pathlib.Path) -> None:
    """The msgpack file has version, step and weights, which T5X needs for inference, and no optimizer's state."""
    tree = flax.serialization.msgpack_restore((_write(tmp_path / "run", step=2915) / "checkpoint").read_bytes())
    assert tree.keys() == {"version", "optimizer"}
    assert tree["version"] == 3
    assert tree["optimizer"].keys() == {"target", "state"}
    step = tree["optimizer"]["state"].pop("step")
    assert tree["optimizer"]["state"] == {}
    assert (step.dtype, step.shape, int(step)) == (np.int32, (), 2915)


def test_large_arrays_are_in_several_chunks(tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """An array above the size of a chunk is cut along its first axis, and comes back whole."""
    monkeypatch.setattr("calm_beam.checkpoints.t5x._CHUNK_BYTES", 1000)
    folder = _write(tmp_path / "run")
    metadata = json.loads((folder / "target.token_embedder.embedding" / ".zarray").read_text())
    assert (metadata["shape"], metadata["chunks"]) == ([64, 16], [15, 16])
    assert len(list((folder / "target.token_embedder.embedding").iterdir())) == 1 + 5
    _assert_holds(load_checkpoint(tmp_path / "run"), _ARRAYS)


def test_a_step_is_replaced_whole(tmp_path: pathlib.Path) -> None:
    """An existing step is replaced with all its arrays."""
    earlier = {**build_arrays(_CONFIG, 1), "decoder/extra/scale": np.ones(3, np.float32)}
    write_independently(tmp_path / "run", earlier, step=5)
    _write(tmp_path / "run")
    _assert_holds(load_checkpoint(tmp_path / "run"), _ARRAYS)
    assert sorted(os.listdir(tmp_path / "run")) == ["checkpoint_5", "sentencepiece.model"]
    assert not (tmp_path / "run" / "checkpoint_5" / "target.decoder.extra.scale").exists()


def test_a_failed_write_leaves_what_was_there(tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """If an array, the tree or the vocabulary cannot be written, the earlier step stays, and nothing is added."""
    _write(tmp_path / "run")
    before = _files(tmp_path / "run")
    arrays = build_arrays(_CONFIG, 1)
    failing: dict[str, Any] = {**arrays, _NAME: np.array([["no", "number"]])}
    with pytest.raises(ValueError, match="could not convert string to float"):
        write_t5x(tmp_path / "run", _CONFIG, arrays=failing, step=5, vocabulary_path=None)
    with pytest.raises(FileNotFoundError, match="nowhere"):
        write_t5x(tmp_path / "run", _CONFIG, arrays=arrays, step=5, vocabulary_path=tmp_path / "nowhere.model")
    with monkeypatch.context() as patch:
        patch.setattr(flax.serialization, "msgpack_serialize", lambda _: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            write_t5x(tmp_path / "run", _CONFIG, arrays=arrays, step=5, vocabulary_path=None)
    assert _files(tmp_path / "run") == before
    assert sorted(os.listdir(tmp_path / "run")) == ["checkpoint_5", "sentencepiece.model"]


def test_without_a_vocabulary(tmp_path: pathlib.Path) -> None:
    """Without a vocabulary none is left next to the step, where an old one would be taken for the model's."""
    _write(tmp_path / "run")
    _write(tmp_path / "run", vocabulary=None)
    assert load_checkpoint(tmp_path / "run").vocabulary_path is None


@pytest.mark.parametrize("step", [0, -1])
def test_steps_that_t5x_does_not_find_are_refused(step: int, tmp_path: pathlib.Path) -> None:
    """Step 0 is refused, since T5X takes it for none."""
    with pytest.raises(ValueError, match=f"step must be at least 1, got {step}"):
        _write(tmp_path / "run", step=step)
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize(
    "fields", [{"relative_max_distance": 64}, {"activation": "silu"}, {"activation": "relu"}], ids=str
)
def test_what_the_arrays_do_not_show_stands_beside_them(tmp_path: pathlib.Path, fields: dict[str, Any]) -> None:
    """Facts that no array shows are written to a `config.gin` of our own, and come back."""
    config = dataclasses.replace(_CONFIG, **fields)
    write_t5x(tmp_path, config, arrays=_ARRAYS, step=1, vocabulary_path=None)
    found = load_checkpoint(tmp_path)
    assert found.config == config
    assert not found.assumed
    with pytest.raises(ValueError, match=r"config\.gin: is of another model, .* Write to another folder\."):
        _write(tmp_path)
    assert not (tmp_path / "checkpoint_5").exists()


_GOLDENS = os.environ.get("CALM_BEAM_GOLDENS", "")


@pytest.mark.skipif(not _GOLDENS, reason="CALM_BEAM_GOLDENS does not name a folder with a checkpoint of T5X")
def test_what_t5x_wrote_is_written_again(tmp_path: pathlib.Path) -> None:
    """T5X's own checkpoint, read and written, has the same tree of weights and the same arrays, byte by byte."""
    checkpoint = load_checkpoint(pathlib.Path(_GOLDENS) / "t5x_checkpoint")
    reference = checkpoint.directory
    assert checkpoint.step is not None
    folder = write_t5x(
        tmp_path, checkpoint.config, arrays=checkpoint.arrays, step=checkpoint.step, vocabulary_path=None
    )
    theirs, ours = (
        flax.serialization.msgpack_restore((each / "checkpoint").read_bytes()) for each in (reference, folder)
    )
    assert ours["version"] == theirs["version"]
    assert ours["optimizer"]["target"] == theirs["optimizer"]["target"]
    np.testing.assert_array_equal(ours["optimizer"]["state"]["step"], theirs["optimizer"]["state"]["step"])
    arrays = sorted(path.name for path in reference.glob("target.*"))
    assert sorted(path.name for path in folder.iterdir()) == ["checkpoint", *arrays]
    for name in arrays:
        files = sorted(path.name for path in (reference / name).iterdir())
        assert sorted(path.name for path in (folder / name).iterdir()) == files
        assert files[0] == ".zarray"
        assert (folder / name / ".zarray").read_bytes() == (reference / name / ".zarray").read_bytes()
        for chunk in files[1:]:
            # Compressed bytes change with the version of the library.
            found, expected = (zlib.decompress((each / name / chunk).read_bytes(), 31) for each in (folder, reference))
            assert found == expected


def test_a_step_that_is_a_link_is_replaced_alone(tmp_path: pathlib.Path) -> None:
    """A step that is a link is replaced without touching the link's target, and nothing else is left."""
    kept = write_independently(tmp_path / "elsewhere", _ARRAYS, step=5)
    before = {path: path.read_bytes() for path in kept.rglob("*") if path.is_file()}
    (tmp_path / "run").mkdir()
    for target in (kept, tmp_path / "absent"):
        (tmp_path / "run" / "checkpoint_5").unlink(missing_ok=True)
        (tmp_path / "run" / "checkpoint_5").symlink_to(target)
        final = write_t5x(tmp_path / "run", _CONFIG, arrays=_ARRAYS, step=5, vocabulary_path=None)
        assert not final.is_symlink()
        assert list((tmp_path / "run").iterdir()) == [final]
        shutil.rmtree(final)
    assert {path: path.read_bytes() for path in kept.rglob("*") if path.is_file()} == before
