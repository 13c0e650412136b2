"""Tests after every round: the mixture keeps its promise under any way of stopping, and other p-values do not."""

import dataclasses

import numpy as np
import pytest

from calm_beam.risk.fwer import PROCEDURES
from calm_beam.risk.pvalues import P_VALUES, p_values_of

from .sequential import (
    END,
    EVERY_EXAMPLE,
    NAMES,
    WATCHED_WORLDS,
    WatchedOutcome,
    rounds_of,
    run_watched_world,
    running_p_values,
    watched_table,
)
from .suite import draws, most_misses
from .worlds import World

_REPLICATIONS = 400
_IDS = [world.name for world in WATCHED_WORLDS]
_BY_NAME = {world.name: world for world in WATCHED_WORLDS}


@pytest.mark.slow
@pytest.mark.parametrize("world", WATCHED_WORLDS, ids=_IDS)
def test_no_way_of_stopping_breaks_the_promise(world: World) -> None:
    """With any looks, at most a share epsilon of calibrations accepts a bad threshold at any look."""
    outcomes = run_watched_world(world, replications=_REPLICATIONS)
    assert [outcome for outcome in outcomes if outcome.is_promised and not outcome.is_valid] == []
    assert {outcome.procedure for outcome in outcomes} == set(PROCEDURES)


def test_stopping_at_the_best_moment_keeps_the_promise() -> None:
    """The promise holds in three worlds with a look after every example (a fast version of the slow test)."""
    for name in ("coin, not monotone", "signed, ternary, all at delta", "coin, delta 0.9"):
        outcomes = run_watched_world(_BY_NAME[name], replications=_REPLICATIONS, names=("signed_mixture",))
        assert all(outcome.is_valid for outcome in outcomes)
        # Looks after every example include all other looks.
        most = {outcome.procedure: outcome.errors for outcome in outcomes if outcome.rounds == EVERY_EXAMPLE}
        assert all(outcome.errors <= most[outcome.procedure] for outcome in outcomes)
        assert max(most.values()) > 0


@pytest.mark.slow
def test_peeking_with_hoeffding_bentkus_is_caught() -> None:
    """It is valid for a fixed 5,000 examples; tested after each of them it errs three times as often as allowed."""
    outcomes = run_watched_world(
        _BY_NAME["coin, 5,000 examples"],
        replications=_REPLICATIONS,
        names=("hoeffding_bentkus", "signed_mixture"),
        procedures=("fixed_sequence",),
    )
    errors = {(outcome.p_value, outcome.rounds): outcome.errors for outcome in outcomes}
    most = most_misses(_REPLICATIONS, 0.05)
    assert errors["hoeffding_bentkus", EVERY_EXAMPLE] > 3 * 0.05 * _REPLICATIONS
    assert errors["hoeffding_bentkus", END] <= most
    assert errors["signed_mixture", EVERY_EXAMPLE] <= most


@pytest.mark.slow
def test_peeking_with_bets_tuned_for_the_end_is_caught() -> None:
    """`wsr` bets by the final number of examples: started again at each of 50 looks, it errs too often."""
    outcomes = run_watched_world(
        _BY_NAME["coin, 5,000 examples"], replications=2000, names=("wsr",), procedures=("fixed_sequence",)
    )
    errors = {outcome.rounds: outcome.errors for outcome in outcomes}
    assert errors["n / 50"] > most_misses(2000, 0.05)
    assert errors[END] <= most_misses(2000, 0.05)


