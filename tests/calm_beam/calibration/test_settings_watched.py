"""Sequential certifications: the counted losses, the proofs, and equality with `calibrate`."""

import dataclasses
import pathlib
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from calm_beam.calibration.certification import setting_manifest, setting_rows
from calm_beam.calibration.loss_table import LossTable
from calm_beam.calibration.plan import layout_of
from calm_beam.calibration.rounds import WatchedSettings, watched, watched_settings
from calm_beam.calibration.settings_rounds import DeclaredExample, DeclaredExamples, EvaluatedLosses, Ledger
from calm_beam.errors import UsageError
from calm_beam.inputs.losses.tables import LossRow
from calm_beam.manifest import (
    Plan,
    SequentialPlan,
    SequentialRecord,
    SettingManifest,
    SettingPlan,
    SettingSequentialPlan,
)
from calm_beam.outputs.totals import CalibrationTotals
from calm_beam.risk.losses import tail_loss, to_signed_fixed_point
from calm_beam.risk.pvalues import P_VALUES
from calm_beam.risk.testing import LossesError
from tests.calm_beam.calibration.builders import build_plan
from tests.calm_beam.inputs.losses.builders import ORDER, coin_rows, declared_examples
from tests.plans import all_specs, all_tests, build_setting_plan

_ROUND = 40


def _declared(examples: Sequence[DeclaredExample]) -> DeclaredExamples:
    return DeclaredExamples.of(examples, salt="calm-beam/0", round_examples=_ROUND)


def _plan(declared: DeclaredExamples, *, rule: dict[str, Any] | None = None, **tests: Any) -> SettingPlan:
    asked: dict[str, Any] = {"groups": (), "deltas": (0.05, 0.15), "epsilons": (0.05,), "watched": True, **tests}
    return build_setting_plan(
        all_tests(**asked),
        ORDER,
        group_key="group" if asked["groups"] else None,
        cluster_key="cluster" if declared.clusters else None,
        sequential=SettingSequentialPlan(
            ids=declared.fingerprint, examples=len(declared.ids), round_examples=_ROUND, **(rule or {})
        ),
    )


def _watched(rows: Sequence[LossRow], declared: DeclaredExamples, plan: SettingPlan, **how: Any) -> WatchedSettings:
    evaluated = EvaluatedLosses.of(rows, declared, settings=ORDER)
    return watched_settings(evaluated, plan, of_rounds=declared.rounds, **how)


def _plain(count: int) -> DeclaredExamples:
    return _declared([DeclaredExample(each.id) for each in declared_examples(count)])


def _manifest(
    rows: Sequence[LossRow], declared: DeclaredExamples, plan: SettingPlan
) -> tuple[SettingManifest, WatchedSettings]:
    evaluated = EvaluatedLosses.of(rows, declared, settings=ORDER)
    found = watched_settings(evaluated, plan, of_rounds=declared.rounds)
    assert found.ended_by is not None
    manifest = setting_manifest(
        LossTable.joined(evaluated.rounds[: found.rounds]),
        plan,
        entries=found.calibrations,
        costs=evaluated.costs[found.rounds - 1],
        patterns=["a.csv"],
        software={"calm-beam": "0"},
        sequential=SequentialRecord(
            rounds=found.rounds,
            of_rounds=declared.rounds,
            of_examples=len(declared.ids),
            ended_by=found.ended_by,
        ),
    )
    return manifest, found


