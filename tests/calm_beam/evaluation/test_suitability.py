"""The suitability of layers for exits from their predictions, on cases computed by hand."""

import dataclasses
import re

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from calm_beam.evaluation.flops import DecoderSizes
from calm_beam.evaluation.suitability import ExitForecast, LayerPredictions, Suitability, suitability_of

# A layer takes 12 d a + 4 d_f d = 64 operations, a skipped one 4 d a = 16, a projection 2 V d = 40.
_SIZES = DecoderSizes(num_layers=3, width=2, attention_width=2, mlp_width=2, encoder_width=2, vocab_size=10)


def _predictions(tokens: list[list[int]], gaps: list[list[float]]) -> LayerPredictions:
    return LayerPredictions(
        tokens=np.array(tokens, np.int32),
        gaps=np.array(gaps, np.float32),
        cross_entropies=np.log(np.arange(len(tokens), 0, -1, dtype=np.float64)),
    )


# Four tokens, three layers: the first token is settled at once, the second agrees at layer 1 and differs again, the
# third agrees at layer 2, the fourth at the last layer only.
_CASE = _predictions(
    [[7, 8, 1, 1], [7, 2, 9, 1], [7, 8, 9, 5]], [[0.9, 0.5, 0.1, 0.1], [0.9, 0.1, 0.8, 0.3], [1.0, 0.9, 0.9, 0.9]]
)


def test_agreement_and_depths_by_hand() -> None:
    """Agreement is counted by layer; the oracle exits at the first layer that agrees, settled at the last change."""
    found = suitability_of(_CASE, sizes=_SIZES, agreeing=1)
    assert found.agreement == (0.5, 0.5, 1.0)
    assert found.first_agreement == (1 + 1 + 2 + 3) / 4
    assert found.settled == (1 + 3 + 2 + 3) / 4
    np.testing.assert_allclose(found.perplexity, (3, 2, 1))


def test_the_threshold_is_the_lowest_above_which_enough_tokens_stay() -> None:
    """At 0.31 the fourth token still reaches the last layer; at 0.3 it exits with another token."""
    everything = suitability_of(_CASE, sizes=_SIZES, agreeing=1).exits[0]
    assert everything.threshold == pytest.approx(0.31)
    assert everything.layers == (1 + 1 + 2 + 3) / 4
    most = suitability_of(_CASE, sizes=_SIZES, agreeing=0.75).exits[0]
    assert most.threshold == pytest.approx(0.11)
    assert most.layers == (1 + 1 + 2 + 2) / 4


def test_a_threshold_below_one_that_fails_is_not_taken() -> None:
    """If a higher threshold loses too many tokens, no lower one is taken, however many it keeps."""
    # Sure and wrong at layer 1; less sure and right for all others.
    sizes = dataclasses.replace(_SIZES, num_layers=2)
    predictions = _predictions([[1, 5, 5], [4, 5, 5]], [[1.0, 0.5, 0.5], [1.0, 0.9, 0.9]])
    found = suitability_of(predictions, sizes=sizes, agreeing=0.9)
    assert [(each.threshold, each.layers, each.work) for each in found.exits] == [(None, 2.0, 1.0)]
    assert found.advice == ""


def test_exits_of_fewer_layers_by_hand() -> None:
    """Each choice of layers has fewer tests and deeper tokens; its cost includes the tests."""
    found = suitability_of(_CASE, sizes=_SIZES, agreeing=1)
    full = 3 * 64 + 40
    assert [(each.min_exit_layer, each.exit_interval) for each in found.exits] == [(1, 1), (2, 2)]
    every, alone = found.exits
    exits = np.array([1, 1, 2, 3])
    assert every.work == pytest.approx((exits * 64 + (3 - exits) * 16 + exits * 40).mean() / full)
    # Layer 2 alone: the second token differs there, and must not exit.
    assert (alone.threshold, alone.layers) == (pytest.approx(0.31), 2.5)
    assert alone.work == pytest.approx(((2 * 64 + 16 + 40) + (3 * 64 + 2 * 40)) / 2 / full)


