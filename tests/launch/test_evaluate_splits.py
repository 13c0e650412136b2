"""`calm-beam evaluate` without `--experiment`: from stored generations to tables, files and figures."""

import csv
import dataclasses
import json
import pathlib
import re

import pyarrow.parquet
import pytest

from calm_beam.errors import UsageError
from calm_beam.evaluation.outcomes import read_grid, read_trials
from calm_beam.evaluation.splits import Splits, find_measures
from calm_beam.inputs.files import digest_of_files
from calm_beam.launch.cli import main
from calm_beam.launch.evaluate.splits.command import _FILES
from calm_beam.manifest.plan_list import PlanList
from calm_beam.outputs import DecodeJob, FinishedSweep
from calm_beam.precision import Precision
from calm_beam.storage import make_folder
from tests.pipelines import SHORT_FLAGS, id_rows, text_rows, write_model, write_rows, write_vocabulary

pytestmark = pytest.mark.timeout(300)

_COUNT = 40


@pytest.fixture(autouse=True)
def _wide_terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "160")


@pytest.fixture(scope="module")
def swept(tmp_path_factory: pytest.TempPathFactory) -> pathlib.Path:
    """A folder with a model, and calibrations of it on text by two measures and the oracle."""
    folder = tmp_path_factory.mktemp("splits")
    vocabulary = write_vocabulary(folder / "pieces.model")
    model = write_model(folder / "model", vocabulary=vocabulary)
    # Every prompt once.
    rows = [row for index, row in enumerate(text_rows(_COUNT * 5 // 4)) if index % 5 != 4]
    data = write_rows(folder / "rows.jsonl", [{**row, "id": f"row-{index}"} for index, row in enumerate(rows)])
    for measure in ("softmax", "state", "oracle"):
        flags = (*SHORT_FLAGS, "--metric=token_f1", f"--confidence={measure}", f"--output={folder / measure}")
        assert main(["calibrate", f"--checkpoint={model}", f"--data={data}", *flags]) == 0
    return folder


def _evaluate(swept: pathlib.Path, output: pathlib.Path, *flags: str, measures: str = "softmax,state,oracle") -> int:
    generations = ",".join(str(swept / name) for name in measures.split(","))
    own = ("--trials=6", "--calibration_share=0.7", "--metric=token_f1", "--delta=0.5,0.9", "--curve_delta=0.3,0.9")
    return main(["evaluate", f"--generations={generations}", f"--output={output}", *own, *flags])


def _rows(path: pathlib.Path) -> list[dict[str, str]]:
    with open(path, encoding="utf-8", newline="") as file:
        return list(csv.DictReader(file))


def test_one_tolerance_is_drawn_over_thresholds(swept: pathlib.Path, tmp_path: pathlib.Path) -> None:
    """One tolerance is drawn over thresholds, since over tolerances it would be a dot; several are not."""
    titles = []
    for deltas in ("0.9", "0.5,0.9"):
        output = tmp_path / deltas
        own = ("--trials=3", "--metric=token_f1", f"--delta={deltas}", f"--curve_delta={deltas}")
        assert main(["evaluate", f"--generations={swept / 'softmax'}", f"--output={output}", *own]) == 0
        page = (output / "splits.html").read_text(encoding="utf-8")
        titles.append(re.findall(r"Risk and layers over the (\w+)", page)[0])
        chart = page[page.index("Risk and layers") : page.index("Quality at fewer layers")]
        # A mark for each threshold, or tolerance, in both charts of both losses, and one in the legend of each loss.
        thresholds = len([row for row in _rows(output / "splits_grid.csv") if row["threshold"]]) // 2
        assert chart.count('class="dot"') == 2 * 2 * (thresholds if deltas == "0.9" else 2) + 2
    assert titles == ["threshold", "tolerance"]


def test_all_measures_in_one_run(
    swept: pathlib.Path, tmp_path: pathlib.Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A line for each loss, tolerance and measure; every trial and the whole set in files; the oracle as a bound."""
    output = tmp_path / "out"
    assert _evaluate(swept, output, "--speedup", "--speedup_prompts=3", "--p_value=hoeffding_bentkus") == 0
    assert {path.name for path in output.iterdir()} == set(_FILES)
    table = _rows(output / "splits.csv")
    assert [(row["consistency"], row["delta"], row["measure"]) for row in table] == [
        (consistency, delta, measure)
        for measure in ("softmax", "state")
        for consistency in ("textual", "risk")
        for delta in ("0.5", "0.9")
    ]
    assert {(row["loss"], row["trials"]) for row in table} == {("dissimilarity", "6"), ("relu", "6")}
    assert {row["delta"] for row in _rows(output / "splits_curves.csv")} == {"0.3", "0.5", "0.9"}
    trials = read_trials(str(output / "splits_trials.parquet"))
    # Two measures, two losses, three tolerances.
    assert len(trials) == 6 * 2 * 2 * 3
    assert {trial.n_calibration + trial.n_test for trial in trials} == {_COUNT}
    expected = Splits(trials=6, calibration_share=0.7, seed=0).parts([f"row-{index}" for index in range(_COUNT)])
    assert {(trial.trial, trial.n_calibration) for trial in trials} == set(enumerate(expected[:, :-1].sum(axis=0)))
    for row in table:
        # Where a line has a threshold, its speedup was measured.
        assert (row["speedup"] != "") == (row["threshold"] != "")
        assert float(row["exceeding_low"]) <= float(row["exceeding_share"]) <= float(row["exceeding_high"])
        assert float(row["flops_calm_table"]) <= float(row["flops_appendix_b"])
    grid = read_grid(str(output / "splits_grid.parquet"))
    assert {row.measure for row in grid} == {"softmax", "state", "oracle"}
    page = (output / "splits.html").read_text(encoding="utf-8")
    # Every trial of the table, the table, its choices, and the whole set.
    assert page.count("<tr>") == 4 + 6 * len(table) + 2 * len(table) + len(grid)
    assert str(swept) not in page
    full = [row for row in grid if row.threshold is None]
    assert {(row.layers, row.risk, row.flops_appendix_b, row.examples) for row in full} == {(4.0, 0.0, 1.0, _COUNT)}
    assert len({row.bleu for row in full}) == 1
    assert full[0].bleu is not None
    printed = capsys.readouterr().out
    assert "textual consistency, token_f1 (dissimilarity loss)" in printed
    # Names are not cut, even with all columns.
    assert printed.count("softmax") >= 4
    assert printed.count("state") >= 4
    assert f"of the full model's {_COUNT}, at most" in printed
    record = json.loads((output / "splits.json").read_text(encoding="utf-8"))
    assert [measure["name"] for measure in record["measures"]] == ["softmax", "state", "oracle"]
    assert record["splits"] == {"trials": 6, "calibration_share": 0.7, "seed": 0}


def test_the_whole_set_is_that_of_the_calibration(swept: pathlib.Path, tmp_path: pathlib.Path) -> None:
    """Risk and layers at every threshold are those of the calibration's own risk table."""
    assert _evaluate(swept, tmp_path / "out", measures="softmax") == 0
    calibrated = {
        float(row["threshold"]): (float(row["risk"]), float(row["layers"]))
        for row in _rows(swept / "softmax" / "risk_table.csv")
    }
    grid = read_grid(str(tmp_path / "out" / "splits_grid.parquet"))
    textual = {row.threshold: (row.risk, row.layers) for row in grid if row.consistency == "textual"}
    assert {key: value for key, value in textual.items() if key is not None} == calibrated


def test_tails_are_those_of_the_calibration(
    swept: pathlib.Path, tmp_path: pathlib.Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """With --tail, shares of outputs with a larger loss are listed next to the means, and equal calibrate's."""
    asked = ("--metric=token_f1", "--consistency=textual,risk", "--tail=0.3")
    stored = f"--generations={swept / 'softmax'}"
    assert main(["calibrate", stored, f"--output={tmp_path / 'calibrated'}", "--delta=0.9", *asked]) == 0
    calibrated = {
        (row["loss"], float(row["threshold"])): float(row["risk"])
        for row in _rows(tmp_path / "calibrated" / "risk_table.csv")
        if ">" in row["loss"]
    }
    assert _evaluate(swept, tmp_path / "out", *asked, measures="softmax") == 0
    grid = read_grid(str(tmp_path / "out" / "splits_grid.parquet"))
    found = {(row.loss, row.threshold): row.risk for row in grid if ">" in row.loss and row.threshold is not None}
    assert found == calibrated
    assert {loss for loss, _ in found} == {"dissimilarity>0.3", "relu>0.3"}
    table = _rows(tmp_path / "out" / "splits.csv")
    assert {row["p_value"] for row in table if ">" in row["loss"]} == {"exact_binomial"}
    assert "textual consistency, token_f1 (dissimilarity>0.3 loss)" in capsys.readouterr().out


def test_results_do_not_depend_on_workers(swept: pathlib.Path, tmp_path: pathlib.Path) -> None:
    """Repeated bundles and another batch composition change no number of any trial."""
    for name, measures, flags in (
        ("one", "softmax", ()),
        ("two", "state,softmax", ("--direct_runner_bundle_repeat=1",)),
    ):
        assert _evaluate(swept, tmp_path / name, *flags, measures=measures) == 0
    alone, beside = (
        [trial for trial in read_trials(str(tmp_path / name / "splits_trials.parquet")) if trial.measure == "softmax"]
        for name in ("one", "two")
    )
    assert alone == beside


@pytest.mark.slow
def test_clusters_are_split_as_a_whole(tmp_path: pathlib.Path) -> None:
    """Examples of one cluster count as one unit, in one part, with the mean of their losses."""
    rows = [{**row, "topic": f"topic-{index // 4}"} for index, row in enumerate(id_rows(24))]
    data = write_rows(tmp_path / "rows.jsonl", rows)
    model = write_model(tmp_path / "model")
    flags = (*SHORT_FLAGS, "--metric=token_f1", "--cluster_key=topic", f"--output={tmp_path / 'softmax'}")
    assert main(["calibrate", f"--checkpoint={model}", f"--data={data}", *flags]) == 0
    assert _evaluate(tmp_path, tmp_path / "out", measures="softmax") == 0
    trials = read_trials(str(tmp_path / "out" / "splits_trials.parquet"))
    members = Splits(trials=6, calibration_share=0.7, seed=0).parts([f"topic-{index}" for index in range(6)])
    assert {(trial.trial, trial.n_calibration) for trial in trials} == set(enumerate(members[:, :-1].sum(axis=0)))
    calibrated = {row["threshold"]: float(row["risk"]) for row in _rows(tmp_path / "softmax" / "risk_table.csv")}
    grid = read_grid(str(tmp_path / "out" / "splits_grid.parquet"))
    assert {
        str(row.threshold): row.risk for row in grid if row.consistency == "textual" and row.threshold is not None
    } == calibrated
    assert {row.n for row in grid} == {6}


@pytest.mark.slow
def test_operations_are_left_out_without_the_model(tmp_path: pathlib.Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Generations whose model is gone are split without operation counts, and a message says why."""
    model = write_model(tmp_path / "model")
    data = write_rows(tmp_path / "rows.jsonl", id_rows(24))
    flags = (*SHORT_FLAGS, "--metric=token_f1", f"--output={tmp_path / 'softmax'}")
    assert main(["calibrate", f"--checkpoint={model}", f"--data={data}", *flags]) == 0
    (tmp_path / "model").rename(tmp_path / "elsewhere")
    assert _evaluate(tmp_path, tmp_path / "out", measures="softmax") == 0
    assert "operations are not counted" in capsys.readouterr().err
    columns = pyarrow.parquet.read_table(tmp_path / "out" / "splits_trials.parquet").to_pydict()
    assert set(columns["flops_appendix_b"]) == {None}
    assert _evaluate(tmp_path, tmp_path / "again", f"--checkpoint={tmp_path / 'elsewhere'}", measures="softmax") == 0
    assert all(float(row["flops_appendix_b"]) > 0 for row in _rows(tmp_path / "again" / "splits.csv"))


@pytest.mark.slow
def test_model_and_data_are_swept_first(tmp_path: pathlib.Path, capsys: pytest.CaptureFixture[str]) -> None:
    """With a model and data instead of generations, each measure is decoded below the output directory."""
    model = write_model(tmp_path / "model")
    data = write_rows(tmp_path / "rows.jsonl", id_rows(24))
    own = ("--trials=3", "--metric=token_f1", "--delta=0.9", "--curve_delta=0.9", "--confidence=softmax,state")
    output = tmp_path / "out"
    assert main(["evaluate", f"--checkpoint={model}", f"--data={data}", f"--output={output}", *SHORT_FLAGS, *own]) == 0
    assert {row["measure"] for row in _rows(output / "splits.csv")} == {"softmax", "state"}
    folder = _stored(output / "sweeps" / "state")
    assert {path.name for path in (output / "sweeps" / "state").iterdir()} == {"generations", "plans"}
    written = {path: path.stat().st_mtime_ns for path in folder.glob("*.parquet")}
    # Data files are compared, not derived ones: a calibration of the same files is of the same data.
    assert PlanList(str(output / "sweeps" / "state")).data_of_outputs() == digest_of_files([str(data)])
    capsys.readouterr()
    flags = ("evaluate", f"--checkpoint={model}", f"--data={data}", f"--output={output}", *SHORT_FLAGS, *own)
    assert main([*flags, "--overwrite"]) == 0
    assert {path: path.stat().st_mtime_ns for path in folder.glob("*.parquet")} == written
    assert main([*flags, "--overwrite", "--max_decode_length=5"]) == 2
    error = capsys.readouterr().err
    assert f"sweep softmax: --resume: {_stored(output / 'sweeps' / 'softmax')} was begun in another way" in error
    assert f"repeat that run as it was, or remove {output / 'sweeps' / 'softmax'} to begin again." in error


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (("--trials=0",), "--trials: expected a whole number of at least 1, got '0'"),
        (("--calibration_share=80",), "calibration_share must be in (0, 1), got 80.0"),
        (("--p_value=wsr",), "--p_value=wsr needs every single loss in an order of its own"),
        (("--delta=5",), "delta must be in (0, 1), got 5"),
        (("--metric=rogue_l",), 'metric "rogue_l" is not known. Did you mean "rouge_l"?'),
        (("--runner=DataflowRunner",), "--project is missing: the id of the Google Cloud project"),
        (("--trails=3",), "unknown flag --trails. Did you mean --trials?"),
        (("--checkpoint=nowhere",), "--checkpoint nowhere:"),
        (
            ("--runner=DataflowRunner", "--template_location=gs://b/t"),
            "--template_location: evaluate reads back what its workers have done, which a template cannot.",
        ),
        (("--accelerator=nvidia-l4",), "--accelerator decides what is decoded, and --generations="),
        (("--confidence=state",), "--confidence decides what is decoded, and --generations="),
        (("--data", "x.jsonl"), "--data decides what is decoded, and --generations="),
        (("--generations=nowhere",), "no decode.json there and no generations below it"),
    ],
)
def test_bad_input(
    swept: pathlib.Path,
    tmp_path: pathlib.Path,
    capsys: pytest.CaptureFixture[str],
    flags: tuple[str, ...],
    message: str,
) -> None:
    """Refused before anything is read or written, with what was expected."""
    assert _evaluate(swept, tmp_path / "out", *flags, measures="softmax") == 2
    assert message in capsys.readouterr().err
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    ("measures", "message"),
    [
        ("softmax,softmax", "softmax is there twice. Name each way of exiting once."),
        ("oracle", "nothing can be served by oracle"),
    ],
)
def test_measures_that_cannot_be_compared(
    swept: pathlib.Path, tmp_path: pathlib.Path, capsys: pytest.CaptureFixture[str], measures: str, message: str
) -> None:
    """Each way of exiting comes once, and at least one of them can be served."""
    assert _evaluate(swept, tmp_path / "out", measures=measures) == 2
    assert message in capsys.readouterr().err


def test_another_data_set_is_refused(
    swept: pathlib.Path, tmp_path: pathlib.Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Measures of other data files are not compared, nor are files whose examples have changed."""
    data = write_rows(tmp_path / "rows.jsonl", [{**row, "id": str(index)} for index, row in enumerate(text_rows(8))])
    flags = (*SHORT_FLAGS, "--metric=token_f1", "--confidence=state", f"--output={tmp_path / 'other'}")
    assert main(["calibrate", f"--checkpoint={swept / 'model'}", f"--data={data}", *flags]) == 0
    both = f"--generations={swept / 'softmax'},{tmp_path / 'other'}"
    assert main(["evaluate", both, f"--output={tmp_path / 'out'}", "--metric=token_f1"]) == 2
    assert "Measures are compared on the same model and data." in capsys.readouterr().err


def test_another_precision_is_refused(swept: pathlib.Path, tmp_path: pathlib.Path) -> None:
    """Measures of another precision are refused: in bfloat16 the full model is another one."""
    softmax, state = (_job(swept / name) for name in ("softmax", "state"))
    rounded = dataclasses.replace(state.settings, precision=Precision(dtype="bfloat16"))
    other = dataclasses.replace(state, settings=rounded)
    for job, name in ((softmax, "softmax"), (other, "other")):
        folder = str(tmp_path / name)
        make_folder(folder)
        job.write(folder)
        FinishedSweep.of([], job=job.digest(), examples=0).write(folder)
    with pytest.raises(UsageError, match=r"dtype is 'bfloat16' in .*other, but 'float32' in"):
        find_measures([str(tmp_path / "softmax"), str(tmp_path / "other")])


def _job(output: pathlib.Path) -> DecodeJob:
    return DecodeJob.read(str(_stored(output)))


def _stored(output: pathlib.Path) -> pathlib.Path:
    (folder,) = (output / "generations").iterdir()
    return folder


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (("--data=rows.jsonl",), "--checkpoint is missing: the folder of the model."),
        (("--checkpoint=model",), "sweep softmax: --data is missing: files with the examples, or --seqio_task."),
        (("--checkpoint=model", "--data=rows.jsonl", "--token_from=last_layer"), "so there is nothing to compare."),
    ],
)
def test_sweeps_that_are_not_begun(
    swept: pathlib.Path, capsys: pytest.CaptureFixture[str], flags: tuple[str, ...], message: str
) -> None:
    """Sweeps with invalid settings are refused before anything is decoded."""
    here = [flag.replace("=model", f"={swept / 'model'}").replace("=rows", f"={swept / 'rows'}") for flag in flags]
    assert main(["evaluate", f"--output={swept / 'none'}", "--confidence=softmax", "--metric=token_f1", *here]) == 2
    assert message in capsys.readouterr().err
    assert not (swept / "none").exists()


def test_an_earlier_result_stays(
    swept: pathlib.Path, tmp_path: pathlib.Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """An earlier result is replaced only with --overwrite."""
    assert _evaluate(swept, tmp_path, "--trials=2", measures="softmax") == 0
    assert _evaluate(swept, tmp_path, "--trials=3", measures="softmax") == 2
    assert "holds splits.csv already. Choose another directory, or pass --overwrite." in capsys.readouterr().err
    assert _evaluate(swept, tmp_path, "--trials=3", "--overwrite", measures="softmax") == 0
    assert {row["trials"] for row in _rows(tmp_path / "splits.csv")} == {"3"}
