"""`calm-beam evaluate`: each experiment from flags to files, and errors for bad input."""

import csv
import importlib.util
import json
import pathlib
import re
from collections.abc import Callable, Sequence
from typing import Any

import pytest

from calm_beam.checkpoints import load_checkpoint
from calm_beam.evaluation.sensitivity import PerturbationDecoder
from calm_beam.exits.propagations import PROPAGATIONS
from calm_beam.launch.cli import main
from calm_beam.launch.evaluate.experiments import PreparedSweeps, prepared_experiment
from calm_beam.launch.evaluate.request import REQUESTS, TradeoffRequest
from calm_beam.launch.run_sweep import prepare_task
from tests.builders import build_config
from tests.pipelines import BROKEN_ID, id_rows, text_rows, write_model, write_rows, write_vocabulary

_SHORT = ("--max_input_length=32", "--max_decode_length=6", "--batch_size=4", "--metric=token_f1")
_FEW_POSITIONS = ("--experiment=sensitivity", "--positions=0-2,5", "--rank=3")
_FEW_THRESHOLDS = ("--experiment=tradeoff", "--confidence=softmax,state", "--thresholds=0.5,0")


@pytest.fixture(autouse=True)
def _wide_terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "400")


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> pathlib.Path:
    """A tiny random model without a vocabulary."""
    return write_model(tmp_path_factory.mktemp("evaluate") / "model")


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> pathlib.Path:
    """Ten prompts of token ids with references."""
    return write_rows(tmp_path_factory.mktemp("evaluate") / "rows.jsonl", id_rows(10))


def _evaluate(model: pathlib.Path, data: pathlib.Path, output: pathlib.Path, *flags: str) -> int:
    return main(["evaluate", f"--checkpoint={model}", f"--data={data}", f"--output={output}", *_SHORT, *flags])


def _table(path: pathlib.Path) -> list[dict[str, str]]:
    with open(path, encoding="utf-8", newline="") as file:
        return list(csv.DictReader(file))


def _checked_files(output: pathlib.Path, name: str) -> dict[str, Any]:
    """Returns the JSON of an experiment, after checking that its CSV holds the same and its plot is an image."""
    assert {path.name for path in output.iterdir()} == {f"{name}.csv", f"{name}.json", f"{name}.svg", f"{name}.html"}
    content: dict[str, Any] = json.loads((output / f"{name}.json").read_text(encoding="utf-8"))
    as_text = [
        {column: "" if value is None else str(value) for column, value in row.items()} for row in content["rows"]
    ]
    assert as_text == _table(output / f"{name}.csv")
    assert (output / f"{name}.svg").read_text(encoding="utf-8").startswith("<?xml")
    page = (output / f"{name}.html").read_text(encoding="utf-8")
    assert page.count("<tr>") == 1 + len(content["rows"])
    assert page.count("<svg viewBox") >= 1
    (found,) = re.findall(r'<p class="sentence">(.*?)</p>', page)
    # Every other part is a number that matters.
    assert re.fullmatch(r"[^<]+(<strong><bdi>[^<]*\d[^<]*</bdi></strong>[^<]+)+", found)
    return content


