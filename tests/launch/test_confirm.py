"""`--holdout_share` from flags to files: the parts, the decoder that confirms, and the messages."""

import csv
import dataclasses
import json
import pathlib
import shutil
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest

import calm_beam as calm
from calm_beam.calibration.confirmation import confirmed_calibration, thresholds_to_confirm
from calm_beam.decoding.branches import Branch
from calm_beam.decoding.decoder import Decoder
from calm_beam.inputs.set_parts import CALIBRATING, CONFIRMING, part_of
from calm_beam.launch.cli import main
from calm_beam.manifest import Calibration, Manifest, Variant, manifest_text, read_manifest
from calm_beam.metrics.squad import token_f1
from calm_beam.outputs import DecodeJob, Generation, read_generations, worker
from calm_beam.outputs.generate import ServedBranches
from calm_beam.serving import Generator
from calm_beam.transforms import ReadGenerations
from tests.instruction_sets import TUNED
from tests.pipelines import SETTINGS, SHORT_FLAGS, id_rows, without_time, write_model, write_rows

_ROWS = 80
_SALT = "calm-beam/0"
_DELTAS = (0.2, 0.45, 0.6, 0.9)
_ASKED = ("--metric=token_f1", f"--delta={','.join(map(str, _DELTAS))}", "--epsilon=0.2")
_CONFIRM = "--holdout_share=0.3"


@pytest.fixture(autouse=True)
def _wide_terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "200")


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> pathlib.Path:
    """A tiny random model without a vocabulary."""
    return write_model(tmp_path_factory.mktemp("confirm") / "model")


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> pathlib.Path:
    """Prompts of token ids, each of a cluster of up to three and of one of two groups."""
    rows = [{**row, "page": f"page {at // 3}", "lang": "ab"[at % 2]} for at, row in enumerate(id_rows(_ROWS))]
    return write_rows(tmp_path_factory.mktemp("confirm") / "rows.jsonl", rows)


@pytest.fixture(scope="module")
def calibrated(model: pathlib.Path, data: pathlib.Path, tmp_path_factory: pytest.TempPathFactory) -> pathlib.Path:
    """The output of a calibration with a holdout."""
    output = tmp_path_factory.mktemp("confirm") / "out"
    assert _calibrate(model, data, output, _CONFIRM) == 0
    return output


def _calibrate(model: pathlib.Path, data: pathlib.Path, output: pathlib.Path, *flags: str) -> int:
    base = ["calibrate", f"--checkpoint={model}", f"--data={data}", f"--output={output}"]
    return main([*base, *SHORT_FLAGS, *_ASKED, *flags])


def _manifest(output: pathlib.Path) -> Manifest:
    return read_manifest(output / "manifest.json")


def _stored(output: pathlib.Path) -> list[Generation]:
    """Returns the only generations of an output directory, in the order of their ids."""
    items = [item for path in output.glob("generations/*/*.parquet") for item in read_generations(path)]
    return sorted(items, key=lambda item: item.example.id)


def _losses(items: Sequence[Generation]) -> np.ndarray:
    """Returns textual losses, shape (examples, thresholds)."""
    return np.array(
        [[1 - token_f1(output.text, [item.outputs[0].text]) for output in item.outputs[1:]] for item in items]
    )


def _confirms(name: str) -> bool:
    return part_of(name, salt=_SALT, holdout_share=0.3) == CONFIRMING


