"""What a calibration is asked to guarantee."""

import dataclasses
import itertools
from collections.abc import Sequence

CONSISTENCIES = ("textual", "risk")


@dataclasses.dataclass(frozen=True)
class Objective:
    """A loss: the kind of consistency and the metric it is measured by.

    Attributes:
      consistency: `textual` (the early output against the full model's; CALM Definition 1) or `risk` (both against the
        references; CALM Definition 2).
      metric: Name of a metric.
    """

    consistency: str
    metric: str

    def __post_init__(self) -> None:
        if self.consistency not in CONSISTENCIES:
            raise ValueError(f"consistency must be one of {', '.join(CONSISTENCIES)}; got {self.consistency!r}.")


@dataclasses.dataclass(frozen=True, kw_only=True)
class Spec:
    """One guarantee: with probability at least 1 - epsilon, the expected loss is at most delta.

    Attributes:
      objective: Which loss.
      delta: Risk tolerance, in (0, 1).
      epsilon: Allowed probability that the chosen threshold breaks the tolerance, in (0, 1).
    """

    objective: Objective
    delta: float
    epsilon: float

    def __post_init__(self) -> None:
        for name, value in (("delta", self.delta), ("epsilon", self.epsilon)):
            if not 0 < value < 1:
                raise ValueError(f"{name} must be in (0, 1), got {value}. It is a fraction: for 5 % pass {name}=0.05.")


def all_specs(
    *, consistencies: Sequence[str], metrics: Sequence[str], deltas: Sequence[float], epsilons: Sequence[float]
) -> tuple[Spec, ...]:
    """Returns every combination as one spec, in the order of the arguments, the last varying fastest.

    Raises:
      ValueError: If a list is empty or holds a value twice, or a value is not allowed.
    """
    lists = {"consistency": consistencies, "metric": metrics, "delta": deltas, "epsilon": epsilons}
    for name, values in lists.items():
        if not values or len(set(values)) != len(values):
            raise ValueError(f"{name} must list one or more different values, got {list(values)}.")
    return tuple(
        Spec(objective=Objective(consistency, metric), delta=delta, epsilon=epsilon)
        for consistency, metric, delta, epsilon in itertools.product(consistencies, metrics, deltas, epsilons)
    )


def objectives_of(specs: Sequence[Spec]) -> tuple[Objective, ...]:
    """Returns the distinct objectives of specs, in order of appearance; each is scored once for all its specs."""
    return tuple(dict.fromkeys(spec.objective for spec in specs))
