"""T5's decoder as native code takes it."""

import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from calm_beam.model.heads import has_own_head
from calm_beam.model.interface import of_layer
from calm_beam.model.native import calls
from calm_beam.model.native_decoder import NativeDecoder, Packing, classifier_of, norms_before_heads

from .config import T5Config
from .layers import NORM_EPSILON


def native_decoder(config: T5Config, parameters: Mapping[str, Any], *, biases: Sequence[Any]) -> NativeDecoder:
    """Returns a model's decoder.

    Args:
      config: Of the model.
      parameters: All of its arrays, as a tree.
      biases: Its `path_terms`, (heads, ages), of each layer or of all.
    """
    decoder, packing = parameters["decoder"], Packing()
    layers = [
        _layer(config, decoder[f"layers_{index}"], np.asarray(of_layer(biases, index + 1)), packing)
        for index in range(config.num_decoder_layers)
    ]
    return NativeDecoder(
        layers,
        norms=[np.asarray(norm["scale"]) for norm in norms_before_heads(config, decoder)],
        factors=[
            1 / math.sqrt(config.emb_dim) if config.tied_head and not has_own_head(config, layer) else 1.0
            for layer in range(1, config.num_decoder_layers + 1)
        ],
        epsilon=NORM_EPSILON,
        embedding=np.asarray(parameters["token_embedder"]["embedding"]),
        packing=packing,
        classifier=classifier_of(config, decoder),
    )


def _layer(config: T5Config, layer: Mapping[str, Any], biases: np.ndarray, packing: Packing) -> calls.Layer:
    own, cross, mlp = layer["self_attention"], layer["encoder_decoder_attention"], layer["mlp"]
    made = calls.Layer(
        **{name: packing.matrix(own[name]["kernel"]) for name in ("query", "key", "value", "out")},
        cross_query=packing.matrix(cross["query"]["kernel"]),
        cross_out=packing.matrix(cross["out"]["kernel"]),
        wide=packing.matrix(mlp["wi_1" if config.gated_mlp else "wi"]["kernel"]),
        narrow=packing.matrix(mlp["wo"]["kernel"]),
        norm=packing.address(layer["pre_self_attention_layer_norm"]["scale"]),
        cross_norm=packing.address(layer["pre_cross_attention_layer_norm"]["scale"]),
        mlp_norm=packing.address(layer["pre_mlp_layer_norm"]["scale"]),
        biases=packing.address(biases),
        bias_heads=biases.shape[0],
        ages=biases.shape[1],
        heads=config.num_heads,
        key_heads=config.num_heads,
        size=config.head_dim,
        width=config.emb_dim,
        activation=calls.ACTIVATIONS.index(config.activation),
        window=calls.NO_WINDOW,
        epsilon=NORM_EPSILON,
    )
    if config.gated_mlp:
        made.gate = packing.matrix(mlp["wi_0"]["kernel"])
    return made
