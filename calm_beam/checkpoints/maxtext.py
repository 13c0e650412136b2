"""Decoder-only models that MaxText trains: Orbax trees, and the run's `config.yml`, which defines their computation.

Layers are stacked (`scan_layers`) or separate. Query kernels of Llama and Mistral include the factor 1/sqrt(head_dim)
that is applied elsewhere, and Llama 3.1's heads rotate neighbouring values together; both are converted to our form.
Source: MaxText `layers/attentions.py`, `layers/embeddings.py`, `models/qwen2.py`, `qwen3.py`, `configs/base.yml`.
"""

import math
import pathlib
import re
from collections.abc import Mapping
from typing import Any

import numpy as np

from calm_beam.model.llama import LlamaConfig, RopeScaling

from .checkpoint import StoredModel
from .hugging_face.files import read_generation
from .metadata import CheckpointError, read_json, read_text, shortened
from .rearranged import changed, turned, unstack_layers
from .stored_array import Array, StoredArray, StoredArrays

CONFIG = "config.yml"
GENERATION = "generation_config.json"
_EMBEDDING = "token_embedder/embedding"
# Kinds of decoders, and whether their query kernels include the attention factor.
_DECODERS = {"llama2": True, "mistral": True, "qwen2": False, "qwen3": False}
_NEEDED = (
    "decoder_block",
    "rope_type",
    "rope_max_timescale",
    "normalization_layer_epsilon",
    "mlp_activations",
    "logits_via_embedding",
    "max_target_length",
)
# Options that change the computation, with the supported values.
_FIXED: Mapping[str, tuple[object, ...]] = {
    "attention_type": (None, "global"),
    "attn_logits_soft_cap": (None, 0),
    "final_logits_soft_cap": (None, 0),
    "num_experts": (None, 1),
    "quantization": (None, ""),
    "rope_min_timescale": (None, 1),
    "trainable_position_size": (None, -1, 0),
    "use_untrainable_positional_embedding": (None, False),
}
_ACTIVATIONS = {"silu": "silu", "swish": "silu", "gelu": "gelu", "relu": "relu"}
# Constants of Llama 3.1's embedding in MaxText's source; no key has them.
_LLAMA_3_1 = RopeScaling(kind="llama3", factor=8.0, original_max_positions=8192)
_THEIR_NORM, _OUR_NORM = "post_self_attention_layer_norm", "pre_mlp_layer_norm"
_QUERY_OR_KEY = re.compile(r"decoder/layers_\d+/self_attention/(query|key)/(?:kernel|bias)")
_BIAS = re.compile(r"decoder/layers_\d+/self_attention/(?:query|key|value)/bias")


def is_maxtext(arrays: StoredArrays) -> bool:
    """Returns whether a tree is MaxText's: a decoder without encoder, with MaxText's name for a norm."""
    return any(_THEIR_NORM in name for name in arrays) and not any(name.startswith("encoder/") for name in arrays)


def read_maxtext(arrays: StoredArrays, folders: tuple[pathlib.Path, ...]) -> StoredModel:
    """Returns a MaxText model.

    Args:
      arrays: Its weights, by their stored names.
      folders: Folders to search for `config.yml` and `generation_config.json`; the first that has one counts.

    Raises:
      CheckpointError: If a file is missing, or the model's computation is unsupported.
      ValueError: If the axis on which layers are stacked is ambiguous.
    """
    path, fields = _read_config(folders)
    end_ids, source = _end_ids(folders)
    heads, kv_heads, head_dim = _heads(arrays)
    theta, scaling, neighbours = _rope(path, fields)
    factor = math.sqrt(head_dim) if _DECODERS[fields["decoder_block"]] else 1.0
    unstacked = unstack_layers({name.replace(_THEIR_NORM, _OUR_NORM): array for name, array in arrays.items()})
    ours = {name: _flat(array) if _BIAS.fullmatch(name) else array for name, array in unstacked.items()}
    if "decoder/layers_0/self_attention/query_norm/scale" in ours and (factor != 1 or neighbours):
        raise CheckpointError(f"{path}: only qwen3 with rope_type default may have norms of queries and keys.")
    for name, array in ours.items():
        if match := _QUERY_OR_KEY.fullmatch(name):
            scale = np.float32(factor if match.group(1) == "query" else 1)
            ours[name] = changed(array, turned(head_dim, scale=scale, neighbours=neighbours))
    try:
        config = LlamaConfig(
            vocab_size=ours[_EMBEDDING].shape[0],
            emb_dim=ours[_EMBEDDING].shape[1],
            num_heads=heads,
            num_kv_heads=kv_heads,
            head_dim=head_dim,
            mlp_dim=ours["decoder/layers_0/mlp/wi_0/kernel"].shape[-1],
            num_decoder_layers=sum(_OUR_NORM in name for name in ours),
            norm_epsilon=fields["normalization_layer_epsilon"],
            rope_theta=theta,
            rope_scaling=scaling,
            max_positions=fields["max_target_length"],
            end_ids=end_ids,
            attention_bias="decoder/layers_0/self_attention/query/bias" in ours,
            query_key_norms="decoder/layers_0/self_attention/query_norm/scale" in ours,
            tied_head=fields["logits_via_embedding"],
            activation=_activation(path, fields),
        )
    except KeyError as error:
        raise CheckpointError(f"{path.parent}: {error.args[0]} is missing in the tree of the model.") from error
    except ValueError as error:
        raise CheckpointError(f"{path}: {error}") from error
    return StoredModel(
        config=config,
        arrays=arrays.of(ours),
        stated=(
            f"Decoder {fields['decoder_block']} with rotary positions {fields['rope_type']}: {path} says so.",
            f"Outputs end with token {' or '.join(map(str, end_ids))}: {source} says so.",
        ),
        generation=read_generation(source.parent, {}).facts(),
    )


