"""Suitability: whether a model can exit early at all, tested before a sweep is paid for.

The full model's own outputs are given to the decoder (teacher forcing), and every layer predicts the
next token. That takes one pass over the outputs, whatever the number of thresholds. It leaves out what the sweep
measures: a token that exits early changes the tokens after it. So these figures are a forecast, not a promise.
"""

import dataclasses
import functools
import itertools
import operator
from collections.abc import Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from calm_beam.checkpoints import Checkpoint
from calm_beam.evaluation.flops import DecoderSizes, share_of_work
from calm_beam.exits.measures.built_in import softmax_gap
from calm_beam.exits.rule import ExitRule
from calm_beam.model import architecture_of, network_of
from calm_beam.model.heads import over_layers
from calm_beam.model.interface import EarlyExitModel, Taught
from calm_beam.precision import FLOAT32, Precision
from calm_beam.training.batches import choose_shapes, make_batches

_WORK = operator.attrgetter("work")
# Softmax thresholds to try.
_GRID = np.linspace(1.0, 0.0, 101)
# Shares of the layers used in the forecast: above the first, exits gain next to nothing; above the second, little.
_NOTHING, _LITTLE = 0.95, 0.8


@dataclasses.dataclass(frozen=True, kw_only=True)
class LayerPredictions:
    """The predictions of every layer for given tokens.

    Attributes:
      tokens: int32, shape (layers, tokens). The most probable token.
      gaps: float32, same shape. Its probability minus that of the second: the paper's softmax response.
      cross_entropies: float64, shape (layers,). Mean cross-entropy of the given tokens, in nats.
    """

    tokens: np.ndarray
    gaps: np.ndarray
    cross_entropies: np.ndarray


@dataclasses.dataclass(frozen=True, kw_only=True)
class ExitForecast:
    """The forecast of savings from softmax exits, for one choice of exit layers.

    Attributes:
      min_exit_layer: The lowest exit layer, from 1.
      exit_interval: The distance between exit layers.
      threshold: Lowest threshold at which, as at all above it, enough tokens equal the last layer's; None if that holds
        only without exits.
      layers: Mean exit layer at that threshold.
      work: The decoder's operations, exit tests included, as a share of the full model's (`share_of_work`).
    """

    min_exit_layer: int
    exit_interval: int
    threshold: float | None
    layers: float
    work: float

    @property
    def flags(self) -> str:
        """The command-line flags for these exit layers."""
        return f"--min_exit_layer={self.min_exit_layer} --exit_interval={self.exit_interval}"


@dataclasses.dataclass(frozen=True, kw_only=True)
class Suitability:
    """The possible gain of a model from exits.

    Attributes:
      agreement: For each layer, from first to last: share of tokens at which it predicts the same as the last one.
      perplexity: For each layer: exp of its mean cross-entropy.
      first_agreement: Mean of the first layer that agrees with the last one, the oracle's exit. No measure that is
        right as often exits earlier.
      settled: Mean of the first layer from which on all agree.
      exits: Forecasts for choices of exit layers: all layers, and for each distance 1, 2, 4, ... the choice with the
        least work. All keep a share `agreeing` of the tokens.
      agreeing: The requested share.
    """

    agreement: tuple[float, ...]
    perplexity: tuple[float, ...]
    first_agreement: float
    settled: float
    exits: tuple[ExitForecast, ...]
    agreeing: float

    @property
    def cheapest(self) -> ExitForecast:
        """The forecast with the least work."""
        return min(self.exits, key=_WORK)

    @property
    def can_exit(self) -> bool:
        """Whether exits save more than next to nothing, so that a calibration may be worth its time."""
        return self._fewest_layers <= _NOTHING * len(self.agreement)

    @property
    def is_suitable(self) -> bool:
        """Whether exits save more than a little, so that a calibration comes before fine-tuning."""
        return self._fewest_layers <= _LITTLE * len(self.agreement)

    @property
    def _fewest_layers(self) -> float:
        return min(forecast.layers for forecast in self.exits)

    @property
    def verdict(self) -> str:
        """A recommendation, in a sentence or two."""
        depth, layers = len(self.agreement), self._fewest_layers
        forecast = (
            f"softmax exits would use about {layers:.1f} of {depth} layers while {self.agreeing:.0%} of the "
            "tokens stay those of the full model"
        )
        if not self.can_exit:
            cause = (
                "Its lower layers often predict the right token but are not sure of it: a trained exit classifier may "
                "help (calm-beam train --stage=classifier), fine-tuning helps more (calm-beam train)."
                if self.first_agreement <= _LITTLE * depth
                else "Its lower layers cannot predict: it was not trained to exit early. Fine-tune it first "
                "(calm-beam train)."
            )
            return f"Not suitable as it is: {forecast}. {cause}"
        if not self.is_suitable:
            return f"Little to gain: {forecast}. Fine-tuning (calm-beam train) moves exits down."
        return f"Suitable: {forecast}. Calibrate it (calm-beam calibrate) to know what may be promised."

    @property
    def advice(self) -> str:
        """A sentence on which layers should exit; empty if none should."""
        every, cheapest = self.exits[0], self.cheapest
        if cheapest.work >= 1:
            # No choice saves anything, and not to exit at all is one of them.
            return (
                "" if every.threshold is None else f"{_price(every)}. Other measures have cheaper tests: state, static."
            )
        if cheapest is every:
            return f"{_price(every)}, and no other choice of layers takes less."
        if every.threshold is None:
            return f"Exits at every layer change too many tokens; with {cheapest.flags} they take {_share(cheapest)}."
        return f"{_price(every)}; with {cheapest.flags} they take {cheapest.work:.0%}."

    def __str__(self) -> str:
        """Returns the verdict, and the advice if there is any, a line each."""
        return "\n".join(filter(None, (self.verdict, self.advice)))


