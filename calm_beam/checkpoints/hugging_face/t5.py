"""T5s that Hugging Face's transformers saves.

T5 1.1 and Flan-T5 (gated GELU, untied head), the original T5 (ReLU, tied head), UL2 (gated SiLU), mT5 (as T5 1.1)
and UMT5 (a table of relative positions in every layer), read without transformers or torch. A config value whose
computation is not supported here is refused. Tensors are stored [out, in], and the tables of relative positions
[buckets, heads].
Source: transformers `configuration_t5.py` and `modeling_t5.py`, and those of mt5 and umt5, versions 4 and 5.
"""

import pathlib
import re
from collections.abc import Callable, Mapping
from typing import Any

from calm_beam.checkpoints.checkpoint import StoredModel
from calm_beam.checkpoints.metadata import CheckpointError, shortened
from calm_beam.checkpoints.stored_array import Array, are_equal
from calm_beam.model import T5Config, parameter_shapes
from calm_beam.model.t5.config import PAD_ID

from .files import EMBEDDING, Described, check_names, prefix_in_words, read_generation, read_tensors, written_ends

# Our name of a size, its key in config.json, and transformers' default.
_SIZES = {
    "vocab_size": ("vocab_size", 32128),
    "emb_dim": ("d_model", 512),
    "num_heads": ("num_heads", 8),
    "head_dim": ("d_kv", 64),
    "mlp_dim": ("d_ff", 2048),
    "num_encoder_layers": ("num_layers", 6),
    "num_decoder_layers": ("num_decoder_layers", None),
    "relative_buckets": ("relative_attention_num_buckets", 32),
    "relative_max_distance": ("relative_attention_max_distance", 128),
}
# Defaults of mT5 and UMT5, by key.
_MULTILINGUAL = {"vocab_size": 250112, "d_ff": 1024, "num_layers": 8, "num_heads": 6, "feed_forward_proj": "gated-gelu"}
# By model_type, the defaults, and whether every layer has its own table of relative positions.
TYPES: Mapping[str, tuple[Mapping[str, Any], bool]] = {
    "t5": ({}, False),
    "mt5": (_MULTILINGUAL, False),
    "umt5": (_MULTILINGUAL, True),
}
# The supported values; they are also transformers' defaults.
_FIXED = {
    "layer_norm_epsilon": 1e-6,
    "is_encoder_decoder": True,
    "pad_token_id": PAD_ID,
}
# Start and end of outputs if no file has them.
_START_ID = 0
_END_ID = 1
# transformers' names of activations, those to write first; its "gelu" is not the tanh form.
_ACTIVATIONS = {"gelu_new": "gelu", "gelu_pytorch_tanh": "gelu", "silu": "silu", "swish": "silu", "relu": "relu"}

_SUBLAYERS = {
    "encoder/pre_attention_layer_norm": "0.layer_norm",
    "encoder/attention": "0.SelfAttention",
    "encoder/pre_mlp_layer_norm": "1.layer_norm",
    "encoder/mlp": "1.DenseReluDense",
    "decoder/pre_self_attention_layer_norm": "0.layer_norm",
    "decoder/self_attention": "0.SelfAttention",
    "decoder/pre_cross_attention_layer_norm": "1.layer_norm",
    "decoder/encoder_decoder_attention": "1.EncDecAttention",
    "decoder/pre_mlp_layer_norm": "2.layer_norm",
    "decoder/mlp": "2.DenseReluDense",
}
_KERNELS = {"query": "q", "key": "k", "value": "v", "out": "o"}
_OUTSIDE_OF_LAYERS = {
    EMBEDDING: "shared.weight",
    "encoder/relpos_bias/rel_embedding": "encoder.block.0.layer.0.SelfAttention.relative_attention_bias.weight",
    "encoder/encoder_norm/scale": "encoder.final_layer_norm.weight",
    "decoder/relpos_bias/rel_embedding": "decoder.block.0.layer.0.SelfAttention.relative_attention_bias.weight",
    "decoder/decoder_norm/scale": "decoder.final_layer_norm.weight",
    "decoder/logits_dense/kernel": "lm_head.weight",
}
_TABLE_OF_A_LAYER = re.compile(r"(encoder|decoder)/layers_(\d+)/relpos_bias/rel_embedding")
_IN_LAYER = re.compile(r"(encoder|decoder)/layers_(\d+)/(\w+)/(?:(\w+)/kernel|scale)")

# Names of the one embedding: files of older versions have it up to three times, and some only under another name.
_EMBEDDINGS = ("shared.weight", "encoder.embed_tokens.weight", "decoder.embed_tokens.weight")
# A tensor of converted original T5s that transformers ignores too: cross-attention has no positions.
_UNUSED = "decoder.block.0.layer.1.EncDecAttention.relative_attention_bias.weight"


