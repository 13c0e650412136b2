"""`calm-beam calibrate` from flags to files."""

import csv
import pathlib
import re
from collections.abc import Sequence

import pytest
import scipy.stats

from calm_beam.checkpoints import load_checkpoint
from calm_beam.launch.cli import main
from calm_beam.manifest import Manifest, read_manifest, without_keys
from calm_beam.metrics.squad import token_f1
from calm_beam.outputs import read_generations
from tests.builders import build_arrays, write_t5x
from tests.pipelines import (
    CONFIG,
    SETTINGS,
    SHORT_FLAGS,
    id_rows,
    text_rows,
    without_time,
    write_model,
    write_rows,
    write_vocabulary,
)

_ASKED = ("--consistency=textual,risk", "--metric=token_f1", "--delta=0.3,0.6", "--epsilon=0.1")


@pytest.fixture(autouse=True)
def _wide_terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "200")


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> pathlib.Path:
    """A tiny random model without a vocabulary."""
    return write_model(tmp_path_factory.mktemp("calibrate") / "model")


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> pathlib.Path:
    """Thirty prompts of token ids, four of them repeated."""
    return write_rows(tmp_path_factory.mktemp("calibrate") / "rows.jsonl", id_rows(30))


def between(candidate: str, references: Sequence[str]) -> float:
    """Returns a score between 0 and 1, and so losses between them."""
    return 0.5 if len(candidate) % 2 else 0.25


def _calibrate(model: pathlib.Path, data: pathlib.Path, output: pathlib.Path, *flags: str) -> int:
    return main(
        ["calibrate", f"--checkpoint={model}", f"--data={data}", f"--output={output}", *SHORT_FLAGS, *_ASKED, *flags]
    )


def _table(output: pathlib.Path) -> list[dict[str, str]]:
    with open(output / "risk_table.csv", encoding="utf-8", newline="") as file:
        return list(csv.DictReader(file))


def _check_choices(manifest: Manifest, table: list[dict[str, str]]) -> None:
    """Checks that every choice is the last threshold before the first failure, by the table alone."""
    for entry in manifest.calibrations:
        key = (entry.consistency, entry.metric, str(entry.delta), str(entry.epsilon))
        rows = [row for row in table if (row["consistency"], row["metric"], row["delta"], row["epsilon"]) == key]
        assert [float(row["threshold"]) for row in rows] == list(SETTINGS.thresholds)
        chosen = None
        for row in rows:
            if float(row["p_value"]) > entry.epsilon:
                break
            chosen = row
        assert entry.threshold == (float(chosen["threshold"]) if chosen else None)
        assert entry.risk == (float(chosen["risk"]) if chosen else 0)
        assert entry.layers == (float(chosen["layers"]) if chosen else CONFIG.num_decoder_layers)


