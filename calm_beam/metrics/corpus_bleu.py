"""Corpus BLEU of a set of outputs, from counts that are added over examples: reported, never tested.

BLEU is not a mean of scores of examples, so there is no p-value for it. It is computed from sums of integers, which
merge exactly in any order and for any part of a set; each example adds its counts.
"""

import functools
import importlib.util
from collections.abc import Sequence
from typing import Any

import numpy as np

_ORDERS = 4
NUM_COUNTS = 2 * _ORDERS + 2
"""Length of `bleu_counts`."""


def is_bleu_available() -> bool:
    """Returns whether sacrebleu is installed."""
    return importlib.util.find_spec("sacrebleu") is not None


def bleu_counts(candidate: str, references: Sequence[str]) -> np.ndarray:
    """Returns one example's contribution to the counts of BLEU.

    Args:
      candidate: The output.
      references: At least one text; an n-gram may match as often as in any of them, and the closest length counts.

    Returns:
      shape (10,), int64: matching n-grams of orders 1 to 4, all n-grams of these orders, tokens of the output and of
      the reference.

    Source: Papineni et al. (2002), "BLEU", as sacrebleu computes it by default (13a tokens, mixed case).
    """
    score = _bleu().sentence_score(candidate, list(references))
    return np.array([*score.counts, *score.totals, score.sys_len, score.ref_len], np.int64)


def bleu_of(counts: np.ndarray) -> float:
    """Returns the BLEU of all examples whose counts were added, in [0, 100].

    Args:
      counts: Sum of `bleu_counts`; BLEU is 0 for no examples.

    Source: Papineni et al. (2002), "BLEU", as sacrebleu computes it by default (exponential smoothing).
    """
    values = [int(value) for value in counts]
    score = type(_bleu()).compute_bleu(
        correct=values[:_ORDERS],
        total=values[_ORDERS : 2 * _ORDERS],
        sys_len=values[-2],
        ref_len=values[-1],
        smooth_method="exp",
    )
    return float(score.score)


@functools.cache
def _bleu() -> Any:
    # Imported here, since it is an extra. Smoothing of single examples does not change their counts.
    from sacrebleu.metrics import BLEU

    return BLEU(effective_order=True)
