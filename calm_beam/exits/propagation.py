"""What the layers that a token skipped keep of it, for later tokens to attend to."""

from collections.abc import Callable, Sequence

import jax
import jax.numpy as jnp

from calm_beam.model.interface import KeysValues

from .propagations import PassedOn


def at_layer(values: Sequence[jax.Array], layer: jax.Array) -> jax.Array:
    """Returns, for each row, what it has at a layer of its own.

    Args:
      values: For layers 1 to L, each of shape (rows..., rest...).
      layer: shape (rows...), in [1, L].

    Returns:
      Shape (rows..., rest...).
    """
    chosen = values[-1]
    for index, value in enumerate(values[:-1], start=1):
        chosen = jnp.where(layer.reshape(layer.shape + (1,) * (value.ndim - layer.ndim)) == index, value, chosen)
    return chosen


def propagated_keys_values(
    passed_on: PassedOn,
    states: Sequence[jax.Array],
    *,
    own: Sequence[KeysValues],
    exit_layer: jax.Array,
    first_exit: int,
    project: Callable[[jax.Array, int], KeysValues],
) -> list[KeysValues]:
    """Returns the keys and values that every layer keeps of a token.

    A layer that the token went through keeps its own. For a skipped layer k > j, with exit layer j:

      EXIT_STATE: made by layer k of d^j (CALM, "State propagation": d^k = d^j);
      FIRST_STATE: made by layer k of the output of the first layer that may exit (the released T5X code);
      KEYS_VALUES: those of layer j, copied (CALM, "State propagation": the ablation that does badly);
      NOTHING: its own, as if nothing had been skipped.

    Args:
      passed_on: One of these.
      states: Output of layers 1 to L had the token gone through them all, each of shape (rows..., width).
      own: Keys and values that layers 1 to L made on the way, of the output of the layer below.
      exit_layer: shape (rows...), in [1, L].
      first_exit: First layer that may exit.
      project: Makes a layer's keys and values of states, given the layer, from 1.

    Returns:
      For layers 1 to L, as `own`.
    """
    if passed_on is PassedOn.NOTHING:
        return list(own)
    copied: KeysValues = ()
    if passed_on is PassedOn.KEYS_VALUES:
        copied = tuple(at_layer([pair[part] for pair in own], exit_layer) for part in range(2))
    source = states[first_exit - 1] if passed_on is PassedOn.FIRST_STATE else at_layer(states, exit_layer)
    kept = []
    for layer, pair in enumerate(own, start=1):
        is_skipped = (exit_layer < layer)[..., None, None]
        theirs = copied or project(source, layer)
        kept.append(tuple(jnp.where(is_skipped, new, mine) for new, mine in zip(theirs, pair, strict=True)))
    return kept
