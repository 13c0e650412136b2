"""Scores of single texts by the metrics of the sacrebleu package."""

from typing import Any

from calm_beam.extras import imported


def sacrebleu_metrics(*, needed_for: str) -> Any:
    """Returns sacrebleu's module of metrics; raises MissingExtraError if the package is missing."""
    return imported("sacrebleu.metrics", extra="metrics", needed_for=f'the metric "{needed_for}"')


def fraction_score(scorer: Any, candidate: str, *, reference: str) -> float:
    """Returns the score of a candidate against one reference, as a fraction in [0, 1]."""
    # Equal words give 100.00000000000004.
    return float(min(1.0, scorer.sentence_score(candidate, [reference]).score / 100))
