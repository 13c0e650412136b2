"""Confirming a chosen threshold by units that did not select it."""

import dataclasses
from typing import Any

import numpy as np
import pytest

from calm_beam.calibration.confirmation import (
    ConfirmedChoice,
    confirmed_calibration,
    confirming_path,
    confirming_places,
    paths_to_confirm,
    thresholds_to_confirm,
)
from calm_beam.calibration.plan import layout_of, set_part
from calm_beam.decoding.settings import DecodeSettings
from calm_beam.exits.rule import ExitRule
from calm_beam.inputs.set_parts import CONFIRMING, part_of
from calm_beam.manifest import CONFIRM_PATH, ParetoPlan, Plan, SequentialPlan, Variant
from calm_beam.risk.pvalues import exact_binomial_p_value
from tests.calm_beam.manifest.builders import build_calibration, build_never_exit
from tests.plans import all_specs, build_plan

_ASKED: dict[str, Any] = {
    "delta": 0.1,
    "epsilon": 0.05,
    "p_value": "exact_binomial",
    "salt": "calm-beam/0",
    "holdout_share": 0.4,
}
_KEYS = [f"row-{number}" for number in range(200)]
_CONFIRMS = np.array([part_of(key, salt="calm-beam/0", holdout_share=0.4) == CONFIRMING for key in _KEYS])


def _choose(losses: np.ndarray, served: np.ndarray, **changes: Any) -> ConfirmedChoice:
    return confirmed_calibration(losses, served, **{"keys": _KEYS, **_ASKED, **changes})


def _first(count: int, among: np.ndarray) -> np.ndarray:
    """Returns losses of 1 for the given numbers of units, and of 0 for all others."""
    losses = np.zeros(len(among))
    losses[np.flatnonzero(among)[:count]] = 1.0
    return losses


