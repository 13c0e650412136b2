"""`calm_beam.verify` and `calm-beam verify` are one job: the same options, refusals and results."""

import dataclasses
import inspect
import json
import pathlib
import shutil
from collections.abc import Mapping
from typing import Any

import pytest
import yaml
from apache_beam.options.pipeline_options import PipelineOptions

import calm_beam as calm
from calm_beam.launch.cli import main
from calm_beam.launch.commands import flag_parsers
from calm_beam.launch.flags import request_of
from calm_beam.launch.verify.report import (
    Verified,
    VerifiedSettings,
    VerifiedThresholds,
    tell_settings,
    tell_thresholds,
)
from calm_beam.launch.verify.request import VerifyRequest
from calm_beam.options import options_of
from calm_beam.options.option import default_of
from tests.calm_beam.inputs.losses.builders import ORDER, coin_rows, write_csv, write_lm_eval
from tests.pipelines import id_rows, text_rows, write_model, write_rows, write_vocabulary
from tests.transforms.setting_decoders import sweep

_SMALL: dict[str, Any] = {"batch_size": 4, "num_shards": 3}
_KINDS: dict[str, dict[str, Any]] = {
    "all entries": {
        **_SMALL,
        "manifest": "plain",
        "data": ("fresh-0.jsonl", "fresh-1.jsonl"),
        "checkpoint": "model",
        "alpha": 0.1,
        "metric": "token_f1",
        "engine": "xla",
        "exit_head": "exact",
        "max_cache_tokens": 2000,
        "model_copies": 2,
        "dtype": "float32",
        "matmul_precision": "highest",
        "confidence": "softmax",
    },
    "groups": {**_SMALL, "manifest": "grouped/manifest.json", "data": "fresh-0.jsonl"},
    "clusters": {**_SMALL, "manifest": "clustered", "data": "fresh-1.jsonl", "anytime": True},
    "confirmed": {**_SMALL, "manifest": "confirmed", "data": "fresh-1.jsonl"},
    "variants": {**_SMALL, "manifest": "several", "data": "fresh-0.jsonl"},
    "fields": {
        **_SMALL,
        "manifest": "textual calibration",
        "data": "fields",
        "data_format": "jsonl",
        "inputs_field": "q",
        "targets_field": "a",
        "vocabulary": "vocabulary.model",
    },
    "losses": {"manifest": "certified", "losses": ("fresh-0.csv", "fresh-1.csv"), "alpha": 0.01},
    "losses at any time": {"manifest": "certified", "losses": "fresh-0.csv", "anytime": True, "state": "state.json"},
    "broken": {"manifest": "certified", "losses": "broken.csv"},
    "scores": {
        "manifest": "scored",
        "baseline": "lm/fresh",
        "candidates": ("int8=lm/fresh8", "int4=lm/fresh4"),
        "task": "gsm8k",
        "metric": "exact_match,strict-match",
        "direction": "higher",
    },
    "outputs": {"manifest": "swept", "outputs": "fresh swept", "metric": "token_f1"},
    "nothing promised": {"manifest": "nothing", "losses": "fresh-0.csv"},
}


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> pathlib.Path:
    """A folder with calibrations, certifications, and fresh data for them."""
    folder = tmp_path_factory.mktemp("verify")
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        _write_calibrations(folder)
        _write_certifications(folder)
    return folder


