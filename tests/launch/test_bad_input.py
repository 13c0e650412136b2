"""Bad input gets a message with the offending value and what was expected, and nothing is written."""

import dataclasses
import gzip
import json
import os
import pathlib
import re
import socket
from collections.abc import Callable

import pytest

from calm_beam.launch.cli import main
from tests.builders import build_arrays, build_config, train_vocabulary, write_t5x
from tests.pipelines import (
    BROKEN_ID,
    CONFIG,
    SHORT_FLAGS,
    id_rows,
    text_rows,
    write_model,
    write_rows,
    write_vocabulary,
)
from tests.sampling import sampled


@dataclasses.dataclass(frozen=True)
class _Place:
    """A folder with a good model and good data, to be spoiled; `flags` calibrate them."""

    folder: pathlib.Path

    @property
    def model(self) -> pathlib.Path:
        return self.folder / "model"

    @property
    def data(self) -> pathlib.Path:
        return self.folder / "rows.jsonl"

    @property
    def output(self) -> pathlib.Path:
        return self.folder / "out"

    @property
    def flags(self) -> list[str]:
        asked = ["--metric=token_f1", "--delta=0.3", "--epsilon=0.1"]
        paths = [f"--checkpoint={self.model}", f"--data={self.data}", f"--output={self.output}"]
        return ["calibrate", *paths, *SHORT_FLAGS, *asked]


@pytest.fixture
def place(tmp_path: pathlib.Path) -> _Place:
    """A place where everything is in order."""
    write_model(tmp_path / "model")
    write_rows(tmp_path / "rows.jsonl", id_rows(12))
    return _Place(tmp_path)


def _run(place: _Place, *flags: str, capsys: pytest.CaptureFixture[str]) -> tuple[int, str]:
    """Returns the exit status and stderr."""
    status = main([*place.flags, *flags])
    printed = capsys.readouterr()
    assert status == 0 or printed.out == ""
    return status, printed.err


def test_the_place_is_in_order(place: _Place, capsys: pytest.CaptureFixture[str]) -> None:
    """The unspoiled place gives a manifest (the twin of all tests here)."""
    assert _run(place, capsys=capsys)[0] == 0
    assert (place.output / "manifest.json").is_file()


