"""What a certification settles before it sums a loss."""

import dataclasses
import itertools
from collections.abc import Mapping, Sequence

from calm_beam.errors import UsageError
from calm_beam.inputs.losses.shown import named
from calm_beam.manifest import SettingPlan, SettingTest
from calm_beam.risk.fwer import PROCEDURES
from calm_beam.risk.pvalues import P_VALUES, why_not_watched

from .guarantee import are_kept, default_p_value
from .loss_table import LossTable

ORDERS = ("cost", "cost_ascending")
LONGEST_NAME = 1000
"""Characters of a setting's or a group's name: it stands in every line of tables and in every drawing."""
_SHOWN = 40


@dataclasses.dataclass(frozen=True, kw_only=True)
class SettingGuarantees:
    """What is asked of settings: every combination of the lists is a promise of its own.

    Attributes:
      deltas: Risk tolerances.
      epsilons: Allowed probabilities of error; one if joint.
      tails: Losses of which a share delta of examples may lose more, besides the tests of the mean.
      loss: What the losses are: `given`, `signed` or `relu`.
      p_value: Test of one setting; None takes the one that suits the losses (`calm_beam.calibration.guarantee`).
      procedure: How several settings are tested.
      joint: Whether all are to hold together. Then each gets an equal share of epsilon (Bonferroni).
      clustered: Whether losses are means over clusters.
      watched: Whether the tests are looked at after every round.
    """

    deltas: Sequence[float]
    epsilons: Sequence[float]
    tails: Sequence[float] = ()
    loss: str = "given"
    p_value: str | None = None
    procedure: str = "fixed_sequence"
    joint: bool = False
    clustered: bool = False
    watched: bool = False

    def __post_init__(self) -> None:
        for name, values in (("delta", self.deltas), ("epsilon", self.epsilons), ("tail", self.tails)):
            if not (values or name == "tail") or len(set(values)) != len(values):
                raise UsageError(f"--{name} must list one or more different values, got {list(values)}.")
            for value in values:
                if not (0 <= value < 1 if name == "tail" else 0 < value < 1):
                    interval = "[0, 1)" if name == "tail" else "(0, 1)"
                    raise UsageError(
                        f"--{name} must be in {interval}, got {value:g}. It is a fraction: for 5 % pass 0.05."
                    )
        if self.joint and len(self.epsilons) > 1:
            raise UsageError(f"--joint divides one epsilon among all entries, got {list(self.epsilons)}. Choose one.")
        for name, choice, known in (("p_value", self.p_value, P_VALUES), ("procedure", self.procedure, PROCEDURES)):
            if choice is not None and choice not in known:
                raise UsageError(f"--{name} must be one of {', '.join(known)}; got {choice!r}.")

    def tests(self, *, groups: Sequence[str] = (), losses: int | None = None) -> tuple[SettingTest, ...]:
        """Returns each with nothing left open: of all examples and then of each group, the mean first.

        Args:
          groups: Groups of examples with tests of their own.
          losses: How many there are, examples times settings; None where that is not known yet.

        Raises:
          UsageError: If a combination is not allowed.
        """
        combinations = list(itertools.product((None, *self.tails), (None, *groups), self.deltas, self.epsilons))
        share, is_kept = len(combinations) if self.joint else 1, are_kept(losses, entries=len(combinations))
        tests = []
        for tail, group, delta, epsilon in combinations:
            test = SettingTest(
                group=group,
                loss=self.loss,
                tail=None if tail is None else tail + 0.0,
                delta=delta,
                epsilon=epsilon / share,
                p_value=self.p_value or self._default_p_value(tail, is_kept=is_kept),
                procedure=self.procedure,
            )
            _check(test, clustered=self.clustered)
            if self.watched and (reason := why_not_watched(test.p_value)) is not None:
                raise UsageError(f"{reason}, or leave --sequential out.")
            tests.append(test)
        return tuple(tests)

    def _default_p_value(self, tail: float | None, *, is_kept: bool) -> str:
        if self.watched:
            # The only one that may be.
            return "signed_mixture"
        return default_p_value(
            is_binary=tail is not None and not self.clustered,
            is_signed=tail is None and self.loss == "signed",
            is_kept=is_kept,
        )


