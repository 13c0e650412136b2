"""Whether a model can exit early at all, before anybody pays for a sweep.

The full model's own outputs are given to the decoder as they are (teacher forcing), and every layer says what it would
predict next. That takes one pass over the outputs, whatever the number of thresholds. It leaves out what the sweep
measures: that a token that exits early changes the tokens after it. So these figures are a forecast, and no promise.
"""

import dataclasses

import numpy as np

# Thresholds of softmax that are tried.
_GRID = np.linspace(1.0, 0.0, 101)
# Shares of the layers that the forecast takes: above the first, exits gain next to nothing; above the second, little.
_NOTHING, _LITTLE = 0.95, 0.8


@dataclasses.dataclass(frozen=True, kw_only=True)
class LayerPredictions:
    """What every layer predicts of tokens that are given.

    Attributes:
      tokens: int32, shape (layers, tokens). The most probable one.
      gaps: float32, same shape. By how much it is more probable than the second: the paper's softmax response.
      cross_entropies: float64, shape (layers,). Of the given tokens, their mean, in nats.
    """

    tokens: np.ndarray
    gaps: np.ndarray
    cross_entropies: np.ndarray


@dataclasses.dataclass(frozen=True, kw_only=True)
class Suitability:
    """How much a model could gain by exits.

    Attributes:
      agreement: Of each layer, from the first to the last: share of tokens at which it predicts what the last one does.
      perplexity: Of each layer: exp of its mean cross-entropy.
      first_agreement: Mean of the first layer that agrees with the last one, the oracle's exit. No measure that is
        right as often exits earlier.
      settled: Mean of the first layer from which on all agree.
      threshold: Lowest threshold of softmax at which, as at all above it, a share `agreeing` of the tokens is the
        last layer's; None if there is none but never to exit.
      layers: Mean exit layer at that threshold.
      agreeing: The share that was asked for.
    """

    agreement: tuple[float, ...]
    perplexity: tuple[float, ...]
    first_agreement: float
    settled: float
    threshold: float | None
    layers: float
    agreeing: float

    @property
    def verdict(self) -> str:
        """What to do, in a sentence or two."""
        depth = len(self.agreement)
        forecast = (
            f"softmax exits would use about {self.layers:.1f} of {depth} layers while {self.agreeing:.0%} of the "
            "tokens stay those of the full model"
        )
        if self.layers > _NOTHING * depth:
            cause = (
                "Its lower layers often predict the right token but are not sure of it: a trained exit classifier may "
                "help (calm-beam train --stage=classifier), fine-tuning helps more (calm-beam train)."
                if self.first_agreement <= _LITTLE * depth
                else "Its lower layers cannot predict: it was not trained to exit early. Fine-tune it first "
                "(calm-beam train)."
            )
            return f"Not suitable as it is: {forecast}. {cause}"
        if self.layers > _LITTLE * depth:
            return f"Little to gain: {forecast}. Fine-tuning (calm-beam train) moves exits down."
        return f"Suitable: {forecast}. Calibrate it (calm-beam calibrate) to know what may be promised."


def suitability(predictions: LayerPredictions, *, agreeing: float = 0.98) -> Suitability:
    """Returns how much a model could gain by exits.

    Args:
      predictions: Of at least one token.
      agreeing: Share of tokens that softmax exits may not change, in (0, 1].

    Raises:
      ValueError: If the share is out of range, or there is no token.

    Source: CALM, "Local confidence measures" (softmax response) and "State propagation" (oracle).
    """
    if not 0 < agreeing <= 1:
        raise ValueError(f"agreeing must be in (0, 1], got {agreeing}. It is the share of tokens that stay: 0.98, say.")
    if not predictions.tokens.size:
        raise ValueError("there is no token to look at: every output is empty.")
    agrees = predictions.tokens == predictions.tokens[-1]
    # From above: layers that agree, together with all above them.
    settles = np.logical_and.accumulate(agrees[::-1])[::-1]
    threshold, layers = _lowest_threshold(predictions.gaps, agrees, agreeing=agreeing)
    return Suitability(
        agreement=tuple(agrees.mean(axis=1).tolist()),
        perplexity=tuple(np.exp(predictions.cross_entropies).tolist()),
        first_agreement=float(1 + agrees.argmax(axis=0).mean()),
        settled=float(1 + settles.argmax(axis=0).mean()),
        threshold=threshold,
        layers=layers,
        agreeing=agreeing,
    )


def _lowest_threshold(gaps: np.ndarray, agrees: np.ndarray, *, agreeing: float) -> tuple[float | None, float]:
    """Returns a threshold, from the highest down as far as all keep enough tokens, and the mean exit layer there."""
    found: tuple[float | None, float] = None, float(len(gaps))
    for threshold in _GRID:
        exits = gaps >= threshold
        # Whoever has not left leaves at the last layer.
        exits[-1] = True
        place = exits.argmax(axis=0)
        if np.take_along_axis(agrees, place[None], axis=0).mean() < agreeing:
            break
        found = float(threshold), float(1 + place.mean())
    return found
