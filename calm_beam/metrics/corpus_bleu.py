"""BLEU of a whole set of outputs, from counts that add up over its examples: reported, never tested.

BLEU is no mean of scores of examples, so no p-value is about it. But it is made of sums of whole numbers, which merge
exactly in any order, and which any part of a set has: its counts are gathered example by example.
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
    """Returns what one example adds to the counts of BLEU.

    Args:
      candidate: The output.
      references: At least one text; each n-gram may occur as often as in any of them, and the closest in length counts.

    Returns:
      shape (10,), int64: matching n-grams of orders 1 to 4, all n-grams of these, tokens of the output and of the
      reference.

    Source: Papineni et al. (2002), "BLEU", as sacrebleu computes it by default (13a tokens, mixed case).
    """
    score = _bleu().sentence_score(candidate, list(references))
    return np.array([*score.counts, *score.totals, score.sys_len, score.ref_len], np.int64)


def bleu_of(counts: np.ndarray) -> float:
    """Returns the BLEU of all examples whose counts were added, in [0, 100].

    Args:
      counts: Sum of `bleu_counts`; that of no example has BLEU 0.

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
    # Here, since it is an extra. Smoothing of single examples does not touch their counts.
    from sacrebleu.metrics import BLEU

    return BLEU(effective_order=True)
