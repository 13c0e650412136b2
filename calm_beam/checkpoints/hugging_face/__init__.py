"""Folders that Hugging Face's transformers saves: `config.json` with a `model_type`, and safetensors.

The `model_type` selects the family. Folders can also be written for transformers, so that a model that was trained here
is not locked in.
"""

import pathlib
from collections.abc import Callable, Mapping
from typing import Any

from calm_beam.checkpoints.checkpoint import NO_FACTS, Arrays, Config, GenerationFacts, StoredModel
from calm_beam.checkpoints.metadata import CheckpointError, read_json, shortened
from calm_beam.checkpoints.model_folder import (
    GENERATION,
    SPIECE,
    WEIGHTS,
    check_range,
    replacing_model,
    write_json,
    write_vocabulary,
    write_weights,
)
from calm_beam.inputs.vocabularies.tokenizer_json import CONFIG, TOKENIZER, read_tokenizer_files
from calm_beam.model import T5Config
from calm_beam.model.llama import LlamaConfig

from . import decoder_only, t5
from .decoder_only import describe_decoder_only
from .files import EXITS, Described, in_their_form, with_exits, without_exits
from .t5 import describe_t5

# Readers by model_type.
_READERS = {
    **dict.fromkeys(t5.TYPES, t5.read_t5),
    **dict.fromkeys(decoder_only.FAMILIES, decoder_only.read_decoder_only),
}
# Keys that show why a model of another type is not supported.
_REASONS = {
    "num_local_experts": "a mixture of experts",
    "num_experts": "a mixture of experts",
    "n_routed_experts": "a mixture of experts",
    "kv_lora_rank": "multi-head latent attention",
    "vision_config": "a model that sees images",
    "audio_config": "a model that hears",
    "text_config": "a model of more than text",
}


def is_hugging_face(directory: pathlib.Path) -> bool:
    """Returns whether a folder has a `config.json` with a type of model, as transformers writes it."""
    try:
        return "model_type" in read_json(directory / "config.json")
    except CheckpointError:
        return False


def read_hugging_face(directory: pathlib.Path, *, keeps: Callable[[str], bool]) -> StoredModel:
    """Returns config and float32 weights of a folder that transformers saved.

    Args:
      directory: Folder with `config.json` and `model.safetensors`, or the parts in its index; with the file of exit
        parameters that `write_hugging_face` has written, if there is one.
      keeps: Which tensors to read, by name.

    Returns:
      The model, arrays by the names of its architecture's `parameter_shapes`, kernels [in, out].

    Raises:
      CheckpointError: If the model's family or computation is not supported; if a file is missing or damaged, or a
        tensor is missing, unknown or of another type than a float of 16 or 32 bits.
    """
    path = directory / "config.json"
    fields = read_json(path)
    model_type = fields.get("model_type")
    reader = _READERS.get(model_type) if isinstance(model_type, str) else None
    if reader is None:
        reason = next((f", {words}" for key, words in _REASONS.items() if fields.get(key)), "")
        raise CheckpointError(
            f"{path}: model_type is {shortened(repr(model_type))}{reason}; expected one of "
            f"{', '.join(map(repr, _READERS))}."
        )
    _check_is_plain(path, fields)
    return with_exits(directory, reader(directory, fields, keeps=keeps), keeps=keeps)


def _check_is_plain(path: pathlib.Path, fields: Mapping[str, Any]) -> None:
    """Refuses features that neither the type of the model nor its tensors would show."""
    if fields.get("quantization_config"):
        quantized = fields["quantization_config"]
        method = quantized.get("quant_method") if isinstance(quantized, dict) else None
        raise CheckpointError(
            f"{path}: has a quantization_config ({shortened(method or 'no quant_method')}): quantised weights are not "
            "read. Use the model's float weights."
        )
    code = fields.get("auto_map")
    if isinstance(code, dict) and any(key.startswith("AutoModel") for key in code):
        raise CheckpointError(
            f"{path}: auto_map names code of the model's own, {shortened(sorted(map(str, code.values())))}, which is "
            "not run. If the model is computed as its model_type says, remove auto_map."
        )


_DESCRIBED: Mapping[type, Callable[[Any], Described]] = {T5Config: describe_t5, LlamaConfig: describe_decoder_only}
# transformers' class for tokenizers that are defined by `tokenizer.json` alone.
_PLAIN_CLASS = "PreTrainedTokenizerFast"


def write_hugging_face(
    directory: pathlib.Path,
    config: Config,
    *,
    arrays: Arrays,
    vocabulary_path: pathlib.Path | None,
    extra_ids: int = 0,
    dtype: str = "float32",
    generation: GenerationFacts = NO_FACTS,
) -> None:
    """Writes a folder in transformers' format; each file is written atomically, `config.json` last.

    Exit norms, exit heads and the exit classifier are written to a separate file, which transformers ignores and
    `read_hugging_face` reads.

    Args:
      directory: The folder to write to; made if needed.
      config: Config of the model.
      arrays: Weights by name.
      vocabulary_path: The SentencePiece model, or `tokenizer.json`, to copy next to the weights; with None, none is
        left there.
      extra_ids: Number of its sentinels, which a file next to it records.
      dtype: `float32` or `float16`, which transformers then also computes in.
      generation: What is kept of the settings that the model came with.

    Raises:
      ValueError: If transformers has no model with the same computation; if `dtype` is another one, or a weight is not
        finite in it.
    """
    described = _DESCRIBED[type(config)](without_exits(config))
    check_range(arrays, dtype)
    tensors = {
        theirs: tensor
        for ours, names in described.names.items()
        for theirs, tensor in zip(names, in_their_form(ours, arrays[ours], count=len(names)), strict=True)
    }
    own = {name: array for name, array in arrays.items() if name not in described.names}
    # Read first, since it may be in this folder.
    tokenizer_class = _tokenizer_class(vocabulary_path)
    with replacing_model(directory, {**described.fields, **generation.token_ids, "torch_dtype": dtype}):
        write_vocabulary(directory, vocabulary_path, extra_ids=extra_ids, name=SPIECE)
        _write_tokenizer_config(directory, tokenizer_class, extra_ids=extra_ids)
        write_weights(directory / WEIGHTS, tensors, source=arrays, dtype=dtype)
        if own:
            write_weights(directory / EXITS, own, source=arrays, dtype=dtype)
        else:
            (directory / EXITS).unlink(missing_ok=True)
        write_json(directory / GENERATION, {**described.generation, **generation.fields()})


def _tokenizer_class(vocabulary_path: pathlib.Path | None) -> str | None:
    """Returns the transformers class that reads a `tokenizer.json` the same way; None for other vocabularies."""
    if vocabulary_path is None or vocabulary_path.name != TOKENIZER:
        return None
    return read_tokenizer_files(str(vocabulary_path)).tokenizer_class or _PLAIN_CLASS


def _write_tokenizer_config(directory: pathlib.Path, tokenizer_class: str | None, *, extra_ids: int) -> None:
    """Writes vocabulary settings that transformers would otherwise derive from the type of the model."""
    path = directory / CONFIG
    fields = read_json(path) if path.is_file() else {}
    if tokenizer_class is not None and fields.get("tokenizer_class") is None:
        write_json(path, {**fields, "tokenizer_class": tokenizer_class})
    elif (directory / SPIECE).is_file() and not fields and not extra_ids:
        # The default is 100.
        write_json(path, {"extra_ids": 0})
