"""Folders that Orbax wrote, of every kind that training programs produce."""

import json
import pathlib
import shutil
from collections.abc import Callable
from typing import Any

import flax.serialization
import flax.traverse_util
import ml_dtypes
import numpy as np
import orbax.checkpoint
import pytest

from calm_beam.checkpoints import Checkpoint, CheckpointError, FloatArrays, fingerprint, load_checkpoint
from tests.builders import build_arrays, build_config, write_t5x

_CONFIG = build_config(num_encoder_layers=1, num_decoder_layers=2, exit_classifier=2)
_ARRAYS = build_arrays(_CONFIG, 0)
_KERNEL = "decoder/layers_0/mlp/wo/kernel"
_KERNEL_FOLDER = "target.decoder.layers_0.mlp.wo.kernel"

Tree = dict[str, Any]


def _tree(arrays: FloatArrays = _ARRAYS) -> Tree:
    return flax.traverse_util.unflatten_dict(dict(arrays), sep="/")


def _state(arrays: FloatArrays = _ARRAYS) -> Tree:
    """Returns T5X's saved state: the weights, and an optimizer's state that must not be taken for them."""
    return {"target": _tree(arrays), "state": {"step": np.int32(7), "param_states": _tree(build_arrays(_CONFIG, 9))}}


def _save(folder: pathlib.Path, tree: Tree, **options: Any) -> pathlib.Path:
    handler = orbax.checkpoint.PyTreeCheckpointHandler(**options)
    orbax.checkpoint.Checkpointer(handler).save(folder, tree)
    return folder


def _as_early_versions(item: pathlib.Path, tree: Tree, *, inline: tuple[str, ...] = ()) -> None:
    """Turns a folder without OCDBT into one of the first versions: a msgpack file instead of the metadata.

    Args:
      item: The folder.
      tree: The saved tree.
      inline: Names of arrays to put into the msgpack file itself, as T5X does with the step.
    """
    for name in ("_METADATA", "_CHECKPOINT_METADATA"):
        (item / name).unlink(missing_ok=True)
    leaves = flax.traverse_util.flatten_dict(tree, sep=".")
    for name in leaves:
        if name in inline:
            shutil.rmtree(item / name)
        else:
            leaves[name] = f"PLACEHOLDER://{name}"
    content = flax.traverse_util.unflatten_dict(leaves, sep=".")
    (item / "checkpoint").write_bytes(flax.serialization.msgpack_serialize(content))


def _assert_holds(checkpoint: Checkpoint, arrays: FloatArrays = _ARRAYS) -> None:
    assert checkpoint.layout == "orbax"
    assert checkpoint.arrays.keys() == arrays.keys()
    for name, array in arrays.items():
        assert checkpoint.arrays[name].dtype == np.float32
        np.testing.assert_array_equal(checkpoint.arrays[name], array)


@pytest.mark.parametrize("use_ocdbt", [True, False], ids=["ocdbt", "folders"])
@pytest.mark.parametrize(
    "tree",
    [_state(), {"params": _tree(), "opt_state": {"mu": _tree(build_arrays(_CONFIG, 9))}, "step": 7}, _tree()],
    ids=["target", "params", "bare"],
)
def test_what_orbax_wrote(tree: Tree, use_ocdbt: bool, tmp_path: pathlib.Path) -> None:
    """The weights come back exactly, from T5X's train state, from Flax's and bare, in a database or in folders."""
    folder = _save(tmp_path / "checkpoint_7", tree, use_ocdbt=use_ocdbt)
    assert (folder / "manifest.ocdbt").exists() == use_ocdbt
    for path in (tmp_path, folder):
        checkpoint = load_checkpoint(path)
        _assert_holds(checkpoint)
        assert (checkpoint.config, checkpoint.directory, checkpoint.step) == (_CONFIG, folder, 7)
        assert checkpoint.fingerprint() == fingerprint(_ARRAYS)


def test_the_optimizers_state_is_not_read(tmp_path: pathlib.Path) -> None:
    """The weights are read without the optimizer's state."""
    folder = _save(tmp_path / "checkpoint_7", _state(), use_ocdbt=False)
    for part in folder.glob("state.*"):
        shutil.rmtree(part)
    _assert_holds(load_checkpoint(tmp_path))


