"""`--exits=auto`: the candidates, their measured costs, and the promise."""

import dataclasses
import itertools
import json
import pathlib
import re
import time
from collections.abc import Sequence
from typing import Any

import pytest
from apache_beam.options.pipeline_options import PipelineOptions

import calm_beam as calm
from calm_beam.calibration.result import RiskRow, read_risk_table
from calm_beam.errors import UsageError
from calm_beam.evaluation.performance import Estimate
from calm_beam.evaluation.serving_speed import Serving, Speedup, measured_cost
from calm_beam.exits.measures import Need
from calm_beam.exits.token_cost import TokenCost
from calm_beam.launch.calibrate import flag_parsers
from calm_beam.launch.calibrate.auto import _candidates
from calm_beam.launch.calibrate.command import CalibrateCall, calibrate_and_report
from calm_beam.launch.calibrate.prepare import settled_exits
from calm_beam.launch.calibrate.request import CalibrateRequest
from calm_beam.launch.cli import main
from calm_beam.launch.flags import parse_flags, request_of
from calm_beam.launch.runners import Workers
from calm_beam.manifest import Variant, read_manifest
from tests.builders import build_config
from tests.pipelines import SHORT_FLAGS, id_rows, write_model, write_rows

_ASKED = ("--metric=token_f1", "--delta=0.45,0.6", "--epsilon=0.2")


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> pathlib.Path:
    """A tiny random model without a vocabulary."""
    return write_model(tmp_path_factory.mktemp("auto") / "model")


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> pathlib.Path:
    """Prompts of token ids."""
    return write_rows(tmp_path_factory.mktemp("auto") / "rows.jsonl", id_rows(60))


def _calibrate(model: pathlib.Path, data: pathlib.Path, output: pathlib.Path, *flags: str) -> int:
    base = ["calibrate", f"--checkpoint={model}", f"--data={data}", f"--output={output}", "--exits=auto"]
    return main([*base, *SHORT_FLAGS, *_ASKED, *flags])