def read_t5(directory: pathlib.Path, fields: Mapping[str, Any], *, keeps: Callable[[str], bool]) -> StoredModel:
    """Returns a T5 that transformers saved.

    Args:
      directory: Folder with `config.json` and `model.safetensors`, or the parts in its index.
      fields: Content of `config.json`.
      keeps: Which tensors to read, by name.

    Raises:
      CheckpointError: If the model's computation is not supported; if a file is missing or damaged, or a tensor is
        missing, unknown or of another type than a float of 16 or 32 bits.
    """
    path = directory / "config.json"
    defaults, bias_per_layer = TYPES[fields["model_type"]]
    _check_head_is_its_own(path, fields)
    fields = {**defaults, **fields}
    sizes = {**_sizes(path, fields), "relative_bias_per_layer": bias_per_layer}
    gated_mlp, activation = _feed_forward(path, fields)
    for key in ("tie_word_embeddings", "scale_decoder_outputs"):
        if type(fields.get(key, True)) is not bool:
            raise CheckpointError(f"{path}: {key} must be true or false, got {shortened(repr(fields[key]))}.")
    for key, expected in _FIXED.items():
        # Null counts as missing; some configs list the one end-of-sequence id.
        if fields.get(key) not in (None, expected, [expected]):
            raise CheckpointError(f"{path}: {key} is {shortened(repr(fields[key]))}; only {expected!r} is supported.")
    generation = read_generation(directory, fields)
    start_id, start_source = generation.start_id(_START_ID)
    end_ids, end_source = generation.end_ids(_END_ID)
    stated = generation.not_followed()
    if start_id != _START_ID:
        stated = (f"The decoder begins with token {start_id}: {start_source} says so.", *stated)
    if end_ids != (_END_ID,):
        stated = (f"Outputs end with token {' or '.join(map(str, end_ids))}: {end_source} says so.", *stated)
    settled: dict[str, Any] = {
        "gated_mlp": gated_mlp,
        "activation": activation,
        "start_id": start_id,
        "end_ids": end_ids,
    }
    # Refuses sizes out of range before anything is allocated for them.
    try:
        T5Config(**sizes, **settled)
    except ValueError as error:
        raise CheckpointError(f"{path}: {error}") from error
    stored = read_tensors(directory, keeps)
    tensors = dict(stored)
    tensors.pop(_UNUSED, None)
    tensors["shared.weight"] = embedding = _embedding(directory, tensors)
    head = _head(directory, fields, tensors=tensors, embedding=embedding)
    if head is not None:
        tensors["lm_head.weight"] = head
    config = T5Config(**sizes, **settled, tied_head=head is None)
    names = {name: _their_name(name) for name in parameter_shapes(config)}
    check_names(directory, found=tensors, expected=names.values(), model="T5")
    arrays = {ours: tensors[theirs] if ours == EMBEDDING else tensors[theirs].T for ours, theirs in names.items()}
    return StoredModel(config=config, arrays=stored.of(arrays), stated=stated, generation=generation.facts())


def describe_t5(config: T5Config) -> Described:
    """Returns transformers' description of a T5: a `t5`, or a `umt5` if every layer has a table of positions.

    Args:
      config: Config of the model, without exit norms, exit heads or classifier.

    Raises:
      ValueError: If transformers has no such model.
    """
    if config.relative_bias_per_layer and config.tied_head:
        raise ValueError(
            "every layer of the model has a table of relative positions, which of transformers' T5s only umt5 has, and "
            "its head is tied: what umt5 computes then depends on the version of transformers."
        )
    name = next(theirs for theirs, ours in _ACTIVATIONS.items() if ours == config.activation)
    # In T5, "gated-gelu" has always meant the tanh form.
    gated_name = "gelu" if config.activation == "gelu" else name
    model_type = "umt5" if config.relative_bias_per_layer else "t5"
    ends = written_ends(config.end_ids)
    generation: dict[str, Any] = {
        "decoder_start_token_id": config.start_id,
        "eos_token_id": ends,
        "pad_token_id": PAD_ID,
    }
    if config.num_decoder_layers > config.num_encoder_layers:
        # transformers 5 makes as many layers of the KV cache as the encoder has, and fails at the first one that lacks.
        generation["use_cache"] = False
    return Described(
        fields={
            "architectures": [f"{model_type.upper()}ForConditionalGeneration"],
            "model_type": model_type,
            **{key: getattr(config, ours) for ours, (key, _) in _SIZES.items()},
            "feed_forward_proj": f"gated-{gated_name}" if config.gated_mlp else name,
            "is_gated_act": config.gated_mlp,
            "dense_act_fn": name,
            "tie_word_embeddings": config.tied_head,
            **_FIXED,
            "decoder_start_token_id": config.start_id,
            "eos_token_id": ends,
        },
        generation=generation,
        names={ours: [_their_name(ours)] for ours in parameter_shapes(config)},
    )