def _write_calibrations(folder: pathlib.Path) -> None:
    vocabulary = write_vocabulary(folder / "vocabulary.model")
    write_model(folder / "model")
    write_model(folder / "textual", vocabulary=vocabulary)
    for name, seed in (("ids", 0), ("fresh-0", 1), ("fresh-1", 2)):
        rows = [{**row, "id": f"{name} {row['id']}"} for row in id_rows(40, seed=seed)]
        named = [{**row, "cluster": f"{name} {at // 2}", "group": "ab"[at % 2]} for at, row in enumerate(rows)]
        write_rows(folder / f"{name}.jsonl", named)
    write_rows(folder / "texts.jsonl", text_rows(20))
    fields = [{"q": f"{row['input']} too", "a": row["references"]} for row in text_rows(20)]
    write_rows(folder / "fields", fields)
    asked: dict[str, Any] = {
        "thresholds": (0.9, 0.5, 0.2, 0.05, 0.0),
        "max_input_length": 32,
        "max_decode_length": 6,
        "metric": "token_f1",
        "epsilon": 0.1,
        "delta": (0.7, 0.8),
        "p_value": "signed_mixture",
        **_SMALL,
    }
    ids: dict[str, Any] = {**asked, "checkpoint": "model", "data": "ids.jsonl"}
    calm.calibrate(**ids, consistency=("textual", "risk"), tail=0.3, engine="xla", exit_head="exact", output="plain")
    calm.calibrate(**ids, group_key="group", output="grouped")
    calm.calibrate(**ids, cluster_key="cluster", output="clustered")
    calm.calibrate(**{**ids, "delta": 0.9, "epsilon": 0.4}, holdout_share=0.4, output="confirmed")
    calm.calibrate(**{**ids, "delta": (0.5, 0.9)}, schedule="decay", tau=(0, 6), output="several")
    calm.calibrate(**asked, checkpoint="textual", data="texts.jsonl", output="textual calibration")


def _write_certifications(folder: pathlib.Path) -> None:
    write_csv(folder / "losses.csv", coin_rows(600))
    for name, seed, wrong in (("fresh-0", 1, 0.08), ("fresh-1", 2, 0.08), ("broken", 3, 0.6)):
        rows = coin_rows(200, seed=seed, wrong=(0.01, 0.03, wrong, 0.3))
        write_csv(folder / f"{name}.csv", [dataclasses.replace(row, id=f"{name} {row.id}") for row in rows])
    calm.certify(losses="losses.csv", order=ORDER, delta=(0.1, 0.15), group_key="group", output="certified")
    calm.certify(losses="losses.csv", order=ORDER, delta=0.001, output="nothing")
    full = [1.0] * 380 + [0.0] * 20
    for name, wrong, first in (("full", 0, 0), ("8", 4, 0), ("4", 20, 0), ("fresh", 0, 900), ("fresh8", 4, 900)):
        write_lm_eval(folder / "lm" / name, {"strict-match": [0.0] * wrong + full[wrong:], "none": full}, first=first)
    write_lm_eval(folder / "lm" / "fresh4", {"strict-match": full, "none": full}, first=900)
    candidates = ("int8=lm/8", "int4=lm/4")
    metric = "exact_match,strict-match"
    calm.certify(baseline="lm/full", candidates=candidates, metric=metric, delta=0.1, output="scored")
    for name in ("swept", "fresh swept"):
        texts = [{"id": f"{name} {at}", "input": f"{name} one two three {at}"} for at in range(60)]
        sweep(write_rows(folder / f"{name}.jsonl", texts), folder / name)
    calm.certify(outputs="swept", metric="token_f1", delta=0.4, output="swept")


