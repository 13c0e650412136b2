"""Entries that hand their epsilon on: tests of a certification, the manifest, and refusals of readers."""

import dataclasses
import pathlib
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest

from calm_beam.calibration.certification import entries_of, setting_manifest, setting_rows
from calm_beam.calibration.loss_table import LossTable
from calm_beam.inputs.losses.tables import LossRow
from calm_beam.manifest import (
    CONFIRM_PATH,
    HAND_ON,
    ManifestError,
    SettingManifest,
    SettingPlan,
    joint_procedure,
    manifest_text,
    read_setting_manifest,
    write_manifest,
)
from tests.calm_beam.manifest.builders import build_plan_record
from tests.plans import all_tests, build_setting_plan

_SETTINGS = ("16 bits", "8 bits")
_UNITS = 60


def _table(risky: int) -> LossTable:
    """Returns losses of groups a, whose settings lose nothing, and b, whose second setting loses `risky` times."""
    return LossTable.of(
        LossRow(id=f"{group}-{unit}", setting=setting, loss=float(lost), group=group)
        for group in ("a", "b")
        for setting in _SETTINGS
        for unit in range(_UNITS)
        for lost in [group == "b" and setting == _SETTINGS[1] and unit < risky]
    )


def _plan(joint: str | None = HAND_ON, **asked: Any) -> SettingPlan:
    tests = all_tests(
        groups=["a", "b"], deltas=[0.2], epsilons=[0.06], joint=True, **{"p_value": "exact_binomial", **asked}
    )
    return build_setting_plan(tests, _SETTINGS, joint_epsilon=0.06, joint_procedure=joint, group_key="group")


def _manifest(plan: SettingPlan, *, risky: int = 6) -> SettingManifest:
    table = _table(risky)
    entries = entries_of(plan, setting_rows(table, plan, costs={}))
    return setting_manifest(table, plan, entries=entries, costs={}, patterns=["losses"], software={"calm-beam": "1"})


def _chosen(manifest: SettingManifest) -> Sequence[str | None]:
    return [entry.setting for entry in manifest.calibrations]


def test_what_is_proved_to_its_end_hands_on(tmp_path: pathlib.Path) -> None:
    """The whole and group a have nothing left to test, so b is tested at all of epsilon and not at a third."""
    kept, handed_on = _manifest(_plan(None)), _manifest(_plan())
    assert _chosen(kept) == ["8 bits", "8 bits", "16 bits"]
    assert _chosen(handed_on) == ["8 bits"] * 3
    last = handed_on.calibrations[-1]
    assert 0.02 < last.path[-1].p_value <= 0.06
    # A reader sees the level, and the p-values are as before.
    assert [entry.tested_epsilon for entry in handed_on.calibrations] == [None, None, pytest.approx(0.06)]
    assert [entry.promised_epsilon for entry in kept.calibrations] == [0.02] * 3
    for entry, other in zip(kept.calibrations, handed_on.calibrations, strict=True):
        assert [step.p_value for step in entry.path] == [step.p_value for step in other.path]
    assert "tested_epsilon" not in manifest_text(kept)
    write_manifest(handed_on, tmp_path / "manifest.json")
    assert read_setting_manifest(tmp_path / "manifest.json") == handed_on
    assert "one with it was tested at that level, and holds with probability at least 1 - 0.06" in handed_on.guarantee
    assert [handed_on.error_of(entry) for entry in handed_on.calibrations] == [0.02, 0.02, 0.06]


def test_what_has_not_come_to_its_end_hands_nothing_on() -> None:
    """Entries that have not finished hand nothing on, whether one or all but one of three stopped."""
    stopped = _manifest(_plan(), risky=40)
    assert _chosen(stopped) == ["16 bits", "8 bits", "16 bits"]
    assert [entry.tested_epsilon for entry in stopped.calibrations] == [pytest.approx(0.03), None, pytest.approx(0.03)]
    assert [len(entry.path) for entry in stopped.calibrations] == [2, 2, 2]


def test_other_procedures_take_and_do_not_give() -> None:
    """Procedures that divide epsilon within a grid only receive: a reader could not see when all of it was proved."""
    found = _manifest(_plan(procedure="bonferroni"))
    assert _chosen(found)[:2] == ["8 bits", "8 bits"]
    assert [entry.tested_epsilon for entry in found.calibrations] == [None] * 3
    tests = [*_plan().tests[:2], dataclasses.replace(_plan().tests[2], procedure="bonferroni")]
    mixed = _manifest(build_setting_plan(tests, _SETTINGS, **_joint()))
    assert mixed.calibrations[2].tested_epsilon == pytest.approx(0.06)


def _joint() -> dict[str, Any]:
    return {"joint_epsilon": 0.06, "joint_procedure": HAND_ON, "group_key": "group"}


@pytest.mark.parametrize(
    ("place", "level", "message"),
    [
        (2, None, r"path\[1\].rejected must be false, got true: p_value is"),
        (2, 0.05, r"calibrations\[2\].tested_epsilon must be 0.06[0-9]*, which is what others have handed on"),
        (0, 0.03, r"calibrations\[0\].tested_epsilon must be 0.02, which is"),
        (0, 0.02, "tested_epsilon must be above epsilon, or be left out, got 0.02"),
    ],
)
def test_a_level_that_nobody_handed_on_is_refused(place: int, level: float | None, message: str) -> None:
    """Readers compute the levels again from the written p-values, and refuse others."""
    manifest = _manifest(_plan())
    content: Any = manifest.to_dict()
    content["calibrations"][place].pop("tested_epsilon", None)
    if level is not None:
        content["calibrations"][place]["tested_epsilon"] = level
    with pytest.raises(ManifestError, match=message):
        SettingManifest.from_dict(content)


def test_rounds_and_single_promises_hand_nothing_on() -> None:
    """Sequential promises keep their epsilon, and a separate promise has none to hand it to."""
    assert joint_procedure(0.1, is_sequential=False) == HAND_ON
    assert joint_procedure(None, is_sequential=False) is None
    assert joint_procedure(0.1, is_sequential=True) is None
    with pytest.raises(ManifestError, match="joint_procedure must be left out without joint_epsilon"):
        dataclasses.replace(_plan(), joint_epsilon=None)


def test_what_is_confirmed_to_its_end_hands_on() -> None:
    """Entries with a choice that are confirmed to their end hand on; a failed one keeps its level."""
    plan = build_plan_record(confirm_share=0.3, confirm_path=CONFIRM_PATH, joint_epsilon=0.1)
    handing = dataclasses.replace(plan, tests=plan.tests * 2, joint_epsilon=0.2, joint_procedure=HAND_ON)
    p_values = [[0.01, 0.04], [], [0.01, 0.09], [0.01, 0.3]]
    kept = dataclasses.replace(handing, joint_procedure=None)
    assert kept.confirmed_epsilons(p_values) == pytest.approx([0.2 / 3, 0.05, 0.2 / 3, 0.2 / 3])
    # The first one finishes and leaves half to each; at that level the third finishes, and leaves all to the last.
    assert handing.confirmed_epsilons(p_values) == pytest.approx([0.2 / 3, 0.05, 0.1, 0.2])
    assert handing.confirmed_epsilons([[0.5], [], [], [0.7]]) == pytest.approx([0.1, 0.05, 0.05, 0.1])
    levels = np.array(handing.confirmed_epsilons([[0.01]] * 4))
    assert (levels == 0.05).all()
