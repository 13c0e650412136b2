"""What a loss is made of: the kind of consistency, the metric, and how its scores become a loss."""

import dataclasses

from calm_beam.risk.tails import split_tail, tail_in_words

LOSSES_OF = {"textual": ("dissimilarity",), "risk": ("signed", "relu")}
"""The losses that each kind of consistency can be measured by, the default first."""

CONSISTENCIES = tuple(LOSSES_OF)
LOSSES = tuple(loss for losses in LOSSES_OF.values() for loss in losses)


@dataclasses.dataclass(frozen=True)
class Objective:
    """A loss: the kind of consistency, the metric it is measured by, and what is made of its scores.

    Attributes:
      consistency: `textual` (the early output against the full model's; CALM Definition 1) or `risk` (both against the
        references; CALM Definition 2).
      metric: Name of a metric.
      loss: One of `LOSSES_OF[consistency]`, or a tail of one (`calm_beam.risk.tails`); see `calm_beam.risk.losses`.
    """

    consistency: str
    metric: str
    _: dataclasses.KW_ONLY
    loss: str

    def __post_init__(self) -> None:
        if self.consistency not in CONSISTENCIES:
            raise ValueError(f"consistency must be one of {', '.join(CONSISTENCIES)}; got {self.consistency!r}.")
        allowed = LOSSES_OF[self.consistency]
        if split_tail(self.loss)[0] not in allowed:
            raise ValueError(
                f"loss must be one of {', '.join(allowed)} for {self.consistency} consistency; got {self.loss!r}."
            )

    @property
    def tail(self) -> float | None:
        """What a loss has to exceed to count as 1, and else as 0; None where losses count as they are."""
        return split_tail(self.loss)[1]

    def consistency_in_words(self) -> str:
        """Returns the kind of consistency and, of a tail, what a loss has to exceed to count.

        >>> Objective("textual", "rouge_l", loss="dissimilarity>0.3").consistency_in_words()
        'textual > 0.3'
        """
        return f"{self.consistency}{tail_in_words(self.loss)}"

    @property
    def is_signed(self) -> bool:
        """Whether losses lie in [-1, 1] and not in [0, 1]."""
        return self.loss == "signed"
