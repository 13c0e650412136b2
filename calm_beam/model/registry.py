"""The registry of architectures, by type of config, and the default length of prompts."""

import types
from collections.abc import Mapping
from typing import TYPE_CHECKING

from calm_beam.precision import FLOAT32, Precision

from .architecture import Architecture, ModelConfig
from .llama.architecture import LlamaArchitecture
from .llama.config import LlamaConfig
from .t5.architecture import T5Architecture
from .t5.config import T5Config

if TYPE_CHECKING:
    from .interface import EarlyExitModel, PackedLayer


ARCHITECTURES: Mapping[type, Architecture] = types.MappingProxyType(
    {T5Config: T5Architecture(), LlamaConfig: LlamaArchitecture()}
)


def architecture_of(config: ModelConfig) -> Architecture:
    """Returns the architecture of a model, given its config."""
    return ARCHITECTURES[type(config)]


def parameter_shapes(config: ModelConfig) -> dict[str, tuple[int, ...]]:
    """Returns the name and shape of every parameter of a model.

    Args:
      config: Sizes of the model.

    Returns:
      Mapping from a name such as `decoder/layers_0/mlp/wi_0/kernel` to a shape; kernels are [in, out].
    """
    return dict(architecture_of(config).parameter_shapes(config))


def network_of(
    config: ModelConfig, *, precision: Precision = FLOAT32, dropout_rate: float = 0.0, layer_dropout: float = 0.0
) -> "EarlyExitModel":
    """Returns the network of a model, given its config and precision; loads JAX.

    Args:
      config: Sizes of the model.
      precision: Precision in which it computes.
      dropout_rate: Share of activations that are dropped if a method is called with `deterministic=False`.
      layer_dropout: Rate at which rows then skip the last decoder layer, in [0, 1); see `layer_dropout_rates`.

    Raises:
      UsageError: If the architecture has no dropout and some is requested.
    """
    return architecture_of(config).network(
        config, precision=precision, dropout_rate=dropout_rate, layer_dropout=layer_dropout
    )


def packed_layer_of(model: "EarlyExitModel") -> "PackedLayer":
    """Returns a decoder layer of a network for packed rows; loads JAX."""
    return architecture_of(model.config).packed_layer(model.config, precision=model.precision)


USUAL_INPUT_LENGTH = 512
"""Most tokens of a prompt, where the model has room for them."""


def default_input_length(config: ModelConfig, *, steps: int) -> int:
    """Returns the default for the most tokens of a prompt: 512, or fewer if the model has no room for them.

    Args:
      config: The model's config.
      steps: Most tokens of an output, which also need room.
    """
    room = architecture_of(config).room_for_prompts(config, steps=steps)
    return USUAL_INPUT_LENGTH if room is None else min(USUAL_INPUT_LENGTH, room)