@settings(max_examples=20, deadline=None)
@given(
    seed=st.integers(0, 10_000),
    procedure=st.sampled_from(["fixed_sequence", "holm", "multi_start"]),
    joint=st.booleans(),
    tail=st.booleans(),
)
def test_entries_are_those_of_a_sequential_calibration(seed: int, procedure: str, joint: bool, tail: bool) -> None:
    """On the same losses in the same rounds, tests, decisions and looks are `calibrate --sequential`'s, bit for bit."""
    generator = np.random.default_rng(seed)
    count, risks = int(generator.integers(60, 300)), np.array([0.02, 0.05, 0.1, 0.3])
    declared = _plain(count)
    losses = {each: generator.uniform(size=4) * 2 * risks for each in declared.ids}
    rows = [
        LossRow(name, setting, float(loss))
        for name, of_example in losses.items()
        for setting, loss in zip(ORDER, of_example, strict=True)
    ]
    tails = (0.25,) if tail else ()
    plan = _plan(declared, deltas=(0.1, 0.2), procedure=procedure, joint=joint, tails=tails)
    found = _watched(_shuffled(rows, generator), declared, plan)
    specs = all_specs(
        consistencies=("textual",),
        metrics=("token_f1",),
        deltas=(0.1, 0.2),
        epsilons=(0.05,),
        p_value="signed_mixture",
        procedure=procedure,
        joint=joint,
        tails=tails,
    )
    grid = (0.9, 0.7, 0.5, 0.3)
    theirs = build_plan(specs, grid, sequential=SequentialPlan(round_examples=_ROUND))
    totals = [
        _totals([losses[name] for name in declared.ids[declared.round(number)]], theirs)
        for number in range(found.rounds)
    ]
    expected = watched(totals, theirs, num_layers=4)
    names = dict(zip(grid, ORDER, strict=True))
    for entry, calibration in zip(found.calibrations, expected.calibrations, strict=True):
        assert (entry.delta, entry.epsilon, entry.tail is None) == (
            calibration.delta,
            calibration.epsilon,
            calibration.loss == "dissimilarity",
        )
        assert entry.setting == (None if calibration.threshold is None else names[calibration.threshold])
        assert [(step.setting, step.n, step.risk, step.p_value, step.rejected) for step in entry.path] == [
            (names[step.threshold], step.n, step.risk, step.p_value, step.rejected) for step in calibration.path
        ]
        assert [(look.n, look.setting, look.risk, look.log_capital) for look in entry.looks or ()] == [
            (look.n, None if look.threshold is None else names[look.threshold], look.risk, look.log_capital)
            for look in calibration.looks or ()
        ]
    assert [(row.p_value, row.loss_sum, row.tested) for of_test in found.rows for row in of_test] == [
        (row.p_value, row.loss_sum, row.tested) for row in expected.rows
    ]


def _shuffled(rows: Sequence[LossRow], generator: np.random.Generator) -> list[LossRow]:
    """Returns rows in a random order."""
    return [rows[index] for index in generator.permutation(len(rows)).tolist()]


def _totals(losses: Sequence[np.ndarray], plan: Plan) -> CalibrationTotals:
    table = np.stack(losses)[:, None]
    objectives = layout_of(plan).objectives
    of_objectives = [table if each.tail is None else tail_loss(table, above=each.tail) for each in objectives]
    fixed = to_signed_fixed_point(np.concatenate(of_objectives, axis=1))
    totals = CalibrationTotals.of_losses(
        [str(index) for index in range(len(fixed))], fixed, layout=layout_of(plan), salt=""
    )
    whole = dataclasses.replace(
        totals.whole,
        layer_sums=(40, *(40 - 5 * place for place in range(layout_of(plan).thresholds))),
        token_counts=(10,) * (layout_of(plan).thresholds + 1),
    )
    return dataclasses.replace(totals, by_shard=((0, len(fixed)),), whole=whole)


def test_one_round_is_an_ordinary_certification() -> None:
    """With all examples in one round, the risk table is that of a certification by the same p-value."""
    rows = coin_rows(30)
    declared = _plain(30)
    plan = _plan(declared)
    assert _watched(rows, declared, plan).rows == setting_rows(
        LossTable.of(_bare(rows)), plan, costs={"8bit": 8.0, "6bit": 6.0, "4bit": 4.0, "3bit": 3.0}
    )


def _bare(rows: Sequence[LossRow]) -> list[LossRow]:
    return [dataclasses.replace(row, group=None, cluster=None) for row in rows]


def test_only_whole_rounds_count() -> None:
    """Only complete rounds count, from the first on; losses beyond change only the number that waits."""
    rows, declared = coin_rows(200), _plain(200)
    later = {*declared.ids[2 * _ROUND :]}
    gap = declared.ids[2 * _ROUND + 3]
    kept = [row for row in rows if (row.id, row.setting) != (gap, "4bit")]
    evaluated = EvaluatedLosses.of(kept, declared, settings=ORDER)
    assert [len(each.ids) for each in evaluated.rounds] == [_ROUND, _ROUND]
    assert evaluated.missing == ((gap,), (), ())
    assert evaluated.waiting == 4 * 3 * _ROUND - 1
    assert evaluated.in_words().startswith(
        f"round 3 lacks losses of 1 id ({gap!r}) under 1 setting ('4bit'); 479 losses of this or later rounds"
    )
    spoiled = [dataclasses.replace(row, loss=1.0) if row.id in later else row for row in kept]
    plan = _plan(declared)
    assert _watched(kept, declared, plan) == _watched(spoiled, declared, plan)
    assert evaluated.digests() == EvaluatedLosses.of(spoiled, declared, settings=ORDER).digests()


def test_the_first_round_that_proves_enough_stops() -> None:
    """Whether losses arrive by round, at once or with many more, the certification stops at the same look."""
    rows, declared = coin_rows(400, wrong=(0, 0, 0, 0.5)), _plain(400)
    plan = _plan(declared, rule={"stop_at_setting": "4bit"})
    whole = _watched(rows, declared, plan)
    assert (whole.ended_by, whole.rounds) == ("stop_at_setting", 3)
    ids: set[str] = set()
    for number in range(declared.rounds):
        ids |= {*declared.ids[declared.round(number)]}
        found = _watched([row for row in rows if row.id in ids], declared, plan)
        assert found.rounds == min(number + 1, 3)
        if number < 2:
            assert found.ended_by is None
        else:
            assert found == whole


