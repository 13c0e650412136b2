"""Joint promises that hand their epsilon on, in worlds that are adversarial to that; and the twins that err."""

import dataclasses
import itertools
from collections.abc import Callable

import numpy as np
import pytest

from calm_beam.calibration.certification import entries_of, setting_rows
from calm_beam.calibration.loss_table import LossTable
from calm_beam.manifest import CONFIRM_PATH, HAND_ON, Plan
from tests.calm_beam.manifest.builders import build_plan_record
from tests.plans import all_tests, build_setting_plan

from .suite import SEED, most_misses

_EPSILON, _PROMISES, _REPLICATIONS = 0.2, 4, 4_000


def _plan() -> Plan:
    """Returns a plan of four promises over a grid of two thresholds."""
    (test, _) = build_plan_record().tests
    return build_plan_record(
        tests=tuple(dataclasses.replace(test, delta=delta) for delta in (0.1, 0.2, 0.3, 0.4)),
        thresholds=(0.9, 0.8),
        confirm_share=0.5,
        confirm_path=CONFIRM_PATH,
        joint_epsilon=_EPSILON,
        joint_procedure=HAND_ON,
    )


def _worlds() -> tuple[np.ndarray, np.ndarray]:
    """Returns which promises have a wrong threshold, and the p-values of both thresholds, in many calibrations.

    All safe thresholds are proved, so that every promise that can hand on does. P-values of wrong thresholds are
    uniform, and no two of a calibration are small together: each error adds to the others.
    """
    rng = np.random.default_rng(SEED)
    is_wrong = rng.uniform(size=(_REPLICATIONS, _PROMISES)) < [0.3, 0.5, 0.7, 0.9]
    place = np.cumsum(is_wrong, axis=1) - 1
    count = np.maximum(is_wrong.sum(axis=1, keepdims=True), 1)
    apart = (rng.uniform(size=(_REPLICATIONS, 1)) + place / count) % 1
    # The first threshold of every promise is safe.
    return is_wrong, np.stack([np.zeros_like(apart), np.where(is_wrong, apart, 0.0)], axis=-1)


def _errors(levels_of: Callable[[list[list[float]]], list[float]]) -> tuple[int, int]:
    """Returns the number of calibrations with a wrong promise, and the number that could have one."""
    is_wrong, p_values = _worlds()
    levels = np.array([levels_of(found) for found in p_values.tolist()])
    wrong = (is_wrong & (p_values[..., 1] <= levels)).any(axis=1)
    return int(wrong.sum()), int(is_wrong.any(axis=1).sum())


@pytest.mark.parametrize("tests", ["path", "confirmation"])
def test_handing_on_uses_all_of_a_joint_epsilon_and_no_more(tests: str) -> None:
    """Whichever promises are finished, the others together err as often as all may, and no more often."""
    plan = _plan()
    errors, some = _errors(plan.tested_epsilons if tests == "path" else plan.confirmed_epsilons)
    assert 0.9 * _EPSILON * some < errors <= most_misses(some, _EPSILON)
    # Without handing on, epsilon that some promises do not need is lost.
    kept, _ = _errors(lambda found: [test.epsilon for test in plan.tests])
    assert kept < 0.75 * errors


def test_what_goes_on_must_not_hand_on() -> None:
    """If every promise handed on its epsilon at its first proof, and still used it, too many promises would err."""
    errors, some = _errors(lambda found: [2 * level for level in _plan().tested_epsilons(found)])
    assert errors > 1.3 * most_misses(some, _EPSILON)


def test_what_has_failed_must_not_hand_on() -> None:
    """If failed promises also left their epsilon to those after them, too many promises would be wrong."""
    each = _EPSILON / _PROMISES
    errors, some = _errors(lambda found: [each * place for place in range(1, _PROMISES + 1)])
    assert errors > 1.2 * most_misses(some, _EPSILON)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("safe", "wrong"), [(0.0, 0.1), (0.01, 0.1), (0.0, 0.12)], ids=["at delta", "nearly all safe", "above delta"]
)
def test_certifications_that_hand_on_are_seldom_wrong(safe: float, wrong: float) -> None:
    """Losses are drawn, summed and tested as in `certify --joint`, for groups of which one hands on to the others."""
    delta, epsilon, n, replications = 0.1, 0.1, 150, 500
    names, settings = ("a", "b", "c"), ("1", "2", "3")
    risks = {"a": (0.0, 0.0, safe), "b": (0.0, wrong, wrong), "c": (0.0, wrong, 0.2)}
    tests = all_tests(
        groups=names, deltas=(delta,), epsilons=(epsilon,), joint=True, p_value="exact_binomial", losses=None
    )
    plan = build_setting_plan(tests, settings, joint_epsilon=epsilon, joint_procedure=HAND_ON, group_key="group")
    ids = tuple(str(unit) for unit in range(n * len(names)))
    groups = tuple(itertools.chain.from_iterable([name] * n for name in names))
    of_group = np.repeat([risks[name] for name in names], n, axis=0)
    mean = dict(zip(settings, of_group.mean(axis=0), strict=True))
    rng, errors, raised = np.random.default_rng(SEED), 0, 0
    for _ in range(replications):
        # One number decides all settings of an example: a failure at one is a failure at all riskier ones.
        losses = (rng.uniform(size=(len(ids), 1)) < of_group).astype(np.float64)
        table = LossTable(ids=ids, settings=settings, losses=losses, groups=groups, clusters=None, fingerprints={})
        entries = entries_of(plan, setting_rows(table, plan, costs={}))
        raised += any(entry.tested_epsilon is not None for entry in entries)
        errors += any(
            step.rejected
            and (mean[step.setting] if entry.group is None else risks[entry.group][settings.index(step.setting)])
            >= delta
            for entry in entries
            for step in entry.path
        )
    assert raised > 0.9 * replications
    assert errors <= most_misses(replications, epsilon)
