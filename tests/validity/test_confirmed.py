"""Thresholds that some units select and others confirm, with few replications; and the twins that err."""

import dataclasses

import numpy as np
import pytest

from calm_beam.manifest import CONFIRM_PATH
from calm_beam.risk.fwer import PROCEDURES
from calm_beam.risk.pvalues import P_VALUES
from tests.calm_beam.manifest.builders import build_plan_record

from .confirmed import CONFIRMED_WORLDS, EAGER, ConfirmedOutcome, confirmed_table, run_confirmed_world
from .suite import SEED, most_misses
from .worlds import World

_REPLICATIONS = 400
_BY_NAME = {world.name: world for world in CONFIRMED_WORLDS}


@pytest.mark.slow
@pytest.mark.parametrize("world", CONFIRMED_WORLDS, ids=[world.name for world in CONFIRMED_WORLDS])
def test_what_others_confirm_is_seldom_wrong(world: World) -> None:
    """However thresholds were selected, and at any level, at most a share epsilon of calibrations errs."""
    outcomes = run_confirmed_world(world, replications=_REPLICATIONS)
    assert [outcome for outcome in outcomes if not outcome.is_valid] == []
    assert {outcome.procedure for outcome in outcomes} == {*PROCEDURES, EAGER}
    assert {outcome.p_value for outcome in outcomes} | {"exact_binomial"} == set(P_VALUES)
    # Otherwise there would be nothing to catch: choices are wrong more often than promises may be.
    assert max(outcome.chosen for outcome in outcomes) > most_misses(_REPLICATIONS, world.epsilon)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "p_value"), [("coin, all at delta", "exact_binomial"), ("bimodal, all at delta", "wsr")]
)
def test_those_who_chose_cannot_confirm(name: str, p_value: str) -> None:
    """Confirmed by the units that selected it, a wrong threshold is promised more than twice as often as allowed."""
    outcomes = run_confirmed_world(_BY_NAME[name], replications=2000)
    (found,) = [each for each in outcomes if (each.p_value, each.procedure) == (p_value, "bonferroni")]
    assert found.repeated > 1.5 * most_misses(2000, found.epsilon)
    assert found.errors <= most_misses(2000, found.epsilon)


@pytest.mark.slow
def test_what_follows_a_failure_cannot_be_confirmed() -> None:
    """Tests that continue after the first failure err more often than allowed; sequential ones do not."""
    world = dataclasses.replace(_BY_NAME["coin, 1,000 examples"], shares=(1.0,) * 8, correlation=0, n=1000)
    outcomes = run_confirmed_world(world, replications=1000)
    (found,) = [each for each in outcomes if (each.p_value, each.procedure) == ("wsr", EAGER)]
    assert found.unordered > 1.1 * most_misses(1000, found.epsilon)
    assert found.errors <= most_misses(1000, found.epsilon)


@pytest.mark.slow
def test_the_test_that_confirms_has_teeth() -> None:
    """In a hard world a valid test errs nearly as often as allowed, since nearly every selection is wrong."""
    outcomes = run_confirmed_world(_BY_NAME["coin, 1,000 examples"], replications=1000)
    worst = max(outcomes, key=lambda outcome: outcome.errors)
    assert worst.chosen > 900
    assert 35 <= worst.errors <= most_misses(1000, 0.05)


def test_dividing_a_joint_epsilon_keeps_it_whatever_depends_on_what() -> None:
    """Four joint promises, some of which selected a threshold, with disjoint errors use all of epsilon and no more."""
    rng, tests, replications = np.random.default_rng(SEED), 4, 20_000
    has_chosen = rng.uniform(size=(replications, tests)) < [0.9, 0.5, 0.5, 0.1]
    # Each is uniform, and no two are small together.
    p_values = (rng.uniform(size=(replications, 1)) + np.arange(tests) / tests) % 1
    plan = build_plan_record(
        tests=build_plan_record().tests * 2, confirm_share=0.5, confirm_path=CONFIRM_PATH, joint_epsilon=0.2
    )
    levels = np.array([plan.confirming_epsilons(of_one) for of_one in has_chosen.tolist()])
    errors = int((has_chosen & (p_values <= levels)).any(axis=1).sum())
    some = int(has_chosen.any(axis=1).sum())
    assert 0.95 * 0.2 * some < errors <= most_misses(some, 0.2)
    # Its twins: fixed shares leave half of epsilon unused, and all of it for each is too much.
    assert (has_chosen & (p_values <= 0.05)).any(axis=1).sum() < 0.65 * errors
    assert (has_chosen & (p_values <= 0.2)).any(axis=1).sum() > 1.5 * most_misses(some, 0.2)


def test_table_has_the_largest_shares() -> None:
    """Shares are in per cent, the largest over p-values and procedures."""
    outcome = ConfirmedOutcome(
        world="coin",
        p_value="wsr",
        procedure="holm",
        epsilon=0.05,
        replications=1000,
        chosen=600,
        errors=30,
        repeated=70,
        unordered=0,
    )
    other = dataclasses.replace(outcome, procedure="fallback", chosen=500, errors=40, repeated=60)
    assert outcome.is_valid
    assert not dataclasses.replace(outcome, errors=120).is_valid
    assert confirmed_table([outcome, other]).splitlines()[2:] == ["| coin | 5 | 60.00 | 4.00 | 7.00 |"]
