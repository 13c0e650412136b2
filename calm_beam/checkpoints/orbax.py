"""Folders that Orbax writes, as newer T5X does: zarr arrays by name, each in a folder or all in one OCDBT database.

TensorStore reads the arrays from folders or files on a local disk, also for T5X's older layout. Sizes in an array's
metadata are first checked against the stored bytes and the free memory: TensorStore ends the process if memory is short
or metadata are nested too deeply.

Orbax itself is not used. It reads the whole tree, including the optimizer's state; asked for the weights alone, it
fails on T5X's checkpoints, whose step is in a msgpack file, and on those of its own early versions.
Source: Orbax `PyTreeCheckpointHandler`, versions 0.2 to 0.12; T5X `checkpoints.py`.
"""

import math
import mmap
import os
import pathlib
import re
from collections.abc import Callable, Mapping
from typing import Any

import ml_dtypes  # noqa: F401 - for the name bfloat16, which numpy does not know otherwise
import numpy as np

from calm_beam.storage import strict_json

from .metadata import CheckpointError, check_is_file, check_memory, read_json, read_whole, shortened
from .stored_array import Array, FileStamp, Slices, StoredArray, StoredArrays

FLOATS = ("float16", "bfloat16", "float32", "float64")

_METADATA = {"zarr": ".zarray", "zarr3": "zarr.json"}
# Weights are never compressed to a thousandth; the slack is for constants.
_MOST_COMPRESSION, _SLACK = 1000, 1 << 20
_MOST_DIMENSIONS = 8

_OF_TENSORSTORE = re.compile(r" \[(?:tensorstore_spec|source locations)=")

Place = np.ndarray | dict[str, Any]


def read_arrays(source: pathlib.Path, places: Mapping[str, Place]) -> StoredArrays:
    """Returns arrays by name, unread except for those that `places` contains.

    Args:
      source: The file that locates them, for messages.
      places: Each array by name: the array itself, or a TensorStore spec with driver and absolute path.

    Raises:
      CheckpointError: If an array is missing or broken, claims an impossible size, or is not of floats.
    """
    try:
        stamps: dict[str, list[FileStamp]] = {}
        for shapes in _claimed_shapes(places, stamps=stamps):
            check_memory(shapes)
        # All are opened before waiting for the first: a checkpoint has hundreds of small files.
        arrays = {name: place if isinstance(place, np.ndarray) else _open(place) for name, place in places.items()}
        found = {name: _array(source, name, place=place) for name, place in arrays.items()}
        return StoredArrays(found, [stamp for of_folder in stamps.values() for stamp in of_folder])
    # TensorStore and numpy raise many types of errors for damaged files.
    except Exception as error:
        raise _unreadable(source, error) from error


def _claimed_shapes(
    places: Mapping[str, Place], *, stamps: dict[str, list[FileStamp]]
) -> tuple[dict[str, tuple[int, ...]], dict[str, tuple[int, ...]]]:
    """Returns the shapes of arrays and of their chunks, from their metadata; adds stamps of their files."""
    pending = {name: _metadata(place) for name, place in places.items() if isinstance(place, dict)}
    claimed = {
        name: _claimed_shape(name, place, read=pending[name].result(), stamps=stamps)
        if isinstance(place, dict)
        else (place.shape, place.shape)
        for name, place in places.items()
    }
    shapes, chunks = ({name: each[part] for name, each in claimed.items()} for part in range(2))
    return shapes, chunks


def _metadata(spec: dict[str, Any]) -> Any:
    """Starts reading the metadata of an array."""
    import tensorstore

    kvstore = dict(spec["kvstore"])
    kvstore["path"] = f"{kvstore['path']}{_METADATA[spec['driver']]}"
    if kvstore["driver"] == "file":
        check_is_file(pathlib.Path(kvstore["path"]))
    return tensorstore.KvStore.open(kvstore).result().read("")


