"""What a calibration is asked to guarantee, and by which test."""

import dataclasses
from collections.abc import Sequence

from calm_beam.manifest import PARETO
from calm_beam.risk.fwer import PROCEDURES
from calm_beam.risk.pvalues import P_VALUES
from calm_beam.risk.tails import split_tail

# The losses that each kind of consistency can be measured by, the default first.
LOSSES = {"textual": ("dissimilarity",), "risk": ("signed", "relu")}
CONSISTENCIES = tuple(LOSSES)
NEAR_TIES = COUNT_NEAR_TIES, WORST_NEAR_TIES = ("count", "worst_case")
_DEFAULT_P_VALUES = {"dissimilarity": "hoeffding_bentkus", "signed": "signed_mixture", "relu": "hoeffding_bentkus"}


@dataclasses.dataclass(frozen=True)
class Objective:
    """A loss: the kind of consistency, the metric it is measured by, and what is made of its scores.

    Attributes:
      consistency: `textual` (the early output against the full model's; CALM Definition 1) or `risk` (both against the
        references; CALM Definition 2).
      metric: Name of a metric.
      loss: One of `LOSSES[consistency]`, or a tail of one (`calm_beam.risk.tails`); see `calm_beam.risk.losses`.
    """

    consistency: str
    metric: str
    _: dataclasses.KW_ONLY
    loss: str

    def __post_init__(self) -> None:
        if self.consistency not in CONSISTENCIES:
            raise ValueError(f"consistency must be one of {', '.join(CONSISTENCIES)}; got {self.consistency!r}.")
        allowed = LOSSES[self.consistency]
        if split_tail(self.loss)[0] not in allowed:
            raise ValueError(
                f"loss must be one of {', '.join(allowed)} for {self.consistency} consistency; got {self.loss!r}."
            )

    @property
    def tail(self) -> float | None:
        """What a loss has to exceed to count as 1, and else as 0; None where losses count as they are."""
        return split_tail(self.loss)[1]

    @property
    def is_signed(self) -> bool:
        """Whether losses lie in [-1, 1] and not in [0, 1]."""
        return self.loss == "signed"


@dataclasses.dataclass(frozen=True, kw_only=True)
class Spec:
    """One guarantee: with probability at least 1 - epsilon, the expected loss is at most delta.

    Attributes:
      objective: Which loss.
      delta: Risk tolerance, in (0, 1).
      epsilon: Allowed probability that the chosen threshold breaks the tolerance, in (0, 1).
      p_value: Test of one threshold, a key of `P_VALUES`.
      procedure: How several thresholds are tested, a key of `PROCEDURES`; or `PARETO`, of several variants.
      group: Name of the group whose prompts it is about; None for all prompts.
    """

    objective: Objective
    delta: float
    epsilon: float
    p_value: str
    procedure: str = "fixed_sequence"
    group: str | None = None

    def __post_init__(self) -> None:
        for name, value in (("delta", self.delta), ("epsilon", self.epsilon)):
            if not 0 < value < 1:
                raise ValueError(f"{name} must be in (0, 1), got {value}. It is a fraction: for 5 % pass {name}=0.05.")
        for name, choice, known in (
            ("p_value", self.p_value, P_VALUES),
            ("procedure", self.procedure, (*PROCEDURES, PARETO)),
        ):
            if choice not in known:
                raise ValueError(f"{name} must be one of {', '.join(known)}; got {choice!r}.")
        if self.objective.is_signed and not P_VALUES[self.p_value].takes_signed:
            valid = " or ".join(name for name, method in P_VALUES.items() if method.takes_signed)
            raise ValueError(
                f"p_value {self.p_value} is for losses in [0, 1], but the signed loss of risk consistency lies in "
                f"[-1, 1]. Take {valid}, or risk_loss=relu."
            )


def default_p_value(loss: str) -> str:
    """Returns the test that suits a loss. Those of a tail are 0 and 1, of which the binomial test is exact."""
    return "exact_binomial" if split_tail(loss)[1] is not None else _DEFAULT_P_VALUES[loss]


def default_risk_loss(p_value: str | None) -> str:
    """Returns the loss of risk consistency that suits a test: `signed`, or `relu` if it is for losses in [0, 1]."""
    is_for_unit_interval = p_value is not None and p_value in P_VALUES and not P_VALUES[p_value].takes_signed
    return "relu" if is_for_unit_interval else "signed"


def objectives_of(specs: Sequence[Spec]) -> tuple[Objective, ...]:
    """Returns the distinct objectives of specs, in order of appearance; each is scored once for all its specs."""
    return tuple(dict.fromkeys(spec.objective for spec in specs))