_BAD_FLAGS = {
    "--thresholds=0.5,1.5": "thresholds must be in [0, 1], got 1.5.",
    "--thresholds=-0.1": "thresholds must be in [0, 1], got -0.1.",
    "--thresholds=nan": "thresholds must be in [0, 1], got nan.",
    "--thresholds=inf,0.5": "thresholds must be in [0, 1], got inf.",
    "--thresholds=0.5,0.5": "thresholds must be distinct in float32, got 0.5 and 0.5.",
    "--thresholds=0.5,0.50000000001": "thresholds must be distinct in float32, got 0.50000000001 and 0.5.",
    "--thresholds=half": "argument --thresholds: expected numbers separated by commas, got 'half'",
    "--thresholds=0.5,,0.4": "argument --thresholds: expected values separated by commas, got '0.5,,0.4'",
    "--delta=5": "--delta must be in (0, 1), got 5. It is a fraction: for 5 % pass 0.05.",
    "--delta=0": "--delta must be in (0, 1), got 0.",
    "--delta=nan": "--delta must be in (0, 1), got nan.",
    "--delta=0.1,0.1": "delta must list one or more different values, got [0.1, 0.1].",
    "--delta=5%": "argument --delta: expected numbers separated by commas, got '5%'",
    "--epsilon=0": "--epsilon must be in (0, 1), got 0. It is a fraction: for 5 % pass 0.05.",
    "--epsilon=1": "--epsilon must be in (0, 1), got 1.",
    "--metric=rouge_k": 'metric "rouge_k" is not known. Did you mean "rouge_l"? Known metrics: rouge_l,',
    "--metric=token_f1,token_f1": "metric must list one or more different values, got ['token_f1', 'token_f1'].",
    "--metric=": "argument --metric: expected values separated by commas, got ''",
    "--metric=no_such_module:f": 'metric "no_such_module:f": cannot import module "no_such_module"',
    "--metric=math:no_such": 'metric "math:no_such": module "math" has no "no_such".',
    "--metric=math:pi": 'metric "math:pi": "pi" is not callable, it is of type float.',
    "--metric=math:": 'metric "math:": expected module:function',
    "--consistency=lexical": "consistency must be one of textual, risk; got 'lexical'.",
    "--p_value=best": "argument --p_value: invalid choice: 'best' (choose from",
    "--risk_loss=squared": "argument --risk_loss: invalid choice: 'squared' (choose from",
    "--procedure=luck": "argument --procedure: invalid choice: 'luck' (choose from",
    "--seed=-1": "argument --seed: expected a whole number of at least 0, got '-1'",
    "--cluster_key=page": "rows.jsonl, line 1: has no 'page', by which examples were to be clustered.",
    "--confidence=gut": "argument --confidence: invalid choice: 'gut' (choose from",
    "--confidence=classifier": "--confidence=classifier needs decoder/meta_cls in the checkpoint;",
    "--schedule=decay": "schedule 'decay' needs a finite tau of at least 0, got None.",
    "--schedule=linear": "argument --schedule: invalid choice: 'linear' (choose from",
    "--tau=4": "tau must not be given with schedule 'constant', got 4.0.",
    "--tau=warm": "argument --tau: expected numbers separated by commas, got 'warm'.",
    "--state_propagation=none": "argument --state_propagation: invalid choice: 'none' (choose from",
    "--token_from=last_layer": "--token_from=last_layer takes every token from the full model, so there is nothing to",
    "--token_from=nowhere": "argument --token_from: invalid choice: 'nowhere' (choose from",
    "--min_exit_layer=5": "min_exit_layer must be at most 4, the decoder's depth; got 5.",
    "--min_exit_layer=0": "argument --min_exit_layer: expected a whole number of at least 1, got '0'",
    "--exit_interval=1.5": "argument --exit_interval: expected a whole number of at least 1, got '1.5'",
    "--batch_size=-4": "argument --batch_size: expected a whole number of at least 1, got '-4'",
    "--max_cache_tokens=67": "max_cache_tokens must be at least 68, got 67: one prompt of 32 tokens and its outputs",
    "--num_shards=0": "argument --num_shards: expected a whole number of at least 1, got '0'",
    "--max_input_length=0": "argument --max_input_length: expected a whole number of at least 1, got '0'",
    "--max_decode_length=long": "argument --max_decode_length: expected a whole number of at least 1, got 'long'",
    "--extra_ids=-1": "argument --extra_ids: expected a whole number of at least 0, got '-1'",
    "--data_format=csv": "argument --data_format: invalid choice: 'csv' (choose from",
    "--on_error=skip": "argument --on_error: invalid choice: 'skip' (choose from",
    "--on_long=drop": "argument --on_long: invalid choice: 'drop' (choose from",
    "--checkpoint=/no/such": "checkpoint /no/such: no such directory.",
    "--checkpoint=s3://b/model": "s3://b/model: of object stores only Google Cloud Storage is supported",
    "--data=s3://b/rows.jsonl": "--data s3://b/rows.jsonl: of object stores only",
    "--data=/no/such-*.jsonl": "--data /no/such-*.jsonl: no such file.",
    "--data=/": "--data /: is a directory. Name its files, for example",
    "--data=": "argument --data: expected values separated by commas, got ''",
    "--vocabulary=s3://b/v.model": "s3://b/v.model: of object stores only",
    "--vocabulary=/no/v.model": "vocabulary /no/v.model: cannot be read as a SentencePiece model",
    "--output=s3://b/out": "--output s3://b/out: of object stores only",
    "--ouput=x": "unknown flag --ouput. Did you mean --output?",
    "--runner=NoRunner": "NoRunner",
    "--direct_num_workers=few": "argument --direct_num_workers: invalid int value: 'few'",
    "stray.jsonl": "unknown argument stray.jsonl.",
}