def _claimed_shape(
    name: str, spec: dict[str, Any], *, read: Any, stamps: dict[str, list[FileStamp]]
) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Returns the shapes of an array and of its chunks, from its metadata; refuses impossible ones.

    `stamps` caches the stamps of files by folder.
    """
    file = _METADATA[spec["driver"]]
    if read.state != "value":
        raise CheckpointError(f"{shortened(name)}: has no {file}.")
    try:
        metadata = strict_json.loads(read.value, constants_allowed=True)
        shape, chunks = _dimensions(metadata, driver=spec["driver"])
    except strict_json.StrictJSONError as error:
        raise CheckpointError(f"{shortened(name)}: cannot read its {file}: {error}.") from error
    except (KeyError, TypeError, IndexError) as error:
        raise CheckpointError(f"{shortened(name)}: its {file} has no shape, or no shape of chunks.") from error
    if len(shape) > _MOST_DIMENSIONS or len(shape) != len(chunks) or min((*shape, *chunks), default=1) < 1:
        raise CheckpointError(f"{shortened(name)}: has shape {shape} in chunks {chunks}, expected at least 1 of each.")
    kvstore = spec["kvstore"]
    folder = kvstore["base"]["path"] if kvstore["driver"] == "ocdbt" else kvstore["path"]
    if folder not in stamps:
        stamps[folder] = _stamps(pathlib.Path(folder))
    stored = sum(stamp.size for stamp in stamps[folder])
    number = math.prod(tuple(-(-size // chunk) for size, chunk in zip(shape, chunks, strict=True)))
    # Every chunk takes at least a byte.
    if max(math.prod(shape), math.prod(chunks)) > _MOST_COMPRESSION * stored + _SLACK or number > stored:
        raise CheckpointError(
            f"{shortened(name)}: claims shape {shape} in chunks {chunks}, but {folder} holds {stored} bytes: "
            "that is not all of it, or the claim is wrong."
        )
    return shape, chunks


def _dimensions(metadata: Any, *, driver: str) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Returns the shapes of an array and of its chunks."""
    chunks = metadata["chunks"] if driver == "zarr" else metadata["chunk_grid"]["configuration"]["chunk_shape"]
    shapes = tuple(metadata["shape"]), tuple(chunks)
    if any(type(size) is not int for shape in shapes for size in shape):
        raise TypeError
    return shapes


def _stamps(folder: pathlib.Path) -> list[FileStamp]:
    """Returns the stamps of all files in a folder; refuses files that a read might never finish."""
    stamps, seen, folders = [], set(), [folder]
    while folders:
        with os.scandir(folders.pop()) as entries:
            for entry in entries:
                if entry.is_dir():
                    # Links may be circular.
                    if (key := os.path.realpath(entry.path)) not in seen:
                        seen.add(key)
                        folders.append(pathlib.Path(entry.path))
                else:
                    check_is_file(pathlib.Path(entry.path))
                    stamps.append(FileStamp.of(pathlib.Path(entry.path)))
    return stamps


def _open(spec: dict[str, Any]) -> Any:
    import tensorstore

    # Otherwise a chunk that was not copied would be read as zeros.
    return tensorstore.open({**spec, "fill_missing_data_reads": False}, open=True, read=True)


def _array(source: pathlib.Path, name: str, *, place: Any) -> Array:
    """Returns an array that TensorStore has opened, or one in memory as float32."""
    opened = place if isinstance(place, np.ndarray) else place.result()
    dtype = opened.dtype if isinstance(opened, np.ndarray) else opened.dtype.numpy_dtype
    if dtype.name not in FLOATS:
        raise CheckpointError(f"{shortened(name)} is {shortened(dtype.name)}, expected one of {', '.join(FLOATS)}.")
    if isinstance(opened, np.ndarray):
        with np.errstate(over="ignore"):
            # Values too large for float32 become infinite, and are found by the check for finite values.
            return np.asarray(opened, dtype=np.float32)

    def read(slices: Slices) -> np.ndarray:
        try:
            values: np.ndarray = opened[slices].read().result()
        except Exception as error:
            raise _unreadable(source, error) from error
        return values

    return StoredArray(opened.shape, dtype, read=read, chunk=opened.chunk_layout.read_chunk.shape)


