"""The facts of a run become a manifest."""

import dataclasses
import pathlib

import numpy as np
import pytest

from calm_beam.calibration.plan import layout_of
from calm_beam.calibration.publish import RunProvenance
from calm_beam.calibration.result import choose_thresholds, risk_rows
from calm_beam.decoding.settings import DecodeSettings
from calm_beam.exits.rule import ExitRule
from calm_beam.exits.thresholds import scheduled_thresholds
from calm_beam.manifest import (
    GUARANTEE,
    Manifest,
    ManifestError,
    ModelRecord,
    Plan,
    VocabularyRecord,
    guarantee_in_words,
    read_manifest,
    write_manifest,
)
from calm_beam.outputs.totals import CalibrationTotals
from calm_beam.risk.losses import to_fixed_point
from tests.calm_beam.calibration.builders import build_example, build_generation, build_output
from tests.plans import all_specs, build_plan

_PROVENANCE = RunProvenance(
    created="2026-01-31T12:00:00Z",
    model=ModelRecord(uri="/models/t5", fingerprint="sha256:aa", layers=4),
    vocabulary=VocabularyRecord(fingerprint="sha256:bb", extra_ids=100),
    settings=DecodeSettings(
        rule=ExitRule(
            confidence="state",
            schedule="decay",
            tau=4.0,
            state_propagation="from_first_exit",
            min_exit_layer=2,
            exit_interval=2,
        ),
        thresholds=(0.9, 0.5),
        max_input_length=48,
        max_decode_length=12,
        task_prefix="résumé : ",
    ),
    patterns=("data/*.jsonl", "more.jsonl.gz"),
    software={"calm-beam": "0.1.0"},
)
_SPECS = all_specs(consistencies=("textual",), metrics=("token_f1",), deltas=(0.3, 0.9), epsilons=(0.05,))
_PLAN = build_plan(_SPECS, _PROVENANCE.settings, model="sha256:aa", vocabulary="sha256:bb")


def _totals(plan: Plan = _PLAN) -> CalibrationTotals:
    """Returns totals of twelve examples and one that failed, each a unit by itself."""
    layout = layout_of(plan)
    generations = [
        build_generation(
            example=build_example(id=str(index)),
            outputs=tuple(build_output("t", exit_layers=(4, 2 + lane % 2)) for lane in range(3)),
            truncated=index < 3,
            duplicate=index < 2,
        )
        for index in range(12)
    ]
    failed = build_generation(example=build_example(id="x"), outputs=(), failure="broken")
    losses = [*([[0.0, index / 16]] for index in range(12)), [[1.0, 1.0]]]
    of_losses = CalibrationTotals.of_losses(
        [str(index) for index in range(13)], to_fixed_point(losses), layout=layout, salt=plan.salt
    )
    return CalibrationTotals.of_examples([*generations, failed], layout).merge(of_losses)


def _manifest(totals: CalibrationTotals, plan: Plan = _PLAN, provenance: RunProvenance = _PROVENANCE) -> Manifest:
    entries = choose_thresholds(risk_rows(totals, plan, num_layers=4), plan, num_layers=4)
    return provenance.manifest(totals, entries, plan=plan, digest=plan.digest)


def test_manifest_is_valid_and_reads_back(tmp_path: pathlib.Path) -> None:
    """The manifest has the provenance, the totals and the choices, and the reader accepts it."""
    totals = _totals()
    manifest = _manifest(totals)
    write_manifest(manifest, tmp_path / "manifest.json")
    read = read_manifest(tmp_path / "manifest.json", model_fingerprint="sha256:aa")
    assert read == manifest
    assert read.plan == _PLAN
    assert read.guarantee == GUARANTEE
    assert (read.data.examples, read.data.failed, read.data.truncated, read.data.duplicates) == (13, 1, 3, 2)
    assert read.data.fingerprint == totals.data_fingerprint()
    assert read.data.patterns == _PROVENANCE.patterns
    assert (read.created, read.model, read.vocabulary) == (
        _PROVENANCE.created,
        _PROVENANCE.model,
        _PROVENANCE.vocabulary,
    )
    assert read.software == {"calm-beam": "0.1.0"}


