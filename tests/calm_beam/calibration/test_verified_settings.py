"""Fresh losses prove promises of settings again, or break them, at the requested level."""

import dataclasses

import numpy as np
import pytest

from calm_beam.calibration.certification import (
    check_fresh,
    entries_of,
    promised,
    setting_manifest,
    setting_rows,
    verify_settings,
)
from calm_beam.calibration.loss_table import LossTable
from calm_beam.errors import UsageError
from calm_beam.inputs.losses.tables import LossRow
from calm_beam.manifest import SettingManifest
from calm_beam.risk.pvalues import p_values_of
from tests.calm_beam.inputs.losses.builders import ORDER, coin_rows
from tests.plans import all_tests, build_setting_plan


def _certified(rows: list[LossRow]) -> SettingManifest:
    sweep = LossTable.of(rows)
    tests = all_tests(groups=("a", "b", "c"), deltas=(0.2,), epsilons=(0.05,), clustered=True)
    plan = build_setting_plan(tests, ORDER, group_key="group", cluster_key="cluster")
    return setting_manifest(
        sweep,
        plan,
        entries=entries_of(plan, setting_rows(sweep, plan, costs={})),
        costs={},
        patterns=["a"],
        software={},
    )


def test_kept_and_broken_promises() -> None:
    """Losses of the same kind prove promises again; much larger ones break them."""
    manifest = _certified(coin_rows(600))
    fresh = LossTable.of(coin_rows(600, seed=1))
    check_fresh(fresh, manifest)
    verdicts = verify_settings(fresh, manifest, alpha=0.05)
    assert [verdict.entry.setting for verdict in verdicts] == ["4bit"] * 4
    assert all(verdict.is_proved_again and not verdict.is_broken for verdict in verdicts)
    worse = LossTable.of(coin_rows(600, seed=1, wrong=(0.0, 0.0, 0.5, 0.0)))
    assert all(verdict.is_broken for verdict in verify_settings(worse, manifest, alpha=0.05))


def test_fresh_p_values_are_those_of_the_losses() -> None:
    """The p-value of an entry is that of the cluster means of its setting and group."""
    manifest = _certified(coin_rows(600))
    fresh = LossTable.of(coin_rows(300, seed=1))
    verdict = verify_settings(fresh, manifest, alpha=0.05)[1]
    assert verdict.entry.group == "a"
    losses = fresh.units(order=["4bit"], group="a")[1][:, 0] / 2**32
    assert verdict.p_value == p_values_of(losses, p_value="hoeffding_bentkus", delta=0.2)
    assert verdict.risk == pytest.approx(np.mean(losses))


def test_losses_that_cannot_test() -> None:
    """The certified losses themselves, unknown settings, and missing settings or groups are refused."""
    rows = coin_rows(600)
    manifest = _certified(rows)
    assert len(promised(manifest)) == 4
    fresh = coin_rows(600, seed=1)
    cases = [
        (rows, "these are the very losses that were certified"),
        ([row for row in rows if row.setting == "4bit"], "these are the very losses that were certified"),
        ([row for row in fresh if row.setting != "4bit"], r"no fresh losses of 1 promised setting \('4bit'\)"),
        ([dataclasses.replace(row, setting="2bit") if row.setting == "3bit" else row for row in fresh], "'2bit'"),
        ([row for row in fresh if row.group != "b"], r"there are no fresh losses of 1 group \('b'\)"),
    ]
    for losses, message in cases:
        with pytest.raises(UsageError, match=message):
            check_fresh(LossTable.of(losses), manifest)
