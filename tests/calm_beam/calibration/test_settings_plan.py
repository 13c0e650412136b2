"""The plan of a certification: tests, and an order that no loss decides."""

import dataclasses
from typing import Any

import pytest

from calm_beam.calibration.certification import settled_order
from calm_beam.calibration.loss_table import LossTable
from calm_beam.errors import UsageError
from tests.calm_beam.inputs.losses.builders import ORDER, coin_rows
from tests.plans import all_tests, build_setting_plan


def test_every_combination_is_a_test() -> None:
    """All examples come first and then each group; the mean before tails; joint tests share one epsilon."""
    tests = all_tests(groups=["a", "b"], deltas=[0.1, 0.2], epsilons=[0.06], tails=[0.5], joint=True)
    assert len(tests) == 12
    assert {test.epsilon for test in tests} == {0.06 / 12}
    assert [(test.tail, test.group, test.delta) for test in tests[:3]] == [
        (None, None, 0.1),
        (None, None, 0.2),
        (None, "a", 0.1),
    ]
    assert [test.p_value for test in tests] == ["hoeffding_bentkus"] * 6 + ["exact_binomial"] * 6
    assert all_tests(groups=(), deltas=[0.1], epsilons=[0.05], loss="signed")[0].p_value == "signed_mixture"


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"deltas": []}, "--delta must list one or more different values, got"),
        ({"deltas": [0.1, 0.1]}, "--delta must list one or more different values"),
        ({"deltas": [5.0]}, r"--delta must be in \(0, 1\), got 5. It is a fraction"),
        ({"epsilons": [0.0]}, r"--epsilon must be in \(0, 1\), got 0"),
        ({"tails": [1.0]}, r"--tail must be in \[0, 1\), got 1"),
        ({"epsilons": [0.1, 0.2], "joint": True}, "--joint divides one epsilon among all entries"),
        ({"p_value": "t_test"}, "--p_value must be one of hoeffding, .*; got 't_test'"),
        ({"procedure": "all"}, "--procedure must be one of fixed_sequence, .*; got 'all'"),
        ({"loss": "signed", "p_value": "hoeffding"}, r"is for losses in \[0, 1\], and signed losses lie in \[-1, 1\]"),
        ({"p_value": "exact_binomial", "clustered": True}, "losses of clusters are means over their examples"),
    ],
)
def test_what_cannot_be_asked(changes: dict[str, Any], message: str) -> None:
    """Values and combinations that no test allows are refused by the names of their flags."""
    with pytest.raises(UsageError, match=message):
        all_tests(**{"groups": (), "deltas": [0.1], "epsilons": [0.05], **changes})


def test_orders() -> None:
    """The order is the given one, or by costs, from the highest or the lowest."""
    sweep = LossTable.of(coin_rows(4))
    assert settled_order(sweep, order=ORDER[::-1], order_by=None, costs={}) == ORDER[::-1]
    assert settled_order(sweep, order=None, order_by="cost", costs={}) == ORDER
    assert settled_order(sweep, order=None, order_by="cost_ascending", costs={}) == ORDER[::-1]
    declared = dict(zip(ORDER, (1.0, 4.0, 3.0, 2.0), strict=True))
    assert settled_order(sweep, order=None, order_by="cost", costs=declared) == ("6bit", "4bit", "3bit", "8bit")


@pytest.mark.parametrize(
    ("order", "message"),
    [
        (ORDER[1:], r"--order must name every setting once: it lacks 1 setting \('8bit'\) that there are losses of"),
        ((*ORDER, "2bit"), r"names 1 setting \('2bit'\) without losses"),
        ((*ORDER, "8bit"), "names a setting twice"),
    ],
)
def test_orders_of_other_settings(order: tuple[str, ...], message: str) -> None:
    """An order that does not name every setting once is refused."""
    with pytest.raises(UsageError, match=message):
        settled_order(LossTable.of(coin_rows(4)), order=order, order_by=None, costs={})


def test_costs_that_depend_on_the_data() -> None:
    """An order by costs needs one for every setting, equal on all examples, and no two alike."""
    rows = coin_rows(4)
    cases = [
        ([dataclasses.replace(row, cost=None) for row in rows], "4 settings .* without a cost. Add the column cost"),
        (
            [dataclasses.replace(row, cost=1.0) if row.setting == "4bit" and row.id == "e0" else row for row in rows],
            r"the cost of 1 setting \('4bit'\) differs between examples, so that its mean depends on the data",
        ),
        ([dataclasses.replace(row, cost=1.0) for row in rows], "cost the same, which leaves their order open"),
    ]
    for changed, message in cases:
        with pytest.raises(UsageError, match=message):
            settled_order(LossTable.of(changed), order=None, order_by="cost", costs={})


def test_the_plan_names_all_that_decides() -> None:
    """Each argument changes the digest; losses do not."""
    tests = all_tests(groups=(), deltas=[0.1], epsilons=[0.05])
    plan = build_setting_plan(tests, ["x", "y"])
    others = [
        build_setting_plan(tests, ["y", "x"]),
        build_setting_plan(all_tests(groups=(), deltas=[0.2], epsilons=[0.05]), ["x", "y"]),
        build_setting_plan(tests, ["x", "y"], seed=1),
        build_setting_plan(tests, ["x", "y"], cluster_key="c"),
        build_setting_plan(tests, ["x", "y"], group_key="c"),
        build_setting_plan(tests, ["x", "y"], joint_epsilon=0.05),
        build_setting_plan(tests, ["x", "y"], metric="acc"),
    ]
    assert len({each.digest for each in (plan, *others)}) == len(others) + 1
