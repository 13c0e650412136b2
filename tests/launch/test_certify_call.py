"""`calm_beam.certify` and `calm-beam certify` are one job: the same options, refusals and results."""

import dataclasses
import inspect
import json
import pathlib
from collections.abc import Mapping
from typing import Any

import pytest
import yaml

import calm_beam as calm
from calm_beam.errors import UsageError
from calm_beam.launch.calibrate.request import CalibrateRequest
from calm_beam.launch.certify.request import CertifyRequest
from calm_beam.launch.cli import main
from calm_beam.launch.commands import flag_parsers
from calm_beam.launch.flags import parse_own_flags, request_of
from calm_beam.options import options_of
from calm_beam.options.groups import DELTA, EPSILON
from calm_beam.options.option import default_of
from tests.calm_beam.inputs.losses.builders import (
    ORDER,
    coin_rows,
    write_csv,
    write_helm,
    write_inspect,
    write_lighteval,
    write_lm_eval,
)
from tests.transforms.setting_decoders import sweep, write_texts

_TABLE: dict[str, Any] = {"losses": "losses.csv", "order": ORDER, "delta": 0.15}
_WATCHED: dict[str, Any] = {
    **_TABLE,
    "sequential": True,
    "ids": "ids.csv",
    "round_examples": 40,
    "losses": "free.csv",
}
_COSTS = {"8bit": 8, "6bit": 6.5, "4bit": 4, "3bit": 3}
_KINDS: dict[str, dict[str, Any]] = {
    "all entries": {**_TABLE, "delta": (0.05, 0.15), "epsilon": (0.05, 0.1), "tail": 0.5, "seed": 7},
    "files": {**_TABLE, "losses": ("half-0.csv", "half-1.csv"), "procedure": "holm", "p_value": "wsr"},
    "by cost": {**_TABLE, "losses": "free.csv", "order": None, "order_by": "cost", "costs": _COSTS},
    "groups": {**_TABLE, "group_key": "group", "joint": True},
    "clusters": {**_TABLE, "cluster_key": "cluster", "p_value": "hoeffding_bentkus"},
    "signed": {**_TABLE, "losses": "signed.csv", "loss": "signed"},
    "lm-eval": {
        "baseline": "lm/full",
        "candidates": ("int8=lm/int8", "lm/int4"),
        "task": "gsm8k",
        "metric": "exact_match,strict-match",
        "costs": {"int8": 8, "int4": 4},
        "cluster_key": "doc.passage",
        "delta": (0.05, 0.2),
    },
    "lighteval": {"baseline": "light/a", "candidates": "light/b", "metric": "acc", "loss": "relu", "delta": 0.2},
    "inspect": {"baseline": "a.eval", "candidates": "b=b.eval", "direction": "higher", "delta": 0.2},
    "outputs": {"outputs": "swept", "metric": "token_f1", "consistency": "risk", "loss": "relu", "delta": (0.3, 0.5)},
    "HELM": {"baseline": "helm/a", "candidates": "x=helm/b", "metric": "exact_match", "delta": 0.2},
    "sequential": {**_WATCHED, "stop_at_setting": "6bit", "group_key": "group", "joint": True},
    "sequential by cost": {
        **_WATCHED,
        "order": None,
        "order_by": "cost",
        "costs": _COSTS,
        "stop_at_cost": 8,
        "stop_gain": 0.02,
    },
    "not enough yet": {**_WATCHED, "losses": "few.csv", "delta": 0.02, "next_rounds": 3},
    "nothing yet": {name: value for name, value in _WATCHED.items() if name != "losses"},
}


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> pathlib.Path:
    """A folder with tables of losses and logs of scores."""
    folder = tmp_path_factory.mktemp("certify")
    rows = coin_rows(600, wrong=(0, 0.01, 0.08, 0.4))
    write_csv(folder / "losses.csv", rows)
    for part in range(2):
        write_csv(folder / f"half-{part}.csv", rows[part::2])
    free = ("id", "setting", "loss", "group", "cluster")
    write_csv(folder / "free.csv", rows, columns=free)
    write_csv(folder / "few.csv", rows[: 4 * 590], columns=free)
    write_csv(folder / "signed.csv", [dataclasses.replace(row, loss=row.loss - 0.25) for row in rows], columns=free)
    (folder / "ids.csv").write_text(
        "id,group,cluster\n" + "".join(f"e{i},{'abc'[i % 3]},c{i // 4}\n" for i in range(600))
    )
    full = [1.0] * 380 + [0.0] * 20
    for name, wrong in (("full", 0), ("int8", 4), ("int4", 60)):
        scores = [0.0] * wrong + full[wrong:]
        write_lm_eval(folder / "lm" / name, {"strict-match": scores, "flexible-extract": full})
    for name, wrong in (("a", 0), ("b", 10)):
        scores = [0.0] * wrong + full[wrong:]
        write_lighteval(folder / "light" / name, scores, higher=True)
        write_inspect(folder / f"{name}.eval", ["I" if score == 0 else "C" for score in scores])
        write_helm(folder / "helm" / name, scores, asked="easy ")
    sweep(write_texts(folder / "texts.jsonl", 60), folder / "swept")
    return folder


