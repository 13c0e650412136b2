"""`--config=FILE`: the same request as flags, errors that name the key, and flags that win."""

import json
import pathlib
from collections.abc import Sequence
from typing import Any

import pytest
import yaml
from apache_beam.options.pipeline_options import PipelineOptions, WorkerOptions

from calm_beam.launch.calibrate import flag_parsers
from calm_beam.launch.calibrate.request import CalibrateRequest
from calm_beam.launch.cli import main
from calm_beam.launch.convert import ConvertRequest
from calm_beam.launch.decode.request import DecodeRequest
from calm_beam.launch.evaluate.request import PropagationRequest, SensitivityRequest, SplitsRequest, TradeoffRequest
from calm_beam.launch.flags import UsageError, given_flags, parse_flags, parsed, request_of, request_parser
from calm_beam.launch.generate.request import GenerateRequest
from calm_beam.launch.monitor import MonitorRequest
from calm_beam.launch.plan.request import PlanRequest
from calm_beam.launch.report.request import ReportRequest
from calm_beam.launch.suitability.request import SuitabilityRequest
from calm_beam.launch.train.request import TrainRequest
from calm_beam.options import Options
from calm_beam.options.option import taking

_OPTIONS = {
    "checkpoint": "model",
    "data": ["a.jsonl", "b.jsonl"],
    "thresholds": [0.9, 0.5],
    "delta": 0.1,
    "metric": ["token_f1", "rouge_l"],
    "stop_gain": "2%",
    "sequential": True,
    "resume": False,
    "round_examples": 5,
    "task_prefix": "",
    "vocabulary": None,
    "stop_strings": ["a,b\n", "c"],
}


def _parsed(*argv: str) -> tuple[CalibrateRequest, PipelineOptions]:
    parser = flag_parsers()[0]
    flags, options = parse_flags(parser, argv)
    return request_of(CalibrateRequest, flags, parser=parser), options


def _file(folder: pathlib.Path, content: str, *, name: str = "run.yaml") -> str:
    path = folder / name
    path.write_text(content, encoding="utf-8")
    return f"--config={path}"


@pytest.mark.parametrize("write", [yaml.safe_dump, json.dumps])
def test_a_file_is_the_same_request(write: object, tmp_path: pathlib.Path) -> None:
    """YAML, JSON, flags and Python's arguments give equal requests; options of a file count as given."""
    assert callable(write)
    config = _file(tmp_path, write(_OPTIONS))
    request, _ = _parsed(config)
    assert request == CalibrateRequest(**_OPTIONS)  # type: ignore[arg-type]
    flags = ["--checkpoint=model", "--data=a.jsonl,b.jsonl", "--thresholds=0.9,0.5", "--delta=0.1", "--stop_gain=2%"]
    flags += ["--metric=token_f1,rouge_l", "--sequential", "--round_examples=5", '--stop_strings=["a,b\\n", "c"]']
    assert request == _parsed(*flags)[0]
    left_out = {"resume", "vocabulary"}
    assert set(given_flags(flag_parsers()[0], [config])) == _OPTIONS.keys() - left_out


def test_stop_strings_may_be_none_at_all(tmp_path: pathlib.Path) -> None:
    """An empty list of stop strings is another value than none given, which takes the model's."""
    assert _parsed(_file(tmp_path, "stop_strings: []"))[0].stop_strings == ()
    assert _parsed("--stop_strings=[]")[0].stop_strings == ()
    assert _parsed()[0].stop_strings is None


def test_flags_win(tmp_path: pathlib.Path) -> None:
    """Flags override a file, whether they come before it or after it."""
    config = _file(tmp_path, yaml.safe_dump(_OPTIONS))
    for argv in (
        ["--delta=0.2", config],
        [config, "--delta=0.2"],
        ["--config", config.partition("=")[2], "--delta=0.2"],
    ):
        assert _parsed(*argv)[0].deltas == (0.2,)


