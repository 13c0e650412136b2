"""The built-in confidence measures, and all measures by name.

Each `Measure` says everything that depends on it: what it needs, how it is computed from logits or states, and how it
is bounded where a head is certified.
"""

import functools
import math
import types
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from .measure import Measure, MeasureError, Need, import_measure, is_own

if TYPE_CHECKING:
    import jax

    from calm_beam.exits.decision import DistributionBounds, Summary


def softmax_gap(logits: "jax.Array") -> "jax.Array":
    """Returns the difference of the two largest softmax probabilities, the paper's softmax response.

    In float32 the gap of a very confident layer is exactly 1.0, so even a threshold of 1 can be met: "never exit" is
    not the same as threshold 1.

    Args:
      logits: shape (..., vocabulary).

    Returns:
      Shape (...), in [0, 1]. 0 where the largest logit occurs twice.

    Source: CALM, "Local confidence measures" (softmax response).
    """
    import jax.numpy as jnp

    largest = jnp.max(logits, axis=-1, keepdims=True)
    is_largest = logits == largest
    # Two maxima and a sum instead of a sort or top_k over the vocabulary, which are many times slower on CPU.
    second = jnp.max(jnp.where(is_largest, -jnp.inf, logits), axis=-1)
    tied = jnp.sum(is_largest, axis=-1) > 1
    gap = -jnp.expm1(second - largest[..., 0]) / jnp.sum(jnp.exp(logits - largest), axis=-1)
    return jnp.where(tied, jnp.zeros_like(gap), gap)


def _gap_of_summary(summary: "Summary", _: int) -> "jax.Array":
    import jax.numpy as jnp

    return -jnp.expm1(summary.second - summary.largest) / summary.total


def _gap_bounds(of: "DistributionBounds", _: int) -> tuple["jax.Array", "jax.Array"]:
    import jax.numpy as jnp

    return -jnp.expm1(of.gap_high) / of.total_high, -jnp.expm1(of.gap_low) / of.total_low


SOFTMAX = Measure(
    name="softmax",
    meaning="gap between the two largest probabilities",
    needs=Need.LOGITS,
    confidence=softmax_gap,
    of_summary=_gap_of_summary,
    summary_parts=frozenset({"second", "total"}),
    bounds=_gap_bounds,
    is_gap=True,
)


def softmax_max(logits: "jax.Array") -> "jax.Array":
    """Returns the largest softmax probability, shape (...), of logits (..., vocabulary)."""
    import jax.numpy as jnp

    return 1 / jnp.sum(jnp.exp(logits - jnp.max(logits, axis=-1, keepdims=True)), axis=-1)


def _largest_of_summary(summary: "Summary", _: int) -> "jax.Array":
    return 1 / summary.total


def _largest_bounds(of: "DistributionBounds", _: int) -> tuple["jax.Array", "jax.Array"]:
    return 1 / of.total_high, 1 / of.total_low


SOFTMAX_MAX = Measure(
    name="softmax_max",
    meaning="largest probability",
    needs=Need.LOGITS,
    confidence=softmax_max,
    of_summary=_largest_of_summary,
    summary_parts=frozenset({"total"}),
    bounds=_largest_bounds,
)


def hidden_state_saturation(state: "jax.Array", below: "jax.Array") -> "jax.Array":
    """Returns the cosine similarity of a layer's output and the output of the layer below it.

    Defined from layer 2 on; layer 1 has confidence 0 by definition, so it exits at threshold 0 only.

    Args:
      state: shape (..., width). Output of layer i, without the final norm.
      below: shape (..., width). Output of layer i - 1.

    Returns:
      Shape (...), in [-1, 1].

    Source: CALM, "Local confidence measures" (hidden-state saturation).
    """
    import jax.numpy as jnp

    norms = jnp.linalg.norm(state, axis=-1) * jnp.linalg.norm(below, axis=-1)
    cosines: jax.Array = jnp.sum(state * below, axis=-1) / norms
    return cosines


def _saturation(state: "jax.Array", below: "jax.Array", layer: "jax.Array | int") -> "jax.Array":
    import jax.numpy as jnp

    # Layer 1 has no layer below to compare with: CALM lets it exit at threshold 0 only.
    return jnp.where(layer > 1, hidden_state_saturation(state, below), jnp.float32(0))


STATE = Measure(
    name="state",
    meaning="cosine similarity of a layer's output to the one below",
    needs=Need.STATES,
    confidence=_saturation,
)


def _score(score: "jax.Array") -> "jax.Array":
    return score


CLASSIFIER = Measure(
    name="classifier",
    meaning="probability by the trained exit classifier that the layer predicts what the last one would",
    needs=Need.CLASSIFIER,
    confidence=_score,
)
"""CALM, "Local confidence measures" (early exit classifier); the network itself is the model's `exit_score`."""


def entropy_confidence(logits: "jax.Array") -> "jax.Array":
    """Returns 1 - H / log V, where H is the entropy of the softmax distribution over V tokens.

    Unlike the gap, it takes the whole distribution into account: with two tokens of probability 1/2 each, the gap is 0,
    and this confidence is close to 1.

    Args:
      logits: shape (..., vocabulary), of two or more tokens.

    Returns:
      Shape (...), in [0, 1]: 0 for a uniform distribution, 1 for a certain one.

    Source: the exit criterion of BranchyNet (Teerapittayanon et al., 2016), turned into a confidence.
    """
    import jax.numpy as jnp

    below = logits - jnp.max(logits, axis=-1, keepdims=True)
    weights = jnp.exp(below)
    total = jnp.sum(weights, axis=-1)
    # exp(-inf) (-inf) is NaN, but must be 0.
    weighted = jnp.sum(jnp.where(weights > 0, weights * below, jnp.float32(0)), axis=-1)
    return _entropy_of_sums(total, weighted, logits.shape[-1])


