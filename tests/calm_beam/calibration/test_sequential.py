"""Results of rounds: running p-values against brute force, and the fields of manifests."""

import dataclasses
import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from calm_beam.calibration.plan import check_specs, layout_of
from calm_beam.calibration.result import risk_rows
from calm_beam.calibration.rounds import proved_objectives, watched
from calm_beam.manifest import Plan, SequentialPlan, looks_by_round
from calm_beam.risk.fwer import PROCEDURES
from calm_beam.risk.pvalues import P_VALUES, signed_mixture_p_value
from calm_beam.risk.rules import Proved, StopRule
from tests.plans import all_specs

from .builders import build_plan, build_totals

_LAYERS = 4
_GRID = (0.9, 0.7, 0.5)


def _plan(*, procedure: str = "fixed_sequence", joint: bool = False, **rule: float) -> Plan:
    specs = all_specs(
        consistencies=("risk",),
        metrics=("token_f1",),
        deltas=(0.2, 0.4),
        epsilons=(0.1,),
        p_value="signed_mixture",
        procedure=procedure,
        joint=joint,
    )
    return build_plan(specs, _GRID, sequential=SequentialPlan(round_examples=30, **rule))


def _rounds(seed: int, *, rounds: int = 6, risks: tuple[float, ...] = (0.05, 0.15, 0.35)) -> list[np.ndarray]:
    """Returns losses of shape (examples, thresholds) for each round."""
    generator = np.random.default_rng(seed)
    shapes = [(int(generator.integers(20, 50)), len(risks)) for _ in range(rounds)]
    return [generator.uniform(size=shape) * 2 * np.array(risks) for shape in shapes]


@settings(max_examples=20, deadline=None)
@given(seed=st.integers(0, 10_000), procedure=st.sampled_from(sorted(PROCEDURES)), joint=st.booleans())
def test_p_values_are_the_least_of_all_looks(seed: int, procedure: str, joint: bool) -> None:
    """Each threshold's p-value is the least over all rounds so far, and the tests use those."""
    plan = _plan(procedure=procedure, joint=joint)
    rounds = _rounds(seed)
    found = watched([build_totals(losses[:, None], layout_of(plan)) for losses in rounds], plan, num_layers=_LAYERS)
    for spec, entry in zip(plan.tests, found.calibrations, strict=True):
        looks = [
            signed_mixture_p_value(np.concatenate(rounds[: number + 1]), delta=spec.delta)
            for number in range(len(rounds))
        ]
        rows = [row for row in found.rows if row.delta == spec.delta]
        assert [row.p_value for row in rows] == np.min(looks, axis=0).tolist()
        test = PROCEDURES[procedure](np.min(looks, axis=0), epsilon=spec.epsilon)
        assert [row.rejected for row in rows] == test.rejected.tolist()
        assert entry.looks is not None
        accepted = [
            PROCEDURES[procedure](np.min(looks[: number + 1], axis=0), epsilon=spec.epsilon).last_rejected()
            for number in range(len(rounds))
        ]
        assert [look.threshold for look in entry.looks] == [
            _GRID[place] if place >= 0 else None for place in map(int, accepted)
        ]
        assert [look.n for look in entry.looks] == np.cumsum([len(losses) for losses in rounds]).tolist()
        followed = _GRID.index(entry.threshold) if entry.threshold else 0
        assert [math.exp(-max(0, look.log_capital)) for look in entry.looks] == pytest.approx(
            [look[followed] for look in looks]
        )


def test_one_round_is_an_ordinary_calibration() -> None:
    """If all examples are in one round, the result is an ordinary calibration's."""
    plan = _plan()
    totals = build_totals(np.concatenate(_rounds(1))[:, None], layout_of(plan))
    assert watched([totals], plan, num_layers=_LAYERS).rows == risk_rows(totals, plan, num_layers=_LAYERS)


