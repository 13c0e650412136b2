"""Writing a folder that holds one model: weights in safetensors, and `config.json`, without which there is no model."""

import contextlib
import json
import pathlib
from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np

from calm_beam.storage import replacing

from .checkpoint import Arrays
from .safetensors_files import write_safetensors
from .stored_array import StoredArrays, pieces

CONFIG = "config.json"
WEIGHTS = "model.safetensors"
_WRITABLE = ("float32", "float16")


def check_range(arrays: Arrays, dtype: str) -> None:
    """Refuses weights that a type cannot hold.

    Args:
      arrays: By name.
      dtype: `float32` or `float16`.

    Raises:
      ValueError: If `dtype` is another one, or a weight is not finite in it.
    """
    if dtype not in _WRITABLE:
        raise ValueError(f"dtype must be one of {', '.join(_WRITABLE)}, got {dtype!r}.")
    limit = np.finfo(dtype).max
    for name, array in arrays.items():
        if not all(np.all(np.abs(values) <= limit) for values in pieces(array)):
            raise ValueError(f"{name} has values that are not finite in {dtype} (its largest is {limit}).")


@contextlib.contextmanager
def replacing_model(directory: pathlib.Path, fields: Mapping[str, Any]) -> Iterator[None]:
    """Makes a folder for what is written inside, and writes `config.json` last.

    Args:
      directory: The folder; an overwritten model is no model until its last file is there.
      fields: What `config.json` says.
    """
    directory.mkdir(parents=True, exist_ok=True)
    (directory / CONFIG).unlink(missing_ok=True)
    yield
    write_json(directory / CONFIG, fields)


def write_weights(path: pathlib.Path, arrays: Arrays, *, source: Arrays, dtype: str) -> None:
    """Writes arrays to a file of safetensors, which appears whole or not at all.

    Args:
      path: The file.
      arrays: By the names that they have in it.
      source: What they are made of, whose files must not change meanwhile.
      dtype: As in `check_range`.
    """
    with replacing(path) as temporary:
        write_safetensors(temporary, arrays, dtype=dtype)
        if isinstance(source, StoredArrays):
            source.check_unchanged()


def write_json(path: pathlib.Path, fields: Mapping[str, Any]) -> None:
    """Writes an object to a file, which appears whole or not at all."""
    with replacing(path) as temporary:
        temporary.write_text(json.dumps(fields, indent=2) + "\n", encoding="utf-8")
