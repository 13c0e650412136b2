"""What a run knows about itself becomes a manifest."""

import dataclasses
import pathlib

import numpy as np

from calm_beam.calibration import CalibrationTotals, RunRecord, all_specs, calibrate, risk_rows
from calm_beam.decoding.settings import DecodeSettings
from calm_beam.exits.rule import ExitRule
from calm_beam.manifest import ModelRecord, VocabularyRecord, read_manifest, write_manifest
from tests.calm_beam.calibration.builders import build_example, build_generation, build_output

_RECORD = RunRecord(
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


def _totals() -> CalibrationTotals:
    totals = CalibrationTotals.zero(objectives=1, thresholds=2)
    for index in range(12):
        generation = build_generation(
            example=build_example(id=str(index)),
            outputs=tuple(build_output("t", exit_layers=(4, 2 + lane % 2)) for lane in range(3)),
            truncated=index < 3,
            duplicate=index < 2,
        )
        totals = totals.merge(CalibrationTotals.of(generation, np.array([[0.0, index / 16]])))
    failed = build_generation(example=build_example(id="x"), outputs=(), failure="broken")
    return totals.merge(CalibrationTotals.of(failed, np.ones((1, 2))))


def test_manifest_is_valid_and_reads_back(tmp_path: pathlib.Path) -> None:
    """The manifest says what the record, the totals and the choices say, and the reader accepts it."""
    totals = _totals()
    rows = risk_rows(totals, _SPECS, thresholds=(0.9, 0.5), p_value="hoeffding_bentkus", num_layers=4)
    entries = calibrate(rows, specs=_SPECS, p_value="hoeffding_bentkus", num_layers=4)
    manifest = _RECORD.manifest(totals, entries)
    write_manifest(manifest, tmp_path / "manifest.json")
    read = read_manifest(tmp_path / "manifest.json", model_fingerprint="sha256:aa")
    assert read == manifest
    assert read.calibrations == entries
    assert (read.data.examples, read.data.failed, read.data.truncated, read.data.duplicates) == (13, 1, 3, 2)
    assert read.data.fingerprint == totals.data_fingerprint()
    assert read.data.patterns == _RECORD.patterns
    assert (read.created, read.model, read.vocabulary) == (_RECORD.created, _RECORD.model, _RECORD.vocabulary)
    assert read.software == {"calm-beam": "0.1.0"}


def test_every_setting_that_changes_a_token_is_recorded() -> None:
    """Each field of rule and settings stands in `decode`, under its own name; the grid stands in the paths."""
    totals = _totals()
    rows = risk_rows(totals, _SPECS, thresholds=(0.9, 0.5), p_value="hoeffding", num_layers=4)
    decode = _RECORD.manifest(totals, calibrate(rows, specs=_SPECS, p_value="hoeffding", num_layers=4)).decode
    settings = dataclasses.asdict(_RECORD.settings)
    expected = {**settings.pop("rule"), **settings, "dtype": "float32"}
    del expected["thresholds"]
    assert dataclasses.asdict(decode) == expected


def test_token_ids_have_no_vocabulary() -> None:
    """Without a vocabulary the manifest says null."""
    totals = _totals()
    rows = risk_rows(totals, _SPECS, thresholds=(0.9, 0.5), p_value="hoeffding", num_layers=4)
    entries = calibrate(rows, specs=_SPECS, p_value="hoeffding", num_layers=4)
    assert dataclasses.replace(_RECORD, vocabulary=None).manifest(totals, entries).to_dict()["vocabulary"] is None