def _check(test: SettingTest, *, clustered: bool) -> None:
    method = P_VALUES[test.p_value]
    if test.is_signed and not method.takes_signed:
        valid = " or ".join(name for name, each in P_VALUES.items() if each.takes_signed)
        raise UsageError(
            f"--p_value={test.p_value} is for losses in [0, 1], and signed losses lie in [-1, 1]. Take {valid}, or "
            "another --loss."
        )
    if clustered and not method.takes_fractions:
        raise UsageError(
            f"losses of clusters are means over their examples, and p_value {test.p_value} is for losses of 0 and 1. "
            "Take --p_value=hoeffding_bentkus."
        )


def settled_order(
    sweep: LossTable, *, order: Sequence[str] | None, order_by: str | None, costs: dict[str, float]
) -> tuple[str, ...]:
    """Returns the settings in testing order, which no loss decides.

    Args:
      sweep: What was swept.
      order: The order as it was declared; None where costs make it.
      order_by: One of `ORDERS` where they do: the dearest first, or the cheapest.
      costs: Of each setting, as it was declared; empty where the rows say it.

    Raises:
      UsageError: If the order does not name every setting once, or a cost is missing, or differs between examples:
        then its mean depends on the data.
    """
    if order is not None:
        missing = [name for name in sweep.settings if name not in order]
        extra = [name for name in order if name not in sweep.settings]
        if missing or extra or len(set(order)) != len(order):
            parts = [f"lacks {named(missing, 'setting')} that there are losses of"] if missing else []
            parts += [f"names {named(extra, 'setting')} without losses"] if extra else []
            parts += ["names a setting twice"] if len(set(order)) != len(order) else []
            raise UsageError(f"--order must name every setting once: it {' and '.join(parts)}.")
        return tuple(order)
    known = costs or sweep.costs
    if missing := [name for name in sweep.settings if name not in known]:
        raise UsageError(
            f"--order_by={order_by}: {named(missing, 'setting')} without a cost. Add the column cost, declare them "
            "(--costs), or give the order itself (--order)."
        )
    varying = [name for name in sweep.settings if not costs and name not in sweep.constant_costs]
    if varying:
        raise UsageError(
            f"--order_by={order_by}: the cost of {named(varying, 'setting')} differs between examples, so that its "
            "mean depends on the data, and an order by it too. Give the order itself (--order), or declare costs "
            "(--costs)."
        )
    return order_of_costs({name: known[name] for name in sweep.settings}, order_by=order_by)


def order_of_costs(costs: Mapping[str, float], *, order_by: str | None) -> tuple[str, ...]:
    """Returns settings in the order of what they cost.

    Args:
      costs: Of every setting; no loss has a part in them.
      order_by: One of `ORDERS`.

    Raises:
      UsageError: If two cost the same.
    """
    twice = sorted({name for name in costs if list(costs.values()).count(costs[name]) > 1})
    if twice:
        raise UsageError(
            f"--order_by={order_by}: {named(twice, 'setting')} cost the same, which leaves their order open. Give the "
            "order itself (--order)."
        )
    return tuple(sorted(costs, key=lambda name: costs[name], reverse=order_by == "cost"))


def check_names(plan: SettingPlan) -> None:
    """Refuses names of settings and groups that are too long for a table.

    Raises:
      UsageError: If one is; begins with it.
    """
    groups = [test.group for test in plan.tests if test.group is not None]
    for kind, names in (("setting", plan.order), ("group", groups)):
        if longest := next((name for name in names if len(name) > LONGEST_NAME), None):
            raise UsageError(
                f"{kind} {longest[:_SHOWN]!r}…: its name has {len(longest):,} characters, more than {LONGEST_NAME:,}. "
                "Shorten it."
            )
