"""The losses of one example, against cases worked out by hand."""

import collections
from collections.abc import Sequence

import numpy as np
import pytest

from calm_beam.inputs.examples import DataError
from calm_beam.manifest import Objective
from calm_beam.metrics.registry import METRICS, MetricError
from calm_beam.outputs.scoring import score_generation
from calm_beam.risk.losses import LOSS_SCALE
from tests.calm_beam.calibration.builders import build_example, build_generation

_TEXTUAL = Objective("textual", "token_f1", loss="dissimilarity")
_RELU = Objective("risk", "token_f1", loss="relu")
_SIGNED = Objective("risk", "token_f1", loss="signed")


def test_textual_loss_is_distance_to_the_full_output() -> None:
    """F1 of "red" and of "red cat big dog" against "red cat" is 2/3; references have no effect."""
    generation = build_generation(
        ("red cat", "red cat", "red", "red cat big dog", "fish"), example=build_example(references=())
    )
    losses = score_generation(generation, [_TEXTUAL], metrics=METRICS, num_thresholds=4)
    assert losses.shape == (1, 4)
    assert losses.dtype == np.int64
    # A third of 2^32, rounded up.
    assert losses[0].tolist() == [0, 1431655766, 1431655766, LOSS_SCALE]


def test_risk_loss_is_what_early_exits_lose() -> None:
    """Against the references "cat" and "red dog" the full output "red cat" scores 2/3; better outputs lose nothing."""
    generation = build_generation(
        ("red cat", "red dog", "cat", "red", "fish"), example=build_example(references=("cat", "red dog"))
    )
    losses = score_generation(generation, [_RELU], metrics=METRICS, num_thresholds=4)
    np.testing.assert_allclose(losses[0] / LOSS_SCALE, [0, 0, 0, 2 / 3], rtol=0, atol=2**-32)


def test_signed_loss_lets_better_outputs_pay() -> None:
    """The same outputs by the signed loss: a score of 1 gains a third, a score of 0 loses two."""
    generation = build_generation(
        ("red cat", "red dog", "cat", "red cat", "fish"), example=build_example(references=("cat", "red dog"))
    )
    losses = score_generation(generation, [_SIGNED], metrics=METRICS, num_thresholds=4)
    np.testing.assert_allclose(losses[0] / LOSS_SCALE, [-1 / 3, -1 / 3, 0, 2 / 3], rtol=0, atol=2**-32)


def test_a_tail_counts_outputs_that_lose_more() -> None:
    """Of losses 0, 1/3, 1/3 and 1, one is above 1/3 and three above 0; a tail of the risk ignores better outputs."""
    texts = ("red cat", "red cat", "red", "red cat big dog", "fish")
    tails = [Objective("textual", "token_f1", loss=f"dissimilarity>{above}") for above in (0.0, 0.3, 0.5)]
    losses = score_generation(build_generation(texts), tails, metrics=METRICS, num_thresholds=4)
    expected = np.array([[0, 1, 1, 1], [0, 1, 1, 1], [0, 0, 0, 1]]) * LOSS_SCALE
    np.testing.assert_array_equal(losses, expected)
    generation = build_generation(
        ("red cat", "red dog", "cat", "red", "fish"), example=build_example(references=("cat", "red dog"))
    )
    (losses,) = score_generation(
        generation, [Objective("risk", "token_f1", loss="relu>0.5")], metrics=METRICS, num_thresholds=4
    )
    assert losses.tolist() == [0, 0, 0, LOSS_SCALE]


def test_one_row_per_objective() -> None:
    """Losses come in the order of the objectives."""
    generation = build_generation(("cat", "cat", "a dog"))
    objectives = [_RELU, Objective("textual", "exact_match", loss="dissimilarity"), _TEXTUAL]
    losses = score_generation(generation, objectives, metrics=METRICS, num_thresholds=2)
    assert losses.tolist() == [[0, LOSS_SCALE]] * 3
    alone = [
        score_generation(generation, [objective], metrics=METRICS, num_thresholds=2)[0] for objective in objectives
    ]
    assert losses.tolist() == np.stack(alone).tolist()


def test_a_failed_example_loses_everything() -> None:
    """An example that could not be decoded has loss 1 everywhere, with or without references."""
    generation = build_generation(outputs=(), failure="broken", example=build_example(references=()))
    losses = score_generation(generation, [_TEXTUAL, _RELU, _SIGNED], metrics=METRICS, num_thresholds=3)
    assert losses.tolist() == [[LOSS_SCALE] * 3] * 3


def test_risk_needs_references() -> None:
    """Risk consistency without references is an error that names the example."""
    generation = build_generation(example=build_example(id="lonely", references=()))
    with pytest.raises(DataError, match="example lonely: risk consistency needs references, it has none"):
        score_generation(generation, [_SIGNED], metrics=METRICS, num_thresholds=2)


def test_each_distinct_text_is_scored_once() -> None:
    """The metric scores a text once per objective, however many thresholds give it."""
    seen: collections.Counter[tuple[str, tuple[str, ...]]] = collections.Counter()

    def metric(candidate: str, references: Sequence[str]) -> float:
        seen[candidate, tuple(references)] += 1
        return METRICS["exact_match"](candidate, references)

    generation = build_generation(("a", "a", "a", "b", "b", "a", "c"))
    objectives = [Objective("textual", "mine", loss="dissimilarity"), Objective("risk", "mine", loss="signed")]
    score_generation(generation, objectives, metrics={"mine": metric}, num_thresholds=6)
    assert seen == {(text, references): 1 for text in "abc" for references in (("a",), ("cat",))}


@pytest.mark.parametrize("score", [float("nan"), 1.5, "good"])
def test_scores_outside_the_range_are_refused(score: float) -> None:
    """A score outside [0, 1] is an error naming metric and example."""
    generation = build_generation(example=build_example(id="odd"))
    objectives = [Objective("textual", "mine", loss="dissimilarity")]
    with pytest.raises(MetricError, match=f'metric "mine" on example "odd": returned .*{score}.*expected a number'):
        score_generation(generation, objectives, metrics={"mine": lambda *_: score}, num_thresholds=2)
