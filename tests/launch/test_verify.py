"""`calm-beam verify` from flags to exit status."""

import dataclasses
import hashlib
import json
import pathlib
import re
import shutil
import sys
from typing import Any

import pytest

from calm_beam.launch.cli import main
from calm_beam.manifest import Manifest, read_manifest, write_manifest
from tests.pipelines import SHORT_FLAGS, id_rows, text_rows, write_model, write_rows, write_vocabulary

_RUN = ("--batch_size=4", "--num_shards=3")


@pytest.fixture(autouse=True)
def _wide_terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "200")


@dataclasses.dataclass(frozen=True)
class _Place:
    """A model, a calibration of it, and fresh data; `flags` verify it."""

    model: pathlib.Path
    calibration: pathlib.Path
    calibrated: pathlib.Path
    fresh: pathlib.Path

    @property
    def flags(self) -> list[str]:
        return ["verify", f"--manifest={self.calibration}", f"--data={self.fresh}", *_RUN]


def _calibrate(place: _Place, *flags: str) -> int:
    paths = [f"--checkpoint={place.model}", f"--data={place.calibrated}", f"--output={place.calibration}"]
    return main(["calibrate", *paths, *SHORT_FLAGS, "--metric=token_f1", "--epsilon=0.1", *flags])


@pytest.fixture(scope="module")
def calibrated(tmp_path_factory: pytest.TempPathFactory) -> _Place:
    """Forty prompts calibrated at tolerances that a random model meets, and sixty fresh ones."""
    folder = tmp_path_factory.mktemp("verify")
    place = _Place(
        model=write_model(folder / "model"),
        calibration=folder / "calibration",
        calibrated=write_rows(folder / "calibration.jsonl", id_rows(40)),
        fresh=write_rows(folder / "fresh.jsonl", id_rows(60, seed=1)),
    )
    # Tests of sums, by which no threshold is so near its tolerance that fresh data may not prove it.
    assert _calibrate(place, "--consistency=textual,risk", "--delta=0.7,0.8", "--p_value=signed_mixture") == 0
    return place


@pytest.fixture
def place(calibrated: _Place, tmp_path: pathlib.Path) -> _Place:
    """A place with a calibration of its own, which tests may change."""
    own = tmp_path / "calibration"
    shutil.copytree(calibrated.calibration, own)
    return dataclasses.replace(calibrated, calibration=own)


def _change(place: _Place, **changes: Any) -> None:
    """Writes the manifest again with other values, sealed."""
    path = place.calibration / "manifest.json"
    write_manifest(dataclasses.replace(read_manifest(path), **changes), path, overwrite=True)


def _manifest(place: _Place) -> Manifest:
    return read_manifest(place.calibration / "manifest.json")


def test_kept_promises(calibrated: _Place, capsys: pytest.CaptureFixture[str]) -> None:
    """Fresh data prove the promises again, with status 0; the model is found where it was."""
    assert main(calibrated.flags) == 0
    printed = capsys.readouterr()
    assert "proved again" in printed.out
    assert "BROKEN" not in printed.out
    assert "60 examples, 0 failed" in printed.out
    # Each number of a pair has its name.
    assert re.search(r"then 0\.\d{4} .*kept [-\d.e]+ ", printed.out)
    assert re.search(r"now 0\.\d{4} .*broken [-\d.e]+ ", printed.out)
    assert "No promise is found broken at level 0.05; 4 of 4 are proved again" in printed.out
    assert "warning" not in printed.err


def test_a_broken_promise(place: _Place, capsys: pytest.CaptureFixture[str]) -> None:
    """A promise of much less than the true loss gives status 3; other verdicts do not change."""
    entries = list(_manifest(place).calibrations)
    place_of_textual = next(i for i, e in enumerate(entries) if e.consistency == "textual" and e.threshold is not None)
    entries[place_of_textual] = dataclasses.replace(entries[place_of_textual], delta=0.01)
    _change(place, calibrations=tuple(entries), plan=None)
    assert main([*place.flags, f"--checkpoint={place.model}"]) == 3
    printed = capsys.readouterr().out
    assert printed.count("BROKEN") == 2
    assert "1 of " in printed
    assert "promises is BROKEN: the fresh losses prove that the risk exceeds delta. If all were kept" in printed
    assert "proved again" in printed


