"""A certification gives the results of a calibration on the same losses, bit for bit."""

import dataclasses
import pathlib
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest

from calm_beam.calibration.certification import SettingRow, entries_of, setting_manifest, setting_rows
from calm_beam.calibration.loss_table import LossTable
from calm_beam.calibration.plan import layout_of
from calm_beam.calibration.result import RiskRow, read_risk_table, risk_rows, write_risk_table
from calm_beam.inputs.losses.tables import LossRow
from calm_beam.manifest import PlannedTest, SettingManifest, SettingPlan, read_manifest
from calm_beam.manifest.files import RISK_TABLE
from calm_beam.metrics.registry import get_metric
from calm_beam.outputs import Generation
from calm_beam.risk.evidence import EvidenceError
from calm_beam.risk.fwer import PROCEDURES
from calm_beam.risk.losses import losses_of_scores
from calm_beam.risk.pvalues import P_VALUES
from calm_beam.risk.testing import GridTest, LossSums, RiskTest, control_risk
from tests.calm_beam.calibration.builders import build_plan, build_totals
from tests.calm_beam.inputs.losses.builders import ORDER, coin_rows
from tests.calm_beam.report.builders import GRID, random_generations, write_calibration
from tests.plans import all_specs, all_tests, build_setting_plan

_SETTINGS = tuple(map(repr, GRID))


def _manifest(sweep: LossTable, plan: SettingPlan) -> SettingManifest:
    rows = setting_rows(sweep, plan, costs=sweep.costs)
    return setting_manifest(
        sweep, plan, entries=entries_of(plan, rows), costs=sweep.costs, patterns=["a.csv"], software={"calm-beam": "0"}
    )


def _losses(generations: Sequence[Generation], consistency: str) -> list[LossRow]:
    """Returns the losses of stored outputs as another program would compute them."""
    metric = get_metric("token_f1")
    rows = []
    for item in generations:
        texts = [output.text for output in item.outputs]
        references = item.example.references if consistency == "risk" else texts[:1]
        scores = np.array([metric(text, references) for text in texts])
        loss = "signed" if consistency == "risk" else "dissimilarity"
        losses = losses_of_scores(loss, early_score=scores[1:], full_score=scores[0])
        rows += [LossRow(item.example.id, name, value) for name, value in zip(_SETTINGS, losses.tolist(), strict=True)]
    return rows


def _same(found: Sequence[SettingRow], expected: Sequence[RiskRow]) -> None:
    names = ("n", "loss_sum", "risk", "p_value", "tested", "rejected", "delta", "epsilon")
    assert [[getattr(row, name) for name in names] for row in found] == [
        [getattr(row, name) for name in names] for row in expected
    ]


@pytest.mark.parametrize(
    ("consistency", "p_value"),
    [
        *(("textual", name) for name in P_VALUES if name != "exact_binomial"),
        ("risk", "signed_mixture"),
        ("risk", "wsr"),
    ],
)
def test_entries_are_those_of_a_calibration(tmp_path: pathlib.Path, consistency: str, p_value: str) -> None:
    """On losses of stored generations, n, sums, risks, p-values and decisions equal `calibrate`'s, bit for bit."""
    generations = random_generations(150)
    specs: tuple[PlannedTest, ...] = all_specs(
        consistencies=(consistency,), metrics=("token_f1",), deltas=(0.2, 0.3), epsilons=(0.1,), p_value=p_value
    )
    folder = write_calibration(tmp_path / "out", generations, specs=specs)
    expected = read_risk_table(folder / RISK_TABLE, RiskRow)
    sweep = LossTable.of(reversed(_losses(generations, consistency)))
    loss = "signed" if consistency == "risk" else "given"
    plan = build_setting_plan(
        all_tests(groups=(), deltas=(0.2, 0.3), epsilons=(0.1,), loss=loss, p_value=p_value), _SETTINGS
    )
    rows = setting_rows(sweep, plan, costs={})
    _same([row for of_test in rows for row in of_test], expected)
    for entry, theirs in zip(
        _manifest(sweep, plan).calibrations, read_manifest(folder / "manifest.json").calibrations, strict=True
    ):
        steps = [(step.setting, step.n, step.risk, step.p_value, step.rejected) for step in entry.path]
        assert steps == [(repr(step.threshold), step.n, step.risk, step.p_value, step.rejected) for step in theirs.path]
        assert entry.setting == (None if theirs.threshold is None else repr(theirs.threshold))


def test_thresholds_and_settings_are_tested_by_one_function(monkeypatch: pytest.MonkeyPatch) -> None:
    """One function tests the sums of a calibration and of a table of losses."""
    rows = [dataclasses.replace(row, group=None, cluster=None) for row in coin_rows(40)]
    table = LossTable.of(rows)
    (spec,) = all_specs(consistencies=("textual",), metrics=("token_f1",), deltas=(0.2,), epsilons=(0.1,))
    grid = build_plan([spec], (0.9, 0.5))
    totals = build_totals(np.zeros((40, 1, 2)), layout_of(grid))
    seen: list[Any] = []

    def see(cls: type[GridTest], asked: Any, rounds: Any) -> GridTest:
        seen.append((asked, [evidence.n for evidence in rounds]))
        raise ValueError("seen")

    monkeypatch.setattr(GridTest, "of", classmethod(see))
    tests = all_tests(groups=(), deltas=(0.2,), epsilons=(0.1,))
    with pytest.raises(ValueError, match="seen"):
        risk_rows(totals, grid, num_layers=4)
    with pytest.raises(ValueError, match="seen"):
        setting_rows(table, build_setting_plan(tests, ORDER), costs={})
    assert seen == [(spec, [40]), (tests[0], [40])]