def _unreadable(source: pathlib.Path, error: Exception) -> CheckpointError:
    return CheckpointError(f"{source}: cannot read its arrays: {_reason(error)}")


def _reason(error: Exception) -> str:
    """Returns the reason, without TensorStore's copy of the specification."""
    first = _OF_TENSORSTORE.split(str(error), maxsplit=1)[0]
    return shortened(" ".join(first.split()) or type(error).__name__, most=400)


# Subfolders of a step in which a CheckpointManager puts the tree: T5X's, its own default, the usual one, and MaxText's.
_ITEMS = ("state", "default", "params", "items")
# Keys of the weights in the tree of a train state, T5X's and Flax's; MaxText nests the latter twice.
_WEIGHTS = ("target", "params", "params")
# The msgpack file has this in place of an array that is stored outside.
_PLACEHOLDER = "PLACEHOLDER://"

Key = tuple[str, ...]


def find_item(directory: pathlib.Path) -> pathlib.Path | None:
    """Returns the folder with Orbax's tree, which is `directory` or an item in it, or None if there is none."""
    folders = (directory, *(directory / name for name in _ITEMS))
    return next((folder for folder in folders if _is_item(folder)), None)


def read_orbax(item: pathlib.Path, *, keeps: Callable[[str], bool]) -> StoredArrays:
    """Returns the weights in a folder that `find_item` found, by name, to be read as float32.

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
    # Early versions wrote only the msgpack file, and T5X's own layout has a file of that name too.
    msgpack = folder / "checkpoint"
    if not msgpack.is_file() or not msgpack.stat().st_size:
        return False
    with msgpack.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as content:
        return content.find(_PLACEHOLDER.encode()) >= 0


def _leaves_of_msgpack(path: pathlib.Path) -> dict[Key, Any]:
    """Returns the arrays of a tree that versions before 0.6 wrote, or the names they are stored under."""
    import flax.serialization
    import flax.traverse_util

    content = read_whole(path)
    try:
        tree = flax.traverse_util.flatten_dict(flax.serialization.msgpack_restore(content))
        keys = {leaf: tuple(map(str, leaf)) for leaf in tree}
    except Exception as error:
        # As with T5X, damaged msgpack raises a dozen unrelated types.
        raise CheckpointError(
            f"{path}: not an Orbax checkpoint ({type(error).__name__}: {shortened(error)})."
        ) from error
    return {keys[key]: leaf.removeprefix(_PLACEHOLDER) if isinstance(leaf, str) else leaf for key, leaf in tree.items()}


def _leaves_of_metadata(path: pathlib.Path, metadata: Mapping[str, Any]) -> dict[Key, Any]:
    """Returns the names that arrays are stored under."""
    try:
        keys = [tuple(str(part["key"]) for part in leaf["key_metadata"]) for leaf in metadata["tree_metadata"].values()]
    except (AttributeError, KeyError, TypeError) as error:
        raise CheckpointError(
            f"{path}: expected tree_metadata with the key_metadata of every array ({type(error).__name__}: "
            f"{shortened(error)})."
        ) from error
    return {key: ".".join(key) for key in keys}


def _place(item: pathlib.Path, driver: str, *, leaf: Any) -> Any:
    """Returns an array of the msgpack file, or the place where it is stored."""
    if isinstance(leaf, np.ndarray):
        return leaf
    if (item / "manifest.ocdbt").is_file():
        database = {"driver": "file", "path": f"{item}/"}
        return {"driver": driver, "kvstore": {"driver": "ocdbt", "base": database, "path": f"{leaf}/"}}
    return {"driver": driver, "kvstore": {"driver": "file", "path": f"{item / str(leaf)}/"}}