def test_the_third_version_of_zarr(tmp_path: pathlib.Path) -> None:
    """Arrays in zarr's third version are read."""
    _save(tmp_path / "checkpoint_7", _state(), use_ocdbt=True, use_zarr3=True)
    _assert_holds(load_checkpoint(tmp_path))


@pytest.mark.parametrize("inline", [(), ("state.step",), ("target.decoder.meta_cls.bias",)], ids=str)
def test_the_msgpack_file_of_early_versions(inline: tuple[str, ...], tmp_path: pathlib.Path) -> None:
    """Without metadata, the tree is that of the msgpack file, some of whose arrays may be in it."""
    folder = _save(tmp_path / "checkpoint_7", _state(), use_ocdbt=False)
    _as_early_versions(folder, _state(), inline=inline)
    _assert_holds(load_checkpoint(tmp_path))


def test_as_t5x_writes_it(tmp_path: pathlib.Path) -> None:
    """T5X has the tree in `state`, and its step in the msgpack file; the step's folder is the model's."""
    folder = tmp_path / "checkpoint_7"
    _save(folder / "state", _state(), use_ocdbt=False)
    _as_early_versions(folder / "state", _state(), inline=("state.step",))
    for path in (tmp_path, folder):
        checkpoint = load_checkpoint(path)
        _assert_holds(checkpoint)
        assert (checkpoint.directory, checkpoint.step) == (folder, 7)
    _assert_holds(load_checkpoint(folder / "state"))


def _manage(folder: pathlib.Path, *, prefix: str | None, item: str | None) -> None:
    options = orbax.checkpoint.CheckpointManagerOptions(step_prefix=prefix)
    with orbax.checkpoint.CheckpointManager(folder, options=options, item_names=(item,) if item else None) as manager:
        for step, seed in ((9, 1), (40, 0)):
            save = orbax.checkpoint.args.StandardSave(_state(build_arrays(_CONFIG, seed)))
            manager.save(step, args=orbax.checkpoint.args.Composite(**{item: save}) if item else save)


@pytest.mark.parametrize("prefix", ["checkpoint", None])
@pytest.mark.parametrize("item", ["state", "params", None])
def test_as_a_checkpoint_manager_writes_it(item: str | None, prefix: str | None, tmp_path: pathlib.Path) -> None:
    """A manager's latest step is read, named with or without a prefix, whatever its item is called."""
    _manage(tmp_path, prefix=prefix, item=item)
    checkpoint = load_checkpoint(tmp_path)
    _assert_holds(checkpoint)
    assert checkpoint.step == 40
    assert checkpoint.directory.name == ("checkpoint_40" if prefix else "40")
    _assert_holds(load_checkpoint(checkpoint.directory))


def test_steps_of_both_layouts(tmp_path: pathlib.Path) -> None:
    """The latest step is read from a run that changed from T5X's own layout to Orbax, or back."""
    write_t5x(tmp_path, build_arrays(_CONFIG, 1), step=30)
    _save(tmp_path / "checkpoint_7" / "state", _state(), use_ocdbt=True)
    assert load_checkpoint(tmp_path).layout == "t5x"
    _save(tmp_path / "checkpoint_100" / "state", _state(), use_ocdbt=True)
    _assert_holds(load_checkpoint(tmp_path))


def test_the_vocabulary_beside_the_steps(tmp_path: pathlib.Path) -> None:
    """A vocabulary next to the steps is found, and one in the step's folder comes first."""
    folder = tmp_path / "checkpoint_7"
    _save(folder / "state", _state(), use_ocdbt=True)
    for place in (tmp_path, folder):
        (place / "sentencepiece.model").write_bytes(b"x")
        assert load_checkpoint(tmp_path).vocabulary_path == place / "sentencepiece.model"
        assert load_checkpoint(folder).vocabulary_path == place / "sentencepiece.model"


def test_bfloat16_and_zeros(tmp_path: pathlib.Path) -> None:
    """Weights of 16 bits are read as the float32 of the same value, and arrays of zeros as such."""
    arrays = {name: array.astype(ml_dtypes.bfloat16) for name, array in _ARRAYS.items()}
    arrays["decoder/meta_cls/bias"] *= 0
    _save(tmp_path / "checkpoint_7", _state(arrays), use_ocdbt=True)
    _assert_holds(load_checkpoint(tmp_path), {name: array.astype(np.float32) for name, array in arrays.items()})