def test_beams_flags_too(tmp_path: pathlib.Path) -> None:
    """A file may hold Beam's flags; a list means a repeated flag."""
    _, options = _parsed(_file(tmp_path, "max_num_workers: 7\nexperiments: [one, two]\n"))
    assert options.view_as(WorkerOptions).max_num_workers == 7
    assert options.get_all_options()["experiments"] == ["one", "two"]


def test_a_manifest_is_decoded_alike(tmp_path: pathlib.Path) -> None:
    """A manifest's decoding settings are taken as options; fields that no flag has are not."""
    decode = {"confidence": "state", "schedule": "decay", "tau": 4, "max_input_length": 32, "engine": {"name": "xla"}}
    content = json.dumps({"schema": "calm-beam/manifest/v1", "decode": decode, "plan": {}})
    request, _ = _parsed(_file(tmp_path, content, name="manifest.json"))
    assert (request.rules[0].confidence, request.rules[0].tau, request.max_input_length) == ("state", 4.0, 32)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("detla: 0.1", "run.yaml: detla is no option. Did you mean delta? See calm-beam calibrate --help."),
        ("batch_size: 0", "run.yaml: batch_size: expected a whole number of at least 1, got '0'."),
        ("batch_size: [1, 2]", "run.yaml: batch_size: expected one value, got [1, 2]."),
        ("engine: on", "run.yaml: engine: expected a value, got true; quote it if it is a text."),
        ("engine: cpu", "run.yaml: engine: invalid choice: 'cpu' (choose from"),
        ("resume: 1", "run.yaml: resume: expected true or false, got 1."),
        ("delta: []", "run.yaml: delta: expected one or more values, got []."),
        ("data: ['a,b']", "run.yaml: data: a value in a list must have no comma"),
        ("delta: {a: 1}", "run.yaml: delta: expected a value or a list of values, got a mapping."),
        ("checkpoint: ' '", "run.yaml: checkpoint is empty; leave it out, or give it a value."),
        ("delta: 0.1\ndelta: 0.2", "run.yaml: a key is there twice."),
        ("- delta", "run.yaml: expected options by name, such as delta: 0.1."),
        ("a: [", "run.yaml: not YAML: while parsing"),
        ('{"delta": 1, "delta": 2}', 'run.yaml: key "delta" occurs twice in the same object.'),
        ("!!python/object/apply:os.system [ls]", "run.yaml: not YAML: could not determine a constructor"),
    ],
)
def test_what_is_wrong_in_a_file(
    content: str, message: str, tmp_path: pathlib.Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Errors in a file give status 2 and one line with the file and the key."""
    assert main(["calibrate", _file(tmp_path, content)]) == 2
    said = capsys.readouterr().err
    assert message in said
    assert said.count("\n") == 1


_COMMANDS = (
    "calibrate",
    "certify",
    "convert",
    "decode",
    "evaluate",
    "generate",
    "monitor",
    "plan",
    "report",
    "suitability",
    "train",
    "verify",
)


@pytest.mark.parametrize("command", [*_COMMANDS, "tradeoff"])
def test_commands_that_take_a_file(command: str, tmp_path: pathlib.Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A file may hold whatever options a command needs; unknown keys are named."""
    needed = {"generate": "manifest: m\n", "train": "output: o\n", "plan": "delta: 0.1\n"}
    needed |= {"certify": "delta: 0.1\nlosses: l\norder: a\n", "verify": "manifest: m\n"}
    needed |= {"convert": "checkpoint: c\noutput: o\nlayout: t5x\n"}
    needed |= {"monitor": "manifest: m\nlosses: l\n", "tradeoff": "experiment: tradeoff\n"}
    config = _file(tmp_path, f"{needed.get(command, '')}no_such: 1\n")
    assert main(["evaluate" if command == "tradeoff" else command, config]) == 2
    assert "run.yaml: no_such is no option." in capsys.readouterr().err


# Options of several groups and kinds, for each kind of request.
_OF_REQUESTS: dict[type[Options], dict[str, Any]] = {
    ConvertRequest: {"checkpoint": "c", "output": "o", "layout": "native", "drop_arrays": "a.*", "activation": "gelu"},
    DecodeRequest: {"checkpoint": "c", "data": ["a", "b"], "thresholds": [0.9, 0.5], "tau": 4, "schedule": "decay"},
    GenerateRequest: {"manifest": "m", "input": "i", "output": "o/", "probe_share": "1%", "resume": True},
    MonitorRequest: {"manifest": "m", "losses": "-", "alpha": 0.01, "group": "en"},
    PlanRequest: {"delta": 0.1, "risk_guess": [0.02, 0.05], "p_value": ["wsr"], "replications": 200, "power": 0.8},
    PropagationRequest: {"confidence": "state", "thresholds": [0.5, 0.0], "max_examples": 3},
    ReportRequest: {"calibration": "c", "generations": "g", "max_examples": 3, "confidence": "state"},
    SensitivityRequest: {"positions": ["0-3", "7"], "rank": 3, "metric": "token_f1"},
    SplitsRequest: {"generations": ["a", "b"], "delta": [0.1, 0.2], "tail": 0.3, "trials": 4, "speedup": True},
    SuitabilityRequest: {"agreeing": "98%", "device": "v5e", "max_examples": 7, "seqio_task": "t"},
    TradeoffRequest: {"confidence": ["softmax", "state"], "grid_step": 0.2, "min_exit_layer": 2, "num_shards": 3},
    TrainRequest: {"data": ["a", "b"], "output": "o", "steps": 5, "z_loss": 1e-4, "exit_norm": True, "resume": False},
}


@pytest.mark.parametrize("kind", _OF_REQUESTS, ids=lambda kind: kind.__name__)
def test_every_request_may_come_from_a_file(kind: type[Options], tmp_path: pathlib.Path) -> None:
    """A file, flags and Python's arguments give equal requests."""
    given = _OF_REQUESTS[kind]
    parser = request_parser("some", kind, doc=None)
    flags = [
        f"--{name}" if value is True else f"--{name}={','.join(map(str, value)) if isinstance(value, list) else value}"
        for name, value in given.items()
        if value is not False
    ]
    from_file = parsed(kind, [_file(tmp_path, yaml.safe_dump(given))], parser=parser)
    assert from_file == parsed(kind, flags, parser=parser) == kind(**given)


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        (["--config=no/such.yaml"], "--config no/such.yaml: no such file"),
        (["--config="], "--config is empty; leave it out, or give it a value"),
        (["--config"], "argument --config: expected one argument"),
    ],
)
def test_a_file_that_cannot_be_had(argv: Sequence[str], message: str) -> None:
    """A file that cannot be read is reported with the flag."""
    with pytest.raises(UsageError, match=message):
        _parsed(*argv)


