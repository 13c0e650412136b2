"""Keys and values of the prompts of a batch, made by XLA."""

from collections.abc import Sequence

import jax.numpy as jnp
import numpy as np

from calm_beam.decoding.engine import Slots
from calm_beam.decoding.weights import Weights, prefixes_by_width, zeros
from calm_beam.model import ArrayType
from calm_beam.model.interface import EarlyExitModel, KeysValues

from . import steps
from .attended import source_positions


class Sources:
    """Keys and values of the sources of one padded width."""

    def __init__(self, model: EarlyExitModel, *, width: int, places: int, prefix: Sequence[KeysValues] = ()) -> None:
        """Makes room.

        Args:
          model: The network.
          width: Of all.
          places: How many.
          prefix: Keys and values of what all prompts begin with, as of `steps.admit`.
        """
        config = model.config
        self._prefix = prefix
        self.width = width
        positions = source_positions(width)
        shape = (places, config.num_kv_heads, positions, config.head_dim)
        # Two arrays a layer, not one twice: a buffer can only be given away once.
        kept = ArrayType(shape, model.precision.dtype)
        made = zeros((kept,) * (2 * config.num_decoder_layers), axis=1, of=config.num_kv_heads)
        self.keys_values = list(zip(made[::2], made[1::2], strict=True))
        self.mask = jnp.zeros((places, positions), bool)

    @property
    def places(self) -> int:
        """Sources that there is room for."""
        return self.mask.shape[0]

    def admit(
        self,
        model: EarlyExitModel,
        weights: Weights,
        source_tokens: np.ndarray,
        *,
        lengths: np.ndarray,
        places: np.ndarray,
    ) -> None:
        """Gives places keys and values of prompts; arguments are those of `Engine.prefill`."""
        self.keys_values, self.mask = steps.admit(
            model,
            weights.all,
            keys_values=self.keys_values,
            source_mask=self.mask,
            source_tokens=source_tokens,
            lengths=lengths,
            places=places,
            prefix=self._prefix,
        )


def sources_by_width(model: EarlyExitModel, weights: Weights, slots: Slots) -> dict[int, Sources]:
    """Returns room for the sources of each width."""
    prefixes = prefixes_by_width(model, weights, slots)
    return {
        width: Sources(model, width=width, places=count, prefix=prefixes.get(width, ()))
        for width, count in slots.sources.items()
    }
