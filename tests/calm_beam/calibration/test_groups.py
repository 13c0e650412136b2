"""Groups are named before any loss is seen, summed exactly, and each keeps its own promise."""

import dataclasses
import functools
import pathlib

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from calm_beam.calibration.asked_data import MOST_GROUPS, counted_groups, groups_in_words, groups_of_data
from calm_beam.calibration.plan import layout_of
from calm_beam.calibration.result import RiskRow, choose_thresholds, read_risk_table, risk_rows, risk_table_text
from calm_beam.calibration.rounds import Round, watched
from calm_beam.inputs import DataFiles, Reading
from calm_beam.inputs.examples import DataError, Example
from calm_beam.manifest import GroupRecord, Plan, PlannedTest, SequentialPlan
from calm_beam.outputs import FinishedSweep, OutputsError, StoredShard
from calm_beam.outputs.totals import CalibrationTotals, Layout
from calm_beam.risk.counts import binomial_interval
from calm_beam.risk.fwer import PROCEDURES
from calm_beam.risk.losses import to_signed_fixed_point
from calm_beam.risk.testing import p_values_for
from tests.plans import all_specs

from .builders import build_example, build_generation, build_output, build_plan

_NAMES = ("de", "fr")
_GRID = (0.9, 0.5)


def _specs(**changes: object) -> tuple[PlannedTest, ...]:
    asked: dict[str, object] = {
        "consistencies": ("textual",),
        "metrics": ("token_f1",),
        "deltas": (0.2,),
        "epsilons": (0.1,),
        "groups": _NAMES,
    }
    return all_specs(**{**asked, **changes})


def _plan(**changes: object) -> Plan:
    return build_plan(_specs(**changes), _GRID, group_key="language")


def _totals(losses: np.ndarray, groups: list[str | None], layout: Layout) -> CalibrationTotals:
    """Returns totals of examples whose output lengths depend on their number and their group's name."""
    ids = [f"{index}" for index in range(len(groups))]
    generations = [
        build_generation(
            example=build_example(id=name, group=group),
            outputs=tuple(build_output("t", exit_layers=[1 + place + len(group or "")]) for place in range(3)),
        )
        for place, (name, group) in enumerate(zip(ids, groups, strict=True))
    ]
    fixed = to_signed_fixed_point(losses)
    return CalibrationTotals.of_examples(generations, layout).merge(
        CalibrationTotals.of_losses(ids, fixed, layout=layout, salt="s", groups=groups)
    )


def test_names_are_counted() -> None:
    """Groups are sorted by name, counted, and printed in one line."""
    groups = counted_groups(["fr", "de", "fr"], key="language")
    assert groups == (GroupRecord(name="de", examples=1), GroupRecord(name="fr", examples=2))
    many = counted_groups((f"{name:02}" for name in range(20)), key="page\n")
    assert groups_in_words(many, key="page").endswith("11 (1 example), and 8 more")


def test_a_field_that_tells_examples_apart_names_no_groups() -> None:
    """Too many groups to prove anything, and an example without a group, are refused."""
    with pytest.raises(DataError, match=f"--group_key=id: the data have more than {MOST_GROUPS} groups"):
        counted_groups(map(str, range(MOST_GROUPS + 1)), key="id")
    with pytest.raises(DataError, match="an example names no language"):
        counted_groups(["de", None], key="language")


def test_a_row_without_a_group_is_named(tmp_path: pathlib.Path) -> None:
    """The error names the file and line without a group; numbers may name groups."""
    path = tmp_path / "rows.jsonl"
    path.write_text('{"input": "a", "year": 2020}\n{"input": "b"}\n')
    data = DataFiles.found(str(path), reading=Reading(group_key="year"))
    with pytest.raises(DataError, match=r"rows.jsonl, line 2: has no 'year', which was to name its group"):
        groups_of_data(data)
    path.write_text('{"input": "a", "year": 2020}\n{"input": "b", "year": "x"}\n')
    assert [group.name for group in groups_of_data(data)] == ["2020", "x"]
    path.write_text('{"input": "a", "year": true}\n')
    with pytest.raises(DataError, match="year must be a text that is not empty or an integer, got True"):
        groups_of_data(data)


def test_a_group_is_part_of_what_an_example_is() -> None:
    """Two examples that differ in their groups have different digests, and a group is no cluster."""

    def digest(**changes: object) -> bytes:
        example: Example = build_example(**changes)
        return example.content_digest()

    assert len({digest(), digest(group="a"), digest(group="b"), digest(cluster="a")}) == 4


def test_every_guarantee_is_given_to_the_whole_and_to_each_group() -> None:
    """Every guarantee is given to all examples first, then to each group; a joint epsilon is divided among entries."""
    specs = _specs(deltas=(0.2, 0.3), joint=True)
    assert [(spec.group, spec.delta) for spec in specs] == [
        (group, delta) for group in (None, "de", "fr") for delta in (0.2, 0.3)
    ]
    assert {spec.epsilon for spec in specs} == {0.1 / 6}
    with pytest.raises(ValueError, match="groups must have different names, got"):
        _specs(groups=("de", "de"))