def test_other_rules() -> None:
    """Cost rules stop once no entry's setting costs more, gain rules after five rounds without a gain."""
    rows, declared = coin_rows(600, wrong=(0, 0, 0, 0.5)), _plain(600)
    by_cost = _watched(rows, declared, _plan(declared, rule={"stop_at_cost": 4.0}))
    assert (by_cost.ended_by, by_cost.rounds) == ("stop_at_cost", 3)
    by_gain = _watched(rows, declared, _plan(declared, rule={"stop_gain": 0.02}))
    assert (by_gain.ended_by, by_gain.rounds) == ("stop_gain", 8)
    without = _watched(rows, declared, _plan(declared))
    assert (without.ended_by, without.rounds) == ("end_of_data", 15)
    safe = _watched(coin_rows(600, wrong=(0, 0, 0, 0)), declared, _plan(declared))
    assert (safe.ended_by, safe.rounds) == ("all_proved", 3)


def test_rules_that_ask_for_costs() -> None:
    """A rule about unknown costs is refused, and declared costs replace those of rows."""
    rows, declared = [dataclasses.replace(row, cost=None) for row in coin_rows(120, wrong=(0,) * 4)], _plain(120)
    plan = _plan(declared, rule={"stop_at_cost": 6.0})
    with pytest.raises(LossesError, match=r"asks what settings cost, and nobody says it of setting '8bit'. Declare"):
        _watched(rows, declared, plan)
    costs = dict(zip(ORDER, (4.0, 3.0, 2.0, 1.0), strict=True))
    found = _watched(rows, declared, plan, costs=costs)
    assert [entry.cost for entry in found.calibrations] == [1.0, 1.0]


def test_costs_that_differ_between_examples() -> None:
    """Differing costs are averaged up to each round, and the mean of equal costs is that cost."""
    rows, declared = coin_rows(80), _plain(80)
    number = {name: float(place) for place, name in enumerate(declared.ids)}
    varied = [
        dataclasses.replace(row, cost=number[row.id]) if row.setting == "8bit" else dataclasses.replace(row, cost=0.1)
        for row in rows
    ]
    evaluated = EvaluatedLosses.of(varied, declared, settings=ORDER)
    assert [each["8bit"] for each in evaluated.costs] == [19.5, 39.5]
    assert [each["3bit"] for each in evaluated.costs] == [0.1, 0.1]
    with pytest.raises(LossesError, match="setting '8bit': 79 of 80 rows say a cost"):
        EvaluatedLosses.of([dataclasses.replace(varied[0], cost=None), *varied[1:]], declared, settings=ORDER)


def test_groups_and_clusters() -> None:
    """Groups have their own looks, by clusters; the first rounds may have no example of one."""
    examples = [
        *declared_examples(300),
        *(DeclaredExample(f"rare{index}", "z", f"rare{index // 4}") for index in range(8)),
    ]
    declared = _declared(examples)
    rows = [
        *coin_rows(300),
        *(LossRow(f"rare{index}", name, 0.0, float(name[0])) for index in range(8) for name in ORDER),
    ]
    plan = _plan(declared, groups=("a", "b", "c", "z"), clustered=True, joint=True)
    manifest, found = _manifest(rows, declared, plan)
    assert SettingManifest.from_dict(manifest.to_dict()) == manifest
    assert manifest.data.clusters == 77
    last = {entry.group: entry.looks[-1].n for entry in found.calibrations if entry.looks}
    assert last == {None: 77, "a": 75, "b": 75, "c": 75, "z": 2}
    rare = manifest.calibration(group="z", delta=0.05)
    assert rare.looks is not None
    assert rare.looks[0].n == 0
    assert rare.setting is None
    assert "looked at after every round" in manifest.guarantee


def test_a_group_that_never_came() -> None:
    """A certification that stops before a group's first example proves nothing for it, and says so."""
    declared = _declared([DeclaredExample(f"e{index}", "a") for index in range(400)])
    late = dataclasses.replace(declared, groups=(*declared.groups[:-1], "z") if declared.groups else None)
    rows = [LossRow(f"e{index}", name, 0.0, 1.0) for index in range(400) for name in ORDER]
    plan = _plan(late, groups=("a", "z"), rule={"stop_gain": 0.5})
    found = _watched(rows[: 4 * 400], late, plan)
    (entry,) = [each for each in found.calibrations if each.group == "z" and each.delta == 0.05]
    assert (entry.setting, found.ended_by) == (None, "end_of_data")
    assert [look.n for look in entry.looks or ()] == [*[0] * 9, 1]


