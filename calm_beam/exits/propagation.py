"""What the layers that a token skipped keep of it, for later tokens to attend to."""

from collections.abc import Callable, Sequence

import jax
import jax.numpy as jnp

# Keys and values of one position, each of shape (..., heads, head_dim).
KeysValues = tuple[jax.Array, ...]


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
    state_propagation: str,
    states: Sequence[jax.Array],
    own: Sequence[KeysValues],
    exit_layer: jax.Array,
    *,
    first_exit: int,
    project: Callable[[jax.Array, int], KeysValues],
) -> list[KeysValues]:
    """Returns the keys and values that every layer keeps of a token.

    A layer that the token went through keeps its own. For a skipped layer k > j, with exit layer j:

      from_exit: made by layer k of d^j (CALM, "State propagation": d^k = d^j);
      from_first_exit: made by layer k of the output of the first layer that may exit (the released T5X code);
      projected: those of layer j, copied (CALM, "State propagation": the ablation that does badly);
      full_cache: its own, as if nothing had been skipped.

    Args:
      state_propagation: One of these names.
      states: Output of layers 1 to L had the token gone through them all, each of shape (rows..., width).
      own: Keys and values that layers 1 to L made on the way, of the output of the layer below.
      exit_layer: shape (rows...), in [1, L].
      first_exit: First layer that may exit.
      project: Makes a layer's keys and values of states, given the layer, from 1.

    Returns:
      For layers 1 to L, as `own`.
    """
    if state_propagation == "full_cache":
        return list(own)
    copied: KeysValues = ()
    if state_propagation == "projected":
        copied = tuple(at_layer([pair[part] for pair in own], exit_layer) for part in range(2))
    source = states[first_exit - 1] if state_propagation == "from_first_exit" else at_layer(states, exit_layer)
    kept = []
    for layer, pair in enumerate(own, start=1):
        is_skipped = (exit_layer < layer)[..., None, None]
        passed_on = copied or project(source, layer)
        kept.append(tuple(jnp.where(is_skipped, new, mine) for new, mine in zip(passed_on, pair, strict=True)))
    return kept
