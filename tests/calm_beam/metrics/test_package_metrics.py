"""Metrics that other packages compute: chrF, sentence BLEU and the edit distance."""

import collections
import math
import sys

import hypothesis
import hypothesis.strategies as st
import pytest

from calm_beam.extras import MissingExtraError
from calm_beam.metrics import sacrebleu_scores
from calm_beam.metrics.edit_distance import edit_distance
from calm_beam.metrics.registry import METRICS
from calm_beam.metrics.sacrebleu_scores import chrf, sentence_bleu

_LETTERS = st.text("ab c", max_size=8)


def _ngrams(tokens: object, size: int) -> collections.Counter[tuple[str, ...]]:
    assert isinstance(tokens, str | list)
    return collections.Counter(tuple(tokens[start : start + size]) for start in range(len(tokens) - size + 1))


def _reference_chrf(candidate: str, reference: str) -> float:
    """Returns chrF2 as in the paper, over the orders of which both texts have n-grams."""
    ours, theirs = "".join(candidate.split()), "".join(reference.split())
    precisions, recalls = [], []
    for size in range(1, 7):
        found, wanted = _ngrams(ours, size), _ngrams(theirs, size)
        if found and wanted:
            precisions.append((found & wanted).total() / found.total())
            recalls.append((found & wanted).total() / wanted.total())
    precision, recall = (sum(values) / len(values) if values else 0 for values in (precisions, recalls))
    return 5 * precision * recall / (4 * precision + recall) if precision + recall else 0


def _reference_bleu(candidate: str, reference: str) -> float:
    """Returns sentence BLEU of words between spaces, with exponential smoothing and effective order."""
    ours, theirs = candidate.split(), reference.split()
    logs, smoothing = [], 1.0
    for size in range(1, 5):
        found = _ngrams(ours, size)
        if not found:
            break
        matches = (found & _ngrams(theirs, size)).total()
        if not matches:
            smoothing *= 2
        logs.append(math.log((matches or 1 / smoothing) / found.total()))
    if not logs or not (_ngrams(ours, 1) & _ngrams(theirs, 1)):
        return 0
    return math.exp(min(0, 1 - len(theirs) / len(ours)) + sum(logs) / len(logs))


def _reference_similarity(candidate: str, reference: str) -> float:
    previous = list(range(len(reference) + 1))
    for row, letter in enumerate(candidate, start=1):
        current = [row]
        for column, other in enumerate(reference, start=1):
            current.append(min(previous[column] + 1, current[-1] + 1, previous[column - 1] + (letter != other)))
        previous = current
    return 1 - previous[-1] / max(len(candidate), len(reference), 1)


@hypothesis.settings(max_examples=60, deadline=None, derandomize=True)
@hypothesis.given(_LETTERS, _LETTERS)
def test_scores_are_those_of_the_definitions(candidate: str, reference: str) -> None:
    """Scores are those of the definitions, computed here by other code; equal texts score 1."""
    for metric, expected in (
        (chrf, _reference_chrf),
        (sentence_bleu, _reference_bleu),
        (edit_distance, _reference_similarity),
    ):
        score = metric(candidate, [reference])
        is_equal = candidate == reference or (metric is not edit_distance and not (candidate + reference).strip())
        assert score == (1 if is_equal else pytest.approx(expected(candidate, reference), abs=1e-9))
        assert 0 <= score <= 1


def test_golden_scores() -> None:
    """Scores do not change with the packages' versions; the definitions above give the same."""
    candidate, reference = "The cat sat on the mat.", "A cat was sitting on the mat."
    assert chrf(candidate, [reference]) == pytest.approx(0.39784851694450, abs=1e-12)
    assert sentence_bleu(candidate, [reference]) == pytest.approx(0.37684991644924, abs=1e-12)
    assert edit_distance(candidate, [reference]) == pytest.approx(17 / 29, abs=1e-12)


@pytest.mark.parametrize("metric", [chrf, sentence_bleu, edit_distance])
def test_an_empty_text_scores_nothing_against_another(metric: object) -> None:
    """An empty text scores 1 against itself and 0 against any other."""
    assert callable(metric)
    assert metric("", [""]) == 1.0
    assert metric("", ["a b"]) == metric("a b", [""]) == 0.0


@pytest.mark.parametrize(
    ("metric", "module", "name"),
    [
        (chrf, "sacrebleu.metrics", "chrf"),
        (sentence_bleu, "sacrebleu.metrics", "sentence_bleu"),
        (edit_distance, "rapidfuzz.distance", "edit_distance"),
    ],
)
def test_missing_packages_are_named(metric: object, module: str, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without its package, a metric names the extra to install."""
    assert callable(metric)
    monkeypatch.setitem(sys.modules, module, None)
    sacrebleu_scores._chrf_scorer.cache_clear()
    sacrebleu_scores._bleu_scorer.cache_clear()
    with pytest.raises(MissingExtraError, match=rf'^the metric "{name}" needs {module} \(.*calm-beam\[metrics\]'):
        metric("a", ["b"])


@pytest.mark.parametrize("name", METRICS)
def test_an_empty_reference_is_met_by_an_empty_output_alone(name: str) -> None:
    """Every metric gives an empty reference 1 for an empty output only; texts of ignored words are not empty."""
    metric = METRICS[name]
    assert metric("", [""]) == 1
    assert metric("a cat", [""]) == metric("", ["a cat"]) == 0
    assert metric("a cat", ["", "a cat"]) == 1
    assert metric("the ...", [""]) == metric("", ["the ..."]) == 0