def test_tails_are_those_of_a_calibration(tmp_path: pathlib.Path) -> None:
    """Shares of examples with a larger loss than a tail equal a calibration's."""
    generations = random_generations(150)
    specs = all_specs(
        consistencies=("textual",), metrics=("token_f1",), deltas=(0.2,), epsilons=(0.1,), tails=(0.0, 0.25)
    )
    folder = write_calibration(tmp_path / "out", generations, specs=specs)
    tests = all_tests(groups=(), deltas=(0.2,), epsilons=(0.1,), tails=(0.0, 0.25))
    rows = setting_rows(LossTable.of(_losses(generations, "textual")), build_setting_plan(tests, _SETTINGS), costs={})
    _same([row for of_test in rows for row in of_test], read_risk_table(folder / RISK_TABLE, RiskRow))


@pytest.mark.parametrize("procedure", PROCEDURES)
def test_results_are_those_of_the_sums(procedure: str) -> None:
    """`control_risk` on streamed sums gives a certification's results on the same losses."""
    rows = [dataclasses.replace(row, group=None, cluster=None) for row in coin_rows(300)]
    test = RiskTest(delta=0.1, epsilon=0.05, procedure=procedure)
    sums = LossSums([test])
    for row in rows:
        sums.add(row.id, row.setting, loss=row.loss)
    expected = control_risk(sums, [test], order=ORDER)
    tests = all_tests(groups=(), deltas=(0.1,), epsilons=(0.05,), procedure=procedure)
    (found,) = setting_rows(LossTable.of(rows), build_setting_plan(tests, ORDER), costs={})
    assert [(row.n, row.risk, row.p_value, row.tested, row.rejected) for row in found] == [
        (row.n, row.risk, row.p_value, row.tested, row.accepted) for row in expected
    ]


def _grouped(**changes: Any) -> tuple[LossTable, SettingPlan]:
    sweep = LossTable.of(coin_rows(600))
    tests = all_tests(
        groups=("a", "b", "c"), deltas=(0.1, 0.2), epsilons=(0.05,), joint=True, clustered=True, **changes
    )
    return sweep, build_setting_plan(tests, ORDER, joint_epsilon=0.05, group_key="group", cluster_key="cluster")


def test_groups_and_clusters() -> None:
    """A group's entries are those of its examples alone, with its clusters as units."""
    sweep, plan = _grouped()
    manifest = _manifest(sweep, plan)
    assert [(group.name, group.examples) for group in manifest.data.groups] == [("a", 200), ("b", 200), ("c", 200)]
    assert (manifest.data.examples, manifest.data.clusters) == (600, 150)
    only = LossTable.of(row for row in coin_rows(600) if row.group == "b")
    alone = build_setting_plan(
        [dataclasses.replace(test, group=None) for test in plan.tests if test.group == "b"], ORDER
    )
    expected = setting_rows(only, alone, costs=only.costs)
    found = [rows for rows in setting_rows(sweep, plan, costs=sweep.costs) if rows[0].group == "b"]
    assert [tuple(dataclasses.replace(row, group="") for row in rows) for rows in found] == list(expected)
    assert manifest.calibration(group="b", delta=0.1).path[0].n == manifest.data.units_of("b")


def test_the_manifest_says_what_was_found() -> None:
    """The manifest has settings, costs, entries and the promise, checks itself, and reads back unchanged."""
    manifest = _manifest(*_grouped())
    assert [(setting.name, setting.cost) for setting in manifest.settings] == list(
        zip(ORDER, (8, 6, 4, 3), strict=True)
    )
    entry = manifest.calibration(delta=0.2)
    assert (entry.setting, entry.cost) == ("4bit", 4)
    assert "All calibration entries hold together" in manifest.guarantee
    assert "drawing a cluster, which cluster names" in manifest.guarantee
    assert SettingManifest.from_dict(manifest.to_dict()) == manifest


def test_fractions_and_the_binomial_test() -> None:
    """Losses between 0 and 1 end a binomial test, as in a calibration."""
    sweep = LossTable.of([LossRow("a", "x", 0.5)])
    tests = all_tests(groups=(), deltas=(0.1,), epsilons=(0.05,), p_value="exact_binomial")
    with pytest.raises(EvidenceError, match="exact_binomial is for losses of 0 and 1 only"):
        setting_rows(sweep, build_setting_plan(tests, ["x"]), costs={})


def test_the_risk_table_is_read_back(tmp_path: pathlib.Path) -> None:
    """The table has every setting under every test, with missing values empty."""
    sweep, plan = _grouped()
    rows = tuple(row for of_test in setting_rows(sweep, plan, costs={}) for row in of_test)
    write_risk_table(tmp_path / "table.csv", rows)
    assert read_risk_table(tmp_path / "table.csv", SettingRow) == rows
