"""The native layout: `config.json`, `model.safetensors` and `sentencepiece.model` in one folder.

Tensor names are those of the T5X tree, with slashes. Weights are float32 or float16; bfloat16 is refused on writing,
since rounding to it changes far more outputs than float16 does.
"""

import dataclasses
import json
import pathlib
import shutil

import numpy as np
import safetensors
import safetensors.numpy

from calm_beam.model import T5Config
from calm_beam.storage import replacing

from .checkpoint import CheckpointError, FloatArrays

_FORMAT = "calm-beam/model/v1"
_WRITABLE = ("float32", "float16")


def read_native(directory: pathlib.Path) -> tuple[T5Config, dict[str, np.ndarray]]:
    """Returns config and float32 weights of a native model folder.

    Args:
      directory: Folder with `config.json` and `model.safetensors`.

    Returns:
      The config as written, and the arrays by name.

    Raises:
      CheckpointError: If either file is missing, malformed or of an unknown format.
    """
    path = directory / "config.json"
    try:
        fields = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise CheckpointError(f"{path}: cannot be read as JSON: {error}") from error
    if not isinstance(fields, dict) or fields.pop("format", None) != _FORMAT:
        raise CheckpointError(
            f'{path}: expected a JSON object with "format": "{_FORMAT}", or with "model_type": "t5" (Hugging Face).'
        )
    known = {field.name for field in dataclasses.fields(T5Config)}
    if fields.keys() != known:
        raise CheckpointError(
            f"{path}: unknown keys {sorted(fields.keys() - known)}, missing keys {sorted(known - fields.keys())}."
        )
    weights = directory / "model.safetensors"
    try:
        arrays = safetensors.numpy.load_file(weights)
    # AttributeError: a type that numpy does not have.
    except (OSError, AttributeError, safetensors.SafetensorError) as error:
        raise CheckpointError(f"{weights}: cannot be read as safetensors: {error}") from error
    try:
        config = T5Config(**fields)
    except (TypeError, ValueError) as error:
        raise CheckpointError(f"{path}: {error}") from error
    return config, {name: np.asarray(array, np.float32) for name, array in arrays.items()}


def write_native(
    directory: pathlib.Path,
    config: T5Config,
    arrays: FloatArrays,
    *,
    vocabulary_path: pathlib.Path | None,
    dtype: str = "float32",
) -> None:
    """Writes a native model folder; each file appears whole or not at all, `config.json` last.

    Args:
      directory: Where to; made if needed.
      config: Sizes of the model.
      arrays: Weights by name.
      vocabulary_path: The SentencePiece model to copy beside the weights; with None, none is left there.
      dtype: `float32` or `float16`. float16 halves the file and rounds the weights.

    Raises:
      ValueError: If `dtype` is another one, or a weight is not finite in it.
    """
    if dtype not in _WRITABLE:
        raise ValueError(f"dtype must be one of {', '.join(_WRITABLE)}, got {dtype!r}.")
    limit = np.finfo(dtype).max
    for name, array in arrays.items():
        if not np.all(np.abs(array) <= limit):
            raise ValueError(f"{name} has values that are not finite in {dtype} (its largest is {limit}).")
    directory.mkdir(parents=True, exist_ok=True)
    stored = {name: np.ascontiguousarray(array, dtype) for name, array in arrays.items()}
    # An overwritten model is no model until its last file is there.
    (directory / "config.json").unlink(missing_ok=True)
    config_text = json.dumps({"format": _FORMAT, **dataclasses.asdict(config)}, indent=2) + "\n"
    if vocabulary_path is None:
        (directory / "sentencepiece.model").unlink(missing_ok=True)
    else:
        with replacing(directory / "sentencepiece.model") as temporary:
            shutil.copyfile(vocabulary_path, temporary)
    with replacing(directory / "model.safetensors") as temporary:
        # Not save_file: it makes a file that only its owner can read.
        temporary.write_bytes(safetensors.numpy.save(stored))
    with replacing(directory / "config.json") as temporary:
        temporary.write_text(config_text, encoding="utf-8")
