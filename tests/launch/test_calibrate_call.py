"""`calm_beam.calibrate` and `calm-beam calibrate` are one job: the same options, refusals and results."""

import inspect
import json
import pathlib
import shutil
from collections.abc import Mapping
from typing import Any

import pytest

import calm_beam as calm
from calm_beam.errors import UsageError
from calm_beam.launch.calibrate import command, flag_parsers
from calm_beam.launch.calibrate.request import CalibrateRequest
from calm_beam.launch.cli import main
from calm_beam.options import options_of
from calm_beam.options.option import default_of
from tests.builders import build_arrays, write_t5x
from tests.pipelines import CONFIG, id_rows, text_rows, write_model, write_rows, write_vocabulary
from tests.sampling import sampled

# Python has one argument where the command has several flags or Beam's.
_PYTHONS_OWN = {"model", "candidates", "guarantees", "options"}
_SMALL: dict[str, Any] = {
    "thresholds": (0.9, 0.5, 0.2, 0.05, 0.0),
    "max_input_length": 32,
    "max_decode_length": 6,
    "batch_size": 4,
    "num_shards": 3,
    "metric": "token_f1",
    "delta": (0.3, 0.6),
    "epsilon": 0.1,
}
_IDS: dict[str, Any] = {"checkpoint": "model", "data": "ids.jsonl"}
_LAZY: dict[str, Any] = {**_IDS, "sweep": "lazy", "thresholds": (0.9, 0.0)}
_TEXTS: dict[str, Any] = {"checkpoint": "textual"}
_KINDS: dict[str, dict[str, Any]] = {
    "all entries": {
        **_IDS,
        "consistency": ("textual", "risk"),
        "joint": True,
        "near_ties": "worst_case",
        "seed": 7,
        "cluster_key": "cluster",
    },
    "how it decodes": {
        **_IDS,
        "engine": "xla",
        "exit_head": "exact",
        "max_cache_tokens": 2000,
        "model_copies": 2,
        "on_long": "error",
        "schedule": "decay",
        "tau": 4,
        "state_propagation": "projected",
        "min_exit_layer": 2,
        "exit_interval": 2,
        "on_error": "worst_case",
        "max_failures": 3,
        "procedure": "holm",
        "p_value": "wsr",
    },
    "patience": {**_LAZY, "confidence": "patience", "patience": 2},
    "served": {**_IDS, "consistency": "risk", "risk_loss": "relu", "serve": "risk,0.6"},
    "groups": {**_IDS, "group_key": "group", "consistency": "risk", "tail": 0.5},
    "sequential": {**_IDS, "sequential": True, "round_examples": 10, "stop_at_layers": 3.5, "num_shards": 6},
    "sequential and lazy": {**_LAZY, "sequential": True, "round_examples": 20, "stop_gain": 0.5, "num_shards": 2},
    "variants": {
        **_IDS,
        "schedule": "decay",
        "tau": (0, 6),
        "min_exit_layer": (1, 2),
        "selection_share": 0.4,
    },
    "auto": {**_IDS, "exits": "auto", "objective": "layers"},
    "confirmed": {**_IDS, "holdout_share": 0.4, "delta": 0.9, "epsilon": 0.4},
    "fields": {**_TEXTS, "data": "fields.jsonl", "inputs_field": "q", "targets_field": "a", "task_prefix": "ask: "},
    "text": {**_TEXTS, "data": "lines", "data_format": "text", "vocabulary": "vocabulary.model", "extra_ids": 2},
    "SeqIO": {**_TEXTS, "seqio_task": "calm_beam_text", "seqio_module": "tests.seqio_tasks"},
    "declared": {
        "checkpoint": "t5x",
        "data": "ids.jsonl",
        "activation": "relu",
        "relative_max_distance": 64,
        "dtype": "bfloat16",
    },
    "stored": {"generations": "stored", "metric": "edit_distance", "delta": 0.5, "thresholds": (0.9, 0.5)},
}


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> pathlib.Path:
    """A folder with models, data and generations."""
    folder = tmp_path_factory.mktemp("call")
    vocabulary = write_vocabulary(folder / "vocabulary.model")
    write_model(folder / "model")
    write_model(folder / "textual", vocabulary=vocabulary)
    write_t5x(folder / "t5x", build_arrays(CONFIG, 1))
    rows = id_rows(40)
    named = [{**row, "cluster": f"c{index // 2}", "group": "ab"[index % 2]} for index, row in enumerate(rows)]
    write_rows(folder / "ids.jsonl", named)
    write_rows(folder / "fields.jsonl", [{"q": row["input"], "a": row["references"]} for row in text_rows(20)])
    (folder / "lines").write_text("".join(f"{row['input']}\n" for row in text_rows(20)), encoding="utf-8")
    return folder


