"""Folders that Orbax writes, as newer T5X does: zarr arrays by name, each in a folder or all in one OCDBT database.

Arrays are read through TensorStore and not through the library: it reads the whole tree, optimizer's state included,
or, asked for the weights alone, fails on the checkpoints of T5X, whose step lies in a msgpack file, and on those of its
own early versions. Source: Orbax `PyTreeCheckpointHandler`, versions 0.2 to 0.12; T5X `checkpoints.py`.
"""

import mmap
import pathlib
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np

from .error import CheckpointError
from .metadata import read_json, read_whole, shortened
from .stored_array import StoredArrays
from .zarr_arrays import read_arrays

# Folders of a step in which a CheckpointManager puts the tree: T5X's, its own default, the usual one, and MaxText's.
_ITEMS = ("state", "default", "params", "items")
# Where the weights are in the tree of a train state, T5X's and Flax's; MaxText has the latter twice.
_WEIGHTS = ("target", "params", "params")
# What an array outside of the msgpack file has there instead.
_PLACEHOLDER = "PLACEHOLDER://"

Key = tuple[str, ...]


def find_item(directory: pathlib.Path) -> pathlib.Path | None:
    """Returns the folder with Orbax's tree, which is `directory` or an item in it, or None if there is none."""
    folders = (directory, *(directory / name for name in _ITEMS))
    return next((folder for folder in folders if _is_item(folder)), None)


def read_orbax(item: pathlib.Path, *, keeps: Callable[[str], bool]) -> StoredArrays:
    """Returns the weights in a folder of `find_item` by name, to be read as float32.

    Args:
      item: The folder with `_METADATA`, or with the msgpack file `checkpoint` of early versions. The weights are the
        tree's `target` (T5X) or `params`, or all of it.
      keeps: Which arrays to read, by name.

    Returns:
      Mapping from names such as `decoder/layers_0/mlp/wi_0/kernel` to arrays.

    Raises:
      CheckpointError: If the tree cannot be read, or an array is missing or broken.
    """
    source = item / "_METADATA"
    metadata = read_json(source) if source.is_file() else {}
    if (item / "checkpoint").is_file():
        source = item / "checkpoint"
        leaves = _leaves_of_msgpack(source)
    else:
        leaves = _leaves_of_metadata(source, metadata)
    for key in _WEIGHTS:
        leaves = {name[1:]: leaf for name, leaf in leaves.items() if name[:1] == (key,)} or leaves
    driver = "zarr3" if metadata.get("use_zarr3") else "zarr"
    named = {"/".join(name): leaf for name, leaf in leaves.items()}
    return read_arrays(item, {name: _place(item, driver, leaf=leaf) for name, leaf in named.items() if keeps(name)})


def _is_item(folder: pathlib.Path) -> bool:
    if (folder / "_METADATA").is_file():
        return True
    # Early versions wrote the msgpack file alone, and T5X's own layout has one of that name.
    msgpack = folder / "checkpoint"
    if not msgpack.is_file() or not msgpack.stat().st_size:
        return False
    with msgpack.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as content:
        return content.find(_PLACEHOLDER.encode()) >= 0


def _leaves_of_msgpack(path: pathlib.Path) -> dict[Key, Any]:
    """Returns arrays, or the names they are stored by, of the tree that versions before 0.6 wrote."""
    import flax.serialization
    import flax.traverse_util

    content = read_whole(path)
    try:
        tree = flax.traverse_util.flatten_dict(flax.serialization.msgpack_restore(content))
        keys = {leaf: tuple(map(str, leaf)) for leaf in tree}
    except Exception as error:
        # As for T5X: damaged msgpack raises a dozen unrelated types.
        raise CheckpointError(
            f"{path}: not an Orbax checkpoint ({type(error).__name__}: {shortened(error)})."
        ) from error
    return {keys[key]: leaf.removeprefix(_PLACEHOLDER) if isinstance(leaf, str) else leaf for key, leaf in tree.items()}


def _leaves_of_metadata(path: pathlib.Path, metadata: Mapping[str, Any]) -> dict[Key, Any]:
    """Returns the names that arrays are stored by."""
    try:
        keys = [tuple(str(part["key"]) for part in leaf["key_metadata"]) for leaf in metadata["tree_metadata"].values()]
    except (AttributeError, KeyError, TypeError) as error:
        raise CheckpointError(
            f"{path}: expected tree_metadata with the key_metadata of every array ({type(error).__name__}: "
            f"{shortened(error)})."
        ) from error
    return {key: ".".join(key) for key in keys}


def _place(item: pathlib.Path, driver: str, *, leaf: Any) -> Any:
    """Returns an array of the msgpack file, or where it is stored."""
    if isinstance(leaf, np.ndarray):
        return leaf
    if (item / "manifest.ocdbt").is_file():
        database = {"driver": "file", "path": f"{item}/"}
        return {"driver": driver, "kvstore": {"driver": "ocdbt", "base": database, "path": f"{leaf}/"}}
    return {"driver": driver, "kvstore": {"driver": "file", "path": f"{item / str(leaf)}/"}}