def test_what_groups_cannot_be_told_apart_by_is_refused() -> None:
    """Groups with clusters, p-values that need every loss, and specs that do not match the key are refused."""
    with pytest.raises(ValueError, match="a cluster may hold prompts of several groups"):
        build_plan(_specs(), _GRID, group_key="language", cluster_key="page")
    with pytest.raises(ValueError, match="p_value wsr needs every single loss, and those of groups are only summed"):
        _plan(p_value="wsr")
    with pytest.raises(ValueError, match="group_key is None, but the specs are about 2 groups"):
        build_plan(_specs(), _GRID)
    with pytest.raises(ValueError, match="group_key is 'x', but the specs are about 0 groups"):
        build_plan(_specs(groups=()), _GRID, group_key="x")


def test_plans_without_groups_are_as_they_were() -> None:
    """A plan without groups has no fields about them, so that its digest is that of earlier versions."""
    record = build_plan(_specs(groups=()), _GRID).to_dict()
    assert "group_key" not in record
    assert "group" not in record["tests"][0]  # type: ignore[index]


@settings(max_examples=30, deadline=None)
@given(st.lists(st.tuples(st.sampled_from(_NAMES), st.floats(0, 1)), min_size=1, max_size=12), st.randoms())
def test_sums_of_a_group_are_those_of_its_examples(drawn: list[tuple[str, float]], random: object) -> None:
    """In any merge order a group has the sums of its examples alone, and all groups add up to the whole."""
    layout = layout_of(_plan(p_value="signed_mixture"))
    groups: list[str | None] = [name for name, _ in drawn]
    losses = np.array([[[loss, 1 - loss]] for _, loss in drawn])
    parts = [_totals(losses[[index]], [groups[index]], layout) for index in range(len(drawn))]
    random.shuffle(parts)  # type: ignore[attr-defined]
    merged = functools.reduce(CalibrationTotals.merge, parts)
    alone = dataclasses.replace(layout, groups=())
    for group in _NAMES:
        places = [index for index, name in enumerate(groups) if name == group]
        expected = _totals(losses[places], [group] * len(places), alone) if places else CalibrationTotals.zero(alone)
        found = merged.of_group(group)
        assert (found.risk, found.layer_sums) == (expected.risk, expected.whole.layer_sums)
        assert found.mean_layers(4) == expected.whole.mean_layers(4)
    assert sum(totals.risk.n for _, totals in merged.groups) == merged.risk.n


def test_an_example_of_no_planned_group_ends_the_run() -> None:
    """An example that changed to an unplanned group after the groups were named ends the run."""
    layout = layout_of(_plan())
    with pytest.raises(OutputsError, match="an example is of group 'it', but planned were de, fr"):
        _totals(np.zeros((1, 1, 2)), ["it"], layout)
    with pytest.raises(OutputsError, match="an example is of no group, but planned were de, fr"):
        _totals(np.zeros((1, 1, 2)), [None], layout)


def test_losses_without_their_groups_are_found() -> None:
    """Totals whose groups do not add up to the whole are refused."""
    layout = layout_of(_plan())
    totals = dataclasses.replace(_totals(np.zeros((2, 1, 2)), ["de", "fr"], layout), groups=())
    with pytest.raises(OutputsError, match="the groups have 0 examples, but 2 were scored"):
        totals.check(FinishedSweep(job="", shards=(StoredShard(shard=0, examples=2, failed=0, digest=""),)))


def test_entries_of_groups_are_of_their_own_losses(tmp_path: pathlib.Path) -> None:
    """n, risk and layers of an entry are its group's; a group without examples proves nothing; the table keeps all."""
    plan = _plan(groups=("de", "fr", "it"))
    groups: list[str | None] = [*["de"] * 60, *["fr"] * 40]
    losses = np.zeros((100, 1, 2))
    losses[60:] = 1
    rows = risk_rows(_totals(losses, groups, layout_of(plan)), plan, num_layers=4)
    whole, de, fr, it = choose_thresholds(rows, plan, num_layers=4)
    assert [entry.group for entry in (whole, de, fr, it)] == [None, "de", "fr", "it"]
    assert [entry.path[0].n for entry in (whole, de, fr, it)] == [100, 60, 40, 0]
    assert [entry.path[0].risk for entry in (whole, de, fr, it)] == [0.4, 0.0, 1.0, 0.0]
    assert [entry.threshold for entry in (whole, de, fr, it)] == [None, 0.5, None, None]
    assert it.path[0].p_value == 1
    assert it.layers == 4
    path = tmp_path / "risk_table.csv"
    path.write_text(risk_table_text(rows))
    assert read_risk_table(path, RiskRow) == rows
    assert path.read_text().splitlines()[0].endswith(",layers,group")


