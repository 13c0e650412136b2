"""What a certification settles before it sums a loss."""

import itertools
from collections.abc import Mapping, Sequence

from calm_beam.errors import UsageError
from calm_beam.inputs.losses.shown import named
from calm_beam.inputs.set_parts import salt_of
from calm_beam.manifest import SettingPlan, SettingSequentialPlan, SettingTest
from calm_beam.risk.fwer import PROCEDURES
from calm_beam.risk.pvalues import P_VALUES, why_not_watched

from .guarantee import are_kept, default_p_value
from .loss_table import LossTable

ORDERS = ("cost", "cost_ascending")
LONGEST_NAME = 1000
"""Characters of a setting's or a group's name: it stands in every line of tables and in every drawing."""
_SHOWN = 40


def all_tests(
    *,
    groups: Sequence[str],
    deltas: Sequence[float],
    epsilons: Sequence[float],
    tails: Sequence[float] = (),
    loss: str = "given",
    p_value: str | None = None,
    procedure: str = "fixed_sequence",
    joint: bool = False,
    clustered: bool = False,
    watched: bool = False,
    losses: int | None = None,
) -> tuple[SettingTest, ...]:
    """Returns every combination of the lists as one test: of all examples and then of each group, the mean first.

    Args:
      groups: Groups of examples with tests of their own.
      deltas: Risk tolerances.
      epsilons: Allowed probabilities of error; one if joint.
      tails: Losses of which a share delta of examples may lose more, besides the tests of the mean.
      loss: What the losses are: `given`, `signed` or `relu`.
      p_value: Test of one setting; None takes the one that suits the losses (`calm_beam.calibration.guarantee`).
      procedure: How several settings are tested.
      joint: Whether all are to hold together. Then each gets an equal share of epsilon (Bonferroni).
      clustered: Whether losses are means over clusters.
      watched: Whether the tests are looked at after every round.
      losses: How many there are, examples times settings; None where that is not known yet.

    Raises:
      UsageError: If a list is empty or holds a value twice, or a value or combination is not allowed.
    """
    for name, values in (("delta", deltas), ("epsilon", epsilons), ("tail", tails)):
        if not (values or name == "tail") or len(set(values)) != len(values):
            raise UsageError(f"--{name} must list one or more different values, got {list(values)}.")
        for value in values:
            if not (0 <= value < 1 if name == "tail" else 0 < value < 1):
                interval = "[0, 1)" if name == "tail" else "(0, 1)"
                raise UsageError(f"--{name} must be in {interval}, got {value:g}. It is a fraction: for 5 % pass 0.05.")
    if joint and len(epsilons) > 1:
        raise UsageError(f"--joint divides one epsilon among all entries, got {list(epsilons)}. Choose one.")
    for name, choice, known in (("p_value", p_value, P_VALUES), ("procedure", procedure, PROCEDURES)):
        if choice is not None and choice not in known:
            raise UsageError(f"--{name} must be one of {', '.join(known)}; got {choice!r}.")
    combinations = list(itertools.product((None, *tails), (None, *groups), deltas, epsilons))
    share = len(combinations) if joint else 1
    tests = []
    for tail, group, delta, epsilon in combinations:
        # The only one that may be watched.
        suits = "signed_mixture" if watched else None
        chosen = (
            p_value
            or suits
            or default_p_value(
                is_binary=tail is not None and not clustered,
                is_signed=tail is None and loss == "signed",
                is_kept=are_kept(losses, entries=len(combinations)),
            )
        )
        test = SettingTest(
            group=group,
            loss=loss,
            tail=None if tail is None else tail + 0.0,
            delta=delta,
            epsilon=epsilon / share,
            p_value=chosen,
            procedure=procedure,
        )
        _check(test, clustered=clustered)
        if watched and (reason := why_not_watched(test.p_value)) is not None:
            raise UsageError(f"{reason}, or leave --sequential out.")
        tests.append(test)
    return tuple(tests)


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


def plan_of_settings(
    tests: Sequence[SettingTest],
    order: Sequence[str],
    *,
    joint_epsilon: float | None = None,
    group_key: str | None = None,
    cluster_key: str | None = None,
    seed: int = 0,
    baseline: str | None = None,
    task: str | None = None,
    metric: str | None = None,
    direction: str | None = None,
    sequential: SettingSequentialPlan | None = None,
) -> SettingPlan:
    """Returns the plan; arguments are its attributes, but that the seed decides the salt, as in a calibration.

    Raises:
      UsageError: If the name of a setting or a group is too long for a table.
    """
    for kind, names in (("setting", order), ("group", [test.group for test in tests if test.group is not None])):
        if longest := next((name for name in names if len(name) > LONGEST_NAME), None):
            raise UsageError(
                f"{kind} {longest[:_SHOWN]!r}…: its name has {len(longest):,} characters, more than {LONGEST_NAME:,}. "
                "Shorten it."
            )
    return SettingPlan(
        order=tuple(order),
        tests=tuple(tests),
        joint_epsilon=joint_epsilon,
        group_key=group_key,
        cluster_key=cluster_key,
        salt=salt_of(seed),
        baseline=baseline,
        task=task,
        metric=metric,
        direction=direction,
        sequential=sequential,
    )
