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

from calm_beam import strict_json

from .checkpoint import CheckpointError
from .metadata import check_is_file, check_memory, product, shortened

FLOATS = ("float16", "bfloat16", "float32", "float64")

_METADATA = {"zarr": ".zarray", "zarr3": "zarr.json"}
# No weights are compressed to a thousandth; the slack is for constants.
_MOST_COMPRESSION, _SLACK = 1000, 1 << 20
_MOST_DIMENSIONS = 8

_OF_TENSORSTORE = re.compile(r" \[(?:tensorstore_spec|source locations)=")

Place = np.ndarray | dict[str, Any]


def read_arrays(source: pathlib.Path, places: Mapping[str, Place]) -> dict[str, np.ndarray]:
    """Returns float32 arrays by name.

    Args:
      source: The file that says where they are, for messages.
      places: Where each array is, by name: itself, or as a TensorStore spec with driver and absolute path.

    Raises:
      CheckpointError: If an array is missing or broken, claims to be larger than can be, or is not of floats.
    """
    try:
        check_memory(_claimed_shapes(places))
        # All reads are started before the first is waited for: a checkpoint has hundreds of small files.
        arrays = {name: place if isinstance(place, np.ndarray) else _open(place) for name, place in places.items()}
        return {name: _finish(name, place) for name, place in arrays.items()}
    # What TensorStore and numpy raise of damaged files is of many types.
    except Exception as error:
        raise CheckpointError(f"{source}: cannot read its arrays: {_reason(error)}") from error


def _claimed_shapes(places: Mapping[str, Place]) -> dict[str, tuple[int, ...]]:
    """Returns the shapes of arrays, as their metadata have them."""
    pending = {name: _metadata(place) for name, place in places.items() if isinstance(place, dict)}
    sizes: dict[str, int] = {}
    return {
        name: _claimed_shape(name, place, read=pending[name].result(), sizes=sizes)
        if isinstance(place, dict)
        else place.shape
        for name, place in places.items()
    }


def _metadata(spec: dict[str, Any]) -> Any:
    """Starts to read the metadata of an array."""
    import tensorstore

    kvstore = dict(spec["kvstore"])
    kvstore["path"] = f"{kvstore['path']}{_METADATA[spec['driver']]}"
    if kvstore["driver"] == "file":
        check_is_file(pathlib.Path(kvstore["path"]))
    return tensorstore.KvStore.open(kvstore).result().read("")


def _claimed_shape(name: str, spec: dict[str, Any], *, read: Any, sizes: dict[str, int]) -> tuple[int, ...]:
    """Returns the shape that an array's metadata say, having refused what cannot be; `sizes` remembers folders'."""
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
    if folder not in sizes:
        sizes[folder] = _stored_bytes(pathlib.Path(folder))
    number = product(tuple(-(-size // chunk) for size, chunk in zip(shape, chunks, strict=True)))
    # No chunk is stored in less than a byte.
    if max(product(shape), product(chunks)) > _MOST_COMPRESSION * sizes[folder] + _SLACK or number > sizes[folder]:
        raise CheckpointError(
            f"{shortened(name)}: claims shape {shape} in chunks {chunks}, but {folder} holds {sizes[folder]} bytes: "
            "that is not all of it, or the claim is wrong."
        )
    return shape


def _dimensions(metadata: Any, *, driver: str) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Returns the shapes of an array and of its chunks."""
    chunks = metadata["chunks"] if driver == "zarr" else metadata["chunk_grid"]["configuration"]["chunk_shape"]
    shapes = tuple(metadata["shape"]), tuple(chunks)
    if any(type(size) is not int for shape in shapes for size in shape):
        raise TypeError
    return shapes


def _stored_bytes(folder: pathlib.Path) -> int:
    """Returns how much a folder holds, having refused what would not end when it is read."""
    total, seen, folders = 0, set(), [folder]
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
                    total += entry.stat().st_size
    return total


def _open(spec: dict[str, Any]) -> Any:
    import tensorstore

    # A chunk that was not copied would be read as zeros.
    return tensorstore.open({**spec, "fill_missing_data_reads": False}, open=True, read=True)


def _finish(name: str, place: Any) -> np.ndarray:
    source = place if isinstance(place, np.ndarray) else place.result()
    if source.dtype.name not in FLOATS:
        raise CheckpointError(
            f"{shortened(name)} is {shortened(source.dtype.name)}, expected one of {', '.join(FLOATS)}."
        )
    values = source if isinstance(source, np.ndarray) else source.read().result()
    with np.errstate(over="ignore"):
        # What is too large for float32 becomes infinite, and is found then.
        return np.asarray(values, dtype=np.float32)


def _reason(error: Exception) -> str:
    """Returns what went wrong, without TensorStore's copy of the specification."""
    first = _OF_TENSORSTORE.split(str(error), maxsplit=1)[0]
    return shortened(" ".join(first.split()) or type(error).__name__, most=400)