def _check_head_is_its_own(path: pathlib.Path, fields: Mapping[str, Any]) -> None:
    """Refuses an mT5 or UMT5 whose head may be scaled: transformers' versions disagree about those."""
    tie = fields.get("tie_word_embeddings")
    if fields["model_type"] != "t5" and (tie is not False or "scale_decoder_outputs" in fields):
        raise CheckpointError(
            f"{path}: tie_word_embeddings is {shortened(repr(tie))}. What {fields['model_type']} computes then "
            "depends on the version of transformers: if its head is its own, as in the published models, set it to "
            "false, and remove scale_decoder_outputs."
        )


def _sizes(path: pathlib.Path, fields: Mapping[str, Any]) -> dict[str, Any]:
    sizes: dict[str, Any] = {}
    for ours, (key, default) in _SIZES.items():
        value = fields.get(key, default)
        if key == "num_decoder_layers" and value is None:
            value = sizes["num_encoder_layers"]
        if type(value) is not int or value < 1:
            raise CheckpointError(f"{path}: {key} must be a whole number of at least 1, got {shortened(repr(value))}.")
        sizes[ours] = value
    return sizes


def _feed_forward(path: pathlib.Path, fields: Mapping[str, Any]) -> tuple[bool, str]:
    """Returns whether the feed-forward layer is gated, and our name of its activation."""
    projection = str(fields.get("feed_forward_proj", "relu"))
    parts = projection.split("-")
    # In T5, "gated-gelu" has always meant the tanh form.
    activation = "gelu_new" if projection == "gated-gelu" else parts[-1]
    # These two are derived, but transformers takes the file's values.
    is_gated, name = fields.get("is_gated_act", parts[0] == "gated"), fields.get("dense_act_fn", activation)
    is_form = projection == parts[-1] or parts[:-1] == ["gated"]
    if type(is_gated) is not bool or not isinstance(name, str) or name not in _ACTIVATIONS or not is_form:
        raise CheckpointError(
            f"{path}: feed_forward_proj is {shortened(repr(projection))}, (is_gated_act, dense_act_fn) "
            f"{shortened((is_gated, name))}; expected 'gated-gelu', as in T5 1.1, 'relu', as in the original T5, "
            f"'gated-silu', as in UL2, or another of the activations {', '.join(_ACTIVATIONS)}, gated or not."
        )
    return is_gated, _ACTIVATIONS[name]


def _embedding(directory: pathlib.Path, tensors: dict[str, Array]) -> Array:
    """Removes the one embedding from the tensors and returns it, whatever its names there."""
    found = {name: tensors.pop(name) for name in _EMBEDDINGS if name in tensors}
    if not found:
        hint = prefix_in_words(tensors, _EMBEDDINGS[:1])
        raise CheckpointError(
            f"{directory}: shared.weight is missing, the embedding; found "
            f"{', '.join(map(shortened, sorted(tensors)[:4])) or 'nothing'} ({len(tensors)}).{hint}"
        )
    (first_name, first), *others = found.items()
    for name, other in others:
        if not are_equal(first, other):
            raise CheckpointError(
                f"{directory}: {name} differs from {first_name}; expected one embedding for both stacks."
            )
    return first


def _head(
    directory: pathlib.Path, fields: Mapping[str, Any], *, tensors: dict[str, Array], embedding: Array
) -> Array | None:
    """Removes the head from the tensors and returns it; None if it is the embedding, for states times d_model**-0.5."""
    head = tensors.pop("lm_head.weight", None)
    # Version 5 stores whether hidden states are scaled. Before, the tie decided it; now, a missing head is always tied.
    is_scaled = fields.get("scale_decoder_outputs", fields.get("tie_word_embeddings", True))
    if is_scaled and (head is None or are_equal(head, embedding)):
        return None
    if is_scaled:
        raise CheckpointError(
            f"{directory}: lm_head.weight differs from shared.weight, but the config ties them. What that computes "
            "depends on the version of transformers: remove lm_head.weight, or, if it is a head like T5 1.1's, set "
            "tie_word_embeddings to false and remove scale_decoder_outputs."
        )
    if head is None and "scale_decoder_outputs" not in fields:
        raise CheckpointError(f"{directory}: lm_head.weight is missing, and tie_word_embeddings is false.")
    return embedding if head is None else head


def _their_name(name: str) -> str:
    """Returns a parameter's name in transformers.

    >>> _their_name("decoder/layers_3/self_attention/query/kernel")
    'decoder.block.3.layer.0.SelfAttention.q.weight'
    """
    if name in _OUTSIDE_OF_LAYERS:
        return _OUTSIDE_OF_LAYERS[name]
    if table := _TABLE_OF_A_LAYER.fullmatch(name):
        stack, index = table.groups()
        return f"{stack}.block.{index}.layer.0.SelfAttention.relative_attention_bias.weight"
    match = _IN_LAYER.fullmatch(name)
    assert match is not None, name
    stack, index, sublayer, kernel = match.groups()
    inside = f".{_KERNELS.get(kernel, kernel)}" if kernel else ""
    return f"{stack}.block.{index}.layer.{_SUBLAYERS[f'{stack}/{sublayer}']}{inside}.weight"