def test_one_layer_has_no_choice() -> None:
    """A single layer is always run."""
    sizes = dataclasses.replace(_SIZES, num_layers=1)
    found = suitability_of(_predictions([[3, 4]], [[0.5, 0.6]]), sizes=sizes)
    assert [(each.layers, each.work) for each in found.exits] == [(1.0, 1.0)]


@given(st.integers(2, 6), st.integers(1, 20), st.integers(0, 2**32 - 1))
def test_no_exit_is_below_the_oracles_where_all_tokens_stay(depth: int, count: int, seed: int) -> None:
    """Depths are ordered: first agreement, then settled, within the layers; the last layer always agrees."""
    generator = np.random.default_rng(seed)
    found = suitability_of(
        LayerPredictions(
            tokens=generator.integers(0, 3, (depth, count), np.int32),
            gaps=generator.random((depth, count), np.float32),
            cross_entropies=generator.random(depth),
        ),
        sizes=dataclasses.replace(_SIZES, num_layers=depth),
        agreeing=1,
    )
    assert 1 <= found.first_agreement <= found.settled <= depth
    assert found.agreement[-1] == 1
    for forecast in found.exits:
        assert max(found.first_agreement, forecast.min_exit_layer) <= forecast.layers <= depth
    assert found.cheapest.work <= found.exits[0].work


def _forecast(work: float, *, layers: float = 5.0, interval: int = 1, threshold: float | None = 0.5) -> ExitForecast:
    return ExitForecast(min_exit_layer=interval, exit_interval=interval, threshold=threshold, layers=layers, work=work)


def _of(layers: float, first_agreement: float) -> Suitability:
    return Suitability(
        agreement=(0.5,) * 9 + (1.0,),
        perplexity=(1.0,) * 10,
        first_agreement=first_agreement,
        settled=9.0,
        exits=(_forecast(0.9, layers=layers),),
        agreeing=0.98,
    )


@pytest.mark.parametrize(
    ("layers", "first_agreement", "words"),
    [
        (9.9, 9.5, "Not suitable as it is.*cannot predict: it was not trained to exit early"),
        (9.9, 4.0, "Not suitable as it is.*are not sure of it"),
        (9.0, 4.0, "Little to gain: softmax exits would use about 9.0 of 10 layers while 98% of the tokens"),
        (5.0, 4.0, "Suitable: softmax exits would use about 5.0 of 10 layers"),
    ],
)
def test_the_verdict_says_what_to_do(layers: float, first_agreement: float, words: str) -> None:
    """For a model that never exits, the verdict says so, with advice."""
    with_words = _of(layers, first_agreement).verdict
    assert re.search(words, with_words), with_words


@pytest.mark.parametrize(
    ("exits", "words"),
    [
        (
            (_forecast(0.6), _forecast(0.7, interval=2)),
            "^With their tests, .* take 60% of the full model's operations, and no other",
        ),
        (
            (_forecast(1.3), _forecast(0.8, interval=2)),
            "take 130% .*; with --min_exit_layer=2 --exit_interval=2 they take 80%.$",
        ),
        (
            (_forecast(1.3), _forecast(1.1, interval=2)),
            r"take 130% of .*\. Other measures have cheaper tests: state, static",
        ),
        (
            (_forecast(1.0, threshold=None), _forecast(0.8, interval=2)),
            "change too many .*; with --min_exit_layer=2 .* take 80% of",
        ),
        ((_forecast(1.0, threshold=None), _forecast(1.1, interval=2)), "^$"),
        ((_forecast(1.0, threshold=None),), "^$"),
    ],
)
def test_the_advice_names_the_layers(exits: tuple[ExitForecast, ...], words: str) -> None:
    """If tests cost more than they save, the advice names other layers or another measure."""
    found = dataclasses.replace(_of(5.0, 4.0), exits=exits)
    assert re.search(words, found.advice), found.advice
    assert str(found) == f"{found.verdict}\n{found.advice}".rstrip("\n"), "printed, it says both"


def test_wrong_arguments_are_refused() -> None:
    """Wrong arguments are refused with the reason."""
    with pytest.raises(ValueError, match=r"agreeing must be in \(0, 1\], got 98"):
        suitability_of(_CASE, sizes=_SIZES, agreeing=98)
    with pytest.raises(ValueError, match="no token to look at"):
        suitability_of(_predictions([[], []], [[], []]), sizes=_SIZES)
