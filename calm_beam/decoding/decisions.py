"""What the head, or another measure, decides of packed rows."""

import dataclasses

import numpy as np


@dataclasses.dataclass(frozen=True)
class Decisions:
    """Decisions of rows, each array of shape (rows,).

    Attributes:
      tokens: int32.
      low: float32. The confidence is at least this.
      high: float32. And at most this; the same number unless a certified head decided.
      is_finite: Whether all numbers that were used are finite.
    """

    tokens: np.ndarray
    _: dataclasses.KW_ONLY
    low: np.ndarray
    high: np.ndarray
    is_finite: np.ndarray

    @classmethod
    def measured(cls, confidences: np.ndarray) -> "Decisions":
        """Returns decisions by confidences that need no logits, for token 0."""
        tokens, is_finite = np.zeros(len(confidences), np.int32), np.isfinite(confidences)
        return cls(tokens, low=confidences, high=confidences, is_finite=is_finite)

    @classmethod
    def exact(cls, tokens: np.ndarray, *, confidences: np.ndarray, is_finite: np.ndarray) -> "Decisions":
        """Returns decisions by confidences that are known."""
        return cls(tokens, low=confidences.copy(), high=confidences.copy(), is_finite=is_finite)

    @property
    def confidences(self) -> np.ndarray:
        """The middle of every interval; the confidence itself where that is known."""
        # Halves of what is finite: a sum could overflow, and -inf stays what it is.
        return self.low / 2 + self.high / 2

    @classmethod
    def none(cls, rows: int, *, confidence: float) -> "Decisions":
        """Returns decisions for token 0 with one confidence, to be written over where rows are asked."""
        confidences = np.full(rows, confidence, np.float32)
        return cls.exact(np.zeros(rows, np.int32), confidences=confidences, is_finite=np.ones(rows, bool))

    def of_rows(self, rows: np.ndarray) -> "Decisions":
        """Returns the decisions of some rows, or of rows again and again."""
        return Decisions(self.tokens[rows], low=self.low[rows], high=self.high[rows], is_finite=self.is_finite[rows])

    def among(self, rows: np.ndarray, count: int) -> "Decisions":
        """Returns decisions of so many rows: these of some of them, ascending, and nothing of others (-inf)."""
        if len(rows) == count:
            return self
        of_all = Decisions.none(count, confidence=-np.inf)
        of_all.put(rows, self)
        return of_all

    def put(self, rows: np.ndarray | slice, decisions: "Decisions") -> None:
        """Writes the decisions of some rows."""
        for name in ("tokens", "low", "high", "is_finite"):
            getattr(self, name)[rows] = getattr(decisions, name)