def _entropy_of_summary(summary: "Summary", vocab_size: int) -> "jax.Array":
    return _entropy_of_sums(summary.total, summary.weighted, vocab_size)


def _entropy_of_sums(total: "jax.Array", weighted: "jax.Array", entries: int) -> "jax.Array":
    """Returns the confidence, given the sums of exp(x) and of x exp(x), with x the logits less their largest."""
    import jax.numpy as jnp

    entropy = jnp.log(total) - weighted / total
    # Rounding may exceed either end by a few units in the last place.
    return jnp.clip(1 - entropy / jnp.float32(math.log(entries)), 0, 1)


def _entropy_bounds(of: "DistributionBounds", vocab_size: int) -> tuple["jax.Array", "jax.Array"]:
    import jax.numpy as jnp

    # The entropy is log t + w / t. As a function of t it falls until t = w and rises from there.
    lowest_at = jnp.clip(of.weighted_low, of.total_low, of.total_high)
    high = _entropy_of_sums(lowest_at, -of.weighted_low, vocab_size)
    ends = [_entropy_of_sums(total, -of.weighted_high, vocab_size) for total in (of.total_low, of.total_high)]
    return jnp.minimum(*ends), high


ENTROPY = Measure(
    name="entropy",
    meaning="1 - H / log V, with the entropy H of the distribution over V tokens",
    needs=Need.LOGITS,
    confidence=entropy_confidence,
    of_summary=_entropy_of_summary,
    summary_parts=frozenset({"total", "weighted"}),
    bounds=_entropy_bounds,
)


def share_in_agreement(token: Any, earlier: Any) -> Any:
    """Returns the share of the last k exit layers that predict this token, this layer included.

    Missing layers count as disagreeing: at threshold 1, a token does not exit before k layers in a row have agreed.

    Args:
      token: int32, shape (...). Prediction at this layer.
      earlier: int32, shape (..., k - 1). Predictions at the k - 1 exit layers below; -1 where there are fewer.

    Returns:
      float32, shape (...): 1/k, 2/k, ..., or 1.

    Source: Zhou et al. (2020), "BERT Loses Patience", where an exit takes a number of agreeing layers in a row; a share
    here, so that a threshold can be calibrated.
    """
    import numpy as np

    k = earlier.shape[-1] + 1
    agreeing = (earlier == token[..., None]).sum(axis=-1)
    # Look shares up instead of dividing: a compiler may round the division differently, and a threshold may be a share.
    shares = (np.arange(1, k + 1) / k).astype(np.float32)
    if isinstance(token, np.ndarray):
        return shares[agreeing]
    import jax.numpy as jnp

    return jnp.asarray(shares)[agreeing]


PATIENCE = Measure(
    name="patience",
    meaning="share of the last layers that may exit, --patience of them, which predict the same token",
    needs=Need.TOKENS,
    confidence=share_in_agreement,
)


def agreement(token: Any, last_token: Any) -> Any:
    """Returns 1 where both tokens are the same, else 0.

    It cannot be served, since it needs the last layer: it is the bound that other measures are compared to.

    Args:
      token: int32, shape (...). Predicted at any layer.
      last_token: int32, same shape. Predicted at layer L.

    Returns:
      float32, shape (...).

    Source: CALM, "State propagation" (oracle confidence measure).
    """
    return (token == last_token).astype("float32")


ORACLE = Measure(
    name="oracle",
    meaning="1 where a layer predicts the token that the last one would, else 0; for analysis",
    needs=Need.LAST_TOKEN,
    confidence=agreement,
    takes_schedule=False,
)


def share_of_depth(layer: int, num_layers: int) -> float:
    """Returns i / L at layer i of L, so that threshold m / L exits every token at layer m."""
    return layer / num_layers


STATIC = Measure(
    name="static",
    meaning="i / L at layer i of L: threshold m / L exits every token at layer m",
    needs=Need.LAYER,
    confidence=share_of_depth,
    takes_schedule=False,
)


MEASURES: Mapping[str, Measure] = types.MappingProxyType(
    {measure.name: measure for measure in (SOFTMAX, SOFTMAX_MAX, STATE, CLASSIFIER, ENTROPY, PATIENCE, ORACLE, STATIC)}
)


COMPARABLE = tuple(
    name for name, measure in MEASURES.items() if measure.needs not in (Need.TOKENS, Need.LAYER, Need.LAST_TOKEN)
)
"""Measures that can be served and have no setting; experiments compare them by default."""


def is_measure_name(name: str) -> bool:
    """Returns whether a name is one of `MEASURES`, or has the form of a user's measure; imports nothing."""
    return name in MEASURES or is_own(name)


@functools.cache
def measure_named(name: str) -> Measure:
    """Returns a measure by name; a user's measure is imported, which runs code.

    Raises:
      MeasureError: If there is no measure of this name.
    """
    if name in MEASURES:
        return MEASURES[name]
    if not is_own(name):
        raise MeasureError(f"confidence must be one of {', '.join(MEASURES)}, or module:function; got {name!r}.")
    return import_measure(name)