def test_runs_at_any_time(place: _Place, tmp_path: pathlib.Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Runs on new rows accumulate, also of one metric only; rows with counted ids end the run before decoding."""
    parts = []
    for number in (1, 2):
        rows = [{**row, "id": f"{number}-{row['id']}"} for row in id_rows(20, seed=number)]
        parts.append(write_rows(tmp_path / f"fresh-{number}.jsonl", rows))
    flags = ["verify", f"--manifest={place.calibration}", *_RUN, "--anytime"]
    assert main([*flags, f"--data={parts[0]}"]) == 0
    assert "1 run with --anytime, 20 losses of a promise at most." in capsys.readouterr().out
    assert main([*flags, f"--data={parts[0]},{parts[1]}"]) == 2
    assert "20 of 40 examples were counted by an earlier run" in capsys.readouterr().err
    assert main([*flags, f"--data={parts[1]}", "--metric=token_f1"]) == 0
    printed = capsys.readouterr().out
    assert "No promise is found broken at level 0.05, over all runs with --anytime, those to come as well;" in printed
    assert "2 runs with --anytime, 40 losses of a promise at most." in printed
    state = json.loads((place.calibration / "verification.json").read_text())
    assert (state["runs"], len(state["seen"])) == (2, 40)


def test_rows_without_ids_that_come_again_are_told(
    place: _Place, tmp_path: pathlib.Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Equal prompts without ids, which may be separate draws, give a caution; a whole repeated set is refused."""
    rows = [{key: value for key, value in row.items() if key != "id"} for row in id_rows(30, seed=3)]
    first = write_rows(tmp_path / "first.jsonl", rows[:20])
    second = write_rows(tmp_path / "second.jsonl", rows[15:])
    flags = ["verify", f"--manifest={place.calibration}", *_RUN, "--anytime"]
    assert main([*flags, f"--data={first}"]) == 0
    assert main([*flags, f"--data={first}"]) == 2
    assert "20 of 20 examples were counted by an earlier run" in capsys.readouterr().err
    assert main([*flags, f"--data={second}"]) == 0
    assert (
        "caution: 5 of 15 examples were counted by an earlier run, by prompt and references" in capsys.readouterr().err
    )


def test_fresh_losses_are_those_of_a_calibration(place: _Place, capsys: pytest.CaptureFixture[str]) -> None:
    """Verify's risks and p-values on fresh data are those of a calibration on them."""
    asked = ("--consistency=textual,risk", "--delta=0.7,0.8", "--tail=0.3")
    assert _calibrate(place, *asked, "--overwrite") == 0
    assert main(place.flags) == 0
    found = capsys.readouterr().out
    again = dataclasses.replace(place, calibrated=place.fresh, calibration=place.calibration.parent / "again")
    assert _calibrate(again, *asked) == 0
    by_key = {(e.consistency, e.loss, e.delta): e for e in _manifest(again).calibrations}
    compared = 0
    for entry in _manifest(place).calibrations:
        for tested in by_key[entry.consistency, entry.loss, entry.delta].path:
            if tested.threshold == entry.threshold:
                compared += 1
                assert f"{tested.risk:.4f}" in found
                assert f"{tested.p_value:.2g}" in found
    assert compared > 4
    assert "textual > 0.3" in found


def test_the_calibration_set_is_refused(calibrated: _Place, capsys: pytest.CaptureFixture[str]) -> None:
    """The data that chose the thresholds cannot test them, in whatever order or number of files they come."""
    rows = id_rows(40)
    parts = [write_rows(calibrated.fresh.parent / f"part{k}.jsonl", rows[::-1][k::2]) for k in range(2)]
    for data in (calibrated.calibrated, *[f"{parts[0]},{parts[1]}"]):
        assert main([*calibrated.flags, f"--data={data}"]) == 2
        assert f"--data {data}: is the calibration set itself." in capsys.readouterr().err


def test_repeated_rows_without_ids_are_recognized(tmp_path: pathlib.Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The calibration set is recognised although equal rows got numbers of their own."""
    model = write_model(tmp_path / "model", vocabulary=write_vocabulary(tmp_path / "trained.model"))
    place = _Place(
        model=model,
        calibration=tmp_path / "calibration",
        calibrated=write_rows(tmp_path / "rows.jsonl", text_rows(20)),
        fresh=tmp_path / "rows.jsonl",
    )
    assert _calibrate(place, "--delta=0.9") == 0
    assert main(place.flags) == 2
    assert "is the calibration set itself." in capsys.readouterr().err


def test_shared_prompts_are_counted(place: _Place, capsys: pytest.CaptureFixture[str]) -> None:
    """Fresh prompts that are in the calibration set are counted, or a message says that they cannot be."""
    mixed = write_rows(place.calibration / "mixed.jsonl", [*id_rows(5), *id_rows(40, seed=1)[5:]])
    assert main([*place.flags, f"--data={mixed}"]) in (0, 3)
    assert "warning: 5 of 40 prompts are in the calibration set too." in capsys.readouterr().err
    shutil.rmtree(place.calibration / "generations")
    assert main([*place.flags, f"--data={mixed}"]) in (0, 3)
    assert "is unknown: its generations are not next to the manifest" in capsys.readouterr().err


def test_clusters_and_failures_are_those_of_the_plan(
    calibrated: _Place, tmp_path: pathlib.Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Fresh examples are clustered by the plan's key, and their failures handled by the plan's rule."""
    rows = [{**row, "paragraph": index // 2} for index, row in enumerate(id_rows(40))]
    fresh = [{**row, "paragraph": index // 3} for index, row in enumerate(id_rows(30, seed=2))]
    place = dataclasses.replace(
        calibrated,
        calibration=tmp_path / "clustered",
        calibrated=write_rows(tmp_path / "rows.jsonl", rows),
        fresh=write_rows(tmp_path / "fresh.jsonl", fresh),
    )
    assert _calibrate(place, "--delta=0.9", "--cluster_key=paragraph", "--on_error=worst_case") == 0
    capsys.readouterr()
    assert main(place.flags) == 0
    assert "10 clusters, 0 failed" in capsys.readouterr().out
    assert main([*place.flags, f"--data={calibrated.fresh}"]) == 2
    assert "has no 'paragraph', by which examples were to be clustered." in capsys.readouterr().err


def test_never_exit_cannot_be_broken(place: _Place, capsys: pytest.CaptureFixture[str]) -> None:
    """Without a safe threshold there is nothing to decode, and no promise is broken."""
    manifest = _manifest(place)
    never = dataclasses.replace(
        manifest.calibrations[0],
        threshold=None,
        threshold_by_position=None,
        rule=None,
        risk=0,
        layers=manifest.model.layers,
        path=(dataclasses.replace(manifest.calibrations[0].path[0], p_value=1.0, rejected=False),),
    )
    _change(place, calibrations=(never,), plan=None)
    assert main(place.flags) == 0
    assert "Every entry of the manifest says never exit" in capsys.readouterr().out


def test_another_model_is_refused(place: _Place, tmp_path: pathlib.Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A model other than the calibrated one is refused."""
    other = write_model(tmp_path / "other", seed=1)
    assert main([*place.flags, f"--checkpoint={other}"]) == 2
    assert "Thresholds hold for no other model" in capsys.readouterr().err


def _with_own_metric(place: _Place, tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> pathlib.Path:
    """Lets half of the manifest's entries name code that leaves a mark when it is imported, and returns the mark."""
    mark = tmp_path / "imported"
    code = (
        f"open({str(mark)!r}, 'w').close()\ndef score(candidate, references):\n    return float(len(candidate) % 2)\n"
    )
    (tmp_path / "calm_beam_foreign.py").write_text(code)
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.delitem(sys.modules, "calm_beam_foreign", raising=False)
    entries = [entry for entry in _manifest(place).calibrations if entry.threshold is not None]
    own = [dataclasses.replace(entry, metric="calm_beam_foreign:score") for entry in entries[:2]]
    _change(place, calibrations=(*own, *entries[2:]), plan=None)
    return mark


def test_a_manifest_runs_no_code(
    place: _Place, tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Code that a manifest names is imported only if the caller names it too; the rest can be tested without."""
    mark = _with_own_metric(place, tmp_path, monkeypatch)
    assert main(place.flags) == 2
    message = capsys.readouterr().err
    assert "metric 'calm_beam_foreign:score' is code that the manifest names, and a manifest does not decide" in message
    assert "pass --metric=calm_beam_foreign:score,token_f1, or name the metrics to test without it." in message
    assert main([*place.flags, "--metric=calm_beam_foreign:other"]) == 2
    assert "--metric=calm_beam_foreign:other: the manifest has no entry of it, only of" in capsys.readouterr().err
    assert main([*place.flags, "--metric=token_f1"]) == 0
    assert "2 of 2 are proved again" in (printed := capsys.readouterr().out)
    assert "2 promises of other metrics were not tested." in printed
    for command in (["inspect", str(place.calibration)], ["report", f"--calibration={place.calibration}"]):
        main(command)
    assert not mark.exists()


def test_code_that_the_caller_names_is_run(
    place: _Place, tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The twin: named by the caller, the metric is imported, and its entries are tested."""
    mark = _with_own_metric(place, tmp_path, monkeypatch)
    assert main([*place.flags, "--metric=calm_beam_foreign:score"]) in (0, 3)
    assert mark.exists()
    printed = capsys.readouterr().out
    assert "2 promises" in printed or "of 2 are proved again" in printed


def test_a_metric_that_was_changed_tests_nothing(
    place: _Place, tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """A metric whose source has changed since calibration is refused."""
    _with_own_metric(place, tmp_path, monkeypatch)
    named = [*place.flags, "--metric=calm_beam_foreign:score"]
    digest = hashlib.sha256((tmp_path / "calm_beam_foreign.py").read_bytes()).hexdigest()
    software = {**_manifest(place).software, "calm_beam_foreign:score": f"sha256:{digest}"}
    _change(place, software=software)
    assert main(named) in (0, 3)
    _change(place, software={**software, "calm_beam_foreign:score": f"sha256:{'0' * 64}"})
    assert main(named) == 2
    assert 'metric "calm_beam_foreign:score": its module is now sha256:' in capsys.readouterr().err


def test_what_cannot_be_decoded_alike_is_refused(place: _Place, capsys: pytest.CaptureFixture[str]) -> None:
    """Another precision, p-value or vocabulary than the calibration's is refused."""
    manifest = _manifest(place)
    _change(place, decode=dataclasses.replace(manifest.decode, dtype="float64"))
    assert main(place.flags) == 2
    assert "dtype must be one of float32, bfloat16; got 'float64'" in capsys.readouterr().err
    _change(place, decode=dataclasses.replace(manifest.decode, dtype="bfloat16"))
    assert main([*place.flags, "--dtype=float32"]) == 2
    assert "--dtype=float32: the manifest was calibrated with bfloat16" in capsys.readouterr().err
    entry = next(entry for entry in manifest.calibrations if entry.threshold is not None)
    entries = (dataclasses.replace(entry, p_value="best"),)
    _change(place, decode=manifest.decode, calibrations=entries, plan=None)
    assert main(place.flags) == 2
    assert "the manifest was made with p-value 'best', which this calm-beam does not know." in capsys.readouterr().err
    vocabulary = write_vocabulary(place.calibration / "v.model")
    _change(place, calibrations=manifest.calibrations)
    assert main([*place.flags, f"--vocabulary={vocabulary}"]) == 2
    assert "the manifest is about token ids, without a vocabulary" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        ([], "the following arguments are required: --manifest"),
        (["--manifest={tmp}/none"], "--manifest {tmp}/none: no such file."),
        (
            ["--manifest=s3://b/m.json"],
            "--manifest s3://b/m.json: of object stores only",
        ),
        (["--manifest={manifest}"], "--data is missing: files with the examples, or --seqio_task."),
        (["--manifest={manifest}", "--data={tmp}/no.jsonl"], "--data {tmp}/no.jsonl: no such file."),
        (["--manifest={manifest}", "--alpha=0"], "--alpha must be in (0, 1), got 0."),
        (["--manifest={manifest}", "--alpha=nan"], "--alpha must be in (0, 1), got nan."),
        (["--manifest={manifest}", "--thresholds=0.5"], "unknown flag --thresholds"),
        (["--manifest={manifest}", "--schedule=decay"], "unknown flag --schedule"),
        (["--manifest={manifest}", "--data={tmp}/no.jsonl", "--runner=DataflowRunner"], "--project is missing"),
        (
            [
                "--manifest={manifest}",
                "--data={manifest}.jsonl",
                "--runner=FlinkRunner",
                "--job_endpoint=localhost:1",
                "--temp_location={tmp}/no",
            ],
            "--temp_location {tmp}/no: no such folder.",
        ),
        (["--manifest={manifest}", "--batch_size=0"], "argument --batch_size: expected a whole number of at least 1"),
        (["--manifst={manifest}"], "unknown flag --manifst. Did you mean --manifest?"),
    ],
)
def test_bad_usage(
    flags: list[str], message: str, calibrated: _Place, tmp_path: pathlib.Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Each has status 2 and says what was wrong."""
    paths = {"tmp": tmp_path, "manifest": calibrated.calibration}
    assert main(["verify", *(flag.format(**paths) for flag in flags)]) == 2
    printed = capsys.readouterr()
    assert message.format(**paths) in printed.err
    assert printed.out == ""


def test_a_changed_manifest_is_a_failure(place: _Place, capsys: pytest.CaptureFixture[str]) -> None:
    """A manifest with a number changed by hand has status 1."""
    path = place.calibration / "manifest.json"
    content = json.loads(path.read_text())
    content["calibrations"][0]["delta"] = 0.71
    path.write_text(json.dumps(content))
    assert main(place.flags) == 1
    assert "the manifest was changed after it was written" in capsys.readouterr().err


def test_a_bad_line_is_named(place: _Place, tmp_path: pathlib.Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Fresh data are checked before anything is decoded."""
    data = write_rows(tmp_path / "bad.jsonl", id_rows(150, seed=3))
    with open(data, "a", encoding="utf-8") as file:
        file.write("{}\n")
    assert main([*place.flags, f"--data={data}"]) == 2
    assert f"{data}, line 151: " in capsys.readouterr().err
