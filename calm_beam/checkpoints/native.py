"""The native layout: `config.json`, `model.safetensors` and a vocabulary in one folder.

Tensor names are those of the T5X tree, with slashes. Weights are float32 or float16; bfloat16 is refused on writing,
since rounding to it changes far more outputs than float16 does.
"""

import json
import pathlib
from collections.abc import Callable

import numpy as np

from calm_beam.storage import replacing

from .architectures import BY_NAME, Config, stored_architecture
from .checkpoint import Arrays
from .error import CheckpointError
from .metadata import read_json, shortened
from .safetensors_files import read_safetensors, write_safetensors
from .stored import StoredModel
from .stored_array import StoredArrays, pieces
from .vocabulary_files import write_vocabulary

_FORMAT = "calm-beam/model/v1"
_WRITABLE = ("float32", "float16")
# Of models that do not name theirs: there was one when they were written, and it still does not.
_FIRST_ARCHITECTURE = "t5"


def read_native(directory: pathlib.Path, *, keeps: Callable[[str], bool]) -> StoredModel:
    """Returns the config of a native model folder, as it is written, and its weights, none of which is read yet.

    Args:
      directory: Folder with `config.json` and `model.safetensors`.
      keeps: Which arrays to read, by name.

    Raises:
      CheckpointError: If either file is missing, malformed or of an unknown format.
    """
    path = directory / "config.json"
    expected = f'a JSON object with "format": "{_FORMAT}", or with "model_type": "t5" (Hugging Face)'
    fields = read_json(path, constants_allowed=False, expected=expected)
    if fields.pop("format", None) != _FORMAT:
        raise CheckpointError(f"{path}: expected {expected}.")
    name = fields.pop("architecture", _FIRST_ARCHITECTURE)
    if not isinstance(name, str) or name not in BY_NAME:
        raise CheckpointError(
            f"{path}: architecture is {shortened(repr(name))}, this version knows {', '.join(BY_NAME)}."
        )
    try:
        config = BY_NAME[name].config_of(fields)
    except (TypeError, ValueError) as error:
        raise CheckpointError(f"{path}: {shortened(error)}") from error
    return StoredModel(config=config, arrays=read_safetensors(directory / "model.safetensors", keeps=keeps))


def write_native(
    directory: pathlib.Path,
    config: Config,
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
      vocabulary_path: The SentencePiece model, or `tokenizer.json`, to copy beside the weights; with None, none is left
        there.
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
    name = stored_architecture(config).name
    head = {"format": _FORMAT} if name == _FIRST_ARCHITECTURE else {"format": _FORMAT, "architecture": name}
    config_text = json.dumps({**head, **stored_architecture(config).fields(config)}, indent=2) + "\n"
    write_vocabulary(directory, vocabulary_path, extra_ids=extra_ids)
    with replacing(directory / "model.safetensors") as temporary:
        write_safetensors(temporary, arrays, dtype=dtype)
        if isinstance(arrays, StoredArrays):
            arrays.check_unchanged()
    with replacing(directory / "config.json") as temporary:
        temporary.write_text(config_text, encoding="utf-8")
