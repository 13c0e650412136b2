"""From the losses of a sweep to what is proved of its settings."""

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Self

from calm_beam.manifest import (
    SETTINGS,
    EarlierPlan,
    SequentialRecord,
    SettingCalibration,
    SettingDataRecord,
    SettingGroup,
    SettingManifest,
    SettingPlan,
    SettingRecord,
    SettingStep,
    SettingTest,
    elsewhere_in_words,
    guarantee_in_words,
    time_of_now,
)
from calm_beam.outputs.fingerprint import fingerprint_text, id_sample
from calm_beam.risk.fixed_point import loss_sum_upper
from calm_beam.risk.testing import TESTED_COLUMNS, TestedSetting, grid_tests

from .loss_table import LossTable


@dataclasses.dataclass(frozen=True, kw_only=True)
class SettingRow(TestedSetting):
    """One line of the risk table: one setting under one test.

    Attributes:
      group: Group of examples; empty for all.
      loss: What the losses are.
      tail: What a loss has to exceed to count; None where the mean is bounded.
      delta: Risk tolerance.
      epsilon: Allowed probability of error.
      setting: The setting.
      cost: What the setting costs; None where nobody told.
    """

    group: str
    loss: str
    tail: float | None
    delta: float
    epsilon: float
    setting: str
    cost: float | None

    @classmethod
    def columns(cls, rows: Sequence[Self]) -> tuple[str, ...]:
        """Returns the columns of a table in their order."""
        return ("group", "loss", "tail", "delta", "epsilon", "setting", *TESTED_COLUMNS, "cost")


def setting_rows(
    sweep: LossTable, plan: SettingPlan, *, costs: Mapping[str, float]
) -> tuple[tuple[SettingRow, ...], ...]:
    """Returns for every test the risk of every setting, and what the test says of it.

    Args:
      sweep: All losses.
      plan: What is asked for, fixed before any loss was summed.
      costs: By setting; of those whose cost is known.

    Raises:
      EvidenceError: If the losses do not allow a p-value that was planned.

    Source: Angelopoulos et al. (2021), "Learn then Test"; CALM Algorithm 1 for thresholds.
    """
    tests = grid_tests([sweep.ordered(plan.order, salt=plan.salt)], plan.tests, hands_on=plan.hands_on)
    return tuple(
        rows_of(test, found.after(1), order=plan.order, costs=costs)
        for test, found in zip(plan.tests, tests, strict=True)
    )


def rows_of(
    test: SettingTest, tested: Sequence[TestedSetting], *, order: Sequence[str], costs: Mapping[str, float]
) -> tuple[SettingRow, ...]:
    """Returns the lines of the risk table about one test.

    Args:
      test: The test.
      tested: What it says of every setting.
      order: The settings in testing order.
      costs: By setting; of those whose cost is known.
    """
    return tuple(
        SettingRow(
            **vars(found),
            group=test.group or "",
            loss=test.loss,
            tail=test.tail,
            delta=test.delta,
            epsilon=test.epsilon,
            setting=setting,
            cost=costs.get(setting),
        )
        for setting, found in zip(order, tested, strict=True)
    )


def setting_manifest(
    sweep: LossTable,
    plan: SettingPlan,
    *,
    entries: Sequence[SettingCalibration],
    costs: Mapping[str, float],
    patterns: Sequence[str],
    software: Mapping[str, str],
    sequential: SequentialRecord | None = None,
    earlier_plans: Sequence[EarlierPlan] = (),
) -> SettingManifest:
    """Returns the manifest of a certification.

    Args:
      sweep: All losses that were counted.
      plan: What was asked for.
      entries: What was proved: from `entries_of`, or `calm_beam.calibration.sequential`.
      costs: By setting; of those whose cost is known.
      patterns: Where the losses came from.
      software: Versions of what computed this.
      sequential: How it ended, if it was watched round by round.
      earlier_plans: Those that were asked in the same output directory before.
    """
    groups = sorted({test.group for test in plan.tests if test.group is not None})
    guarantee = guarantee_in_words(
        kind=SETTINGS,
        joint_epsilon=plan.joint_epsilon,
        hands_on=plan.hands_on,
        cluster_key=plan.cluster_key,
        group_key=plan.group_key,
        is_sequential=sequential is not None,
    )
    if sweep.decoder is not None:
        guarantee += f" {elsewhere_in_words(sweep.decoder.name)}"
    return SettingManifest(
        created=time_of_now(),
        settings=tuple(
            SettingRecord(name=name, cost=costs.get(name), fingerprint=fingerprint_text(sweep.fingerprints[name]))
            for name in plan.order
        ),
        data=SettingDataRecord(
            patterns=tuple(patterns),
            examples=len(sweep.ids),
            clusters=sweep.clusters_of(None),
            groups=tuple(
                SettingGroup(name=name, examples=len(sweep.rows_of(name)), clusters=sweep.clusters_of(name))
                for name in groups
            ),
            fingerprint=sweep.fingerprint(),
            id_sample=id_sample(sweep.ids),
        ),
        decoder=sweep.decoder,
        plan=plan,
        earlier_plans=tuple(earlier_plans) or None,
        sequential=sequential,
        calibrations=tuple(_with_example_risk(entry, sweep) for entry in entries),
        guarantee=guarantee,
        software=software,
    )


def _with_example_risk(entry: SettingCalibration, sweep: LossTable) -> SettingCalibration:
    """Returns an entry with the mean loss over examples beside that over clusters, where those are the units."""
    if sweep.clusters is None or entry.setting is None:
        return entry
    single = dataclasses.replace(sweep, clusters=None)
    ids, fixed = single.units(order=(entry.setting,), group=entry.group, tail=entry.tail)
    return dataclasses.replace(entry, example_risk=float(loss_sum_upper(fixed.sum()) / len(ids)))


def entries_of(plan: SettingPlan, rows: Sequence[Sequence[SettingRow]]) -> tuple[SettingCalibration, ...]:
    """Returns what a manifest says of every test, given what that says of every setting, in testing order."""
    paths = [[SettingStep.of(row) for row in of_test if row.tested] for of_test in rows]
    levels = plan.tested_epsilons([[step.p_value for step in path] for path in paths])
    return tuple(
        SettingCalibration.of_tests(test, path, level=level, setting=None, cost=None, risk=None)
        for test, path, level in zip(plan.tests, paths, levels, strict=True)
    )