@pytest.fixture(autouse=True)
def _here(place: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(place)


def _flags(arguments: Mapping[str, Any]) -> list[str]:
    """Returns Python's arguments as command-line flags."""
    return [f"--{name}" if value is True else f"--{name}={_written(value)}" for name, value in arguments.items()]


def _written(value: object) -> str:
    return ",".join(map(str, value)) if isinstance(value, tuple) else str(value)


def _asked(kind: str) -> dict[str, Any]:
    """Returns the arguments of a kind; of stored generations, none about decoding."""
    asked = {**_SMALL, **_KINDS[kind]}
    if kind == "stored":
        return {name: value for name, value in asked.items() if name in {*_KINDS[kind], "epsilon"}}
    return asked


def _undated(output: str) -> dict[str, object]:
    content: dict[str, object] = json.loads(pathlib.Path(output, "manifest.json").read_text())
    del content["created"], content["digest"]
    return content


def test_python_takes_every_option_of_the_command() -> None:
    """Python's arguments and the command's flags have the same names and defaults, except those only Python has."""
    arguments = inspect.signature(calm.calibrate).parameters
    flags = vars(flag_parsers()[0].parse_args([]))
    # Only the command line has options about file contents and about the result's form.
    for name in ("config", "json", "log_to", "require_threshold"):
        del flags[name]
    assert arguments.keys() - _PYTHONS_OWN == flags.keys()
    assert {name for name, _ in options_of(CalibrateRequest)} == flags.keys()
    for name, value in flags.items():
        assert arguments[name].default == default_of(CalibrateRequest, name) == value
    assert all(f"\n  {name}: " in str(calm.calibrate.__doc__) for name in arguments)


def test_every_option_is_in_a_kind() -> None:
    """The kinds compared below use every option except devices, chat formats and files that are not available here."""
    tried = {*_SMALL, "output", *(name for kind in _KINDS.values() for name in kind)}
    untried = {name for name, _ in options_of(CalibrateRequest)} - tried
    assert untried == {
        *("accelerator", "bleurt_checkpoint", "chat_template", "stop_strings", "system"),
        *("grid_step", "matmul_precision", "model_parallelism", "overwrite", "resume"),
        *("seqio_split", "stop_at_threshold", "token_from", "verbose"),
    }


@pytest.mark.parametrize("kind", _KINDS)
def test_the_function_asks_what_the_command_asks(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """For every kind of calibration, both ask the same function for the same values of all options."""
    asked: list[dict[str, object]] = []

    def ask(request: CalibrateRequest, _: object) -> None:
        asked.append({name: getattr(request, name) for name, _ in options_of(CalibrateRequest)})
        raise UsageError("asked")

    monkeypatch.setattr(command, "run_calibration", ask)
    arguments = {**_asked(kind), "output": "never"}
    assert main(["calibrate", *_flags(arguments)]) == 2
    with pytest.raises(UsageError, match="asked"):
        calm.calibrate(**arguments)
    assert asked[0] == asked[1]


@pytest.mark.parametrize("kind", sampled(_KINDS, keep=(0, 6, 7, 9, 13)))
def test_the_function_is_the_command(kind: str, place: pathlib.Path) -> None:
    """For every kind of calibration, both write the same manifest, byte for byte but for dates, and the same risks."""
    if kind == "SeqIO":
        pytest.importorskip("seqio")
    if kind == "stored" and not (place / "stored").exists():
        calm.calibrate(output="stored", **{**_SMALL, **_IDS})
        shutil.copytree("stored", "stored again")
    asked = _asked(kind)
    # Plans are listed in the folder of the generations, so each of the two runs must be the first on its own copy.
    again = {**asked, "generations": "stored again"} if kind == "stored" else asked
    assert main(["calibrate", *_flags({**asked, "output": f"{kind} command"})]) == 0
    manifest = calm.calibrate(**{**again, "output": pathlib.Path(f"{kind} call")})
    assert manifest == calm.read_manifest(f"{kind} call/manifest.json")
    assert _undated(f"{kind} command") == _undated(f"{kind} call")
    tables = [pathlib.Path(f"{kind} {by}", "risk_table.csv").read_bytes() for by in ("command", "call")]
    assert tables[0] == tables[1]


@pytest.mark.parametrize(
    ("given", "flag", "argument"),
    [
        ({"max_failures": 3}, "--max_failures belongs to --on_error=worst_case", "max_failures belongs to on_error='w"),
        ({"batch_size": 0}, "--batch_size: expected a whole number of at least 1", "batch_size: expected a whole num"),
        ({"delta": 5}, "delta must be in (0, 1)", "delta must be in (0, 1)"),
        ({"stop_gain": 0.1}, "--stop_gain belongs to --sequential", "stop_gain belongs to sequential=True"),
        (
            {"resume": True, "overwrite": True},
            "--resume goes on with what is",
            "resume=True goes on with what is there",
        ),
        ({"data": "ids.jsonl"}, "--checkpoint is missing", "checkpoint is missing: the folder of the model"),
        ({"checkpoint": "model"}, "--data is missing", "data is missing: files with the examples, or seqio_task"),
        ({"tau": (1, 1)}, "--tau lists 1 twice", "tau lists 1 twice"),
        ({"generations": "x", "seed": 1, "sweep": "full"}, "--sweep decides what is", "sweep decides what is decoded"),
    ],
)
def test_both_refuse_the_same(
    given: dict[str, Any], flag: str, argument: str, capsys: pytest.CaptureFixture[str], tmp_path: pathlib.Path
) -> None:
    """Both refuse the same values in the same sentence, naming the flag or the argument; nothing is written."""
    output = str(tmp_path / "out")
    assert main(["calibrate", *_flags({**given, "output": output})]) == 2
    said = capsys.readouterr().err.splitlines()[-1].replace("argument --batch_size", "--batch_size")
    assert flag in said
    with pytest.raises(UsageError) as caught:
        calm.calibrate(**given, output=output)
    assert argument in str(caught.value)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"model": "model", "checkpoint": "model"}, "model and checkpoint both name the model"),
        ({"guarantees": [calm.Guarantee("textual", "token_f1", delta=0.1)], "delta": 0.2}, "guarantees and delta say"),
        ({"exits": calm.ExitRule(), "confidence": "state"}, "exits and confidence say the same"),
    ],
)
def test_values_of_pythons_own_say_it_alone(given: dict[str, Any], message: str) -> None:
    """An argument that replaces several options is refused together with one of them."""
    with pytest.raises(UsageError, match=message):
        calm.calibrate(**given)


def test_what_is_said_names_arguments(tmp_path: pathlib.Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Messages on stderr name Python's arguments, and nothing is printed to stdout."""
    calm.calibrate(output=tmp_path / "out", **{**_SMALL, **_IDS, "thresholds": 0.5})
    printed = capsys.readouterr()
    assert "with serve, or pass joint=True (stop this run, and go on with that flag and resume=True)." in printed.err
    assert printed.out == ""


def test_a_misspelt_argument() -> None:
    """A misspelt argument is named with the nearest valid one."""
    with pytest.raises(TypeError, match=r"^calibrate\(\) has no argument 'detla'\. Did you mean delta\?$"):
        calm.calibrate(detla=0.1)  # type: ignore[call-overload]


def test_settings_without_a_decoder() -> None:
    """The error for the settings of a user's decoder says that there is none."""
    with pytest.raises(TypeError, match=r"has no argument 'settings'\. It belongs to decoder, which is missing\.$"):
        calm.calibrate(settings=(2, 1))  # type: ignore[call-overload]
