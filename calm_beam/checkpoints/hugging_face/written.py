"""Writing a folder that transformers loads: a model that was trained here is never locked in."""

import pathlib
from collections.abc import Callable, Mapping
from typing import Any

from calm_beam.checkpoints.architectures import Config
from calm_beam.checkpoints.checkpoint import Arrays
from calm_beam.checkpoints.metadata import read_json
from calm_beam.checkpoints.model_folder import WEIGHTS, check_range, replacing_model, write_json, write_weights
from calm_beam.checkpoints.vocabulary_files import SPIECE, write_vocabulary
from calm_beam.inputs.vocabularies.tokenizer_files import CONFIG, TOKENIZER, read_tokenizer_files
from calm_beam.model import T5Config
from calm_beam.model.llama import LlamaConfig

from .decoder_only import describe_decoder_only
from .described import EMBEDDING, Described
from .exits import EXITS, without_exits
from .generation import GENERATION
from .t5 import describe_t5

_DESCRIBED: Mapping[type, Callable[[Any], Described]] = {T5Config: describe_t5, LlamaConfig: describe_decoder_only}
# What transformers takes for tokenizers that go by `tokenizer.json` alone.
_PLAIN_CLASS = "PreTrainedTokenizerFast"


def write_hugging_face(
    directory: pathlib.Path,
    config: Config,
    *,
    arrays: Arrays,
    vocabulary_path: pathlib.Path | None,
    extra_ids: int = 0,
    dtype: str = "float32",
) -> None:
    """Writes a folder as transformers saves them; each file appears whole or not at all, `config.json` last.

    Norms and heads of exits, and the exit classifier, are written to a file of their own, which transformers does not
    read and `read_hugging_face` does.

    Args:
      directory: Where to; made if needed.
      config: Of the model.
      arrays: Weights by name.
      vocabulary_path: The SentencePiece model, or `tokenizer.json`, to copy beside the weights; with None, none is left
        there.
      extra_ids: Its sentinels, which a file beside it then names.
      dtype: `float32` or `float16`, which transformers then computes in, too.

    Raises:
      ValueError: If transformers has no model that computes the same; if `dtype` is another one, or a weight is not
        finite in it.
    """
    described = _DESCRIBED[type(config)](without_exits(config))
    check_range(arrays, dtype)
    tensors = {
        theirs: arrays[ours] if ours == EMBEDDING else arrays[ours].T for ours, theirs in described.names.items()
    }
    own = {name: array for name, array in arrays.items() if name not in described.names}
    # Read first: it may lie in this folder.
    tokenizer_class = _tokenizer_class(vocabulary_path)
    with replacing_model(directory, {**described.fields, "torch_dtype": dtype}):
        write_vocabulary(directory, vocabulary_path, extra_ids=extra_ids, name=SPIECE)
        _write_tokenizer_config(directory, tokenizer_class, extra_ids=extra_ids)
        write_weights(directory / WEIGHTS, tensors, source=arrays, dtype=dtype)
        if own:
            write_weights(directory / EXITS, own, source=arrays, dtype=dtype)
        else:
            (directory / EXITS).unlink(missing_ok=True)
        write_json(directory / GENERATION, described.generation)


def _tokenizer_class(vocabulary_path: pathlib.Path | None) -> str | None:
    """Returns which class of transformers reads a `tokenizer.json` as it is read here; None for other vocabularies."""
    if vocabulary_path is None or vocabulary_path.name != TOKENIZER:
        return None
    return read_tokenizer_files(str(vocabulary_path)).tokenizer_class or _PLAIN_CLASS


def _write_tokenizer_config(directory: pathlib.Path, tokenizer_class: str | None, *, extra_ids: int) -> None:
    """Says of a vocabulary what transformers would otherwise take from the type of the model."""
    path = directory / CONFIG
    fields = read_json(path) if path.is_file() else {}
    if tokenizer_class is not None and fields.get("tokenizer_class") is None:
        write_json(path, {**fields, "tokenizer_class": tokenizer_class})
    elif (directory / SPIECE).is_file() and not fields and not extra_ids:
        # Left out, they are 100.
        write_json(path, {"extra_ids": 0})
