"""Arrays that TensorStore reads from folders or files on a local disk.

What an array's metadata claim is compared with what is stored and with the memory that is free before TensorStore sees
them: it ends the process where memory is short, or where they are nested too deeply.
"""

import os
import pathlib
import re
from collections.abc import Mapping
from typing import Any

import ml_dtypes  # noqa: F401 - for the name bfloat16, which numpy does not know otherwise
import numpy as np

from calm_beam.storage import strict_json

from .error import CheckpointError
from .metadata import check_is_file, check_memory, product, shortened
from .stored_array import Array, FileStamp, Slices, StoredArray, StoredArrays

FLOATS = ("float16", "bfloat16", "float32", "float64")

_METADATA = {"zarr": ".zarray", "zarr3": "zarr.json"}
# No weights are compressed to a thousandth; the slack is for constants.
_MOST_COMPRESSION, _SLACK = 1000, 1 << 20
_MOST_DIMENSIONS = 8

_OF_TENSORSTORE = re.compile(r" \[(?:tensorstore_spec|source locations)=")

Place = np.ndarray | dict[str, Any]


def read_arrays(source: pathlib.Path, places: Mapping[str, Place]) -> StoredArrays:
    """Returns arrays by name, none of which is read yet but those that `places` has.

    Args:
      source: The file that says where they are, for messages.
      places: Where each array is, by name: itself, or as a TensorStore spec with driver and absolute path.

    Raises:
      CheckpointError: If an array is missing or broken, claims to be larger than can be, or is not of floats.
    """
    try:
        stamps: dict[str, list[FileStamp]] = {}
        for shapes in _claimed_shapes(places, stamps=stamps):
            check_memory(shapes)
        # All are opened before the first is waited for: a checkpoint has hundreds of small files.
        arrays = {name: place if isinstance(place, np.ndarray) else _open(place) for name, place in places.items()}
        found = {name: _array(source, name, place=place) for name, place in arrays.items()}
        return StoredArrays(found, [stamp for of_folder in stamps.values() for stamp in of_folder])
    # What TensorStore and numpy raise of damaged files is of many types.
    except Exception as error:
        raise _unreadable(source, error) from error


def _claimed_shapes(
    places: Mapping[str, Place], *, stamps: dict[str, list[FileStamp]]
) -> tuple[dict[str, tuple[int, ...]], dict[str, tuple[int, ...]]]:
    """Returns the shapes of arrays, as their metadata have them, and of their chunks; adds stamps of their files."""
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
    """Starts to read the metadata of an array."""
    import tensorstore

    kvstore = dict(spec["kvstore"])
    kvstore["path"] = f"{kvstore['path']}{_METADATA[spec['driver']]}"
    if kvstore["driver"] == "file":
        check_is_file(pathlib.Path(kvstore["path"]))
    return tensorstore.KvStore.open(kvstore).result().read("")


def _claimed_shape(
    name: str, spec: dict[str, Any], *, read: Any, stamps: dict[str, list[FileStamp]]
) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Returns the shapes of an array and of its chunks as its metadata say, having refused what cannot be.

    `stamps` remembers what folders hold.
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
    number = product(tuple(-(-size // chunk) for size, chunk in zip(shape, chunks, strict=True)))
    # No chunk is stored in less than a byte.
    if max(product(shape), product(chunks)) > _MOST_COMPRESSION * stored + _SLACK or number > stored:
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
    """Returns the stamps of all files in a folder, having refused what would not end when it is read."""
    stamps, seen, folders = [], set(), [folder]
    while folders:
        with os.scandir(folders.pop()) as entries:
            for entry in entries:
                if entry.is_dir():
                    # Links may lead in circles.
                    if (key := os.path.realpath(entry.path)) not in seen:
                        seen.add(key)
                        folders.append(pathlib.Path(entry.path))
                else:
                    check_is_file(pathlib.Path(entry.path))
                    stamps.append(FileStamp.of(pathlib.Path(entry.path)))
    return stamps


def _open(spec: dict[str, Any]) -> Any:
    import tensorstore

    # A chunk that was not copied would be read as zeros.
    return tensorstore.open({**spec, "fill_missing_data_reads": False}, open=True, read=True)


def _array(source: pathlib.Path, name: str, *, place: Any) -> Array:
    """Returns an array that TensorStore has opened, or one that is in memory as float32."""
    opened = place if isinstance(place, np.ndarray) else place.result()
    dtype = opened.dtype if isinstance(opened, np.ndarray) else opened.dtype.numpy_dtype
    if dtype.name not in FLOATS:
        raise CheckpointError(f"{shortened(name)} is {shortened(dtype.name)}, expected one of {', '.join(FLOATS)}.")
    if isinstance(opened, np.ndarray):
        with np.errstate(over="ignore"):
            # What is too large for float32 becomes infinite, and is found then.
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
    """Returns what went wrong, without TensorStore's copy of the specification."""
    first = _OF_TENSORSTORE.split(str(error), maxsplit=1)[0]
    return shortened(" ".join(first.split()) or type(error).__name__, most=400)
