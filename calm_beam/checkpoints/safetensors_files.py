"""Arrays in one file of safetensors, whose header is believed only as far as the file and the memory go."""

import json
import pathlib
import struct
from collections.abc import Callable
from typing import Any

# For the name bfloat16, which numpy does not know otherwise.
import ml_dtypes  # noqa: F401
import numpy as np
import safetensors

from .checkpoint import Arrays
from .error import CheckpointError
from .metadata import check_is_file, check_memory, shortened
from .stored_array import FileStamp, Slices, StoredArray, StoredArrays, pieces

_STORED = {"float32": "F32", "float16": "F16", "bfloat16": "BF16"}
_FLOATS = tuple(_STORED)
# What numpy calls the types of headers, before their bits.
_KINDS = {"F": "float", "BF": "bfloat", "I": "int", "U": "uint"}


def read_safetensors(path: pathlib.Path, *, keeps: Callable[[str], bool]) -> StoredArrays:
    """Returns the arrays of a file by name, none of which is read yet.

    Args:
      path: The file.
      keeps: Which arrays to read, by name.

    Raises:
      CheckpointError: If it is missing or damaged, or an array does not fit into memory or is of another type than a
        float of 16 or 32 bits.
    """
    check_is_file(path, failed="cannot be read as safetensors")
    stamp = FileStamp.of(path)
    try:
        file: Any = safetensors.safe_open(path, framework="numpy")
        places = {name: file.get_slice(name) for name in file.keys() if keeps(name)}  # noqa: SIM118 - it is no mapping
        check_memory({name: tuple(place.get_shape()) for name, place in places.items()})
        return StoredArrays({name: _array(path, name, place=place) for name, place in places.items()}, [stamp])
    # Damaged headers raise errors of several types.
    except Exception as error:
        raise _unreadable(path, error) from error


def write_safetensors(path: pathlib.Path, arrays: Arrays, *, dtype: str) -> None:
    """Writes arrays to a file, piece by piece.

    Args:
      path: The file.
      arrays: By name.
      dtype: What to store them as, one of numpy's names of floats of 16 or 32 bits.
    """
    width, header, end = np.dtype(dtype).itemsize, {}, 0
    for name, array in arrays.items():
        begin, end = end, end + width * array.size
        header[name] = {"dtype": _STORED[dtype], "shape": list(array.shape), "data_offsets": [begin, end]}
    text = json.dumps(header, separators=(",", ":")).encode()
    # Arrays begin at a multiple of 8, as the library has them.
    text += b" " * (-len(text) % 8)
    with path.open("wb") as file:
        file.write(struct.pack("<Q", len(text)) + text)
        for array in arrays.values():
            for values in pieces(array):
                file.write(np.ascontiguousarray(values, dtype).data)


def _array(path: pathlib.Path, name: str, *, place: Any) -> StoredArray:
    """Returns an array that is read through a slice of the library's."""
    stored: str = place.get_dtype()
    kind = stored.rstrip("0123456789")
    dtype = f"{_KINDS.get(kind, kind)}{stored.removeprefix(kind)}"
    if dtype not in _FLOATS:
        raise CheckpointError(f"{shortened(name)} is {shortened(dtype)}, expected {', '.join(_FLOATS)}.")

    def read(slices: Slices) -> np.ndarray:
        try:
            values: np.ndarray = place[slices if slices else ...]
        except Exception as error:
            raise _unreadable(path, error) from error
        return values

    return StoredArray(tuple(place.get_shape()), np.dtype(dtype), read=read)


def _unreadable(path: pathlib.Path, error: Exception) -> CheckpointError:
    return CheckpointError(f"{path}: cannot be read as safetensors: {shortened(error)}")