def test_seconds_are_measured_and_kept(
    model: pathlib.Path, data: pathlib.Path, tmp_path: pathlib.Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """With a latency objective, seconds are measured before the sweep, kept in the manifest, and reused."""
    assert _calibrate(model, data, tmp_path / "out") == 0
    manifest = read_manifest(tmp_path / "out" / "manifest.json")
    assert manifest.plan is not None
    assert manifest.plan.pareto is not None
    assert manifest.cost is not None
    assert manifest.plan.pareto.objective == "latency"
    assert (manifest.cost.unit, manifest.cost.batch, manifest.cost.device) == ("seconds", 1, "cpu")
    # With so few examples there are two.
    assert len(manifest.plan.pareto.variants) == 2
    # Slower rules are not promised; exits have been timed one prompt at a time and in batches.
    for place, entry in enumerate(manifest.calibrations):
        measured = [speed for speed in manifest.speeds or () if place in speed.calibrations]
        assert [speed.batch for speed in measured] in ([1, 64], [])
        if measured:
            assert (entry.pays is False) == (measured[0].factor - (measured[0].standard_error or 0) < 1)
    kept = json.loads((tmp_path / "out" / "token_cost.json").read_text(encoding="utf-8"))
    assert kept == {"model": manifest.model.fingerprint, **manifest.cost.to_dict()}
    assert "exits=auto: one prompt at a time, a token takes" in capsys.readouterr().err
    (tmp_path / "out" / "manifest.json").unlink()
    assert _calibrate(model, data, tmp_path / "out", "--resume") == 0
    again = read_manifest(tmp_path / "out" / "manifest.json")
    assert (again.cost, again.plan) == (manifest.cost, manifest.plan)
    # The fastest variant, as measured again, comes last.
    for entry, before in zip(again.calibrations, manifest.calibrations, strict=True):
        assert set(entry.path) == set(before.path)


def _measure(
    monkeypatch: pytest.MonkeyPatch, cost: TokenCost, *, gains: dict[str, float], stalls: bool = False
) -> None:
    """Gives a token this cost, and exits by each measure these gains over the full model.

    If the machine stalls, every second measurement says that they are slower, with a large standard error.
    """
    calls = itertools.count(1)

    def measured(_: object, early: dict[tuple[Variant, float], object], **settings: Any) -> dict[object, Speedup]:
        taken, has_stalled = len(settings["prompts"]), stalls and next(calls) % 2
        return {
            way: Speedup(
                factor=Estimate(mean=0.8, standard_error=0.3, prompts=taken)
                if has_stalled
                else Estimate(mean=gains[way[0].confidence or ""], standard_error=0.1, prompts=taken),
                seconds=0.5,
                full_seconds=1.0,
                prompts=taken,
            )
            for way in early
        }

    monkeypatch.setattr("calm_beam.launch.calibrate.speed.measure_speedups", measured)
    monkeypatch.setattr("calm_beam.evaluation.serving_speed.measured_cost", lambda *_, **__: cost)


_EASY = ("--consistency=textual", "--delta=0.97", "--engine=native")


@pytest.mark.parametrize(("fastest", "stalls"), [("softmax", False), ("static", False), ("static", True)])
def test_the_fastest_of_what_was_proved_is_promised(
    fastest: str,
    stalls: bool,
    model: pathlib.Path,
    data: pathlib.Path,
    tmp_path: pathlib.Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Of the variants that were proved, the one measured fastest is promised; manifest and risk table agree.

    A machine that stalls at a measurement changes nothing, since what is uncertain is measured once more.
    """
    cost = TokenCost(layers=2, layer=1e-3, output=1e-6, tests={Need.LOGITS: 1e-6, Need.STATES: 1e-6})
    _measure(monkeypatch, cost, gains={"softmax": 1.5, "static": 1.5} | {fastest: 2.0}, stalls=stalls)
    output = tmp_path / "out"
    assert _calibrate(model, data, output, *_EASY) == 0
    manifest = read_manifest(output / "manifest.json")
    (entry,) = manifest.calibrations
    proved = {step.variant.confidence for step in entry.path if step.rejected and step.variant is not None}
    assert proved == {"softmax", "static"}
    assert entry.variant is not None
    assert entry.rule is not None
    assert (entry.variant.confidence, entry.rule.confidence) == (fastest, fastest)
    assert {speed.factor for speed in manifest.speeds or ()} == {2.0}
    rows = read_risk_table(output / "risk_table.csv", RiskRow)
    tested = sorted((row for row in rows if row.place is not None), key=lambda row: row.place or 0)
    assert [(row.threshold, row.variant) for row in tested] == [step.tested_as for step in entry.path]
    assert (output / "report.html").is_file()


@pytest.mark.parametrize(("gain", "pays"), [(1.5, None), (1.05, False), (0.9, False)])
def test_what_was_forecast_to_be_slow_is_measured(
    gain: float,
    pays: bool | None,
    model: pathlib.Path,
    data: pathlib.Path,
    tmp_path: pathlib.Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Exits that cost more than the full model by the cost of a token are promised if they are clearly faster."""
    cost = TokenCost(layers=2, layer=1e-3, skipped=1.0, output=1e-6, tests={Need.LOGITS: 1e-6})
    _measure(monkeypatch, cost, gains={"softmax": gain, "static": gain})
    assert _calibrate(model, data, tmp_path / "out", *_EASY) == 0
    (entry,) = read_manifest(tmp_path / "out" / "manifest.json").calibrations
    assert entry.pays is pays
    assert (entry.threshold is None) == (pays is False)
    assert any(step.rejected for step in entry.path)


@pytest.mark.parametrize("flag", ["--holdout_share=0.3", "--cluster_key=page"])
def test_where_speeds_are_not_compared_the_cost_of_a_token_decides(
    flag: str, model: pathlib.Path, data: pathlib.Path, tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With a holdout, or with clusters, exits that were given up by their cost stay so, however fast they are."""
    rows = [json.loads(line) for line in data.read_text(encoding="utf-8").splitlines()]
    of_pages = write_rows(tmp_path / "rows.jsonl", [{**row, "page": f"page {at}"} for at, row in enumerate(rows)])
    cost = TokenCost(layers=2, layer=1e-3, skipped=1.0, output=1e-6, tests={Need.LOGITS: 1e-6})
    _measure(monkeypatch, cost, gains={"softmax": 2.0, "static": 2.0})
    assert _calibrate(model, of_pages, tmp_path / "out", *_EASY, flag) == 0
    manifest = read_manifest(tmp_path / "out" / "manifest.json")
    (entry,) = manifest.calibrations
    assert (entry.pays, entry.threshold, entry.confirmation) == (False, None, None)
    assert any(step.rejected and step.layers < manifest.model.layers for step in entry.path)


def test_a_busy_machine_is_told(
    model: pathlib.Path,
    data: pathlib.Path,
    tmp_path: pathlib.Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """Before timings begin, messages say that they will be uncertain, and, once, that examples are too few anyway."""
    monkeypatch.setattr("os.getloadavg", lambda: (1000.0, 1000.0, 1000.0))
    assert _calibrate(model, data, tmp_path / "out", "--objective=throughput:4", "--delta=0.01") == 0
    printed = capsys.readouterr().err
    places = [
        printed.index(words)
        for words in (
            "caution: The promise cannot be proved by 60 examples, even if none of them loses anything: delta 0.01",
            "candidates, since there are fewer than 500 examples; also possible: ",
            "caution: this machine is busy (load 1000.0 on",
            "exits=auto: measuring what a token costs here",
            "exits=auto: 4 prompts at a time, a token takes",
        )
    ]
    assert places == sorted(places)
    assert printed.count("cannot be proved by 60 examples") == 1
    manifest = read_manifest(tmp_path / "out" / "manifest.json")
    assert manifest.cost is not None
    assert manifest.cost.batch == 4
    assert {speed.batch for speed in manifest.speeds or ()} <= {1, 4}


def test_by_layers_nothing_is_measured(model: pathlib.Path, data: pathlib.Path, tmp_path: pathlib.Path) -> None:
    """Layers and operations need no timing, since they cost the same on any machine; Python asks for the same."""
    manifest = calm.calibrate(
        checkpoint=model,
        data=str(data),
        exits="auto",
        objective="layers",
        metric="token_f1",
        delta=0.6,
        epsilon=0.2,
        max_decode_length=6,
        output=tmp_path / "out",
    )
    assert manifest.cost is not None
    assert not manifest.cost.was_measured
    assert (manifest.cost.unit, manifest.cost.layer, manifest.cost.output) == ("layers", 1.0, 0.0)


def test_candidates_follow_from_the_depth() -> None:
    """The first candidates exit from quarters of the depth; no two candidates are equal."""
    found = list(_candidates(8, has_classifier=True, decays=False, tau=None))
    assert found[0] == Variant(confidence="softmax", min_exit_layer=2, exit_interval=2)
    assert len(found) == len(set(found)) >= 12
    assert {each.confidence for each in found} == {"softmax", "static", "state", "classifier"}
    assert {each.confidence for each in _candidates(8, has_classifier=False, decays=True, tau=1.0)} == {
        "softmax",
        "state",
    }
    assert list(_candidates(1, has_classifier=False, decays=False, tau=None)) == []
    assert all(each.min_exit_layer < 2 for each in _candidates(2, has_classifier=True, decays=False, tau=None))


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (("--confidence=state",), "--exits=auto chooses how tokens exit, and --confidence does: leave one of them out"),
        (("--min_exit_layer=2",), "--exits=auto chooses how tokens exit, and --min_exit_layer does"),
        (("--tau=1,4", "--schedule=decay"), "--exits=auto chooses how tokens exit, and --tau does"),
        (("--sequential",), "--exits=auto tries several variants, and --sequential goes through one grid in rounds"),
        (("--objective=speed",), "--objective: expected latency, throughput, layers, flops or throughput:N"),
        (("--objective=throughput:1",), "--objective: expected latency"),
    ],
)
def test_what_does_not_go_together_is_refused(
    flags: tuple[str, ...], message: str, tmp_path: pathlib.Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Flags that set the exits themselves, or need a single grid, are refused before anything is read."""
    try:
        status = main(["calibrate", "--exits=auto", f"--output={tmp_path / 'out'}", *flags])
    except SystemExit as error:
        status = int(error.code or 0)
    assert status == 2
    assert message in " ".join(capsys.readouterr().err.split())


@pytest.mark.parametrize(
    ("asked", "message"),
    [
        (
            {"confidence": "state"},
            "says what exits='auto' is to save, and confidence says how tokens exit",
        ),
        ({"thresholds": (0.9, 0.5)}, "and thresholds says how tokens exit: leave one of them out"),
        ({"exits": calm.ExitRule(confidence="state")}, "and exits says how tokens exit"),
        ({"sequential": True}, "and sequential=True goes through one grid in rounds: leave one of them out"),
    ],
)
def test_an_objective_needs_candidates(asked: dict[str, Any], message: str) -> None:
    """--objective without --exits=auto is refused."""
    with pytest.raises(UsageError, match=re.escape(message)):
        calm.calibrate(objective="layers", **asked)


def test_no_example_that_tests_is_timed(
    model: pathlib.Path, data: pathlib.Path, tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """If all examples test, the timed prompts are generated, the same for all data."""
    timed: list[Sequence[Sequence[int]]] = []

    def kept(serving: Serving, prompts: Sequence[Sequence[int]], **settings: Any) -> TokenCost:
        timed.append(prompts)
        return measured_cost(serving, prompts, **settings)

    monkeypatch.setattr("calm_beam.evaluation.serving_speed.measured_cost", kept)
    rows = data.read_text(encoding="utf-8").splitlines(keepends=True)
    for name, some in (("first", rows[:20]), ("second", rows[20:40])):
        path = tmp_path / f"{name}.jsonl"
        path.write_text("".join(some), encoding="utf-8")
        assert _calibrate(model, path, tmp_path / name) == 0
    first, second = timed
    assert first == second
    assert {len(prompt) for prompt in first} == {24}


_ONE_WAY = "exits: softmax at every layer, since "


def test_the_time_is_that_of_the_whole_command(
    model: pathlib.Path, data: pathlib.Path, tmp_path: pathlib.Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The time at the end counts from the start of the command, loading and measuring included."""
    flags = (f"--checkpoint={model}", f"--data={data}", f"--output={tmp_path / 'out'}", *SHORT_FLAGS, *_ASKED)
    request = _request("--exits=auto", "--objective=layers", *flags)
    assert calibrate_and_report(request, PipelineOptions([]), began=time.time() - 5000) == 0
    (seconds,) = re.findall(r"60 examples in (\d+) s;", capsys.readouterr().out)
    assert 5000 <= int(seconds) < 6000


def _request(*flags: str) -> CalibrateRequest:
    """Returns the request of a command."""
    (parser,) = flag_parsers()
    return request_of(CalibrateRequest, parse_flags(parser, flags)[0], parser=parser)


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        ((), None),
        (("--delta=0.1", "--joint"), None),
        (("--objective=flops",), None),
        (("--selection_share=0.4",), None),
        (("--holdout_share=0.3",), None),
        (("--cluster_key=page",), None),
        (("--tail=0.5",), None),
        (("--p_value=wsr",), None),
        (("--near_ties=worst_case",), None),
        (("--dtype=bfloat16", "--engine=xla"), None),
        (("--confidence=softmax",), ""),
        (("--confidence=state", "--sequential"), ""),
        (("--confidence=softmax,state",), ""),
        (("--min_exit_layer=1",), ""),
        (("--exit_interval=2",), ""),
        (("--thresholds=0.9,0.5",), f"{_ONE_WAY}--thresholds says how tokens exit"),
        (("--grid_step=0.1",), f"{_ONE_WAY}--grid_step says how tokens exit"),
        (("--schedule=decay", "--tau=4"), f"{_ONE_WAY}--tau says how tokens exit"),
        (("--state_propagation=from_first_exit",), f"{_ONE_WAY}--state_propagation says how tokens exit"),
        (("--sequential",), f"{_ONE_WAY}--sequential goes through one grid in rounds"),
        (("--sweep=lazy",), f"{_ONE_WAY}--sweep=lazy goes down one grid as far as its test does"),
        (("--group_key=page",), f"{_ONE_WAY}--group_key gives groups entries of their own"),
        (("--procedure=holm",), f"{_ONE_WAY}--procedure=holm tests the grid of one"),
        (("--procedure=fixed_sequence",), f"{_ONE_WAY}--procedure=fixed_sequence tests the grid of one"),
        (("--generations=out",), "exits: as they were decoded, since --generations=out is decoded already"),
    ],
)
def test_what_turns_the_choice_off(flags: tuple[str, ...], said: str | None) -> None:
    """Exits are chosen automatically unless a flag sets them or allows one way only, which the run reports."""
    request = _request(*flags)
    assert request.is_auto == (said is None)
    assert settled_exits(request, Workers(options=PipelineOptions([]))) == (request, said or None)
    assert said is None or request.variants == () or len(request.variants) > 1


def test_templates_have_one_way() -> None:
    """A template is one pipeline, so it has one way of exiting unless --exits=auto is given."""
    template = Workers(options=PipelineOptions(["--runner=DataflowRunner", "--template_location=gs://bucket/template"]))
    settled, said = settled_exits(_request(), template)
    assert not settled.is_auto
    assert [rule.confidence for rule in settled.rules] == ["softmax"]
    assert said == f"{_ONE_WAY}every way of exiting is a pipeline of its own, and a template is only one"
    assert settled_exits(_request("--exits=auto"), template)[0].is_auto


def test_guarantees_with_a_procedure_have_one_way() -> None:
    """A guarantee with its own testing procedure has one grid, and refuses lists of exits."""
    asked = calm.Guarantee("textual", "token_f1", delta=0.5, procedure="holm")
    assert not CalibrateCall(guarantees=(asked,)).is_auto
    assert CalibrateCall(guarantees=(dataclasses.replace(asked, procedure="fixed_sequence"),)).is_auto
    with pytest.raises(UsageError, match="and --procedure=holm tests the grid of one"):
        CalibrateCall(guarantees=(asked,), exits="auto")


def test_nobody_says_how_tokens_exit(
    model: pathlib.Path, data: pathlib.Path, tmp_path: pathlib.Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Without a flag about exits, several ways are swept, by the same plan as with --exits=auto."""
    where = ["calibrate", f"--checkpoint={model}", f"--data={data}", "--max_decode_length=6", "--num_shards=3"]
    asked = [*where, *_ASKED, "--objective=layers"]
    assert main([*asked, f"--output={tmp_path / 'default'}"]) == 0
    assert "exits=auto: softmax, from layer 1; static, from layer 1" in capsys.readouterr().err
    assert main([*asked, f"--output={tmp_path / 'asked'}", "--exits=auto"]) == 0
    default, named = (read_manifest(tmp_path / name / "manifest.json") for name in ("default", "asked"))
    assert default.plan == named.plan
    assert default.calibrations == named.calibrations
    assert default.plan is not None
    assert default.plan.pareto is not None
    # The flag of the paper's method gives that method.
    assert main([*where, *_ASKED, f"--output={tmp_path / 'paper'}", "--confidence=softmax"]) == 0
    paper = read_manifest(tmp_path / "paper" / "manifest.json")
    assert paper.plan is not None
    assert (paper.plan.pareto, paper.cost, paper.speeds) == (None, None, None)


def test_a_decoder_of_one_layer_has_one_way(
    data: pathlib.Path, tmp_path: pathlib.Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """With one decoder layer nothing is chosen, and a message says so; --exits=auto is refused."""
    config = build_config(num_encoder_layers=1, num_decoder_layers=1)
    small = write_model(tmp_path / "small", config=config)
    asked = ["calibrate", f"--checkpoint={small}", f"--data={data}", "--max_decode_length=6", "--grid_step=0.5"]
    assert main([*asked, *_ASKED, "--exits=auto", f"--output={tmp_path / 'out'}"]) == 2
    reason = "the decoder has 1 layer, of which nothing can exit early"
    assert f"--exits=auto: {reason}." in capsys.readouterr().err
    assert main([*asked[:-1], *_ASKED, f"--output={tmp_path / 'out'}"]) == 0
    assert f"{_ONE_WAY}{reason}" in capsys.readouterr().err


def test_memory_for_one_way_is_for_one_way(
    model: pathlib.Path, data: pathlib.Path, tmp_path: pathlib.Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A cache budget too small for two sweeps at a time is given to one way, and a message says so."""
    asked = ["calibrate", f"--checkpoint={model}", f"--data={data}", "--max_decode_length=6", "--max_input_length=32"]
    # 32 of the prompt, and 6 for each of 20 thresholds and the full model.
    assert main([*asked, *_ASKED, "--max_cache_tokens=200", f"--output={tmp_path / 'out'}"]) == 0
    assert f"{_ONE_WAY}there is memory for one way of exiting at a time, and not for two" in capsys.readouterr().err


def test_single_losses_keep_candidates_few(
    model: pathlib.Path, data: pathlib.Path, monkeypatch: pytest.MonkeyPatch, tmp_path: pathlib.Path
) -> None:
    """A test that needs every loss tests each candidate by itself, however many examples there are."""
    monkeypatch.setattr("calm_beam.launch.calibrate.auto._CANDIDATES", ((0, 12),))
    asked = ["calibrate", f"--checkpoint={model}", f"--data={data}", "--objective=layers", *SHORT_FLAGS[1:], *_ASKED]
    assert main([*asked, f"--output={tmp_path / 'out'}", "--p_value=wsr"]) == 0
    plan = read_manifest(tmp_path / "out" / "manifest.json").plan
    assert plan is not None
    assert plan.pareto is not None
    assert plan.pareto.choosing_share is None
    assert len(plan.pareto.variants) <= 6


def test_what_chooses_a_path_stays_measured(
    model: pathlib.Path,
    data: pathlib.Path,
    tmp_path: pathlib.Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """If a part of the examples chooses, an output directory keeps its timings; others would give another path."""
    measured = TokenCost(layers=2, layer=1e-4, output=1e-4, tests={Need.LOGITS: 1e-5, Need.STATES: 1e-5})
    monkeypatch.setattr("calm_beam.evaluation.serving_speed.measured_cost", lambda *_, **__: measured)
    assert _calibrate(model, data, tmp_path / "out", "--selection_share=0.5") == 0
    first = read_manifest(tmp_path / "out" / "manifest.json")
    other = dataclasses.replace(measured, layer=2e-4)
    monkeypatch.setattr("calm_beam.evaluation.serving_speed.measured_cost", lambda *_, **__: other)
    capsys.readouterr()
    assert _calibrate(model, data, tmp_path / "out", "--selection_share=0.5", "--overwrite") == 0
    assert "exits=auto: the cost of a token was measured before, and is in" in capsys.readouterr().err
    assert read_manifest(tmp_path / "out" / "manifest.json").cost == first.cost
    # If each is tested by itself, whichever is taken was proved.
    assert _calibrate(model, data, tmp_path / "out", "--overwrite") == 0
    again = read_manifest(tmp_path / "out" / "manifest.json").cost
    assert again is not None
    assert again.layer == 2e-4