def test_what_was_accepted_stays_accepted() -> None:
    """A proved threshold is served, whatever later rounds show."""
    plan = _plan()
    good, bad = _rounds(2, rounds=4, risks=(0.0, 0.0, 0.0)), _rounds(3, rounds=4, risks=(0.5, 0.5, 0.5))
    found = watched([build_totals(losses[:, None], layout_of(plan)) for losses in good + bad], plan, num_layers=_LAYERS)
    for entry in found.calibrations:
        assert entry.threshold == 0.5
        assert entry.looks is not None
        assert entry.looks[-1].log_capital < entry.looks[3].log_capital
    # The final p-value alone would not have proved it.
    whole = build_totals(np.concatenate(good + bad)[:, None], layout_of(plan))
    assert not any(row.rejected for row in risk_rows(whole, plan, num_layers=_LAYERS) if row.delta == 0.2)


def test_looks_are_as_a_rule_takes_them() -> None:
    """For each round, looks have the place and the layers of every entry."""
    plan = _plan()
    rounds = _rounds(4, risks=(0.05, 0.15, 0.3))
    found = watched([build_totals(losses[:, None], layout_of(plan)) for losses in rounds], plan, num_layers=_LAYERS)
    looks = looks_by_round(found.calibrations, plan.thresholds)
    assert len(looks) == 6
    first, second = looks[-1]
    assert (first, second) == (Proved(1, 3.5), Proved(2, 3.0))
    assert StopRule(cost=3.5).reason(looks, settings=3) == "cost"


def test_what_nothing_is_left_to_prove_of() -> None:
    """An objective is finished once all of its entries have reached the end of the grid, and not before."""
    plan = _plan()
    half = [build_totals(losses[:, None], layout_of(plan)) for losses in _rounds(4, risks=(0.05, 0.15, 0.3))]
    found = watched(half, plan, num_layers=_LAYERS)
    assert [entry.threshold for entry in found.calibrations] == [0.7, 0.5]
    assert proved_objectives(found.calibrations, plan) == frozenset()
    safe = [build_totals(losses[:, None], layout_of(plan)) for losses in _rounds(4, risks=(0, 0, 0))]
    entries = watched(safe, plan, num_layers=_LAYERS).calibrations
    assert proved_objectives(entries, plan) == {plan.tests[0].objective}


@pytest.mark.parametrize("name", sorted(P_VALUES))
def test_other_p_values_may_not_be_watched(name: str) -> None:
    """All p-values but the mixture hold for a fixed number of examples, and are refused with the reason."""
    plan = _plan()
    specs = tuple(dataclasses.replace(spec, p_value=name, loss="relu") for spec in plan.tests)
    if name == "signed_mixture":
        check_specs(specs, sequential=plan.sequential)
        return
    with pytest.raises(ValueError, match=f"^p_value {name} holds for a number of examples that is fixed beforehand"):
        check_specs(specs, sequential=plan.sequential)


def _rule(plan: Plan) -> StopRule:
    assert plan.sequential is not None
    return plan.sequential.rule(plan.thresholds)


def test_rules_must_be_reachable() -> None:
    """A stopping threshold below the whole grid is refused; one between two is that of the next lower."""
    with pytest.raises(ValueError, match=r"^stop_at_threshold is 0.4, but the lowest threshold of the grid is 0.5"):
        _rule(_plan(stop_at_threshold=0.4))
    assert _rule(_plan(stop_at_threshold=0.8)) == StopRule(place=1)
    rule = _rule(_plan(stop_at_threshold=0.9, stop_at_layers=3.5, stop_gain=0.02))
    assert rule == StopRule(place=0, cost=3.5, gain=0.02)


def test_the_rule_is_hashed_and_the_tests_alone_too() -> None:
    """Another rule is another plan with the same tests."""
    one, other = _plan(stop_gain=0.02), _plan(stop_at_layers=3)
    assert one.digest != other.digest
    assert one.without_rule().digest == other.without_rule().digest == _plan().digest
    assert one.without_rule().digest != _plan(joint=True).digest