@pytest.mark.parametrize("flag", _BAD_FLAGS)
def test_bad_flags(flag: str, place: _Place, capsys: pytest.CaptureFixture[str]) -> None:
    """A wrong flag has status 2, names its value, and starts nothing."""
    status, message = _run(place, flag, capsys=capsys)
    # The line about how many tokens the model takes may come first.
    assert "\ncalm-beam calibrate: " in f"\n{message}"
    assert _BAD_FLAGS[flag] in message
    assert status == 2
    assert not place.output.exists()


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--schedule=decay", "--tau=-1"], "schedule 'decay' needs a finite tau of at least 0, got -1.0."),
        (["--schedule=decay", "--tau=nan"], "schedule 'decay' needs a finite tau of at least 0, got nan."),
        (["--delta", "0.1", "0.2"], "unknown argument 0.2."),
        (
            ["--joint", "--epsilon=0.05,0.1"],
            "a joint guarantee divides one epsilon among all entries, got [0.05, 0.1]. Choose one.",
        ),
        (
            ["--consistency=risk", "--p_value=hoeffding", "--risk_loss=signed"],
            "p_value hoeffding is for losses in [0, 1], but the signed loss of risk consistency lies in [-1, 1]. Take "
            "signed_mixture or wsr or star_bets, or risk_loss=relu.",
        ),
    ],
)
def test_bad_combinations(flags: list[str], message: str, place: _Place, capsys: pytest.CaptureFixture[str]) -> None:
    """Flags that are wrong together have status 2, and say why."""
    status, found = _run(place, *flags, capsys=capsys)
    assert message in found
    assert status == 2
    assert not place.output.exists()


@pytest.mark.parametrize("step", ["0", "2", "-0.1", "nan", "1"])
def test_bad_grid_steps(step: str, place: _Place, capsys: pytest.CaptureFixture[str]) -> None:
    """A grid has a step of at least 0.001 and below 1."""
    flags = [flag for flag in place.flags if not flag.startswith("--thresholds")]
    assert main([*flags, f"--grid_step={step}"]) == 2
    message = f"grid_step must be in [0.001, 1), got {float(step)}. It is the distance of two thresholds, e.g. 0.05."
    assert message in capsys.readouterr().err
    assert not place.output.exists()


def test_a_grid_and_a_step_exclude_each_other(place: _Place, capsys: pytest.CaptureFixture[str]) -> None:
    """A grid and a step exclude each other; neither is silently dropped."""
    status, message = _run(place, "--grid_step=0.1", capsys=capsys)
    assert status == 2
    assert "--grid_step" in message
    assert "--thresholds" in message


def _empty_data(place: _Place) -> str:
    place.data.write_text("")
    return f"--data {place.data}: holds no examples."


def _bad_json(place: _Place) -> str:
    write_rows(place.data, id_rows(3))
    with open(place.data, "a", encoding="utf-8") as file:
        file.write("{'input': 5}\n")
    return f"{place.data}, line 4: not JSON: "


def _both_inputs(place: _Place) -> str:
    write_rows(place.data, [{"input": "a", "input_ids": [5]}])
    return f"{place.data}, line 1: expected exactly one of the keys input and input_ids"


