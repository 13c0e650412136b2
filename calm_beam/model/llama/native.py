"""A decoder of Llama's family as native code takes it."""

import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from calm_beam.model.interface import of_layer
from calm_beam.model.native import calls
from calm_beam.model.native_decoder import NativeDecoder, Packing, classifier_of, norms_before_heads

from .config import LlamaConfig
from .rotary import inverse_frequencies


def native_decoder(config: LlamaConfig, parameters: Mapping[str, Any], *, terms: Sequence[Any]) -> NativeDecoder:
    """Returns a model's decoder.

    Args:
      config: Of the model.
      parameters: All of its arrays, as a tree.
      terms: Its `path_terms`.
    """
    decoder, packing = parameters["decoder"], Packing()
    layers = [
        _layer(config, decoder[f"layers_{index}"], int(of_layer(terms, index + 1).window), packing)
        for index in range(config.num_decoder_layers)
    ]
    return NativeDecoder(
        layers,
        norms=[_scale(config, norm) for norm in norms_before_heads(config, decoder)],
        factors=[1 / config.logits_divisor] * config.num_decoder_layers,
        epsilon=config.norm_epsilon,
        embedding=np.asarray(parameters["token_embedder"]["embedding"]),
        embedding_factor=config.embedding_factor * (math.sqrt(config.emb_dim) if config.scaled_embedding else 1.0),
        frequencies=inverse_frequencies(config),
        turn_factor=config.rope_scaling.attention_factor,
        packing=packing,
        classifier=classifier_of(config, decoder),
    )


def _layer(config: LlamaConfig, layer: Mapping[str, Any], window: int, packing: Packing) -> calls.Layer:
    attention, mlp = layer["self_attention"], layer["mlp"]
    made = calls.Layer(
        **{name: packing.matrix(attention[name]["kernel"]) for name in ("query", "key", "value", "out")},
        gate=packing.matrix(mlp["wi_0"]["kernel"]),
        wide=packing.matrix(mlp["wi_1"]["kernel"]),
        narrow=packing.matrix(mlp["wo"]["kernel"]),
        norm=packing.address(_scale(config, layer["pre_self_attention_layer_norm"])),
        mlp_norm=packing.address(_scale(config, layer["pre_mlp_layer_norm"])),
        heads=config.num_heads,
        key_heads=config.num_kv_heads,
        size=config.head_dim,
        width=config.emb_dim,
        activation=calls.ACTIVATIONS.index(config.activation),
        # What the first step would keep, the source has.
        first=1,
        window=window,
        epsilon=config.norm_epsilon,
        query_scale=config.head_dim**-0.5 if config.query_factor is None else config.query_factor,
    )
    if config.attention_bias:
        for name in ("query", "key", "value"):
            setattr(made, f"{name}_bias", packing.address(attention[name]["bias"]))
    if config.query_key_norms:
        for name in ("query", "key"):
            setattr(made, f"{name}_norm", packing.address(_scale(config, attention[f"{name}_norm"])))
    return made


def _scale(config: LlamaConfig, norm: Mapping[str, Any]) -> np.ndarray:
    scale = np.asarray(norm["scale"])
    return scale + np.float32(1) if config.unit_offset_norms else scale