@pytest.mark.parametrize("procedure", PROCEDURES)
def test_what_is_accepted_stays_accepted(procedure: str) -> None:
    """With running p-values every procedure's last look accepts all that any look accepted, and more in total."""
    for name in ("coin, not monotone", "signed, ternary, all at delta"):
        # A level at which much is accepted.
        world = dataclasses.replace(_BY_NAME[name], shares=(0.0, 0.5, 0.9, 0.2, 0.7), epsilon=0.2)
        (losses,) = draws(world, replications=50)
        looks = range(10, world.n + 1, 10)
        before = np.zeros(losses.shape[1:], bool)
        for look in looks:
            rounds = {"now alone": [look], "running": [one for one in looks if one <= look]}
            p_values = running_p_values("signed_mixture", losses, delta=world.delta, rounds=rounds)
            now = PROCEDURES[procedure](p_values["running"], epsilon=world.epsilon).rejected
            alone = PROCEDURES[procedure](p_values["now alone"], epsilon=world.epsilon).rejected
            assert (now >= before).all()
            assert (now >= alone).all()
            before = now
        assert before.any()


@pytest.mark.parametrize("name", NAMES)
def test_a_look_is_what_a_calibration_of_as_many_computes(name: str) -> None:
    """Cumulative sums give, bit for bit, the p-values of the first examples alone."""
    world = _BY_NAME["signed, ternary"]
    (losses,) = draws(world, replications=3)
    looks = (1, 31, 400)
    found = running_p_values(name, losses, delta=world.delta, rounds={str(look): [look] for look in looks})
    seen = losses if P_VALUES[name].takes_signed else np.maximum(losses, 0)
    for look in looks:
        expected = p_values_of(seen[:look], p_value=name, delta=world.delta)
        np.testing.assert_array_equal(found[str(look)], expected)


def test_rounds() -> None:
    """All rounds end at n; ragged ones have sizes from 1 to 90."""
    rounds = rounds_of("signed_mixture", 500)
    assert all(max(looks) == 500 for looks in rounds.values())
    assert {kind: len(looks) for kind, looks in rounds.items()} == {
        EVERY_EXAMPLE: 500,
        "n / 50": 50,
        "n / 5": 5,
        "ragged": 23,
        END: 1,
    }
    assert sorted(rounds["ragged"])[:5] == [1, 31, 33, 40, 130]
    assert EVERY_EXAMPLE not in rounds_of("wsr", 500)


def test_worlds_are_at_the_boundary() -> None:
    """At least ten worlds, some signed, each with a risk at delta or a thousandth above it."""
    assert len(set(_IDS)) == len(WATCHED_WORLDS) >= 10
    assert sum(world.is_signed for world in WATCHED_WORLDS) >= 3
    assert all(min(share for share in world.shares if share >= 1) <= 1.001 for world in WATCHED_WORLDS)


@pytest.mark.parametrize("world", WATCHED_WORLDS, ids=_IDS)
def test_the_risk_is_the_mean_loss(world: World) -> None:
    """The mean of many drawn losses is the stated risk, within what chance explains, and no loss leaves its range."""
    losses = world.draw(np.random.default_rng(4), max(2, 100_000 // world.n)).reshape(-1, world.risks.size)
    assert losses.max() <= 1
    assert losses.min() >= (-1 if world.is_signed else 0)
    spread = losses.std(axis=0) / np.sqrt(len(losses))
    assert (np.abs(losses.mean(axis=0) - world.risks) <= 5 * spread + 1e-12).all()


def test_table_marks_what_is_broken() -> None:
    """Each p-value and kind of rounds has a column; a share that chance does not explain is bold."""
    outcome = WatchedOutcome(
        world="coin",
        p_value="hoeffding_bentkus",
        rounds=EVERY_EXAMPLE,
        procedure="holm",
        epsilon=0.05,
        replications=1000,
        errors=40,
    )
    worse = dataclasses.replace(outcome, procedure="fallback", errors=220)
    end = dataclasses.replace(outcome, rounds=END)
    assert [one.is_promised for one in (outcome, end)] == [False, True]
    assert watched_table([outcome, worse, end]).splitlines() == [
        "| world | ε, % | hoeffding_bentkus, every example | hoeffding_bentkus, end |",
        "|---|---:|---:|---:|",
        "| coin | 5 | **22.00** | 4.00 |",
    ]
