"""The model's weights and the sources of its prompts, as the device steps take them."""

import functools
from typing import Any

import jax
import jax.numpy as jnp

from calm_beam.checkpoints import Checkpoint
from calm_beam.exits.decision import decide
from calm_beam.exits.head_choice import choose_head
from calm_beam.exits.head_forms import form_on_devices
from calm_beam.exits.measures import Measure
from calm_beam.model import ArrayType
from calm_beam.model.interface import EarlyExitModel, of_layer
from calm_beam.model.partitioning import divided

from .device_groups import DeviceGroup

# What a sweep usually projects at a time.
_ROWS_AT_A_TIME = 256


class Weights:
    """The model's weights on a group of devices, in the parts that the steps take.

    Attributes:
      group: The devices.
    """

    def __init__(
        self,
        checkpoint: Checkpoint,
        model: EarlyExitModel,
        group: DeviceGroup,
        *,
        steps: int,
        measure: Measure,
        exit_head: str,
    ) -> None:
        """Takes a model that was placed on a group; to be called while that runs."""
        arithmetic = model.arithmetic
        tree = checkpoint.parameters(arithmetic)
        self.group = group
        decoder = tree["decoder"]
        config = checkpoint.config
        self.all = {"params": tree}
        self.embedding = {"params": {"token_embedder": tree["token_embedder"]}}
        self.layers = [decoder[f"layers_{index}"] for index in range(config.num_decoder_layers)]
        head = {"decoder_norm": decoder["decoder_norm"]}
        if config.tied_head:
            self.head = {"params": {"decoder": head, "token_embedder": tree["token_embedder"]}}
        else:
            self.head = {"params": {"decoder": {**head, "logits_dense": decoder["logits_dense"]}}}
        self.classifier = {"params": {"decoder": {"meta_cls": decoder["meta_cls"]}}} if config.exit_classifier else {}
        weights, vocab_axis = model.apply(self.head, method="head_weights")
        # None where the exact head decides.
        self.certified_head = choose_head(
            form_on_devices(exit_head, group.division.parts),
            weights,
            vocab_axis=vocab_axis,
            measure=measure,
            arithmetic=arithmetic,
            rows=_ROWS_AT_A_TIME,
            exact=functools.partial(decide, vocab_axis=vocab_axis, measure=measure, arithmetic=arithmetic),
        )
        self._path_terms = _path_terms(model, steps, self.all)

    def path_terms(self, layer: int) -> Any:
        """Returns what a layer needs beside its parameters for the paths of outputs."""
        return of_layer(self._path_terms, layer)


class Sources:
    """Keys and values of the sources of one padded width."""

    def __init__(self, model: EarlyExitModel, *, width: int, places: int) -> None:
        config = model.config
        self.width = width
        shape = (places, config.num_kv_heads, width, config.head_dim)
        # Two arrays a layer, not one twice: a buffer can only be given away once.
        kept = ArrayType(shape, model.arithmetic.dtype)
        made = zeros((kept,) * (2 * config.num_decoder_layers), axis=1, of=config.num_kv_heads)
        self.keys_values = list(zip(made[::2], made[1::2], strict=True))
        self.mask = jnp.zeros((places, width), bool)
        self.free = list(range(places))

    @property
    def places(self) -> int:
        """Sources that there is room for."""
        return self.mask.shape[0]


@functools.partial(jax.jit, static_argnums=(0, 1))
def _path_terms(model: EarlyExitModel, steps: int, parameters: Any) -> list[Any]:
    terms: list[Any] = model.apply(parameters, steps, method="path_terms")
    return terms


@functools.partial(jax.jit, static_argnums=0, static_argnames=("axis", "of"))
def zeros(arrays: tuple[ArrayType, ...], *, axis: int = 0, of: int = 1) -> tuple[jax.Array, ...]:
    """Returns zeros of each shape and type, divided as in `partitioning.divided`, made by one program."""
    return tuple(divided(jnp.zeros(*array), axis, of=of) for array in arrays)
