"""The native layout: `config.json`, `model.safetensors` and `sentencepiece.model` in one folder.

Tensor names are those of the T5X tree, with slashes. Weights are float32 or float16; bfloat16 is refused on writing,
since rounding to it changes far more outputs than float16 does.
"""

import dataclasses
import json
import pathlib
import shutil
from collections.abc import Callable

import numpy as np

from calm_beam.model import T5Config
from calm_beam.sentinels import write_extra_ids
from calm_beam.storage import replacing

from .checkpoint import Arrays
from .error import CheckpointError
from .metadata import read_json, shortened
from .safetensors_files import read_safetensors, write_safetensors
from .stored_array import StoredArrays, pieces

_FORMAT = "calm-beam/model/v1"
_WRITABLE = ("float32", "float16")
# Keys without which a model is T5's.
_ADDED_LATER = {"activation", "relative_bias_per_layer"}


def read_native(directory: pathlib.Path, *, keeps: Callable[[str], bool]) -> tuple[T5Config, StoredArrays]:
    """Returns the config of a native model folder and its weights, to be read as float32.

    Args:
      directory: Folder with `config.json` and `model.safetensors`.
      keeps: Which arrays to read, by name.

    Returns:
      The config as written, and the arrays by name.

    Raises:
      CheckpointError: If either file is missing, malformed or of an unknown format.
    """
    path = directory / "config.json"
    expected = f'a JSON object with "format": "{_FORMAT}", or with "model_type": "t5" (Hugging Face)'
    fields = read_json(path, constants_allowed=False, expected=expected)
    if fields.pop("format", None) != _FORMAT:
        raise CheckpointError(f"{path}: expected {expected}.")
    known = {field.name for field in dataclasses.fields(T5Config)}
    unknown, missing = fields.keys() - known, known - fields.keys() - _ADDED_LATER
    if unknown or missing:
        raise CheckpointError(f"{path}: unknown keys {shortened(sorted(unknown))}, missing keys {sorted(missing)}.")
    try:
        config = T5Config(**fields)
    except (TypeError, ValueError) as error:
        raise CheckpointError(f"{path}: {error}") from error
    return config, read_safetensors(directory / "model.safetensors", keeps=keeps)


def write_native(
    directory: pathlib.Path,
    config: T5Config,
    *,
    arrays: Arrays,
    vocabulary_path: pathlib.Path | None,
    extra_ids: int = 0,
    dtype: str = "float32",
) -> None:
    """Writes a native model folder; each file appears whole or not at all, `config.json` last.

    Args:
      directory: Where to; made if needed.
      config: Sizes of the model.
      arrays: Weights by name.
      vocabulary_path: The SentencePiece model to copy beside the weights; with None, none is left there.
      extra_ids: Its sentinels, which a file beside it then names.
      dtype: `float32` or `float16`. float16 halves the file and rounds the weights.

    Raises:
      ValueError: If `dtype` is another one, or a weight is not finite in it.
    """
    if dtype not in _WRITABLE:
        raise ValueError(f"dtype must be one of {', '.join(_WRITABLE)}, got {dtype!r}.")
    limit = np.finfo(dtype).max
    for name, array in arrays.items():
        if not all(np.all(np.abs(values) <= limit) for values in pieces(array)):
            raise ValueError(f"{name} has values that are not finite in {dtype} (its largest is {limit}).")
    directory.mkdir(parents=True, exist_ok=True)
    # An overwritten model is no model until its last file is there.
    (directory / "config.json").unlink(missing_ok=True)
    config_text = json.dumps({"format": _FORMAT, **dataclasses.asdict(config)}, indent=2) + "\n"
    if vocabulary_path is None:
        (directory / "sentencepiece.model").unlink(missing_ok=True)
    else:
        with replacing(directory / "sentencepiece.model") as temporary:
            shutil.copyfile(vocabulary_path, temporary)
    write_extra_ids(directory, extra_ids if vocabulary_path else 0)
    with replacing(directory / "model.safetensors") as temporary:
        write_safetensors(temporary, arrays, dtype=dtype)
        if isinstance(arrays, StoredArrays):
            arrays.check_unchanged()
    with replacing(directory / "config.json") as temporary:
        temporary.write_text(config_text, encoding="utf-8")