@pytest.mark.slow
def test_propagation(
    model: pathlib.Path, data: pathlib.Path, tmp_path: pathlib.Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The full model, the oracle with every propagation, and the noisy cache at each threshold, in table and files."""
    output = tmp_path / "deep" / "out"
    assert _evaluate(model, data, output, "--experiment=propagation", "--thresholds=0,0.5") == 0
    rows = _checked_files(output, "propagation")["rows"]
    assert [(row["confidence"], row["state_propagation"], row["token_from"], row["threshold"]) for row in rows] == [
        (None, None, None, None),
        *(("oracle", name, "exit_layer", 1.0) for name in PROPAGATIONS),
        ("softmax", "from_exit", "last_layer", 0.5),
        ("softmax", "from_exit", "last_layer", 0.0),
    ]
    assert rows[0]["layers"] == 4
    assert (rows[0]["similarity"], rows[0]["quality_change"]) == (1, 0)
    assert rows[1 + list(PROPAGATIONS).index("full_cache")]["similarity"] == 1
    assert rows[-1]["layers"] == 1
    assert all(row["prompts"] == 10 and 0 <= row["quality"] <= 1 for row in rows)
    printed = capsys.readouterr().out
    for name in (*(f"oracle, {name}" for name in PROPAGATIONS), "noisy cache, softmax 0.5", "full model"):
        assert name in printed
    assert "10 prompts: all examples; 0 cut." in printed
    assert str(output / "propagation.svg") in printed


def test_sensitivity(
    model: pathlib.Path, data: pathlib.Path, tmp_path: pathlib.Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Both kinds at every position that was asked for, with the number of prompts that have it."""
    assert _evaluate(model, data, tmp_path / "out", *_FEW_POSITIONS) == 0
    content = _checked_files(tmp_path / "out", "sensitivity")
    rows = content["rows"]
    assert [(row["kind"], row["position"]) for row in rows] == [
        (kind, position) for kind in ("sampling", "layer") for position in (0, 1, 2, 5)
    ]
    assert rows[0]["prompts"] == 10
    for kind in ("sampling", "layer"):
        counts = [row["prompts"] for row in rows if row["kind"] == kind]
        assert counts == sorted(counts, reverse=True)
    assert {row["replaced"] for row in rows if row["kind"] == "sampling"} == {1}
    assert all(0 <= row["similarity"] <= 1 for row in rows)
    assert content["flags"]["rank"] == 3
    assert "(rank 3)" in capsys.readouterr().out


def test_tradeoff(
    model: pathlib.Path, data: pathlib.Path, tmp_path: pathlib.Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Each measure over the grid, static layers and the oracle; what exits later has more layers."""
    assert _evaluate(model, data, tmp_path / "out", *_FEW_THRESHOLDS) == 0
    rows = _checked_files(tmp_path / "out", "tradeoff")["rows"]
    assert [(row["confidence"], row["threshold"]) for row in rows] == [
        (None, None),
        *((name, threshold) for name in ("softmax", "state") for threshold in (0.5, 0.0)),
        *(("static", layer / 4) for layer in (4, 3, 2, 1)),
        ("oracle", 1.0),
    ]
    layers = {(row["confidence"], row["threshold"]): row["layers"] for row in rows}
    assert [layers["static", layer / 4] for layer in (1, 2, 3, 4)] == [1, 2, 3, 4]
    assert layers["softmax", 0.0] == layers["state", 0.0] == 1 < layers["softmax", 0.5]
    printed = capsys.readouterr().out
    assert "static layer 3" in printed
    assert "every layer ran" not in printed


def test_workers_measure_the_same(model: pathlib.Path, data: pathlib.Path, tmp_path: pathlib.Path) -> None:
    """Two threads that decode token ids with references in shards give the same numbers to the digit."""
    threads = ("--direct_num_workers=2", "--direct_running_mode=multi_threading", "--num_shards=3")
    for name, flags in (("one", ()), ("two", threads)):
        assert _evaluate(model, data, tmp_path / name, *_FEW_THRESHOLDS, "--max_examples=7", *flags) == 0
    for file in ("tradeoff.csv", "tradeoff.json"):
        assert (tmp_path / "one" / file).read_bytes() == (tmp_path / "two" / file).read_bytes()
    assert _table(tmp_path / "one" / "tradeoff.csv")[1]["quality"] != ""


@pytest.mark.parametrize(("classifier", "measures"), [(0, 4), (1, 5), (2, 5)])
def test_measures_are_those_of_the_checkpoint(
    classifier: int, measures: int, data: pathlib.Path, tmp_path: pathlib.Path
) -> None:
    """By default all measures of the checkpoint are compared, with two more passes for the bounds."""
    model = write_model(tmp_path / "model", config=build_config(exit_classifier=classifier))
    request = TradeoffRequest(checkpoint=model, data=[str(data)])
    prepared = prepared_experiment(request, prepare_task(request, request.settings))
    assert isinstance(prepared, PreparedSweeps)
    assert len(prepared.variants) == measures + 2


def test_a_file_names_the_experiment(model: pathlib.Path, data: pathlib.Path, tmp_path: pathlib.Path) -> None:
    """A config file is equivalent to flags, including the experiment's name."""
    config = tmp_path / "run.yaml"
    config.write_text("experiment: sensitivity\npositions: [0-2, 5]\nrank: 3\n")
    assert _evaluate(model, data, tmp_path / "file", f"--config={config}") == 0
    assert _evaluate(model, data, tmp_path / "flags", *_FEW_POSITIONS) == 0
    contents = [(tmp_path / name / "sensitivity.json").read_bytes() for name in ("file", "flags")]
    assert contents[0] == contents[1]


def test_layers_that_nobody_saves(
    model: pathlib.Path, data: pathlib.Path, tmp_path: pathlib.Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A rule that needs the full model saves no layers, and a message says so."""
    flags = ("--experiment=tradeoff", "--confidence=softmax", "--thresholds=0.5", "--state_propagation=full_cache")
    assert _evaluate(model, data, tmp_path / "out", *flags) == 0
    assert "Here layers are those of the exits: every layer ran." in capsys.readouterr().out
    rows = _checked_files(tmp_path / "out", "tradeoff")["rows"]
    assert {row["state_propagation"] for row in rows} == {None, "full_cache"}


def test_texts_without_references(tmp_path: pathlib.Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Without references, files and terminal have no quality; texts need no ids."""
    model = write_model(tmp_path / "model", vocabulary=write_vocabulary(tmp_path / "v.model"))
    data = write_rows(tmp_path / "rows.jsonl", [{"input": row["input"]} for row in text_rows(8)])
    assert _evaluate(model, data, tmp_path / "out", *_FEW_THRESHOLDS) == 0
    rows = _checked_files(tmp_path / "out", "tradeoff")["rows"]
    assert {row["quality"] for row in rows} == {None}
    printed = capsys.readouterr().out
    assert "Layers per token and similarity" in printed
    assert "change " not in printed.split("Oracle:")[0]


def test_a_sample(model: pathlib.Path, tmp_path: pathlib.Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A sample is reported as one, and does not depend on the order of the data."""
    tables = []
    for name, rows in (("one", id_rows(40)), ("other", id_rows(40)[::-1])):
        data = write_rows(tmp_path / f"{name}.jsonl", rows)
        assert _evaluate(model, data, tmp_path / name, *_FEW_POSITIONS, "--max_examples=10") == 0
        tables.append(_table(tmp_path / name / "sensitivity.csv"))
        assert json.loads((tmp_path / name / "sensitivity.json").read_text())["sample"] in capsys.readouterr().out
    assert tables[0] == tables[1]
    content = json.loads((tmp_path / "one" / "sensitivity.json").read_text())
    assert content["sample"] == ("10 prompts: of 40 examples, those whose ids have the smallest hashes; 0 cut.")


def test_equal_runs_give_equal_files(model: pathlib.Path, data: pathlib.Path, tmp_path: pathlib.Path) -> None:
    """Equal runs into different directories give equal files to the byte."""
    contents = []
    for output in (tmp_path / "one", tmp_path / "other"):
        assert _evaluate(model, data, output, *_FEW_POSITIONS) == 0
        contents.append({path.name: path.read_bytes() for path in output.iterdir()})
    assert contents[0] == contents[1]


def test_experiments_share_a_directory(
    model: pathlib.Path, data: pathlib.Path, tmp_path: pathlib.Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """One experiment leaves the files of another alone; its own are kept unless --overwrite is given."""
    output = tmp_path / "out"
    output.mkdir()
    (output / "tradeoff.csv").write_text("another")
    (output / "sensitivity.json").write_text("mine")
    assert _evaluate(model, data, output, *_FEW_POSITIONS) == 2
    expected = f"--output {output}: holds sensitivity.json already. Choose another directory, or pass --overwrite."
    assert expected in capsys.readouterr().err
    assert (output / "sensitivity.json").read_text() == "mine"
    assert _evaluate(model, data, output, *_FEW_POSITIONS, "--overwrite") == 0
    assert json.loads((output / "sensitivity.json").read_text())["experiment"] == "sensitivity"
    assert (output / "tradeoff.csv").read_text() == "another"


def test_a_calibration_is_left_alone(
    model: pathlib.Path, data: pathlib.Path, tmp_path: pathlib.Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A directory with a manifest is refused, also with --overwrite: staging would take the manifest away."""
    (tmp_path / "manifest.json").write_text("{}")
    assert _evaluate(model, data, tmp_path, *_FEW_POSITIONS, "--overwrite") == 2
    assert f"--output {tmp_path}: holds a calibration. Choose another directory." in capsys.readouterr().err
    assert (tmp_path / "manifest.json").read_text() == "{}"


def test_a_failed_run_leaves_nothing(tmp_path: pathlib.Path, capsys: pytest.CaptureFixture[str]) -> None:
    """An example that cannot be decoded ends each experiment with status 1 and its name."""
    model = write_model(tmp_path / "model", is_broken=True)
    data = write_rows(tmp_path / "rows.jsonl", [{"input_ids": [5, 1]}, {"id": "bad", "input_ids": [BROKEN_ID, 1]}])
    for flags in (_FEW_POSITIONS, _FEW_THRESHOLDS):
        assert _evaluate(model, data, tmp_path / "out", *flags) == 1
        printed = capsys.readouterr()
        assert "calm-beam evaluate: example bad: the model gave logits that are not finite" in printed.err
        assert printed.out == ""
    assert {path.name for path in tmp_path.iterdir()} == {"model", "rows.jsonl"}


def test_no_output_has_the_position(
    model: pathlib.Path, tmp_path: pathlib.Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """If all outputs are shorter than every position, the message says so."""
    decoder = PerturbationDecoder(
        load_checkpoint(model), positions=(5,), rank=1, max_decode_length=6, max_input_length=32, batch_size=4
    )
    rows = id_rows(40)
    results = decoder.decode([row["input_ids"] for row in rows])
    data = write_rows(tmp_path / "rows.jsonl", [rows[index] for index, result in results if not result.outputs])
    assert _evaluate(model, data, tmp_path / "out", "--experiment=sensitivity", "--positions=5") == 1
    message = "no output is long enough to have one of the --positions. Name lower ones."
    assert message in capsys.readouterr().err
    assert not (tmp_path / "out").exists()


def test_figures_are_an_extra(
    model: pathlib.Path,
    data: pathlib.Path,
    tmp_path: pathlib.Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """Without matplotlib all but the figure is written, the message names the extra, and no earlier figure stays."""
    find_spec = importlib.util.find_spec
    monkeypatch.setattr(
        importlib.util, "find_spec", lambda name, *more: None if name == "matplotlib" else find_spec(name, *more)
    )
    (output := tmp_path / "out").mkdir()
    (output / "sensitivity.svg").write_text("of an earlier run")
    assert _evaluate(model, data, output, *_FEW_POSITIONS, "--overwrite") == 0
    message = "plots need matplotlib, which is not installed: pip install 'calm-beam[plots]' (in a checkout: "
    printed = capsys.readouterr()
    assert message in printed.err
    assert ".svg" not in printed.out
    assert {path.name for path in output.iterdir()} == {f"sensitivity.{kind}" for kind in ("csv", "json", "html")}


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--experiment=splitz"], "argument --experiment: invalid choice: 'splitz' (choose from"),
        (["--experiment=tradeoff", "--rank=3"], "unknown flag --rank."),
        (["--experiment=sensitivity", "--confidence=state"], "unknown flag --confidence."),
        (["--experiment=sensitivity", "--position=3"], "unknown flag --position. Did you mean --positions?"),
        (["--experiment=sensitivity", "--runner=DirectRunner"], "unknown flag --runner."),
        (["--experiment=tradeoff", "--runner=DataflowRunner"], "--project is missing: the id of the Google Cloud"),
        (["--experiment=tradeoff", "--runner=PortableRunner"], "--runner=PortableRunner needs --job_endpoint"),
        (["--experiment=tradeoff", "--accelerator=nvidia-l4"], "--accelerator is for --runner=DataflowRunner"),
        (
            [
                "--experiment=propagation",
                "--runner=FlinkRunner",
                "--flink_job_server_jar=https://h/f.jar",
                "--temp_location=/no",
            ],
            "--temp_location /no: no such",
        ),
        (["--experiment=sensitivity", "--positions=3-1"], "expected positions from 0, as in 0-9,15,20; got '3-1'"),
        (["--experiment=sensitivity", "--positions=0-99999999999"], "expected positions from 0, as in 0-9,15,20; got"),
        (["--experiment=sensitivity", "--positions=1_0"], "expected positions from 0, as in 0-9,15,20; got '1_0'"),
        (["--experiment=sensitivity", "--positions=٣"], "expected positions from 0, as in 0-9,15,20; got '٣'"),
        (["--experiment=sensitivity", "--positions=-1"], "expected positions from 0, as in 0-9,15,20; got '-1'"),
        (["--experiment=sensitivity", "--positions=1-"], "expected positions from 0, as in 0-9,15,20; got '1-'"),
        (["--experiment=sensitivity", "--positions=0,6"], "positions must be in [0, 6), the output's room; got 6."),
        (["--experiment=sensitivity", "--positions=0-3,2"], "positions must list one or more different values"),
        (["--experiment=sensitivity", "--rank=65"], "rank must be in [1, 64], the model's token ids; got 65."),
        (["--experiment=sensitivity", "--rank=0"], "argument --rank: expected a whole number of at least 1, got '0'"),
        (
            ["--experiment=tradeoff", "--confidence=gut"],
            "--confidence must list measures of softmax, softmax_max, state",
        ),
        (["--experiment=tradeoff", "--confidence=oracle"], "got 'oracle'. Static layers and the oracle are always"),
        (["--experiment=tradeoff", "--confidence=state,state"], "--confidence must list different measures, got state"),
        (["--experiment=tradeoff", "--confidence=classifier"], "--confidence=classifier needs decoder/meta_cls in the"),
        (["--experiment=tradeoff", "--grid_step=2"], "grid_step must be in [0.001, 1), got 2.0."),
        (["--experiment=tradeoff", "--tau=4"], "tau must not be given with schedule 'constant', got 4.0."),
        (
            ["--experiment=tradeoff", "--min_exit_layer=5"],
            "min_exit_layer must be at most 4, the decoder's depth; got 5.",
        ),
        (["--experiment=propagation", "--confidence=gut"], "argument --confidence: invalid choice: 'gut'"),
        (["--experiment=propagation", "--confidence=classifier"], "--confidence=classifier needs decoder/meta_cls"),
        (["--experiment=propagation", "--thresholds=1.5"], "thresholds must be in [0, 1], got 1.5."),
        (
            ["--experiment=tradeoff", "--max_examples=0"],
            "argument --max_examples: expected a whole number of at least 1",
        ),
        (["--experiment=tradeoff", "--metric=rouge_k"], 'metric "rouge_k" is not known. Did you mean "rouge_l"?'),
        (["--experiment=tradeoff", "--metric=math:floor"], 'metric "math:floor" on example'),
        (
            ["--experiment=tradeoff", "--output=s3://b/out"],
            "--output s3://b/out: of object stores only",
        ),
        (["--experiment=tradeoff", "--output={data}"], "--output {data}: is a file, expected a directory."),
        (["--experiment=tradeoff", "--data=/no/such.jsonl"], "--data /no/such.jsonl: no such file."),
        (["--experiment=tradeoff", "--checkpoint=/no/such"], "checkpoint /no/such: no such directory."),
    ],
    ids=str,
)
def test_bad_usage(
    flags: Sequence[str],
    message: str,
    model: pathlib.Path,
    data: pathlib.Path,
    tmp_path: pathlib.Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """Each has status 2, says what was wrong with the value, and writes nothing."""
    assert _evaluate(model, data, tmp_path / "out", *(flag.format(data=data) for flag in flags)) == 2
    printed = capsys.readouterr()
    # The line about how many tokens the model takes may come first.
    assert "\ncalm-beam evaluate: " in f"\n{printed.err}"
    assert message.format(data=data) in printed.err
    assert printed.out == ""
    assert not list(tmp_path.iterdir())


def _mixed(rows: list[dict[str, Any]]) -> str:
    del rows[3]["reference_ids"]
    return "example row-3 has no references, example row-0 differs: a mean over some of them"


def _text_among_ids(rows: list[dict[str, Any]]) -> str:
    rows[3] = {"id": "row-3", "input": "some text", "reference_ids": [[5]]}
    return "{path}, line 4: its prompt is text, but that of {path}, line 1 is token ids."


def _repeated_id(rows: list[dict[str, Any]]) -> str:
    rows[4]["id"] = "row-1"
    return "id 'row-1' occurs twice ({path}, line 2 and {path}, line 5). Ids must be unique."


def _unknown_id(rows: list[dict[str, Any]]) -> str:
    rows[2]["input_ids"] = [64]
    return "example row-2: its input_ids have 64; the model knows ids from 0 to 63."


@pytest.mark.parametrize("spoil", [_mixed, _text_among_ids, _repeated_id, _unknown_id])
def test_bad_data(
    spoil: Callable[[list[dict[str, Any]]], str],
    model: pathlib.Path,
    tmp_path: pathlib.Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """Data that would give a mean of something else are refused before decoding, by the example's name."""
    rows = id_rows(6)
    message = spoil(rows)
    path = write_rows(tmp_path / "rows.jsonl", rows)
    assert _evaluate(model, path, tmp_path / "out", *_FEW_POSITIONS) == 2
    assert message.format(path=path) in capsys.readouterr().err
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("name", REQUESTS)
def test_help_of_an_experiment(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    """With an experiment's name, help lists its flags and those of a sample; without, all experiments."""
    own = {"propagation": "--thresholds", "sensitivity": "--positions", "tradeoff": "--grid_step"}
    with pytest.raises(SystemExit) as ended:
        main(["evaluate", f"--experiment={name}", "--help"])
    assert ended.value.code == 0
    printed = capsys.readouterr().out
    assert own[name] in printed
    assert "--max_examples" in printed
    with pytest.raises(SystemExit):
        main(["evaluate", "--help"])
    printed = capsys.readouterr().out
    assert "--max_examples" not in printed
    assert "--trials" in printed
    assert name in printed


@pytest.mark.slow
def test_the_embedded_model(tmp_path: pathlib.Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Without model and data, the demo model and data are used, and the run says so."""
    assert main(["evaluate", "--experiment=sensitivity", f"--output={tmp_path / 'out'}", "--max_examples=3"]) == 0
    printed = capsys.readouterr()
    assert "no --checkpoint and no --data: the demo model on the demo data" in printed.err
    assert "3 prompts: of 1,000 examples" in printed.out
    assert _checked_files(tmp_path / "out", "sensitivity")["flags"]["metric"] == "rouge_l_unicode"
