"""The native layout: `config.json`, `model.safetensors` and a vocabulary in one folder.

Tensor names are those of the T5X tree, with slashes. Weights are float32 or float16; bfloat16 is refused on writing,
since rounding to it changes far more outputs than float16 does.
"""

import pathlib
from collections.abc import Callable

from .architectures import BY_NAME, Config, stored_architecture
from .checkpoint import Arrays
from .error import CheckpointError
from .metadata import read_json, shortened
from .model_folder import CONFIG, WEIGHTS, check_range, replacing_model, write_weights
from .safetensors_files import read_safetensors
from .stored import StoredModel
from .vocabulary_files import write_vocabulary

_FORMAT = "calm-beam/model/v1"
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
    path = directory / CONFIG
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
    return StoredModel(config=config, arrays=read_safetensors(directory / WEIGHTS, keeps=keeps))


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
    check_range(arrays, dtype)
    name = stored_architecture(config).name
    head = {"format": _FORMAT} if name == _FIRST_ARCHITECTURE else {"format": _FORMAT, "architecture": name}
    with replacing_model(directory, {**head, **stored_architecture(config).fields(config)}):
        write_vocabulary(directory, vocabulary_path, extra_ids=extra_ids)
        write_weights(directory / WEIGHTS, arrays, source=arrays, dtype=dtype)