def _damaged_gzip(place: _Place) -> str:
    packed = gzip.compress(place.data.read_bytes())
    (place.folder / "model" / "rows.jsonl.gz").write_bytes(packed[: len(packed) // 2])
    return f"{place.folder / 'model' / 'rows.jsonl.gz'}: damaged gzip data after line "


def _nested_json(place: _Place) -> str:
    place.data.write_text("[" * 100_000)
    return f"{place.data}, line 1: not JSON that we read: nested deeper than 100 levels."


def _directory_as_data(place: _Place) -> str:
    place.data.unlink()
    place.data.mkdir()
    return f"--data {place.data}: "


def _no_vocabulary(place: _Place) -> str:
    write_rows(place.data, text_rows(3))
    return f"no vocabulary in or next to {place.model}: pass --vocabulary, or data that has input_ids."


def _large_vocabulary(place: _Place) -> str:
    path = train_vocabulary(place.model / "sentencepiece.model", size=65)
    return f"vocabulary {path} has 65 ids, the model's output head 64: they do not belong together."


def _large_extra_ids(place: _Place) -> str:
    path = write_vocabulary(place.model / "sentencepiece.model", size=40)
    return f"vocabulary {path} has 140 ids, the model's output head 64"


def _foreign_vocabulary(place: _Place) -> str:
    path = train_vocabulary(place.model / "sentencepiece.model", pad_id=-1, eos_id=2, unk_id=0, bos_id=1)
    return f"vocabulary {path}: ids of pad, eos and unknown are (-1, 2, 0), T5 needs 0, 1 and a third."


def _no_model(place: _Place) -> str:
    (place.model / "config.json").unlink()
    return f"checkpoint {place.model}: no model here. Expected config.json with model.safetensors (native"


def _broken_weights(place: _Place) -> str:
    (place.model / "model.safetensors").write_bytes(b"nothing")
    return f"{place.model / 'model.safetensors'}: cannot be read as safetensors"


def _wrong_sizes(place: _Place) -> str:
    config = json.loads((place.model / "config.json").read_text())
    (place.model / "config.json").write_text(json.dumps({**config, "mlp_dim": 33}))
    return f"checkpoint {place.model}: config.json says "


def _sizes_that_are_none(place: _Place) -> str:
    config = json.loads((place.model / "config.json").read_text())
    (place.model / "config.json").write_text(json.dumps({**config, "mlp_dim": "33"}))
    return f"{place.model / 'config.json'}: "


def _unknown_key(place: _Place) -> str:
    config = json.loads((place.model / "config.json").read_text())
    (place.model / "config.json").write_text(json.dumps({**config, "layers": 3}))
    return f"{place.model / 'config.json'}: unknown keys ['layers'], missing keys []."


def _broken_t5x(place: _Place) -> str:
    for path in place.model.iterdir():
        path.unlink()
    folder = write_t5x(place.model, build_arrays(CONFIG, 0))
    (folder / "checkpoint").write_bytes(b"\x00")
    return f"{folder / 'checkpoint'}: not a T5X checkpoint ("


def _missing_array(place: _Place) -> str:
    for path in place.model.iterdir():
        path.unlink()
    arrays = build_arrays(CONFIG, 0)
    del arrays["decoder/layers_2/mlp/wo/kernel"]
    folder = write_t5x(place.model, arrays)
    return f"checkpoint {folder}: not a T5 parameter tree: missing decoder/layers_2/mlp/wo/kernel"


def _output_is_a_file(place: _Place) -> str:
    place.output.write_text("mine")
    return f"--output {place.output}: is a file, expected a directory."


def _no_references(place: _Place) -> str:
    rows = [{**row, "reference_ids": []} if index == 4 else row for index, row in enumerate(id_rows(6))]
    write_rows(place.data, rows)
    return f"{place.data}, line 5: risk consistency needs references, example row-4 has none."


def _surrogates(place: _Place) -> str:
    write_vocabulary(place.model / "sentencepiece.model")
    place.data.write_text('{"input": "\\ud800 x"}\n')
    return f"{place.data}, line 1: "


def _metric_that_does_not_import(place: _Place) -> str:
    return 'metric "calm_beam_bad_metric:f": cannot import module "calm_beam_bad_metric"'


@pytest.mark.parametrize(
    ("spoil", "flags"),
    [
        (_empty_data, []),
        (_bad_json, []),
        (_both_inputs, []),
        (_damaged_gzip, ["--data={model}/rows.jsonl.gz"]),
        (_nested_json, []),
        (_directory_as_data, []),
        (_no_vocabulary, []),
        (_large_vocabulary, ["--vocabulary={model}/sentencepiece.model"]),
        (_large_extra_ids, ["--extra_ids=100", "--vocabulary={model}/sentencepiece.model"]),
        (_foreign_vocabulary, ["--vocabulary={model}/sentencepiece.model"]),
        (_no_model, []),
        (_broken_weights, []),
        (_wrong_sizes, []),
        (_sizes_that_are_none, []),
        (_unknown_key, []),
        (_broken_t5x, []),
        (_missing_array, []),
        (_output_is_a_file, []),
        (_no_references, ["--consistency=textual,risk"]),
        (_surrogates, []),
        (_metric_that_does_not_import, ["--metric=calm_beam_bad_metric:f"]),
    ],
)
def test_bad_files(
    spoil: Callable[[_Place], str],
    flags: list[str],
    place: _Place,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A file that is wrong is found before work starts: status 2, where and what, and nothing is written."""
    (place.folder / "calm_beam_bad_metric.py").write_text("raise NameError('unfinished')\n")
    monkeypatch.syspath_prepend(str(place.folder))
    expected = spoil(place)
    before = place.output.read_bytes() if place.output.is_file() else None
    status, message = _run(place, *(flag.format(model=place.model) for flag in flags), capsys=capsys)
    assert expected in message
    assert message.count("\n") == 1
    assert status == 2
    assert before == (place.output.read_bytes() if place.output.is_file() else None)
    assert before is not None or not place.output.exists()


def _late_text(place: _Place) -> str:
    write_rows(place.data, [*id_rows(110), {"id": "late", "input": "some text", "reference_ids": [[5]]}])
    return f"{place.data}, line 111: its prompt is text, but that of {place.data}, line 1 is token ids."


def _late_json(place: _Place) -> str:
    write_rows(place.data, [*id_rows(110), ["row"]])
    return f"{place.data}, line 111: expected a JSON object, got list."


def _late_references(place: _Place) -> str:
    write_rows(place.data, [*id_rows(110), {"id": "late", "input_ids": [5, 1]}])
    return f"{place.data}, line 111: risk consistency needs references, example late has none."


def _id_beyond_the_embedding(place: _Place) -> str:
    write_rows(place.data, [*id_rows(110), {"id": "far", "input_ids": [5, 64], "reference_ids": [[5]]}])
    return "example far: its input_ids have 64; the model knows ids from 0 to 63."


def _id_twice(place: _Place) -> str:
    write_rows(place.data, [*id_rows(4), {"id": "row-2", "input_ids": [5], "reference_ids": [[5]]}])
    return f"id 'row-2' occurs 2 times ({place.data}, line 3 and {place.data}, line 5). Ids must be unique"


def _long_prompt(place: _Place) -> str:
    write_rows(place.data, [{"id": "long", "input_ids": [5] * 40, "reference_ids": [[5]]}])
    return "example long: its input has 40 tokens, max_input_length is 32. Raise it, or pass --on_long=truncate"


def _broken_embedding(place: _Place) -> str:
    write_model(place.model, is_broken=True)
    write_rows(place.data, [{"id": "nan", "input_ids": [BROKEN_ID], "reference_ids": [[5]]}])
    return "example nan: the model gave logits that are not finite. Check the checkpoint; --on_error=worst_case"


def _metric_that_is_no_score(place: _Place) -> str:
    write_rows(place.data, [{"id": "one", "input_ids": [5], "reference_ids": [[5]]}])
    return 'metric "tests.launch.test_bad_input:two" on example "one": returned 2.0, expected a number in [0, 1].'


def two(candidate: str, references: list[str]) -> float:
    """Returns 2, which is not a valid score, for all texts but those of the trial before a run."""
    return 1.0 if "text" in candidate else 2.0


def always_two(candidate: str, references: list[str]) -> float:
    """Returns 2, which is not a valid score."""
    return 2.0


def test_a_broken_metric_is_found_before_work_starts(place: _Place, capsys: pytest.CaptureFixture[str]) -> None:
    """A user's metric is tried once before anything is decoded."""
    status, message = _run(place, "--metric=tests.launch.test_bad_input:always_two", capsys=capsys)
    assert 'metric "tests.launch.test_bad_input:always_two" on example' in message
    assert "returned 2.0, expected a number in [0, 1]" in message
    assert status == 2
    assert not place.output.exists()


@pytest.mark.parametrize(
    ("spoil", "flags"),
    # Errors that a worker finds when it reads, groups and decodes.
    sampled(
        [
            (_late_text, []),
            (_late_json, []),
            (_late_references, []),
            (_id_beyond_the_embedding, []),
            (_id_twice, []),
            (_long_prompt, ["--on_long=error"]),
            (_broken_embedding, []),
            (_metric_that_is_no_score, ["--metric=tests.launch.test_bad_input:two"]),
        ],
        keep=(0, 4, 6),
    ),
)
def test_what_workers_find(
    spoil: Callable[[_Place], str], flags: list[str], place: _Place, capsys: pytest.CaptureFixture[str]
) -> None:
    """Errors found after work has started give status 1 and one line, and neither table nor manifest."""
    expected = spoil(place)
    status, message = _run(place, "--consistency=textual,risk", *flags, capsys=capsys)
    # Before that line, a slow machine may print progress.
    *progress, error = message.splitlines()
    said = r"reading|loading|compiling|decoded |engine: |\d+ promises hold each by itself"
    said += r"|exits: softmax at every layer, since |caution: .* cannot be proved by"
    assert [line for line in progress if not re.match(said, line)] == []
    assert error.startswith("calm-beam calibrate: ")
    assert expected in error
    assert "while running" not in error
    assert status == 1
    assert not (place.output / "manifest.json").exists()
    assert not (place.output / "risk_table.csv").exists()


def test_sizes_of_the_classifier_are_checked(place: _Place, capsys: pytest.CaptureFixture[str]) -> None:
    """The twin of "classifier without weights": with them, the confidence is accepted."""
    write_model(place.model, config=build_config(num_encoder_layers=1, exit_classifier=2))
    assert _run(place, "--confidence=classifier", capsys=capsys)[0] == 0


def test_an_output_below_a_file(place: _Place, capsys: pytest.CaptureFixture[str]) -> None:
    """A directory that cannot be made is a clear failure, and the file in its way stays."""
    (place.folder / "notes").write_text("mine")
    status, message = _run(place, f"--output={place.folder / 'notes' / 'out'}", capsys=capsys)
    assert status in (1, 2)
    assert str(place.folder / "notes") in message
    assert (place.folder / "notes").read_text() == "mine"


@pytest.mark.parametrize("name", sampled(["rows [1].jsonl", "rows,1.jsonl", "rows*.jsonl", "a?b.jsonl"], keep=(0, 1)))
def test_a_file_is_found_by_its_name(name: str, place: _Place, capsys: pytest.CaptureFixture[str]) -> None:
    """A file whose name would be a pattern or a list is found by its name, and no other."""
    data = place.folder / name
    data.write_text(place.data.read_text())
    place.data.write_text("no example")
    (place.folder / "rows 1.jsonl").write_text("no example")
    assert _run(place, f"--data={data}", capsys=capsys)[0] == 0
    assert json.loads((place.output / "manifest.json").read_text())["data"]["patterns"] == [str(data)]


def test_a_link_is_read_by_its_own_name(place: _Place, capsys: pytest.CaptureFixture[str]) -> None:
    """Caches keep files under digests and link to them: the link tells the format, and two links are one file."""
    blob = place.folder / "e3b0c44298fc1c14"
    place.data.rename(blob)
    place.data.symlink_to(blob)
    (place.folder / "again.jsonl").symlink_to(blob)
    assert _run(place, f"--data={place.data},{place.folder / 'again.jsonl'}", capsys=capsys)[0] == 0
    examples = len(blob.read_text().splitlines())
    assert json.loads((place.output / "manifest.json").read_text())["data"]["examples"] == examples


def _make_pipe(path: pathlib.Path) -> None:
    os.mkfifo(path)


def _make_loop(path: pathlib.Path) -> None:
    path.symlink_to(path)


def _make_dangling(path: pathlib.Path) -> None:
    path.symlink_to("nowhere")


def _make_socket(path: pathlib.Path) -> None:
    with socket.socket(socket.AF_UNIX) as bound:
        bound.bind(str(path))


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (_make_pipe, "is a pipe, expected a file. Write what comes from it to a file."),
        (_make_loop, "is a link that leads back to itself. Name the file that it should lead to."),
        (_make_dangling, "is a link to nowhere, which is not there. Fix the link, or name the file itself."),
        (_make_socket, "is a socket, expected a file. Write what comes from it to a file."),
    ],
)
def test_what_is_no_file_is_called_by_its_kind(
    make: Callable[[pathlib.Path], None], message: str, place: _Place, capsys: pytest.CaptureFixture[str]
) -> None:
    """A path that exists but is no file is called by its kind, not "missing", whichever flag names it."""
    data = place.folder / "x.jsonl"
    make(data)
    assert _run(place, f"--data={data}", capsys=capsys) == (2, f"calm-beam calibrate: --data {data}: {message}\n")
    for flags in (
        ["plan", "--delta=0.1", f"--pilot={data}"],
        ["monitor", f"--manifest={data}", "--losses=-"],
        ["generate", f"--manifest={data}"],
        ["inspect", str(data)],
    ):
        assert main(flags) == 2
        assert f"{data}: {message}" in capsys.readouterr().err


def test_how_files_are_named_is_said(place: _Place, capsys: pytest.CaptureFixture[str]) -> None:
    """If a pattern or a list matches nothing, the message explains how both are read."""
    message = (
        "As in shells, * and ? stand for any characters, [...] for one of some, unless a file is called just that."
    )
    assert message in _run(place, f"--data={place.folder}/rows[12].jsonl", capsys=capsys)[1]
    assert "no such file. Commas separate names;" in _run(place, f"--data={place.data},{place.data}x", capsys=capsys)[1]