def test_a_path_of_any_name(tmp_path: pathlib.Path) -> None:
    """A folder whose name has blanks, percent signs and accents is read, database or not."""
    for use_ocdbt in (True, False):
        folder = tmp_path / f"é 100 % {use_ocdbt}" / "checkpoint_7"
        _assert_holds(load_checkpoint(_save(folder, _state(), use_ocdbt=use_ocdbt)))


def test_another_model_is_refused(tmp_path: pathlib.Path) -> None:
    """Weights of another model are refused with what was expected and found."""
    _save(tmp_path / "checkpoint_7", {"params": {"wte": np.zeros((3, 2), np.float32)}}, use_ocdbt=True)
    with pytest.raises(CheckpointError, match=r"checkpoint_7: not a T5 parameter tree: .*found 1 arrays \(wte"):
        load_checkpoint(tmp_path)


def _cut(path: pathlib.Path) -> None:
    path.write_bytes(path.read_bytes()[:-40])


@pytest.mark.parametrize(
    ("use_ocdbt", "damage", "message"),
    [
        (False, lambda item: shutil.rmtree(item / _KERNEL_FOLDER), f"cannot read its arrays: .*{_KERNEL_FOLDER}"),
        (False, lambda item: (item / _KERNEL_FOLDER / "0.0").unlink(), f"cannot read its arrays: .*{_KERNEL_FOLDER}"),
        (True, lambda item: shutil.rmtree(item / "ocdbt.process_0"), "checkpoint_7: cannot read its arrays"),
        (True, lambda item: (item / "manifest.ocdbt").unlink(), "checkpoint_7: cannot read its arrays"),
        (True, lambda item: _cut(item / "_METADATA"), "_METADATA: cannot be read as JSON"),
        (True, lambda item: (item / "_METADATA").write_text("[]"), "_METADATA: expected a JSON object, got list"),
        (True, lambda item: (item / "_METADATA").write_text("{}"), r"_METADATA: expected tree_metadata .*KeyError"),
    ],
    ids=["array", "chunk", "data", "manifest", "cut", "list", "empty"],
)
def test_damaged_folders_are_refused(
    use_ocdbt: bool, damage: Callable[[pathlib.Path], object], message: str, tmp_path: pathlib.Path
) -> None:
    """A missing or broken part is refused by the name of the folder, file or array."""
    damage(_save(tmp_path / "checkpoint_7", _state(), use_ocdbt=use_ocdbt))
    with pytest.raises(CheckpointError, match=message):
        load_checkpoint(tmp_path)


def test_a_damaged_msgpack_file_is_refused(tmp_path: pathlib.Path) -> None:
    """A msgpack file that was cut is refused by name."""
    folder = _save(tmp_path / "checkpoint_7", _state(), use_ocdbt=False)
    _as_early_versions(folder, _state())
    _cut(folder / "checkpoint")
    with pytest.raises(CheckpointError, match=r"checkpoint_7/checkpoint: not an Orbax checkpoint \("):
        load_checkpoint(tmp_path)


def test_unfinished_steps_are_passed_over(tmp_path: pathlib.Path) -> None:
    """A step that was still being written when its program died is skipped."""
    _save(tmp_path / "checkpoint_7", _state(), use_ocdbt=True)
    shutil.copytree(tmp_path / "checkpoint_7", tmp_path / "checkpoint_8.orbax-checkpoint-tmp-0")
    (tmp_path / "checkpoint_9").mkdir()
    assert load_checkpoint(tmp_path).step == 7


def test_the_metadata_names_every_array(tmp_path: pathlib.Path) -> None:
    """An array that the tree lacks is missing, even if it is stored."""
    folder = _save(tmp_path / "checkpoint_7", _state(), use_ocdbt=True)
    metadata = json.loads((folder / "_METADATA").read_text())
    key = str(("target", *_KERNEL.split("/")))
    del metadata["tree_metadata"][key]
    (folder / "_METADATA").write_text(json.dumps(metadata))
    with pytest.raises(CheckpointError, match=f"missing {_KERNEL}; unknown none"):
        load_checkpoint(tmp_path)
