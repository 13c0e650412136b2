"""Builders of tests and plans of calibrations and certifications, from the few values that a test is about."""

import dataclasses
from collections.abc import Sequence
from typing import Any

from calm_beam.calibration.certification import SettingGuarantees, check_names
from calm_beam.calibration.guarantee import every_guarantee, specs_of
from calm_beam.calibration.plan import PlanTerms, plan_of
from calm_beam.decoding.settings import DecodeSettings
from calm_beam.inputs.set_parts import salt_of
from calm_beam.manifest import Plan, PlannedTest, SettingPlan, SettingTest

_OF_SPECS = ("groups", "joint", "is_clustered", "losses")
_TERMS = tuple(field.name for field in dataclasses.fields(PlanTerms))


def all_specs(**asked: Any) -> tuple[PlannedTest, ...]:
    """Returns the specs of every combination of lists; takes the arguments of `every_guarantee` and of `specs_of`."""
    others = {name: asked.pop(name) for name in _OF_SPECS if name in asked}
    return specs_of(every_guarantee(**asked), **others)


def build_plan(specs: Sequence[PlannedTest], settings: DecodeSettings, **asked: Any) -> Plan:
    """Returns a plan about model `m` by default; takes the arguments of `plan_of` and of `PlanTerms`."""
    terms = PlanTerms(**{name: asked.pop(name) for name in _TERMS if name in asked})
    return plan_of(specs, settings, **{"model": "m", "vocabulary": None, **asked}, terms=terms)


def all_tests(*, groups: Sequence[str] = (), losses: int | None = None, **asked: Any) -> tuple[SettingTest, ...]:
    """Returns every combination of lists as a test of settings; takes the arguments of `SettingGuarantees`, too."""
    return SettingGuarantees(**asked).tests(groups=groups, losses=losses)


def build_setting_plan(
    tests: Sequence[SettingTest], order: Sequence[str], *, seed: int = 0, **asked: Any
) -> SettingPlan:
    """Returns a plan about settings, whose names are checked; takes the fields of `SettingPlan`."""
    nothing = dict.fromkeys(("joint_epsilon", "group_key", "cluster_key", "baseline", "task", "metric"))
    plan = SettingPlan(tests=tuple(tests), order=tuple(order), salt=salt_of(seed), **{**nothing, **asked})
    check_names(plan)
    return plan
