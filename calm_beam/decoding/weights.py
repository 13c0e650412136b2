"""The model's weights on a group of devices, in the parts that engines take."""

import functools
from collections.abc import Collection, Iterator, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from calm_beam.checkpoints import Checkpoint
from calm_beam.exits.certified_head import CertifiedHead, heads_of_form
from calm_beam.exits.measures import Measure, Need
from calm_beam.manifest import EngineRecord
from calm_beam.model import ArrayType, architecture_of
from calm_beam.model.heads import exit_layers, head_parameters, kernel_layers
from calm_beam.model.interface import EarlyExitModel, of_layer
from calm_beam.model.native import library
from calm_beam.model.native_decoder import NativeDecoder
from calm_beam.model.partitioning import divided

from .compilation import compiled
from .device_groups import DeviceGroup


def decides_natively(measures: Sequence[Measure]) -> bool:
    """Returns whether native code's exact head computes all that measures need of logits."""
    return all(measure.needs is not Need.LOGITS or measure.of_summary is not None for measure in measures)


class Head(NamedTuple):
    """A head, of one layer or of all.

    Attributes:
      layer: Layer for which the network applies it. Each has its own program; layers with equal parameter trees share
        one.
      parameters: The head's parameters.
      certified: The certified head; None where the exact head decides.
      native: The exact head for native code; None where another decides, or there is no native code.
    """

    layer: int
    parameters: Any
    certified: CertifiedHead | None
    native: library.Head | None = None


class Weights:
    """The model's weights on a group of devices, in the parts that engines take.

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
        measures: Sequence[Measure],
        engine: EngineRecord,
    ) -> None:
        """Takes a model that was placed on a group, for an engine; call it within `DeviceGroup.running`."""
        tree = checkpoint.parameters(model.precision)
        self.group = group
        decoder = tree["decoder"]
        config = checkpoint.config
        self.all = {"params": tree}
        self.embedding = {"params": {"token_embedder": tree["token_embedder"]}}
        self.layers = [decoder[f"layers_{index}"] for index in range(config.num_decoder_layers)]
        self.classifier = {"params": {"decoder": {"meta_cls": decoder["meta_cls"]}}} if config.exit_classifier else {}
        self._path_terms = _path_terms(model, steps, self.all)
        # The model packed for native code, if that runs the layers.
        self.native: NativeDecoder | None = None
        if engine.name == "native":
            self.native = architecture_of(config).native_decoder(config, tree, terms=self._path_terms)
        kernels = [model.apply(self.all, layer, method="head_weights") for layer in kernel_layers(config)]
        certified = heads_of_form(engine.head, kernels)
        # One head for each layer, or one for all.
        self._heads = []
        for layer in exit_layers(config):
            applied_as, parameters = head_parameters(tree, config, layer)
            head = Head(applied_as, {"params": parameters}, of_layer(certified, layer))
            if self.native and not head.certified and decides_natively(measures):
                head = head._replace(native=self.native.head(layer, of_layer(kernels, layer)))
            self._heads.append(head)

    @property
    def is_certified(self) -> bool:
        """Whether certified heads are asked before the exact ones."""
        return self._heads[0].certified is not None

    def programs(self) -> list[Head]:
        """Returns one head for each program that is compiled."""
        return list({head.layer: head for head in self._heads}.values())

    def heads_of(self, layers: np.ndarray) -> Iterator[tuple[Head, np.ndarray]]:
        """Yields the heads of layers, (states,), each with the indices of its states."""
        if len(self._heads) == 1:
            yield self._heads[0], np.arange(len(layers))
            return
        for layer in np.unique(layers).tolist():
            yield self._heads[layer - 1], np.flatnonzero(layers == layer)

    def native_heads(self, layers: Collection[int]) -> list[library.Head | None]:
        """Returns the exact native head of each layer, None for layers that are not in `layers`."""
        depth = len(self.layers)
        return [of_layer(self._heads, layer).native if layer in layers else None for layer in range(1, depth + 1)]

    def path_terms(self, layer: int) -> Any:
        """Returns a layer's path terms: what it needs besides its parameters to attend to the paths of outputs."""
        return of_layer(self._path_terms, layer)


@functools.partial(compiled, static_argnums=(0, 1))
def _path_terms(model: EarlyExitModel, steps: int, parameters: Any) -> list[Any]:
    terms: list[Any] = model.apply(parameters, steps, method="path_terms")
    return terms


@functools.partial(compiled, static_argnums=0, static_argnames=("axis", "of"))
def zeros(arrays: tuple[ArrayType, ...], *, axis: int = 0, of: int = 1) -> tuple[jax.Array, ...]:
    """Returns zeros of each shape and type, divided as in `partitioning.divided`, made by one program."""
    return tuple(divided(jnp.zeros(*array), axis, of=of) for array in arrays)
