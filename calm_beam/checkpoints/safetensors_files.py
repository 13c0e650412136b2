"""Arrays in one file of safetensors, whose header is believed only as far as the file and the memory go."""

import pathlib
from collections.abc import Callable

# For the name bfloat16, which numpy does not know otherwise.
import ml_dtypes  # noqa: F401
import numpy as np
import safetensors

from .checkpoint import CheckpointError
from .metadata import check_is_file, check_memory, shortened

_FLOATS = ("float32", "float16", "bfloat16")


def read_safetensors(path: pathlib.Path, *, keeps: Callable[[str], bool]) -> dict[str, np.ndarray]:
    """Returns the arrays of a file as float32, by name.

    Args:
      path: The file.
      keeps: Which arrays to read, by name.

    Raises:
      CheckpointError: If it is missing or damaged, does not fit into memory, or an array is of another type than a
        float of 16 or 32 bits.
    """
    check_is_file(path, failed="cannot be read as safetensors")
    try:
        with safetensors.safe_open(path, framework="numpy") as file:
            names = [name for name in file.keys() if keeps(name)]  # noqa: SIM118 - it is no mapping
            check_memory({name: tuple(file.get_slice(name).get_shape()) for name in names})
            return {name: _as_float32(name, file.get_tensor(name)) for name in names}
    # Damaged headers raise errors of several types; a type that numpy does not have raises another.
    except Exception as error:
        raise CheckpointError(f"{path}: cannot be read as safetensors: {shortened(error)}") from error


def _as_float32(name: str, array: np.ndarray) -> np.ndarray:
    if array.dtype.name not in _FLOATS:
        raise CheckpointError(f"{shortened(name)} is {array.dtype.name}, expected {', '.join(_FLOATS)}.")
    return array.astype(np.float32, copy=False)