@pytest.fixture(autouse=True)
def _here(place: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(place)
    monkeypatch.setenv("COLUMNS", "200")


def _flags(arguments: Mapping[str, Any]) -> list[str]:
    """Returns Python's arguments as command-line flags."""
    return [f"--{name}" if value is True else f"--{name}={_written(value)}" for name, value in arguments.items()]


def _written(value: object) -> str:
    return ",".join(map(str, value)) if isinstance(value, tuple) else str(value)


def _parsed(*argv: str) -> VerifyRequest:
    (parser,) = flag_parsers("verify")
    return request_of(VerifyRequest, parser.parse_known_args(list(argv))[0], parser=parser)


def _told(done: Verified) -> int:
    if isinstance(done, VerifiedThresholds):
        return tell_thresholds(done)
    assert isinstance(done, VerifiedSettings)
    return tell_settings(done)


def test_python_takes_every_option_of_the_command() -> None:
    """Python's arguments and the command's flags have the same names and defaults, except Beam's own."""
    signature = inspect.signature(calm.verify)
    assert signature.return_annotation is Verified
    arguments = signature.parameters
    (parser,) = flag_parsers("verify")
    flags = vars(parser.parse_args(["--manifest=m"]))
    # Only the command line has options about file contents and about the result's form.
    for name in ("config", "json"):
        del flags[name]
    assert arguments.keys() - {"options"} == flags.keys() == {name for name, _ in options_of(VerifyRequest)}
    assert [name for name, each in arguments.items() if each.default is inspect.Parameter.empty] == ["manifest"]
    del flags["manifest"]
    for name, value in flags.items():
        assert arguments[name].default == default_of(VerifyRequest, name) == value
    assert all(f"\n  {name}: " in str(calm.verify.__doc__) for name in arguments)


def test_every_option_is_in_a_kind() -> None:
    """The kinds compared below use every option except devices, and files that are not available here."""
    tried = {name for kind in _KINDS.values() for name in kind}
    assert {name for name, _ in options_of(VerifyRequest)} - tried == {
        *("accelerator", "activation", "bleurt_checkpoint", "model_parallelism", "relative_max_distance"),
        *("seqio_module", "seqio_split", "seqio_task", "verbose"),
    }


@pytest.mark.parametrize("kind", _KINDS)
def test_the_function_is_the_command(kind: str, tmp_path: pathlib.Path, capsys: pytest.CaptureFixture[str]) -> None:
    """For every kind of test, both find the same to the last printed digit, and leave the same state."""
    asked = _KINDS[kind]
    states = []
    if asked.get("anytime"):
        states = [tmp_path / "command.json", tmp_path / "call.json"]
        asked = {**asked, "state": states[0]}
    status = main(["verify", *_flags(asked)])
    told = capsys.readouterr().out
    assert status == (3 if kind == "broken" else 0)
    done = calm.verify(**{**asked, "state": states[1]} if states else asked)
    assert capsys.readouterr().out == ""
    assert done.is_broken is (kind == "broken")
    assert bool(done.verdicts) is (kind != "nothing promised")
    assert len(str(done).splitlines()) == 1 + len(done.verdicts)
    assert str(done).count("BROKEN") == sum(verdict.is_broken for verdict in done.verdicts)
    assert _told(done) == status
    assert capsys.readouterr().out == told
    if states:
        assert states[0].read_bytes() == states[1].read_bytes()
        assert done.evidence is not None


def test_a_calibration_that_says_never_exit(tmp_path: pathlib.Path, capsys: pytest.CaptureFixture[str]) -> None:
    """With "never exit" nothing is decoded: Python returns no verdicts, and the command prints why."""
    shutil.copytree("plain/generations", tmp_path / "stored" / "generations")
    calm.calibrate(
        generations=str(tmp_path / "stored"), metric="token_f1", delta=0.001, epsilon=0.001, output=tmp_path / "never"
    )
    asked: dict[str, Any] = {"manifest": tmp_path / "never", "data": "fresh-0.jsonl"}
    done = calm.verify(**asked)
    assert (done.verdicts, done.is_broken) == ((), False)
    capsys.readouterr()
    assert main(["verify", *_flags(asked)]) == 0
    assert "says never exit: there is nothing" in capsys.readouterr().out


@pytest.mark.parametrize("kind", _KINDS)
def test_a_file_is_the_same_request(kind: str, tmp_path: pathlib.Path) -> None:
    """YAML, JSON, flags and Python's arguments give equal, hashable requests."""
    asked = _KINDS[kind]
    content = {name: list(value) if isinstance(value, tuple) else value for name, value in asked.items()}
    for name, text in (("run.yaml", yaml.safe_dump(content)), ("run.json", json.dumps(content))):
        (tmp_path / name).write_text(text, encoding="utf-8")
    request = _parsed(f"--config={tmp_path / 'run.yaml'}")
    assert request == _parsed(f"--config={tmp_path / 'run.json'}")
    assert request == VerifyRequest(**asked) == _parsed(*_flags(asked))
    assert hash(request) == hash(dataclasses.replace(request))
    assert request.is_of_settings is ("data" not in asked)


def test_a_file_names_fresh_losses(tmp_path: pathlib.Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A config file decides the kind of test, as flags do; its errors name the key."""
    config = tmp_path / "run.yaml"
    config.write_text("manifest: certified\nlosses: [broken.csv]\n")
    assert main(["verify", f"--config={config}"]) == 3
    assert main(["verify", f"--config={config}", "--losses=fresh-0.csv"]) == 0
    config.write_text("manifest: certified\nlosses: fresh-0.csv\nrunner: DirectRunner\n")
    capsys.readouterr()
    assert main(["verify", f"--config={config}"]) == 2
    assert "run.yaml: runner is no option." in capsys.readouterr().err


@pytest.mark.parametrize(
    ("given", "flag", "argument"),
    [
        ({}, "--data is missing: files with the", "data is missing: files with the examples, or seqio_task"),
        ({"alpha": 0}, "--alpha must be in (0, 1), got 0", "alpha must be in (0, 1), got 0"),
        ({"state": "x"}, "--state belongs to --anytime", "state belongs to anytime=True, which is missing"),
        ({"candidates": "x"}, "--candidates belongs to --baseline", "candidates belongs to baseline, which is missing"),
        ({"baseline": "x"}, "--candidates is missing: the runs", "candidates is missing: the runs that are compared"),
        ({"losses": "x", "baseline": "y", "candidates": "z"}, "(--losses) or", "name either the losses (losses) or"),
        ({"losses": "x", "metric": "a"}, "--metric belongs to --baseline", "metric belongs to baseline, and losses is"),
        ({"losses": "x", "data": "y"}, "--data is about outputs of a model", "data is about outputs of a model, and l"),
        ({"losses": "x", "batch_size": 4}, "and --losses needs none", "batch_size is about outputs of a model, and"),
        ({"data": "x", "metric": "a"}, "--metric=a: the manifest has no", "metric='a': the manifest has no entry of"),
        ({"data": "x", "dtype": "bfloat16"}, "--dtype=bfloat16: the", "dtype='bfloat16': the manifest was calibrated"),
        ({"losses": "fresh-0.csv"}, "--manifest plain: is one of calibrate", "manifest plain: is one of calibrate"),
    ],
)
def test_both_refuse_the_same(
    given: dict[str, Any], flag: str, argument: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """Both refuse the same values in the same sentence, naming the flag or the argument."""
    asked = {"manifest": "plain", **given}
    assert main(["verify", *_flags(asked)]) == 2
    printed = capsys.readouterr()
    assert printed.out == ""
    assert flag in printed.err.splitlines()[-1]
    with pytest.raises(calm.CalmBeamError) as caught:
        calm.verify(**asked)
    assert argument in str(caught.value)


def test_a_certification_needs_losses() -> None:
    """A manifest of settings with data for a model is refused with what verifies it."""
    with pytest.raises(calm.CalmBeamError, match="verify with losses tests it"):
        calm.verify(manifest="certified", data="fresh-0.jsonl")
    with pytest.raises(calm.CalmBeamError, match="options are of pipelines that decode"):
        calm.verify(manifest="certified", losses="fresh-0.csv", options=PipelineOptions([]))


def test_a_misspelt_argument() -> None:
    """A misspelt argument is named with the nearest valid one."""
    with pytest.raises(TypeError, match=r"^verify\(\) has no argument 'losess'\. Did you mean losses\?$"):
        calm.verify(losess="x", manifest="m")  # type: ignore[call-arg]


def test_the_name_that_other_steps_have_for_the_model() -> None:
    """An argument `model`, as transforms and `calibrate` take it, is answered with this function's name for it."""
    with pytest.raises(TypeError, match=r"^verify\(\) has no argument 'model'\. Did you mean checkpoint\?$"):
        calm.verify(model="x", manifest="m")  # type: ignore[call-arg]
    with pytest.raises(TypeError, match=r"^suitability\(\) has no argument 'model'\. Did you mean checkpoint\?$"):
        calm.suitability(model="x")  # type: ignore[call-arg]