def test_rounds_are_watched_in_every_group(tmp_path: pathlib.Path) -> None:
    """A group may have no example in the first rounds; a counted round's sums for it are read again."""
    plan = dataclasses.replace(_plan(p_value="signed_mixture"), sequential=SequentialPlan(round_examples=30))
    parts = [["de"] * 30, ["de"] * 20 + ["fr"] * 10, ["de"] * 30]
    rounds = []
    for number, groups in enumerate(parts, start=1):
        totals = dataclasses.replace(
            _totals(np.zeros((30, 1, 2)), list(groups), layout_of(plan)), by_shard=((number, 30),)
        )
        shards = (StoredShard(shard=number, examples=30, failed=0, digest="x"),)
        counted = Round(
            number=number, division="sha256:1", scored_by={}, rounds=3, examples=90, shards=shards, totals=totals
        )
        counted.write(str(tmp_path), plan)
        again = Round.read(str(tmp_path), number, plan)
        assert again is not None
        assert again.totals == totals
        rounds.append(again.totals)
    whole, de, fr = watched(rounds, plan, num_layers=4).calibrations
    assert [[look.n for look in entry.looks or ()] for entry in (whole, de, fr)] == [
        [30, 60, 90],
        [30, 50, 80],
        [0, 10, 10],
    ]
    assert whole.threshold == de.threshold == 0.5
    assert fr.threshold is None
    first = watched(rounds[:1], plan, num_layers=4).calibrations[2]
    assert first.path[0].n == 0


# The tests below draw many calibration sets at once, as thresholds of one grid that share only the labels.
_DELTA, _EPSILON, _EXAMPLES = 0.2, 0.1, 300


def _accepted(
    risks: dict[str, tuple[float, float]], *, seed: int, joint: bool, labels: int = 25, sets: int = 800
) -> dict[str | None, np.ndarray]:
    """Returns the number of sets that accepted the second of two thresholds, for the whole and every group.

    Args:
      risks: Risk of each group at the first threshold and at the second; a third of the prompts are of the first group.
      seed: Seed of all draws.
      joint: Whether all entries are to hold together.
      labels: Number of draws of groups.
      sets: Calibration sets for each draw.
    """
    generator = np.random.default_rng(seed)
    specs = _specs(groups=tuple(risks), deltas=(_DELTA,), epsilons=(_EPSILON,), p_value="exact_binomial", joint=joint)
    layout = Layout.of(specs, thresholds=sets)
    first, second = risks
    found: dict[str | None, list[np.ndarray]] = {spec.group: [] for spec in specs}
    for _ in range(labels):
        groups: list[str | None] = [first if is_first else second for is_first in generator.random(_EXAMPLES) < 1 / 3]
        means = np.array([risks[group or ""] for group in groups])
        p_values: dict[str | None, list[np.ndarray]] = {spec.group: [] for spec in specs}
        for place in range(2):
            losses = generator.random((_EXAMPLES, 1, sets)) < means[:, place, None, None]
            ids = [str(index) for index in range(_EXAMPLES)]
            totals = CalibrationTotals.of_losses(
                ids, to_signed_fixed_point(losses.astype(float)), layout=layout, salt="s", groups=groups
            )
            for spec in specs:
                p_values[spec.group].append(p_values_for(spec, totals.evidence(spec)))
        for spec in specs:
            test = PROCEDURES[spec.procedure](np.stack(p_values[spec.group], axis=-1), epsilon=spec.epsilon)
            found[spec.group].append(test.rejected[:, 1])
    return {group: np.concatenate(rejected) for group, rejected in found.items()}


def _is_at_most(accepted: np.ndarray, epsilon: float) -> bool:
    """Returns whether a frequency is compatible with a probability of at most epsilon."""
    low, _ = binomial_interval(int(accepted.sum()), len(accepted), confidence=0.999)
    return low <= epsilon


def test_a_group_fails_while_the_mean_passes() -> None:
    """The whole rightly accepts a threshold that breaks one group's promise, and this group's entry refuses it."""
    # Over all prompts the second threshold has risk 0.21 / 3 + 0.04 / 3 * 2, far below delta.
    accepted = _accepted({"fr": (0.02, 0.21), "en": (0.02, 0.04)}, seed=1, joint=False)
    assert accepted[None].mean() > 0.99
    assert accepted["en"].mean() > 0.99
    assert _is_at_most(accepted["fr"], _EPSILON)
    # The test is near its bound, so that a weaker one would be noticed, such as serving by the whole.
    assert accepted["fr"].mean() > 0.01
    assert not _is_at_most(accepted[None], _EPSILON)


def test_joint_entries_are_all_right_together() -> None:
    """If every entry can be wrong, the chance that any is stays below epsilon; with epsilon each, it would not."""
    wrong = {"fr": (0.02, 0.201), "en": (0.02, 0.201)}
    joint = _accepted(wrong, seed=2, joint=True)
    assert _is_at_most(np.any(list(joint.values()), axis=0), _EPSILON)
    alone = _accepted(wrong, seed=2, joint=False)
    assert not _is_at_most(np.any(list(alone.values()), axis=0), _EPSILON)
    assert all(_is_at_most(accepted, _EPSILON) for accepted in alone.values())