def test_every_setting_that_changes_a_token_is_recorded() -> None:
    """Each field of rule and settings is in `decode`, under its own name; the grid is in the paths."""
    decode = _manifest(_totals()).decode
    settings = dataclasses.asdict(_PROVENANCE.settings)
    expected = {**settings.pop("rule"), **settings.pop("precision"), **settings}
    assert expected["matmul_precision"] == "highest"
    expected["matmul_precision"] = None
    del expected["thresholds"]
    assert expected.pop("token_from") == "exit_layer"
    assert dataclasses.asdict(decode) == expected


def test_every_position_has_its_threshold() -> None:
    """An entry that exits has its float32 threshold for each position; one that never exits has none."""
    exits, never = _manifest(_totals()).calibrations[::-1]
    assert (exits.threshold, never.threshold) == (0.5, None)
    expected = scheduled_thresholds(_PROVENANCE.settings.rule, (0.5,), max_decode_length=12)[:, 0]
    assert exits.threshold_by_position is not None
    assert np.array_equal(np.array(exits.threshold_by_position, np.float32), expected)
    assert list(exits.threshold_by_position) == [float(value) for value in expected]
    assert never.threshold_by_position is None


def test_tokens_of_the_last_layer_make_no_manifest() -> None:
    """Tokens of the last layer cannot be written to a manifest, since serving would give other tokens."""
    settings = dataclasses.replace(_PROVENANCE.settings, rule=ExitRule(token_from="last_layer"))
    with pytest.raises(ManifestError, match="token_from must be exit_layer, got last_layer"):
        _manifest(_totals(), provenance=dataclasses.replace(_PROVENANCE, settings=settings))


def test_token_ids_have_no_vocabulary() -> None:
    """Without a vocabulary the manifest has null."""
    provenance = dataclasses.replace(_PROVENANCE, vocabulary=None)
    assert _manifest(_totals(), provenance=provenance).to_dict()["vocabulary"] is None


def test_a_plan_that_was_changed_is_not_written() -> None:
    """The plan must have the digest that was taken before any loss was seen."""
    totals = _totals()
    entries = choose_thresholds(risk_rows(totals, _PLAN, num_layers=4), _PLAN, num_layers=4)
    with pytest.raises(ManifestError, match=r"the plan is sha256:.*, but the run was started with sha256:0000"):
        _PROVENANCE.manifest(totals, entries, plan=_PLAN, digest="sha256:" + "0" * 64)
    other = dataclasses.replace(_PLAN, tests=_PLAN.tests[::-1])
    with pytest.raises(ManifestError, match=r"calibrations\[0\].delta must be 0.9, as was planned, got 0.3"):
        _PROVENANCE.manifest(totals, entries, plan=other, digest=other.digest)


def test_a_joint_guarantee_is_said() -> None:
    """Entries that hold together have the joint epsilon and their own."""
    specs = all_specs(consistencies=("textual",), metrics=("token_f1",), deltas=(0.3, 0.9), epsilons=(0.1,), joint=True)
    plan = build_plan(specs, _PROVENANCE.settings, model="sha256:aa", vocabulary=None, joint_epsilon=0.1)
    manifest = _manifest(_totals(plan), plan)
    assert manifest.guarantee == guarantee_in_words(joint_epsilon=0.1, hands_on=True)
    assert "hold together: with probability at least 1 - 0.1 over" in manifest.guarantee
    assert manifest.plan is not None
    assert manifest.plan.joint_epsilon == 0.1
    assert [entry.epsilon for entry in manifest.calibrations] == [0.05, 0.05]


def test_clusters_are_counted() -> None:
    """With clusters the manifest has both numbers, and tests count clusters."""
    plan = dataclasses.replace(_PLAN, cluster_key="paragraph")
    layout = layout_of(plan)
    examples = CalibrationTotals.of_examples([build_generation() for _ in range(12)], layout)
    units = CalibrationTotals.of_losses(["a", "b"], to_fixed_point([[[0.0, 0.5]]] * 2), layout=layout, salt=plan.salt)
    manifest = _manifest(examples.merge(units), plan)
    assert (manifest.data.examples, manifest.data.clusters) == (12, 2)
    assert manifest.guarantee == guarantee_in_words(cluster_key="paragraph")
    assert manifest.guarantee.startswith(GUARANTEE)
    assert "drawing a cluster, which paragraph names, and then one of its prompts" in manifest.guarantee
    assert {step.n for entry in manifest.calibrations for step in entry.path} == {2}