def test_the_pipeline_comes_to_what_plain_functions_come_to(calibrated: pathlib.Path) -> None:
    """Each part is decoded separately; choice and confirmation equal those computed from single losses."""
    manifest, chose, confirmed = _manifest(calibrated), _stored(calibrated), _stored(calibrated / "confirmation")
    keys = [item.example.id for item in (*chose, *confirmed)]
    assert sorted(keys) == sorted(f"row-{index}" for index in range(_ROWS))
    assert [_confirms(key) for key in keys] == [False] * len(chose) + [True] * len(confirmed)
    losses = np.zeros((_ROWS, len(SETTINGS.thresholds)))
    served = np.zeros_like(losses)
    losses[: len(chose)] = _losses(chose)
    (folder,) = (calibrated / "confirmation" / "generations").iterdir()
    job = DecodeJob.read(str(folder))
    assert job.decoder == "batch"
    places = [SETTINGS.thresholds.index(threshold) for threshold in job.settings.thresholds]
    served[len(chose) :, places] = _losses(confirmed)
    for entry in manifest.calibrations:
        expected = confirmed_calibration(
            losses,
            served,
            keys=keys,
            delta=entry.delta,
            epsilon=entry.epsilon,
            p_value=entry.p_value,
            salt=_SALT,
            holdout_share=0.3,
        )
        assert entry.threshold == (None if expected.promised is None else SETTINGS.thresholds[expected.promised])
        if not expected.path:
            assert entry.confirmation is None
            continue
        assert entry.confirmation is not None
        for step, place, p_value in zip(entry.confirmation, expected.path, expected.p_values, strict=False):
            assert (step.threshold, step.p_value) == (SETTINGS.thresholds[place], p_value)
            assert step.n == len(confirmed)
            assert step.risk == pytest.approx(served[len(chose) :, place].mean(), abs=1e-8)
        # Up to the chosen threshold, or the first that failed.
        assert len(entry.confirmation) == len(expected.path) or not entry.confirmation[-1].rejected
    lengths = {len(each.confirmation or ()) for each in manifest.calibrations}
    assert lengths > {0}
    assert max(lengths) > 1
    assert manifest.confirmation is not None
    assert (manifest.data.examples, manifest.confirmation.data.examples) == (len(chose), len(confirmed))
    assert not (calibrated / "unconfirmed").exists()


def test_the_decoder_that_serves_has_decoded(calibrated: pathlib.Path, model: pathlib.Path) -> None:
    """The confirming outputs are what a generator of the manifest answers in batches, as are the full model's."""
    items = _stored(calibrated / "confirmation")
    prompts = [item.example.input_ids or () for item in items]
    (folder,) = (calibrated / "confirmation" / "generations").iterdir()
    thresholds = DecodeJob.read(str(folder)).settings.thresholds
    entries = {each.threshold: each for each in _manifest(calibrated).calibrations if each.threshold is not None}
    assert entries
    for threshold, entry in entries.items():
        generator = Generator.from_manifest(_manifest(calibrated), model, delta=entry.delta, batch_size=4)
        served, full = generator.generate_batch(prompts), generator.full_model().generate_batch(prompts)
        for lane, answers in ((1 + thresholds.index(threshold), served), (0, full)):
            for item, answer in zip(items, answers, strict=True):
                output = item.outputs[lane]
                assert (answer.tokens, answer.exit_layers) == (output.tokens, output.exit_layers)
                assert answer.text == output.text