def test_end_to_end(
    model: pathlib.Path,
    data: pathlib.Path,
    tmp_path: pathlib.Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """A run writes generations, a risk table, a manifest whose choices follow from the table, and the report.

    For that, the model is not loaded again.
    """
    output = tmp_path / "deep" / "out"
    monkeypatch.setattr("calm_beam.launch.report.command._model", lambda *_: pytest.fail("loaded again"))
    assert _calibrate(model, data, output) == 0
    assert {path.name for path in output.iterdir()} == {
        "generations",
        "manifest.json",
        "plans",
        "report.html",
        "risk_table.csv",
    }
    manifest = read_manifest(output / "manifest.json", model_fingerprint=load_checkpoint(model).fingerprint())
    assert len(manifest.calibrations) == 4
    assert len({entry.threshold for entry in manifest.calibrations}) > 1
    table = _table(output)
    assert len(table) == 4 * len(SETTINGS.thresholds)
    _check_choices(manifest, table)
    stored = [item for path in output.glob("generations/*/*.parquet") for item in read_generations(path)]
    assert sorted(item.example.id for item in stored) == sorted(row["id"] for row in id_rows(30))
    printed = capsys.readouterr()
    assert "not counted" not in printed.err
    assert "30 examples in" in printed.out
    assert "; 4 repeated inputs, 0 prompts cut, 0 failed." in printed.out
    assert f"Manifest: {output / 'manifest.json'}" in printed.out


def test_manifest_records_what_was_asked(model: pathlib.Path, data: pathlib.Path, tmp_path: pathlib.Path) -> None:
    """The manifest holds flags that change a token, and the data patterns as given."""
    flags = ("--schedule=decay", "--tau=4", "--min_exit_layer=2", "--exit_interval=2", "--p_value=hoeffding")
    more = ("--state_propagation=from_first_exit", "--risk_loss=relu", "--procedure=holm", "--seed=5")
    assert _calibrate(model, data, tmp_path / "out", *flags, *more) == 0
    manifest = read_manifest(tmp_path / "out" / "manifest.json")
    decode = manifest.decode
    assert (decode.schedule, decode.tau, decode.min_exit_layer, decode.exit_interval) == ("decay", 4.0, 2, 2)
    assert (decode.state_propagation, decode.confidence) == ("from_first_exit", "softmax")
    assert (decode.max_input_length, decode.max_decode_length) == (32, 6)
    assert manifest.data.patterns == (str(data),)
    assert manifest.model.layers == 4
    assert {(entry.p_value, entry.procedure) for entry in manifest.calibrations} == {("hoeffding", "holm")}
    assert [entry.loss for entry in manifest.calibrations] == ["dissimilarity"] * 2 + ["relu"] * 2
    assert manifest.plan is not None
    assert manifest.plan.salt == "calm-beam/5"
    assert manifest.plan.thresholds == SETTINGS.thresholds
    (outputs,) = (tmp_path / "out" / "generations").iterdir()
    assert manifest.plan.outputs == outputs.name
    assert re.fullmatch(r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\dZ", manifest.created)
    assert {"calm-beam", "python", "jax", "apache-beam"} <= manifest.software.keys()


def test_what_cannot_be_served_is_said(
    model: pathlib.Path, data: pathlib.Path, tmp_path: pathlib.Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Static layers and the oracle are calibrated like any measure; a caution says that the oracle cannot be served."""
    for confidence, propagation, is_servable in (("oracle", "full_cache", False), ("static", "projected", True)):
        output = tmp_path / confidence
        flags = (f"--confidence={confidence}", f"--state_propagation={propagation}")
        assert _calibrate(model, data, output, *flags) == 0
        expected = f"caution: confidence {confidence} with state propagation {propagation} runs every layer for every"
        assert (expected in capsys.readouterr().err) is not is_servable
        decode = read_manifest(output / "manifest.json").decode
        assert (decode.confidence, decode.state_propagation) == (confidence, propagation)


def test_joint_guarantee(
    model: pathlib.Path, data: pathlib.Path, tmp_path: pathlib.Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """With --joint the four entries share epsilon, and manifest and terminal say that they hold together."""
    assert _calibrate(model, data, tmp_path / "out", "--joint", "--verbose") == 0
    manifest = read_manifest(tmp_path / "out" / "manifest.json")
    assert [entry.epsilon for entry in manifest.calibrations] == [0.025] * 4
    assert manifest.plan is not None
    assert manifest.plan.joint_epsilon == 0.1
    assert manifest.guarantee.startswith("All calibration entries hold together: with probability at least 1 - 0.1 ")
    shown = " ".join(capsys.readouterr().out.split())
    assert "proved, all together with probability at least 90 %" in shown
    assert without_keys(manifest.guarantee) in shown


def test_tails_are_held_besides_the_mean(
    model: pathlib.Path, data: pathlib.Path, tmp_path: pathlib.Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A tail's risk is the share of outputs with a larger loss, as in the generations; all outputs name the tail."""
    assert _calibrate(model, data, tmp_path, "--consistency=textual", "--delta=0.6", "--tail=0.3", "--verbose") == 0
    shown = capsys.readouterr().out
    assert "textual > 0.3" in shown
    assert "textual by exact_binomial of dissimilarity losses above 0.3" in shown
    mean, tail = read_manifest(tmp_path / "manifest.json").calibrations
    assert (mean.loss, tail.loss, tail.p_value) == ("dissimilarity", "dissimilarity>0.3", "exact_binomial")
    outputs = [item.outputs for path in tmp_path.glob("generations/*/*.parquet") for item in read_generations(path)]
    for lane, step in enumerate(tail.path, start=1):
        lost = [1 - token_f1(texts[lane].text, [texts[0].text]) > 0.3 for texts in outputs]
        assert step.risk == pytest.approx(sum(lost) / len(lost), abs=1e-9)
        assert step.p_value == pytest.approx(scipy.stats.binom.cdf(sum(lost), len(lost), 0.6))
    assert "lose more than 0.3 token_f1" in (tmp_path / "report.html").read_text(encoding="utf-8")


def test_tails_of_clusters_are_no_coins(
    model: pathlib.Path, tmp_path: pathlib.Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The binomial test is refused for tails of clusters before decoding; another test is their default."""
    data = write_rows(tmp_path / "rows.jsonl", [{**row, "page": number // 3} for number, row in enumerate(id_rows(30))])
    flags = ("--cluster_key=page", "--tail=0.3")
    assert _calibrate(model, data, tmp_path / "out", *flags, "--metric=exact_match", "--p_value=exact_binomial") == 2
    assert "a tail of clusters is a share of each cluster's outputs" in capsys.readouterr().err
    assert not (tmp_path / "out").exists()
    assert _calibrate(model, data, tmp_path / "out", *flags) == 0
    assert {entry.p_value for entry in read_manifest(tmp_path / "out" / "manifest.json").calibrations} == {"star_bets"}


def test_clusters(model: pathlib.Path, tmp_path: pathlib.Path, capsys: pytest.CaptureFixture[str]) -> None:
    """With --cluster_key the tests count clusters, and manifest and terminal say so."""
    rows = [{**row, "page": index // 5} for index, row in enumerate(id_rows(30))]
    data = write_rows(tmp_path / "rows.jsonl", rows)
    assert _calibrate(model, data, tmp_path / "out", "--cluster_key=page", "--p_value=wsr") == 0
    manifest = read_manifest(tmp_path / "out" / "manifest.json")
    assert (manifest.data.examples, manifest.data.clusters) == (30, 6)
    assert {row["n"] for row in _table(tmp_path / "out")} == {"6"}
    assert "30 examples in 6 clusters in" in capsys.readouterr().out


def test_fractions_are_refused_by_the_binomial_test(
    model: pathlib.Path, data: pathlib.Path, tmp_path: pathlib.Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Losses between 0 and 1 end a run that planned the binomial p-value; known metrics are refused before that."""
    binomial, flags = "--p_value=exact_binomial", ("--p_value=exact_binomial", "--risk_loss=relu")
    assert _calibrate(model, data, tmp_path / "out", *flags) == 2
    message = capsys.readouterr().err
    assert "--p_value=exact_binomial is for losses of 0 and 1 only, and those of token_f1 lie in between." in message
    assert _calibrate(model, data, tmp_path / "out", *flags, "--metric=tests.launch.test_calibrate:between") == 1
    message = capsys.readouterr().err.splitlines()[-1]
    assert message.startswith("calm-beam calibrate: exact_binomial is for losses of 0 and 1 only, but at one threshold")
    assert {path.name for path in (tmp_path / "out").iterdir()} == {"generations", "plans"}
    # Every output of the model scores 0.
    exact = ("--metric=exact_match", "--consistency=textual")
    assert _calibrate(model, data, tmp_path / "out", binomial, *exact, "--resume") == 0


def test_an_earlier_result_is_kept(
    model: pathlib.Path, data: pathlib.Path, tmp_path: pathlib.Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A directory with a manifest is refused untouched; with --overwrite the result is the same but for its time."""
    output = tmp_path / "out"
    assert _calibrate(model, data, output) == 0
    content = {path: path.read_bytes() for path in output.rglob("*") if path.is_file()}
    first = read_manifest(output / "manifest.json")
    capsys.readouterr()
    assert _calibrate(model, data, output) == 2
    message = f"--output {output}: holds a manifest already. Choose another directory, or pass --overwrite."
    assert message in capsys.readouterr().err
    assert {path: path.read_bytes() for path in output.rglob("*") if path.is_file()} == content
    assert _calibrate(model, data, output, "--overwrite") == 0
    assert without_time(read_manifest(output / "manifest.json")) == without_time(first)


def test_no_safe_threshold_is_a_result(
    model: pathlib.Path, data: pathlib.Path, tmp_path: pathlib.Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A tolerance that nothing meets gives status 0 and "never exit"."""
    assert _calibrate(model, data, tmp_path / "out", "--delta=0.001") == 0
    manifest = read_manifest(tmp_path / "out" / "manifest.json")
    assert [entry.threshold for entry in manifest.calibrations] == [None, None]
    assert "never exit" in capsys.readouterr().out


def test_texts_from_a_t5x_checkpoint(tmp_path: pathlib.Path) -> None:
    """Text prompts are calibrated with the vocabulary next to T5X checkpoint folders, the latest of which is used."""
    write_t5x(tmp_path / "model", build_arrays(CONFIG, 1), step=900)
    latest = write_t5x(tmp_path / "model", build_arrays(CONFIG, 2), step=1000)
    write_vocabulary(tmp_path / "model" / "sentencepiece.model")
    data = write_rows(tmp_path / "rows.jsonl", text_rows(10))
    assert _calibrate(tmp_path / "model", data, tmp_path / "out", "--task_prefix=the ") == 0
    manifest = read_manifest(tmp_path / "out" / "manifest.json")
    assert manifest.model.uri == str(latest)
    assert manifest.vocabulary is not None
    assert (manifest.data.examples, manifest.data.duplicates, manifest.decode.task_prefix) == (10, 2, "the ")


def test_several_files_and_globs(model: pathlib.Path, tmp_path: pathlib.Path) -> None:
    """Patterns may overlap: each file is read once."""
    rows = id_rows(6)
    write_rows(tmp_path / "a1.jsonl", rows[:2])
    write_rows(tmp_path / "a2.jsonl", rows[2:5])
    write_rows(tmp_path / "b.jsonl", rows[5:])
    pattern = pathlib.Path(f"{tmp_path}/a*.jsonl,{tmp_path}/a1.jsonl,{tmp_path}/[bc].jsonl")
    assert _calibrate(model, pattern, tmp_path / "out") == 0
    manifest = read_manifest(tmp_path / "out" / "manifest.json")
    assert manifest.data.examples == 6
    assert manifest.data.patterns == tuple(str(pattern).split(","))


def test_own_metrics_are_imported(model: pathlib.Path, data: pathlib.Path, tmp_path: pathlib.Path) -> None:
    """A metric named module:function gives what the same metric gives under its own name."""
    assert _calibrate(model, data, tmp_path / "own", "--metric=calm_beam.metrics.squad:token_f1") == 0
    assert _calibrate(model, data, tmp_path / "known") == 0
    own, known = _table(tmp_path / "own"), _table(tmp_path / "known")
    assert {row["metric"] for row in own} == {"calm_beam.metrics.squad:token_f1"}
    software = read_manifest(tmp_path / "own" / "manifest.json").software
    assert software["calm_beam.metrics.squad:token_f1"].startswith("sha256:")
    assert [row["loss_sum"] for row in own] == [row["loss_sum"] for row in known]


def test_default_flags_name_the_embedded_task(
    tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Without model and data, the demo model and data are used, and stderr says so."""
    from calm_beam.inputs.demo import embedded

    monkeypatch.setattr(embedded, "MODEL", tmp_path / "none")
    main(["calibrate", f"--output={tmp_path / 'out'}"])
    assert "calibrating the demo model on the demo data" in capsys.readouterr().err


def test_overwriting_leaves_no_earlier_generation(
    model: pathlib.Path, data: pathlib.Path, tmp_path: pathlib.Path
) -> None:
    """Overwriting removes all earlier files, also with fewer examples or another number of shards."""
    fewer = write_rows(tmp_path / "fewer.jsonl", id_rows(30)[:5])
    output = tmp_path / "out"
    assert _calibrate(model, data, output, "--num_shards=3") == 0
    assert _calibrate(model, fewer, output, "--num_shards=2", "--overwrite") == 0
    ids = [item.example.id for path in output.glob("generations/*/*.parquet") for item in read_generations(path)]
    assert len(ids) == len(set(ids)) == 5
