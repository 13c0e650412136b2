"""The layout that T5X's `Checkpointer` writes: one msgpack file, and one zarr array a parameter.

`checkpoint_<step>/checkpoint` holds the tree; its leaves are either small arrays or TensorStore specs whose path is
relative to the folder. Only the `target` tree (the weights) is read, never the optimizer's state. T5X itself is not
needed. Source: T5X `checkpoints.py` (version 3 of its format).
"""

import pathlib
import re
from typing import Any

import flax.serialization
import flax.traverse_util
import numpy as np
import tensorstore

from .checkpoint import CheckpointError

_STEP = re.compile(r"checkpoint_(\d+)$")


def latest_step_directory(directory: pathlib.Path) -> pathlib.Path | None:
    """Returns the `checkpoint_<step>` folder in `directory` with the highest step, or None if there is none."""
    steps = {
        int(match.group(1)): child
        for child in directory.iterdir()
        if (match := _STEP.match(child.name)) and (child / "checkpoint").is_file()
    }
    return steps[max(steps)] if steps else None


def read_t5x(directory: pathlib.Path) -> dict[str, np.ndarray]:
    """Returns the weights of a `checkpoint_<step>` folder as float32 arrays by name.

    Args:
      directory: The folder with the msgpack file `checkpoint`.

    Returns:
      Mapping from names such as `decoder/layers_0/mlp/wi_0/kernel` to arrays.

    Raises:
      CheckpointError: If the msgpack file is not a T5X checkpoint, or an array is missing or broken.
    """
    path = directory / "checkpoint"
    try:
        tree = flax.serialization.msgpack_restore(path.read_bytes())
        target = tree["optimizer"]["target"]
    except Exception as error:
        # msgpack raises a dozen unrelated types on damaged input; all of them mean the same to the user.
        raise CheckpointError(
            f"{path}: not a T5X checkpoint ({type(error).__name__}: {error}). "
            'Expected msgpack with {"optimizer": {"target": ...}}.'
        ) from error
    if not isinstance(target, dict):
        raise CheckpointError(f"{path}: not a T5X checkpoint: its target is a {type(target).__name__}, not a tree.")
    leaves = flax.traverse_util.flatten_dict(target, is_leaf=lambda _, value: _is_spec(value), sep="/")
    unreadable = [name for name, leaf in leaves.items() if not isinstance(leaf, np.ndarray) and not _is_spec(leaf)]
    if unreadable:
        raise CheckpointError(f"{path}: {unreadable[0]} is neither an array nor the place of one.")
    try:
        # All reads are started before the first is waited for: a checkpoint has hundreds of small files.
        pending = {name: _open(directory, leaf) if _is_spec(leaf) else leaf for name, leaf in leaves.items()}
        return {name: _finish(leaf) for name, leaf in pending.items()}
    except (ValueError, TypeError) as error:
        raise CheckpointError(f"{path}: cannot read its arrays: {error}") from error


def _is_spec(value: Any) -> bool:
    return isinstance(value, dict) and isinstance(value.get("kvstore"), dict)


def _open(directory: pathlib.Path, spec: dict[str, Any]) -> Any:
    """Starts to read one zarr array; T5X stores its path relative to the checkpoint's folder."""
    relative = pathlib.PurePosixPath(spec["kvstore"].get("path", "")).name
    kvstore = {"driver": "file", "path": f"{directory / relative}/"}
    # A chunk that was not copied would be read as zeros.
    spec = {"driver": "zarr", "kvstore": kvstore, "fill_missing_data_reads": False}
    return tensorstore.open(spec, open=True, read=True)


def _finish(leaf: Any) -> np.ndarray:
    values = leaf if isinstance(leaf, np.ndarray) else leaf.result().read().result()
    return np.asarray(values, dtype=np.float32)