def test_what_is_told(
    model: pathlib.Path, data: pathlib.Path, tmp_path: pathlib.Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Table, inspect, report and files show chosen thresholds that were not confirmed, with their p-values."""
    asked = ("--holdout_share=10%", "--seed=1", "--p_value=hoeffding_bentkus")
    assert _calibrate(model, data, tmp_path / "out", *asked, "--verbose") == 0
    printed, manifest = capsys.readouterr(), _manifest(tmp_path / "out")
    assert f"plan {manifest.plan.digest}" in printed.err if manifest.plan else False
    told = [entry for entry in manifest.calibrations if entry.confirmation is not None]
    refused = next(entry for entry in told if entry.threshold is None)
    assert refused.confirmation is not None
    assert refused.chosen is not None
    (failed,) = refused.confirmation
    words = f"chosen {refused.chosen.threshold:g}, not confirmed: p = {failed.p_value:.2g}"
    line = f"textual token_f1, delta {refused.delta:g}, epsilon 0.2: {words}"
    assert "confirming threshold" in printed.err
    assert line in printed.out
    assert "other examples, which chose nothing, tested what was chosen, decoded by the batch decoder" in printed.out
    assert "The promise is about what that decoder gives" in " ".join(printed.out.split())
    assert main(["inspect", str(tmp_path / "out"), f"--checkpoint={model}"]) == 0
    shown = capsys.readouterr().out
    assert line in shown
    assert "Confirmation: " in shown
    page = (tmp_path / "out" / "report.html").read_text(encoding="utf-8")
    threshold = f"{refused.chosen.threshold:g}"
    assert f"The chosen threshold, {threshold}, was not confirmed by examples that chose nothing" in page
    with (tmp_path / "out" / "risk_table.csv").open(newline="") as file:
        rows = [row for row in csv.DictReader(file) if row["confirmed"]]
    for entry in told:
        steps = {step.threshold: step for step in entry.confirmation or ()}
        of_entry = [row for row in rows if float(row["delta"]) == entry.delta]
        held = [threshold for threshold, step in steps.items() if step.rejected]
        assert [float(row["threshold"]) for row in of_entry if row["confirmed"] == "true"] == held
        # Thresholds that were not reached are listed too, with their p-values.
        assert {float(row["threshold"]) for row in of_entry} >= {*steps, entry.chosen.threshold if entry.chosen else 0}
    assert main(["report", f"--calibration={tmp_path / 'out'}", f"--output={tmp_path / 'again.html'}"]) == 0
    assert (tmp_path / "again.html").read_text(encoding="utf-8") == page


def test_nothing_to_confirm(model: pathlib.Path, data: pathlib.Path, tmp_path: pathlib.Path) -> None:
    """If no threshold was chosen, the holdout is not decoded."""
    assert _calibrate(model, data, tmp_path / "out", _CONFIRM, "--delta=0.01") == 0
    manifest = _manifest(tmp_path / "out")
    assert manifest.plan is not None
    assert (manifest.plan.confirm_share, manifest.confirmation) == (0.3, None)
    assert [entry.threshold for entry in manifest.calibrations] == [None]
    assert not (tmp_path / "out" / "confirmation").exists()
    assert not (tmp_path / "out" / "unconfirmed").exists()


@pytest.mark.slow
def test_another_tolerance_leaves_the_parts_as_they_are(
    model: pathlib.Path, data: pathlib.Path, calibrated: pathlib.Path, tmp_path: pathlib.Path
) -> None:
    """The same salt draws the same holdout for another tolerance; another seed draws another one."""
    ids = {item.example.id for item in _stored(calibrated / "confirmation")}
    assert _calibrate(model, data, tmp_path / "out", _CONFIRM, "--delta=0.7", "--metric=exact_match") == 0
    assert _calibrate(model, data, tmp_path / "other", _CONFIRM, "--delta=0.9", "--seed=1") == 0
    assert ids == {item.example.id for item in _stored(tmp_path / "out" / "confirmation")}
    assert ids != {item.example.id for item in _stored(tmp_path / "other" / "confirmation")}


@pytest.mark.slow
def test_equal_examples_are_drawn_one_by_one(model: pathlib.Path, tmp_path: pathlib.Path) -> None:
    """Equal rows without ids are drawn one by one: kept together, a frequent prompt would be in one part only."""
    rows = [{"input_ids": [5, 9, 1]}] * 40 + [{"input_ids": [7, 1]}] * 40
    data = write_rows(tmp_path / "rows.jsonl", rows)
    assert _calibrate(model, data, tmp_path / "out", _CONFIRM, "--delta=0.99") == 0
    manifest = _manifest(tmp_path / "out")
    assert manifest.confirmation is not None
    assert manifest.data.examples + manifest.confirmation.data.examples == 80
    for output in (tmp_path / "out", tmp_path / "out" / "confirmation"):
        assert {item.example.input_ids for item in _stored(output)} == {(5, 9, 1), (7, 1)}
    # All examples: the holdout repeats examples of the selection.
    assert manifest.data.duplicates == manifest.data.examples - 2
    assert manifest.confirmation.data.duplicates == manifest.confirmation.data.examples


def test_a_killed_run_goes_on(
    model: pathlib.Path,
    data: pathlib.Path,
    calibrated: pathlib.Path,
    tmp_path: pathlib.Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """Killed while it confirms, a run decodes what is missing and gives the same manifest."""
    output = tmp_path / "out"
    shutil.copytree(calibrated, output)
    for path in output.glob("*.*"):
        path.unlink()
    (folder,) = (output / "confirmation" / "generations").iterdir()
    (folder / "complete.json").unlink()
    # Another head would be another decoder; without native code there is none.
    assert _calibrate(model, data, output, _CONFIRM, "--exit_head=int8", "--resume") == 2
    assert ("was begun in another way" if TUNED else "exit_head is int8, but") in capsys.readouterr().err
    next(folder.glob("*.parquet")).unlink()
    assert _calibrate(model, data, output, _CONFIRM) == 2
    assert "of a run that did not finish" in capsys.readouterr().err
    assert _calibrate(model, data, output, "--holdout_share=0.2", "--resume") == 2
    assert "part.confirm_share is 0.3 there, 0.2 here" in capsys.readouterr().err
    assert _calibrate(model, data, output, "--resume") == 2
    assert "was begun in another way" in capsys.readouterr().err
    assert _calibrate(model, data, output, _CONFIRM, "--resume") == 0
    assert without_time(_manifest(output)) == without_time(_manifest(calibrated))
    assert (output / "risk_table.csv").read_bytes() == (calibrated / "risk_table.csv").read_bytes()
    capsys.readouterr()
    assert _calibrate(model, data, output, _CONFIRM, "--resume") == 0
    assert "is finished; nothing is left to do" in capsys.readouterr().err
    rows = [json.loads(line) for line in data.read_text().splitlines()]
    changed = next(row for row in rows if _confirms(row["id"]))
    changed["input_ids"] = [3, 1]
    data_now = write_rows(tmp_path / "rows.jsonl", rows)
    text = data_now.read_text()
    kept = data.read_text()
    try:
        data.write_text(text)
        assert _calibrate(model, data, output, _CONFIRM, "--resume") == 2
    finally:
        data.write_text(kept)
    assert "the data have changed since" in capsys.readouterr().err


@pytest.mark.slow
def test_who_has_confirmed_confirms_nothing_more(
    model: pathlib.Path, data: pathlib.Path, tmp_path: pathlib.Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A confirmed sequential run is finished and refuses another stopping rule."""
    flags = (_CONFIRM, "--sequential", "--round_examples=20", "--delta=0.9", "--num_shards=6")
    assert _calibrate(model, data, tmp_path / "out", *flags, "--stop_at_threshold=0.9") == 0
    manifest = _manifest(tmp_path / "out")
    assert manifest.sequential is not None
    assert manifest.sequential.rounds < manifest.sequential.of_rounds
    (entry,) = manifest.calibrations
    assert entry.confirmation is not None
    assert entry.looks is not None
    assert _calibrate(model, data, tmp_path / "out", *flags, "--stop_at_threshold=0.9", "--resume") == 0
    assert "nothing is left to do" in capsys.readouterr().err
    assert _calibrate(model, data, tmp_path / "out", *flags, "--stop_at_threshold=0.5", "--resume") == 2
    assert "The examples that confirm have been looked at, and could not confirm what is chosen now" in (
        capsys.readouterr().err
    )


@pytest.mark.slow
def test_a_run_of_an_earlier_version_is_finished(
    model: pathlib.Path, data: pathlib.Path, tmp_path: pathlib.Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A manifest whose plan tests the chosen threshold alone is finished, and `--resume` has nothing to do."""
    assert _calibrate(model, data, tmp_path / "out", _CONFIRM, "--delta=0.001") == 0
    manifest = _manifest(tmp_path / "out")
    assert manifest.plan is not None
    early = dataclasses.replace(manifest, plan=dataclasses.replace(manifest.plan, confirm_path=None))
    (tmp_path / "out" / "manifest.json").write_text(manifest_text(early), encoding="utf-8")
    assert _calibrate(model, data, tmp_path / "out", _CONFIRM, "--delta=0.001", "--resume") == 0
    assert "nothing is left to do" in capsys.readouterr().err


@pytest.mark.slow
def test_groups_are_confirmed_by_their_own(model: pathlib.Path, data: pathlib.Path, tmp_path: pathlib.Path) -> None:
    """Every entry is confirmed by the holdout examples of its own group."""
    assert _calibrate(model, data, tmp_path / "out", _CONFIRM, "--group_key=lang", "--delta=0.9") == 0
    manifest = _manifest(tmp_path / "out")
    assert manifest.confirmation is not None
    items = _stored(tmp_path / "out" / "confirmation")
    counts = {name: sum(item.example.group == name for item in items) for name in ("a", "b")}
    found = {entry.group: entry.confirmation[0].n for entry in manifest.calibrations if entry.confirmation is not None}
    assert found.pop(None) == len(items)
    assert found == counts


@pytest.mark.slow
def test_entries_that_chose_divide_a_joint_epsilon(
    model: pathlib.Path, data: pathlib.Path, tmp_path: pathlib.Path
) -> None:
    """With `--joint`, entries without a threshold leave their share of epsilon to those that confirm."""
    assert _calibrate(model, data, tmp_path / "out", _CONFIRM, "--joint", "--delta=0.01,0.9") == 0
    manifest = _manifest(tmp_path / "out")
    nothing, chosen = manifest.calibrations
    # The other entry proved its whole grid and left its share of the path to this one.
    assert (nothing.chosen, nothing.epsilon, nothing.tested_epsilon) == (None, 0.1, 0.2)
    assert chosen.confirmation is not None
    assert (chosen.epsilon, chosen.promised_epsilon) == (0.1, 0.2)
    assert "An entry without a tested_epsilon or confirming_epsilon holds alone" in manifest.guarantee


@pytest.mark.slow
def test_clusters_are_in_one_part(model: pathlib.Path, data: pathlib.Path, tmp_path: pathlib.Path) -> None:
    """Every cluster is in one part as a whole, and is one unit."""
    flags = (_CONFIRM, "--cluster_key=page", "--delta=0.9", "--p_value=wsr")
    assert _calibrate(model, data, tmp_path / "out", *flags) == 0
    manifest = _manifest(tmp_path / "out")
    assert manifest.confirmation is not None
    pages = {item.example.cluster for item in _stored(tmp_path / "out" / "confirmation")}
    assert pages == {f"page {at}" for at in range(27) if _confirms(f"page {at}")}
    (entry,) = manifest.calibrations
    assert entry.confirmation is not None
    assert entry.confirmation[0].n == len(pages) == manifest.confirmation.data.clusters
    assert manifest.data.clusters == 27 - len(pages)


@pytest.mark.slow
def test_variants_are_confirmed_by_their_own_decoding(
    model: pathlib.Path, data: pathlib.Path, tmp_path: pathlib.Path
) -> None:
    """Each chosen variant decodes at its chosen threshold, and its entry is confirmed by these outputs."""
    flags = (_CONFIRM, "--schedule=decay", "--tau=0,6", "--min_exit_layer=1,2", "--delta=0.45,0.6")
    assert _calibrate(model, data, tmp_path / "out", *flags) == 0
    manifest = _manifest(tmp_path / "out")
    assert manifest.confirmation is not None
    assert manifest.plan is not None
    folders = [DecodeJob.read(str(path)) for path in (tmp_path / "out" / "confirmation" / "generations").iterdir()]
    decoded = {
        (Variant(tau=job.settings.rule.tau, min_exit_layer=job.settings.rule.min_exit_layer), threshold)
        for job in folders
        for threshold in job.settings.thresholds
    }
    chosen = {(entry.chosen.variant, entry.chosen.threshold) for entry in manifest.calibrations if entry.chosen}
    asked = thresholds_to_confirm(manifest.calibrations, manifest.plan)
    assert decoded == {(variant, threshold) for variant, grid in asked.items() for threshold in grid}
    assert decoded > chosen
    assert len({variant for variant, _ in decoded}) > 1
    page = (tmp_path / "out" / "report.html").read_text(encoding="utf-8")
    assert all(f"chosen {threshold:g} ({variant.in_words()})" in page for variant, threshold in chosen if variant)


@pytest.mark.slow
def test_a_lazy_sweep_comes_to_the_same(
    model: pathlib.Path, data: pathlib.Path, calibrated: pathlib.Path, tmp_path: pathlib.Path
) -> None:
    """A lazy sweep gives the same entries: what it does not decode could not have been chosen."""
    assert _calibrate(model, data, tmp_path / "out", _CONFIRM, "--sweep=lazy", "--delta=0.45") == 0
    (entry,) = _manifest(tmp_path / "out").calibrations
    assert entry == _entries(calibrated)[_DELTAS.index(0.45)]


def _entries(output: pathlib.Path) -> tuple[Calibration, ...]:
    return _manifest(output).calibrations


@pytest.mark.slow
def test_python_does_the_same(
    model: pathlib.Path, data: pathlib.Path, calibrated: pathlib.Path, tmp_path: pathlib.Path
) -> None:
    """`calibrate(holdout_share=0.3)` gives the same entries."""
    arguments: dict[str, Any] = {
        "model": model,
        "data": str(data),
        "guarantees": [calm.Guarantee("textual", "token_f1", delta=delta, epsilon=0.2) for delta in _DELTAS],
        "thresholds": SETTINGS.thresholds,
        "max_input_length": 32,
        "max_decode_length": 6,
        "batch_size": 4,
        "num_shards": 3,
        "holdout_share": 0.3,
    }
    manifest = calm.calibrate(output=tmp_path / "out", **arguments)
    assert manifest.calibrations == _entries(calibrated)
    assert manifest.confirmation == _manifest(calibrated).confirmation
    assert manifest.plan == _manifest(calibrated).plan
    again = calm.calibrate(output=tmp_path / "out", overwrite=True, **arguments)
    assert again.calibrations == manifest.calibrations
    with pytest.raises(ValueError, match=r"^holdout_share: expected a share above 0 and below 1, .* got 30\."):
        calm.calibrate(output=tmp_path / "other", **{**arguments, "holdout_share": 30})


def test_who_fails_counts(data: pathlib.Path, tmp_path: pathlib.Path, capsys: pytest.CaptureFixture[str]) -> None:
    """An example that fails in the holdout ends the run, or counts with loss 1 and is listed."""
    model = write_model(tmp_path / "model", is_broken=True)
    rows = [json.loads(line) for line in data.read_text().splitlines()]
    broken = next(row for row in rows if _confirms(row["id"]))
    broken["input_ids"] = [63, 1]
    path = write_rows(tmp_path / "rows.jsonl", rows)
    assert _calibrate(model, path, tmp_path / "out", _CONFIRM, "--delta=0.9") == 1
    told = capsys.readouterr().err
    assert broken["id"] in told
    assert "--resume goes on from there" in told
    assert not (tmp_path / "out" / "manifest.json").exists()
    flags = ("--on_error=worst_case", "--max_failures=1", "--delta=0.9")
    assert _calibrate(model, path, tmp_path / "worst", _CONFIRM, *flags) == 0
    manifest = _manifest(tmp_path / "worst")
    assert manifest.confirmation is not None
    assert (manifest.data.failed, manifest.confirmation.data.failed_ids) == (0, (broken["id"],))
    (entry,) = manifest.calibrations
    assert entry.confirmation is not None
    assert all(step.risk >= 1 / step.n for step in entry.confirmation)
    (listed,) = [json.loads(line) for line in (tmp_path / "worst" / "failures.jsonl").read_text().splitlines()]
    assert listed["id"] == broken["id"]
    assert "Failed examples count with loss 1 at every threshold." in capsys.readouterr().out


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        ((_CONFIRM, "--generations=DIR"), "--holdout_share decides what is decoded, and --generations=DIR is decoded"),
        (("--holdout_share=30",), "expected a share above 0 and below 1, such as 2% or 0.02, got '30'"),
        (("--holdout_share=1e-12",), "all of the 80 examples were drawn to choose a threshold, and none to confirm it"),
        ((_CONFIRM, "--state_propagation=full_cache"), "--holdout_share: nothing can be skipped with"),
    ],
)
def test_what_cannot_be_confirmed_is_refused(
    flags: tuple[str, ...],
    message: str,
    model: pathlib.Path,
    data: pathlib.Path,
    tmp_path: pathlib.Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """Options that do not go with a holdout are refused with the reason before anything is decoded."""
    asked = [*SHORT_FLAGS, *_ASKED] if "--generations=DIR" not in flags else []
    base = [] if "--generations=DIR" in flags else [f"--checkpoint={model}", f"--data={data}"]
    assert main(["calibrate", *base, f"--output={tmp_path / 'out'}", *asked, *flags]) == 2
    assert message in " ".join(capsys.readouterr().err.split())
    assert not (tmp_path / "out").exists()


def test_who_has_confirmed_is_not_fresh(
    model: pathlib.Path,
    data: pathlib.Path,
    calibrated: pathlib.Path,
    tmp_path: pathlib.Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """`verify` refuses the calibration set and either part of it."""
    rows = [json.loads(line) for line in data.read_text().splitlines()]
    for name in (None, CALIBRATING, CONFIRMING):
        some = [row for row in rows if name is None or _confirms(row["id"]) == (name == CONFIRMING)]
        path = write_rows(tmp_path / "some.jsonl", some)
        flags = [f"--manifest={calibrated}", f"--checkpoint={model}", f"--data={path}"]
        assert main(["verify", *flags]) == 2
        assert "is the calibration set itself" in capsys.readouterr().err


def test_what_is_verified_is_the_decoder_that_is_promised(
    model: pathlib.Path,
    calibrated: pathlib.Path,
    tmp_path: pathlib.Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """Verify decodes fresh examples by the decoder that confirmed, at the promised thresholds, without a sweep."""
    decoded: list[tuple[float, ...]] = []

    class Watched(ServedBranches):
        def __init__(self, decoder: Decoder, branches: Sequence[Branch]) -> None:
            full_model, *others = (float(branch.thresholds[0]) for branch in branches)
            assert full_model == float("inf")
            decoded.append(tuple(others))
            super().__init__(decoder, branches)

    monkeypatch.setattr(worker, "ServedBranches", Watched)
    monkeypatch.setattr(worker, "_sweep", None)
    path = write_rows(tmp_path / "fresh.jsonl", id_rows(20, seed=5))
    assert main(["verify", f"--manifest={calibrated}", f"--checkpoint={model}", f"--data={path}"]) in (0, 3)
    promised = {entry.threshold for entry in _entries(calibrated) if entry.threshold is not None}
    assert set(decoded) == {tuple(float(np.float32(threshold)) for threshold in sorted(promised, reverse=True))}
    assert "decoded by the decoder that serves" in " ".join(capsys.readouterr().out.split())


def test_who_has_confirmed_chooses_nothing(
    calibrated: pathlib.Path, tmp_path: pathlib.Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Generations of the holdout are refused as a calibration set: they cannot choose another threshold."""
    asked = ("--metric=token_f1", "--delta=0.95", f"--output={tmp_path / 'out'}")
    assert main(["calibrate", f"--generations={calibrated / 'confirmation'}", *asked]) == 2
    assert "its examples are a holdout that has already confirmed a choice" in capsys.readouterr().err
    with pytest.raises(ValueError, match="its examples are a holdout that has already confirmed a choice"):
        ReadGenerations(str(calibrated / "confirmation"))


def test_plan_refuses_it_as_a_pilot(calibrated: pathlib.Path, capsys: pytest.CaptureFixture[str]) -> None:
    """`plan` refuses a pilot with a holdout, whose cost it does not forecast."""
    assert main(["plan", f"--pilot={calibrated}", "--examples=1000"]) == 2
    assert "was made with --holdout_share, and what confirming takes is not forecast" in capsys.readouterr().err


@pytest.mark.slow
def test_worker_processes_confirm(
    model: pathlib.Path, data: pathlib.Path, calibrated: pathlib.Path, tmp_path: pathlib.Path
) -> None:
    """Two worker processes give the same entries."""
    flags = ("--direct_num_workers=2", "--direct_running_mode=multi_processing")
    assert _calibrate(model, data, tmp_path / "out", _CONFIRM, *flags) == 0
    assert _entries(tmp_path / "out") == _entries(calibrated)