@pytest.fixture(autouse=True)
def _here(place: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(place)


def _flags(arguments: Mapping[str, Any]) -> list[str]:
    """Returns Python's arguments as command-line flags."""
    given = {name: value for name, value in arguments.items() if value is not None}
    return [f"--{name}" if value is True else f"--{name}={_written(value)}" for name, value in given.items()]


def _written(value: object) -> str:
    if isinstance(value, dict):
        return ",".join(f"{name}={each}" for name, each in value.items())
    return ",".join(map(str, value)) if isinstance(value, tuple) else str(value)


def _parsed(*argv: str) -> CertifyRequest:
    (parser,) = flag_parsers("certify")
    return request_of(CertifyRequest, parse_own_flags(parser, argv), parser=parser)


def _undated(output: str) -> dict[str, object]:
    content: dict[str, object] = json.loads(pathlib.Path(output, "manifest.json").read_text())
    del content["created"], content["digest"]
    return content


def test_python_takes_every_option_of_the_command() -> None:
    """The flags and the arguments are the same names with the same defaults."""
    arguments = inspect.signature(calm.certify).parameters
    (parser,) = flag_parsers("certify")
    flags = vars(parser.parse_args([]))
    # Only the command line has options about file contents and about the result's form.
    for name in ("config", "json", "log_to", "require_threshold"):
        del flags[name]
    assert arguments.keys() == flags.keys() == {name for name, _ in options_of(CertifyRequest)}
    for name, value in flags.items():
        assert arguments[name].default == default_of(CertifyRequest, name) == value
    assert all(f"\n  {name}: " in str(calm.certify.__doc__) for name in arguments)


def test_every_option_is_in_a_kind() -> None:
    """The kinds compared below use every option except those that continue or replace an earlier result."""
    tried = {"output", *(name for kind in _KINDS.values() for name in kind)}
    assert {name for name, _ in options_of(CertifyRequest)} - tried == {"overwrite", "resume", "verbose"}


@pytest.mark.parametrize("kind", _KINDS)
def test_the_function_is_the_command(kind: str) -> None:
    """For every kind of certification, both write the same files, byte for byte but for dates."""
    asked = _KINDS[kind]
    assert main(["certify", *_flags({**asked, "output": f"{kind} command"})]) == 0
    manifest = calm.certify(**{**asked, "output": pathlib.Path(f"{kind} call")})
    command, call = pathlib.Path(f"{kind} command"), pathlib.Path(f"{kind} call")
    if kind.endswith("yet"):
        assert manifest is None
        assert (command / "plan.json").read_bytes() == (call / "plan.json").read_bytes()
        assert (command / "next_ids.txt").read_text() == (call / "next_ids.txt").read_text() != ""
        return
    assert manifest is not None
    assert manifest.digest == json.loads((call / "manifest.json").read_text())["digest"]
    assert _undated(str(command)) == _undated(str(call))
    assert (command / "risk_table.csv").read_bytes() == (call / "risk_table.csv").read_bytes()
    # Only the command writes the page.
    assert {path.name for path in command.iterdir()} - {path.name for path in call.iterdir()} == {"report.html"}


def test_a_stopped_certification_goes_on(tmp_path: pathlib.Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Python's calls stop, find the stop again, and continue by another rule, as the command does."""
    asked = {**_WATCHED, "costs": _COSTS, "output": tmp_path / "out"}
    stopped = calm.certify(**asked, stop_at_setting="8bit")
    assert stopped is not None
    assert calm.certify(**asked, stop_at_setting="8bit") == stopped
    with pytest.raises(UsageError, match=r"had stopped by another rule to stop\. resume=True goes on"):
        calm.certify(**asked, stop_gain=0.02)
    manifest = calm.certify(**asked, stop_gain=0.02, resume=True)
    assert manifest is not None
    assert manifest.sequential is not None
    assert [end.plan for end in manifest.sequential.continues] == [stopped.plan.digest]
    assert capsys.readouterr().out == ""


@pytest.mark.parametrize("kind", _KINDS)
def test_a_file_is_the_same_request(kind: str, tmp_path: pathlib.Path) -> None:
    """YAML, JSON, flags and Python's arguments give equal, hashable requests."""
    asked = _KINDS[kind]
    content = {name: list(value) if isinstance(value, tuple) else value for name, value in asked.items()}
    for name, text in (("run.yaml", yaml.safe_dump(content, sort_keys=False)), ("run.json", json.dumps(content))):
        (tmp_path / name).write_text(text, encoding="utf-8")
    request = _parsed(f"--config={tmp_path / 'run.yaml'}")
    assert request == _parsed(f"--config={tmp_path / 'run.json'}")
    assert request == CertifyRequest(**asked) == _parsed(*_flags(asked))
    assert hash(request) == hash(dataclasses.replace(request))


@pytest.mark.parametrize(
    ("given", "flag", "argument"),
    [
        ({}, "name either the losses (--losses) or the", "name either the losses (losses) or the scores (baseline"),
        ({"losses": "x"}, "missing. Declare it before you look at the losses: --order=A,B", "order='A,B"),
        ({"losses": "x", "order": "a", "ids": "y"}, "--ids belongs to --sequential", "ids belongs to sequential=True"),
        ({"losses": "x", "metric": "a"}, "--metric belongs to --baseline", "metric belongs to baseline, which is"),
        ({"losses": "x", "order": "a", "seed": -1}, "--seed: expected a whole number", "seed: expected a whole number"),
        ({"losses": "x", "order": "a", "costs": "b"}, "--costs: expected NAME=NUMBER", "costs: expected NAME=NUMBER"),
        ({"losses": "x", "order": "a", "loss": "relu"}, "--loss=relu is made of scores", "loss='relu' is made of scor"),
        ({"losses": "x", "order": "a", "epsilon": 2}, "--epsilon must be in (0, 1)", "epsilon must be in (0, 1), got"),
        ({"sequential": True, "order": "a"}, "--ids is missing: all examples", "ids is missing: all examples"),
        ({"losses": "none.csv", "order": "a"}, "none.csv: no such file", "none.csv: no such file"),
    ],
)
def test_both_refuse_the_same(
    given: dict[str, Any], flag: str, argument: str, capsys: pytest.CaptureFixture[str], tmp_path: pathlib.Path
) -> None:
    """Both refuse the same values in the same sentence, naming the flag or the argument; nothing is written."""
    asked = {"delta": 0.1, **given, "output": str(tmp_path / "out")}
    assert main(["certify", *_flags(asked)]) in (1, 2)
    said = capsys.readouterr().err.splitlines()[-1].replace("argument --", "--")
    assert flag in said
    with pytest.raises(calm.CalmBeamError) as caught:
        calm.certify(**asked)
    assert argument in str(caught.value)
    assert list(tmp_path.iterdir()) == []


def test_what_is_said_names_arguments(tmp_path: pathlib.Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Messages on stderr name Python's arguments, and nothing is printed to stdout."""
    given = {**_KINDS["inspect"], "output": tmp_path / "out"}
    calm.certify(**given)
    printed = capsys.readouterr()
    assert "a higher score is better" in printed.err
    assert "--" not in printed.err
    assert printed.out == ""
    calm.certify(**{**_WATCHED, "output": tmp_path / "out", "overwrite": True})
    assert "--overwrite" not in capsys.readouterr().err


def test_a_misspelt_argument() -> None:
    """A misspelt argument is named with the nearest valid one."""
    with pytest.raises(TypeError, match=r"^certify\(\) has no argument 'losess'\. Did you mean losses\?$"):
        calm.certify(losess="x", delta=0.1)  # type: ignore[call-arg]


def test_a_missing_argument() -> None:
    """A missing argument without a default is named."""
    with pytest.raises(TypeError, match=r"^verify\(\) needs the argument 'manifest'\.$"):
        calm.verify()


def test_tolerances_have_one_default() -> None:
    """Every function that proves or plans has the same default tolerance; the demo data have their own."""
    (certify,), (calibrate,) = flag_parsers("certify"), flag_parsers("calibrate")
    assert CertifyRequest(losses="x", order="a").delta == (DELTA,)
    assert CalibrateRequest(checkpoint="m", data="d").deltas == (DELTA,)
    for parser in (certify, calibrate, *flag_parsers("plan")):
        said = {action.dest: action.help or "" for action in parser._actions}
        assert f"default: {DELTA:g}" in said["delta"]
        assert f"default: {EPSILON:g}" in said["epsilon"]