def _price(every: ExitForecast) -> str:
    return f"With their tests, exits at every layer take {_share(every)}"


def _share(forecast: ExitForecast) -> str:
    return f"{forecast.work:.0%} of the full model's operations"


def suitability_of(predictions: LayerPredictions, *, sizes: DecoderSizes, agreeing: float = 0.98) -> Suitability:
    """Returns the possible gain of a model from exits.

    Args:
      predictions: Predictions for at least one token.
      sizes: Sizes of the model.
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
    # Layers that agree, together with all layers above them.
    settles = np.logical_and.accumulate(agrees[::-1])[::-1]
    forecasts = [
        _forecast(predictions.gaps, agrees, rule=rule, sizes=sizes, agreeing=agreeing) for rule in _rules(len(agrees))
    ]
    # Forecasts are ordered by distance.
    by_interval = itertools.groupby(forecasts, key=operator.attrgetter("exit_interval"))
    cheapest = [min(alike, key=_WORK) for _, alike in by_interval]
    return Suitability(
        agreement=tuple(agrees.mean(axis=1).tolist()),
        perplexity=tuple(np.exp(predictions.cross_entropies).tolist()),
        first_agreement=float((1 + agrees.argmax(axis=0)).mean()),
        settled=float((1 + settles.argmax(axis=0)).mean()),
        exits=tuple(dict.fromkeys([forecasts[0], *cheapest])),
        agreeing=agreeing,
    )


def _rules(depth: int) -> Iterator[ExitRule]:
    """Yields choices of exit layers: distances of 1, 2, 4, ..., each from every multiple of it."""
    interval, end = 1, max(depth, 2)
    while interval < end:
        for lowest in range(interval, end, interval):
            yield ExitRule(min_exit_layer=lowest, exit_interval=interval)
        interval *= 2


def _forecast(
    gaps: np.ndarray, agrees: np.ndarray, *, rule: ExitRule, sizes: DecoderSizes, agreeing: float
) -> ExitForecast:
    """Returns the forecast at the lowest threshold such that it and all above it keep enough tokens."""
    layers = np.array(rule.exit_layers(len(gaps)))
    gaps, agrees = gaps[layers - 1], agrees[layers - 1]
    threshold, exits = None, np.full(gaps.shape[1], layers[-1])
    for tried in _GRID:
        leaves = gaps >= tried
        # Tokens that have not exited before exit at the last layer.
        leaves[-1] = True
        place = leaves.argmax(axis=0)
        if np.take_along_axis(agrees, place[None], axis=0).mean() < agreeing:
            break
        threshold, exits = float(tried), layers[place]
    return ExitForecast(
        min_exit_layer=rule.min_exit_layer,
        exit_interval=rule.exit_interval,
        threshold=threshold,
        layers=float(exits.mean()),
        # Without exits there are no tests.
        work=1.0 if threshold is None else share_of_work(exits, sizes, rule=rule),
    )


_BATCH_TOKENS, _SHAPES = 2048, 3

_Pair = tuple[Sequence[int], Sequence[int]]


def layer_predictions(
    checkpoint: Checkpoint, pairs: Sequence[_Pair], *, precision: Precision = FLOAT32
) -> LayerPredictions:
    """Returns the predictions of every layer for the targets' tokens, each given those before it.

    Args:
      checkpoint: The model.
      pairs: Prompts as decoding sees them, and outputs with their end tokens; at least one of each.
      precision: Precision in which the model computes.

    Raises:
      ValueError: If the model produces states that are not finite.
    """
    architecture = architecture_of(checkpoint.config)
    pairs = [(architecture.taught_source(prompt, output), output) for prompt, output in pairs]
    shapes = choose_shapes(pairs, batch_tokens=_BATCH_TOKENS, num_shapes=_SHAPES)
    model = network_of(checkpoint.config, precision=precision)
    parameters = jax.device_put({"params": checkpoint.parameters(precision)})
    parts: list[list[np.ndarray]] = [[], [], []]
    for batch in make_batches(pairs, shapes):
        made = _of_layers(model, parameters, batch)
        for part, values in zip(parts, made, strict=True):
            # [layers, rows, target] -> [layers, tokens]
            part.append(np.asarray(values)[:, batch.is_target])
    tokens, gaps, cross_entropies = (np.concatenate(part, axis=1) for part in parts)
    if not np.isfinite(cross_entropies).all():
        raise ValueError("the model gives logits that are not finite. Check the checkpoint.")
    return LayerPredictions(tokens=tokens, gaps=gaps, cross_entropies=cross_entropies.astype(np.float64).mean(axis=1))


@functools.partial(jax.jit, static_argnums=0)
def _of_layers(model: EarlyExitModel, parameters: Any, batch: Taught) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Returns predicted tokens, gaps and cross-entropies, each (layers, rows, target)."""
    apply = functools.partial(model.apply, parameters)
    states = apply(batch, method="teacher_forced")

    def of_layer(state: jax.Array, *, layer: int) -> tuple[jax.Array, jax.Array, jax.Array]:
        logits = apply(state, layer, method="head")
        given = jnp.take_along_axis(logits, jnp.asarray(batch.targets)[..., None], axis=-1)[..., 0]
        return jnp.argmax(logits, axis=-1), softmax_gap(logits), jax.nn.logsumexp(logits, axis=-1) - given

    of_all: tuple[jax.Array, jax.Array, jax.Array] = over_layers(of_layer, states, model.config)
    return of_all