@pytest.mark.parametrize(
    ("name", "old_name", "value"),
    [("max_cache_tokens", "token_budget", 5000), ("holdout_share", "confirm_share", 0.3)],
)
def test_options_have_their_old_names(name: str, old_name: str, value: float, tmp_path: pathlib.Path) -> None:
    """The previous release's option names still work as flags and in files; no help lists them."""
    for argv in ([f"--{old_name}={value}"], [_file(tmp_path, json.dumps({old_name: value}))]):
        request, _ = _parsed("--checkpoint=model", "--data=a.jsonl", *argv)
        assert getattr(request, name) == value
    parser = flag_parsers()[0]
    assert f"--{name}" in parser.format_help_all()
    assert old_name not in parser.format_help_all()


def test_python_takes_old_names_and_refuses_both() -> None:
    """An argument by its old name is the argument; with the new one too, it is unknown."""

    @taking(CalibrateRequest)
    def asked(request: CalibrateRequest) -> CalibrateRequest:
        return request

    call: Any = asked
    assert call(checkpoint="model", data="a.jsonl", token_budget=5000).max_cache_tokens == 5000
    with pytest.raises(TypeError, match="has no argument 'token_budget'"):
        call(checkpoint="model", data="a.jsonl", token_budget=5000, max_cache_tokens=5000)