def test_by_hand() -> None:
    """Of four thresholds three are proved; their losses as served decide, the safest first."""
    chooses = int((~_CONFIRMS).sum())
    confirms = len(_KEYS) - chooses
    losses = np.stack([_first(count, ~_CONFIRMS) for count in (0, 3, 4, 30)], axis=1)
    found = set()
    for failing in range(13):
        served = np.stack([_first(count, _CONFIRMS) for count in (failing // 3, failing // 2, failing, 0)], axis=1)
        choice = _choose(losses, served)
        assert choice.test.rejected.tolist() == [True, True, True, False]
        assert (choice.path, choice.chosen) == ((0, 1, 2), 2)
        counts = np.array([failing // 3, failing // 2, failing], float)
        expected = exact_binomial_p_value(counts, n=confirms, delta=0.1)
        assert choice.p_values == tuple(expected)
        held = int(np.cumprod(expected <= 0.05).sum())
        assert choice.promised == (held - 1 if held else None)
        found.add(choice.promised)
    assert found == {None, 0, 1, 2}


def test_what_follows_a_failure_is_not_promised() -> None:
    """A lower threshold after a failure is not reached, though it would pass the test."""
    losses = np.stack([_first(count, ~_CONFIRMS) for count in (0, 3, 4)], axis=1)
    choice = _choose(losses, np.stack([np.ones(200), np.zeros(200), np.zeros(200)], axis=1))
    assert choice.path == (0, 1, 2)
    assert choice.p_values[1] < 0.05
    assert choice.promised is None


@pytest.mark.parametrize(
    ("p_values", "share", "places"),
    [
        ([0.04], 0.3, (0,)),
        ([0.01, 0.04], 0.3, (0, 1)),
        ([1e-30, 1e-8, 1e-4, 0.01, 0.04], 0.3, (1, 2, 4)),
        ([1e-7, 1e-6, 1e-5, 0.01, 0.04], 0.3, (0, 2, 4)),
        # A larger holdout must prove more.
        ([1e-30, 1e-8, 1e-4, 0.01, 0.04], 0.5, (2, 3, 4)),
        ([1e-30, 1e-20, 1e-15, 1e-14], 0.5, (3,)),
        # The last ones that are small enough, if p-values do not grow along the path.
        ([1e-5, 1e-30, 0.04, 1e-5, 0.04], 0.3, (1, 3, 4)),
    ],
)
def test_safer_places_are_chosen_by_their_p_values(
    p_values: list[float], share: float, places: tuple[int, ...]
) -> None:
    """At most two places before the chosen one are tested, at which the selection would have proved much more."""
    found = confirming_places([*p_values, 0.9], [*[True] * len(p_values), False], epsilon=0.05, holdout_share=share)
    assert tuple(dict.fromkeys(found.tolist())) == places
    assert found.shape == (CONFIRM_PATH,)
    nothing = confirming_places([0.9], [False], epsilon=0.05, holdout_share=share)
    assert nothing.tolist() == [-1, -1, -1]


def test_each_part_is_asked_for_its_own_losses() -> None:
    """Sweep losses of the holdout, and served losses of the selection, change nothing."""
    losses, served = np.zeros((200, 2)), np.zeros((200, 2))
    losses[_CONFIRMS] = 1.0
    served[~_CONFIRMS] = 1.0
    choice = _choose(losses, served)
    assert (choice.path, choice.promised) == ((1,), 1)
    # Nor does another threshold of the holdout.
    served[:, 0] = 1.0
    assert _choose(losses, served).promised == 1


@pytest.mark.parametrize("p_value", ["wsr", "star_bets"])
def test_bets_follow_the_keys(p_value: str) -> None:
    """The order of bets depends on keys and salt, not on the order of units."""
    rng = np.random.default_rng(0)
    losses = (rng.uniform(size=(200, 2)) < [0.01, 0.03]) * 0.8
    choice = _choose(losses, losses, p_value=p_value)
    moved = rng.permutation(200)
    keys = [_KEYS[place] for place in moved]
    assert choice.p_values
    assert _choose(losses[moved], losses[moved], p_value=p_value, keys=keys).p_values == choice.p_values
    assert _choose(losses, losses, p_value=p_value, salt="other").p_values != choice.p_values


def test_nothing_chosen_needs_no_confirmation() -> None:
    """Never exit needs no confirmation."""
    choice = _choose(np.ones((200, 2)), np.zeros((200, 2)))
    assert (choice.chosen, choice.path, choice.p_values, choice.promised) == (None, (), (), None)


def test_parts_do_not_depend_on_what_is_asked() -> None:
    """The same units select and confirm for other tolerances, losses and procedures."""
    generator = np.random.default_rng(0)
    for delta in (0.05, 0.3, 0.6):
        noise = generator.uniform(size=(200, 3))
        losses = np.where(_CONFIRMS[:, None], noise, 0.0)
        choice = _choose(losses, np.zeros((200, 3)), delta=delta, p_value="hoeffding_bentkus", procedure="holm")
        # The holdout's sweep losses would have proved nothing.
        assert choice.chosen == 2


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"keys": ["a"] * 200}, "keys must be distinct: a unit in both parts would confirm its own choice"),
        ({"keys": _KEYS[:10]}, r"with one key per unit; got \(200, 2\), \(200, 2\) and 10 keys"),
        ({"holdout_share": 30}, r"holdout_share must be in \(0, 1\), got 30. For 30 % pass 0.3"),
        ({"holdout_share": 1e-9}, "of 200 units, 200 were drawn to choose what the other 0 confirm. Both parts need"),
        ({"holdout_share": 1 - 1e-9}, "of 200 units, 0 were drawn to choose what the other 200 confirm"),
    ],
)
def test_what_cannot_be_confirmed_is_refused(changes: dict[str, Any], message: str) -> None:
    """A calibration that cannot be confirmed is refused with the reason."""
    with pytest.raises(ValueError, match=message):
        _choose(np.zeros((200, 2)), np.zeros((200, 2)), **changes)


def test_shapes_have_to_fit() -> None:
    """There must be one served loss for every loss of the sweep."""
    with pytest.raises(ValueError, match=r"losses and served must have shape \(units, thresholds\)"):
        _choose(np.zeros((200, 2)), np.zeros((200, 3)))


def _plan(*, tests: int = 2, **changes: Any) -> Plan:
    deltas = tuple((place + 1) / 10 for place in range(tests))
    specs = all_specs(consistencies=("textual",), metrics=("exact_match",), deltas=deltas, epsilons=(0.05,))
    settings = DecodeSettings(rule=ExitRule(), thresholds=(0.9, 0.5), max_input_length=8, max_decode_length=8)
    return build_plan(specs, settings, **{"holdout_share": 0.3, **changes})


def test_the_plan_says_who_confirms() -> None:
    """The holdout share is part of the plan, and so of its digest; without it, the plan has no such field."""
    plan, other = _plan(), _plan(holdout_share=None)
    assert (plan.to_dict()["confirm_share"], plan.to_dict()["confirm_path"]) == (0.3, 3)
    assert plan.digest != other.digest
    assert "confirm_share" not in other.to_dict()
    assert plan.that_chooses() == other
    part = set_part(plan, CONFIRMING)
    assert part is not None
    assert (part.confirm_share, part.salt) == (0.3, "calm-beam/0")
    assert set_part(other, CONFIRMING) is None
    with pytest.raises(ValueError, match=r"holdout_share must be in \(0, 1\), got 30"):
        _plan(holdout_share=30)


def test_other_tolerances_are_confirmed_by_the_same_examples() -> None:
    """The parts follow from the salt, whatever is tested."""
    parts = [set_part(_plan(), CONFIRMING), set_part(dataclasses.replace(_plan(), tests=_plan().tests[:1]), CONFIRMING)]
    assert parts[0] == parts[1]


def test_what_confirms_is_counted_for_each_threshold_by_itself() -> None:
    """Confirmed totals are counted for each threshold alone, without rounds, a path, or the rest of the grid."""
    watched = dataclasses.replace(
        _plan(),
        sequential=SequentialPlan(round_examples=10),
        tests=tuple(dataclasses.replace(spec, p_value="signed_mixture") for spec in _plan().tests),
    )
    confirming = watched.that_confirms((0.5,))
    assert (confirming.thresholds, confirming.sequential, confirming.confirm_share) == ((0.5,), None, None)
    variants = (Variant(min_exit_layer=1), Variant(min_exit_layer=2))
    varied = dataclasses.replace(
        _plan(),
        pareto=ParetoPlan(variants=variants, choosing_share=0.3),
        tests=tuple(dataclasses.replace(spec, procedure="pareto") for spec in _plan().tests),
    ).that_confirms((0.5,))
    assert varied.pareto is None
    assert layout_of(varied).groups == ()


def test_every_chosen_threshold_is_decoded_once() -> None:
    """Every chosen threshold is decoded once, descending, with those tested before it; never exit needs none."""
    bold = build_calibration(
        threshold=0.9, risk=0.0125, layers=5.5, path=(build_calibration().path[0],), procedure="holm"
    )
    safe = dataclasses.replace(build_calibration().path[0], p_value=1e-4)
    entries = [build_calibration(), bold, build_calibration(delta=0.2), build_never_exit()]
    plan = _plan(tests=4)
    assert thresholds_to_confirm(entries, plan) == {None: (0.9, 0.8)}
    assert thresholds_to_confirm([build_never_exit()] * 4, plan) == {}
    entry = build_calibration(path=(safe, *build_calibration().path[1:]))
    assert [step.threshold for step in confirming_path(entry, epsilon=0.05, holdout_share=0.3)] == [0.9, 0.8]
    assert confirming_path(build_never_exit(), epsilon=0.05, holdout_share=0.3) == ()


def test_those_that_chose_divide_a_joint_epsilon() -> None:
    """Entries with a threshold divide a joint epsilon; separate entries, and entries that all have one, keep theirs."""
    plan = _plan(tests=4, joint_epsilon=0.2)
    assert plan.confirming_epsilons([True, False, True, False]) == [0.1, 0.05, 0.1, 0.05]
    assert plan.confirming_epsilons([False, False, True, False]) == pytest.approx([0.05, 0.05, 0.2, 0.05])
    for has_chosen in ([True] * 4, [False] * 4):
        assert plan.confirming_epsilons(has_chosen) == [0.05] * 4
    # As early writers tested, and as separate entries do.
    early = dataclasses.replace(plan, confirm_path=None)
    for other in (early, _plan(tests=4)):
        assert other.confirming_epsilons([True, False, True, False]) == [0.05] * 4
    entries = [build_calibration(epsilon=0.05), build_never_exit(epsilon=0.05)] * 2
    assert [level for level, _ in paths_to_confirm(entries, plan)] == [0.1, 0.05, 0.1, 0.05]
