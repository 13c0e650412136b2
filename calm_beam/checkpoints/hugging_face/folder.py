"""Which family a folder of transformers is of, by the `model_type` in its `config.json`."""

import pathlib
from collections.abc import Callable, Mapping
from typing import Any

from calm_beam.checkpoints.error import CheckpointError
from calm_beam.checkpoints.metadata import read_json, shortened
from calm_beam.checkpoints.stored import StoredModel

from . import decoder_only, t5
from .exits import with_exits

# What reads each model_type.
_READERS = {
    **dict.fromkeys(t5.TYPES, t5.read_t5),
    **dict.fromkeys(decoder_only.FAMILIES, decoder_only.read_decoder_only),
}
# Keys by which a model of another type shows why it is not read.
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
    """Returns whether a folder holds a `config.json` that names a type of model, as transformers writes it."""
    try:
        return "model_type" in read_json(directory / "config.json")
    except CheckpointError:
        return False


def read_hugging_face(directory: pathlib.Path, *, keeps: Callable[[str], bool]) -> StoredModel:
    """Returns config and float32 weights of a folder that transformers saved.

    Args:
      directory: Folder with `config.json` and `model.safetensors`, or the parts named by its index; and, if exits have
        something of their own, what `write_hugging_face` wrote of that.
      keeps: Which tensors to read, by name.

    Returns:
      The model, arrays by the names of its architecture's `parameter_shapes`, kernels [in, out].

    Raises:
      CheckpointError: If the model is of a family that is not supported, or computed in another way; if a file is
        missing or damaged, or a tensor is missing, unknown or of another type than a float of 16 or 32 bits.
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
    """Refuses what neither the type of the model nor its tensors would show."""
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