@pytest.mark.parametrize("name", sorted(set(P_VALUES) - {"signed_mixture"}))
def test_other_p_values_may_not_be_watched(name: str) -> None:
    """Other p-values are refused, since they hold for a fixed number of examples."""
    with pytest.raises(
        UsageError, match=rf"^p_value {name} holds for .* Take signed_mixture, or leave --sequential out"
    ):
        _plan(_plain(10), p_value=name)


@pytest.mark.parametrize(
    ("row", "message"),
    [
        (LossRow("zzz", "8bit", 0.0), r"there are losses of 1 id \('zzz'\) that --ids does not declare"),
        (LossRow("e1", "2bit", 0.0), r"there are losses of 1 setting \('2bit'\) that --order does not name"),
        (LossRow("e1", "8bit", 0.0), r"setting '8bit' has several losses for 1 id \('e1'\)"),
    ],
)
def test_what_was_not_declared_is_refused(row: LossRow, message: str) -> None:
    """An undeclared loss is refused, as is a repeated one, whether or not its round counts."""
    with pytest.raises(LossesError, match=message):
        EvaluatedLosses.of([*coin_rows(20), row], _plain(100), settings=ORDER)


def test_the_ledger(tmp_path: pathlib.Path) -> None:
    """The ledger reads back unchanged, and refuses changed or missing losses and a changed file."""
    rows, declared = coin_rows(120), _plain(120)
    evaluated = EvaluatedLosses.of(rows, declared, settings=ORDER)
    path = tmp_path / "plan.json"
    ledger = Ledger(plan=_plan(declared)).with_rounds(evaluated.digests()[:2], missing="")
    assert Ledger.read(str(path)) is None
    ledger.write(str(path), replaces="")
    assert Ledger.read(str(path)) == ledger
    with pytest.raises(UsageError, match="another call has written it meanwhile"):
        dataclasses.replace(ledger, rounds=()).write(str(path), replaces="")
    changed = [dataclasses.replace(row, loss=1 - row.loss) if row.id == declared.ids[45] else row for row in rows]
    digests = EvaluatedLosses.of(changed, declared, settings=ORDER).digests()
    with pytest.raises(LossesError, match="the losses or costs of round 2 are others than they were"):
        ledger.with_rounds(digests, missing="")
    with pytest.raises(LossesError, match="round 2 was counted before, and is not whole now: it lacks b"):
        ledger.with_rounds(digests[:1], missing="it lacks b")
    path.write_text(path.read_text().replace('"salt": "calm-beam/0"', '"salt": "calm-beam/1"'))
    with pytest.raises(UsageError, match=r"plan\.json: is not as calm-beam writes it \(it was changed after"):
        Ledger.read(str(path))


def test_what_may_be_asked_for_later() -> None:
    """The plan cannot change; its stopping rule may change at a stop, which is recorded."""
    rows, declared = coin_rows(400, wrong=(0, 0, 0, 0.5)), _plain(400)
    plan = _plan(declared, rule={"stop_at_setting": "4bit"})
    ledger = Ledger(plan=plan)
    ended, _ = _manifest(rows, declared, plan)
    other = _plan(declared, rule={"stop_gain": 0.02})
    assert ledger.going_on(plan, ended=None, resumes=False) is ledger
    tests = _plan(declared, deltas=(0.1,))
    assert tests.sequential is not None
    rounds = dataclasses.replace(tests, sequential=dataclasses.replace(tests.sequential, round_examples=41))
    with pytest.raises(UsageError, match="the tests and --round_examples of it cannot be changed"):
        ledger.going_on(rounds, ended=None, resumes=True)
    with pytest.raises(UsageError, match="the rule to stop is part of the plan"):
        ledger.going_on(other, ended=None, resumes=True)
    with pytest.raises(UsageError, match="--resume goes on by this one, and says so"):
        ledger.going_on(other, ended=ended, resumes=False)
    continued = ledger.going_on(other, ended=ended, resumes=True)
    assert continued.plan == other
    (end,) = continued.continues
    assert (end.plan, end.rounds, end.ended_by) == (plan.digest, 3, "stop_at_setting")
    # The new rule applies only after the round at which the old one stopped.
    later = _watched(rows, declared, _plan(declared, rule={"stop_at_setting": "8bit"}), looked_at=end.rounds)
    assert (later.rounds, later.ended_by) == (3, "stop_at_setting")
    done = _manifest(rows, declared, _plan(declared))[0]
    with pytest.raises(UsageError, match="all examples have been counted"):
        Ledger(plan=_plan(declared)).going_on(other, ended=done, resumes=True)