def _read_config(folders: tuple[pathlib.Path, ...]) -> tuple[pathlib.Path, Mapping[str, Any]]:
    # Imported here: it comes with Flax, and no other layout needs it.
    import yaml

    path = _first(folders, CONFIG, "the config of the run (save_config_to_gcs=true writes it)")
    try:
        fields = yaml.safe_load(read_text(path))
    except yaml.YAMLError as error:
        raise CheckpointError(f"{path}: cannot be read as YAML: {shortened(error)}") from error
    if not isinstance(fields, dict):
        raise CheckpointError(f"{path}: expected keys and values, got {type(fields).__name__}.")
    missing = [key for key in _NEEDED if fields.get(key) is None]
    if missing:
        raise CheckpointError(f"{path}: does not say {', '.join(missing)}, which no array shows.")
    if fields["decoder_block"] not in _DECODERS:
        raise CheckpointError(
            f"{path}: decoder_block is {shortened(repr(fields['decoder_block']))}; only {', '.join(_DECODERS)} are "
            "supported."
        )
    for key, allowed in _FIXED.items():
        if fields.get(key) not in allowed:
            raise CheckpointError(f"{path}: {key} is {shortened(repr(fields[key]))}, which is not supported.")
    if fields["logits_via_embedding"] and fields.get("normalize_embedding_logits", True):
        raise CheckpointError(f"{path}: normalize_embedding_logits is on, which is not supported.")
    return path, fields


def _first(folders: tuple[pathlib.Path, ...], name: str, what: str) -> pathlib.Path:
    found = next((folder / name for folder in folders if (folder / name).is_file()), None)
    if found is None:
        raise CheckpointError(f"no {name}, {what}, in {' or '.join(map(str, folders))}: put it there.")
    return found


def _end_ids(folders: tuple[pathlib.Path, ...]) -> tuple[tuple[int, ...], pathlib.Path]:
    path = _first(folders, GENERATION, 'which names what ends an output, such as {"eos_token_id": 2}')
    named = read_json(path).get("eos_token_id")
    ids = named if isinstance(named, list) else [named]
    if not ids or not all(type(index) is int for index in ids):
        raise CheckpointError(f"{path}: eos_token_id is {shortened(repr(named))}; expected an id, or a list of ids.")
    return tuple(sorted(set(ids))), path


def _heads(arrays: StoredArrays) -> tuple[int, int, int]:
    """Returns the number of query heads, of key heads, and the width of a head, from the last axes of kernels."""
    found = {}
    for which in ("query", "key"):
        shape = next(
            (each.shape for name, each in arrays.items() if name.endswith(f"self_attention/{which}/kernel")), ()
        )
        if len(shape) not in (3, 4):
            raise CheckpointError(
                f"{which} kernels have shape {shape}; expected heads and their width on the last axes."
            )
        found[which] = shape[-2:]
    if found["query"][1] != found["key"][1]:
        raise CheckpointError(f"heads of queries and keys have widths {found['query'][1]} and {found['key'][1]}.")
    return found["query"][0], found["key"][0], found["query"][1]


def _rope(path: pathlib.Path, fields: Mapping[str, Any]) -> tuple[float, RopeScaling, bool]:
    """Returns base and scaling of rotary positions, and whether neighbours are rotated together."""
    kind, theta = str(fields["rope_type"]), fields["rope_max_timescale"]
    factor = fields.get("rope_linear_scaling_factor", 1.0)
    if kind.startswith("llama3.1") or str(fields.get("model_name", "")).startswith("llama3.1"):
        return theta, (_LLAMA_3_1 if fields.get("rope_use_scale", True) else RopeScaling()), True
    if kind != "default":
        raise CheckpointError(f"{path}: rope_type is {shortened(repr(kind))}; only default and llama3.1 are supported.")
    return theta, (RopeScaling() if factor == 1 else RopeScaling(kind="linear", factor=factor)), False


def _activation(path: pathlib.Path, fields: Mapping[str, Any]) -> str:
    named = fields["mlp_activations"]
    if not isinstance(named, list) or len(named) != 2 or named[0] not in _ACTIVATIONS or named[1] != "linear":
        raise CheckpointError(
            f"{path}: mlp_activations is {shortened(repr(named))}; expected [NAME, linear], NAME one of "
            f"{', '.join(_ACTIVATIONS)}."
        )
    return _ACTIVATIONS[named[0]]


def _flat(array: Array) -> Array:
    return array.joined(0) if isinstance(array, StoredArray) else array.reshape(-1)
