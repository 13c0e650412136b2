"""`--exits=auto`: which ways of exiting are tried, what they are said to cost, and what is promised."""

import json
import pathlib
from collections.abc import Sequence
from typing import Any

import pytest

import calm_beam as calm
from calm_beam.errors import UsageError
from calm_beam.evaluation.measured_cost import measured_cost
from calm_beam.evaluation.serving_speed import Serving
from calm_beam.exits.token_cost import TokenCost
from calm_beam.launch.calibrate.auto import _candidates
from calm_beam.launch.cli import main
from calm_beam.manifest import Variant, read_manifest
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
    """Where seconds count, they are measured before the sweep, stand in the manifest, and are gone on with."""
    assert _calibrate(model, data, tmp_path / "out") == 0
    manifest = read_manifest(tmp_path / "out" / "manifest.json")
    assert manifest.plan is not None
    assert manifest.plan.pareto is not None
    assert manifest.cost is not None
    assert manifest.plan.pareto.objective == "latency"
    assert (manifest.cost.unit, manifest.cost.batch, manifest.cost.device) == ("seconds", 1, "cpu")
    # Of so few examples, there are two.
    assert len(manifest.plan.pareto.variants) == 2
    # What is slower is promised no more; what exits has been timed one at a time and in batches.
    for place, entry in enumerate(manifest.calibrations):
        measured = [speed for speed in manifest.speeds or () if place in speed.calibrations]
        assert [speed.batch for speed in measured] in ([1, 64], [])
        if measured:
            assert (entry.pays is False) == (measured[0].factor < 1)
    kept = json.loads((tmp_path / "out" / "token_cost.json").read_text(encoding="utf-8"))
    assert kept == {"model": manifest.model.fingerprint, **manifest.cost.to_dict()}
    assert "exits=auto: one prompt at a time, a token takes" in capsys.readouterr().err
    (tmp_path / "out" / "manifest.json").unlink()
    assert _calibrate(model, data, tmp_path / "out", "--resume") == 0
    again = read_manifest(tmp_path / "out" / "manifest.json")
    assert (again.cost, again.plan) == (manifest.cost, manifest.plan)
    assert [entry.path for entry in again.calibrations] == [entry.path for entry in manifest.calibrations]


def test_a_busy_machine_is_told(
    model: pathlib.Path,
    data: pathlib.Path,
    tmp_path: pathlib.Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """What a busy machine measures is uncertain, and that is said."""
    monkeypatch.setattr("os.getloadavg", lambda: (1000.0, 1000.0, 1000.0))
    assert _calibrate(model, data, tmp_path / "out", "--objective=throughput:4") == 0
    assert "caution: this machine is busy (load 1000.0 on" in capsys.readouterr().err
    manifest = read_manifest(tmp_path / "out" / "manifest.json")
    assert manifest.cost is not None
    assert manifest.cost.batch == 4
    assert {speed.batch for speed in manifest.speeds or ()} <= {1, 4}


def test_by_layers_nothing_is_measured(model: pathlib.Path, data: pathlib.Path, tmp_path: pathlib.Path) -> None:
    """Layers and operations cost what they cost on any machine; Python asks for the same."""
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
    """Layers that may exit lie at quarters of the depth first; no two candidates are the same."""
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
    """What says itself how tokens exit, or goes through one grid, is refused before anything is read."""
    try:
        status = main(["calibrate", "--exits=auto", f"--output={tmp_path / 'out'}", *flags])
    except SystemExit as error:
        status = int(error.code or 0)
    assert status == 2
    assert message in " ".join(capsys.readouterr().err.split())


def test_an_objective_needs_candidates() -> None:
    """Without them nothing is chosen by it."""
    with pytest.raises(UsageError, match="objective belongs to exits, which is missing"):
        calm.calibrate(objective="layers")


def test_no_example_that_tests_is_timed(
    model: pathlib.Path, data: pathlib.Path, tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where all examples test, prompts are made to be timed: the same ones, whatever the data are."""
    timed: list[Sequence[Sequence[int]]] = []

    def kept(serving: Serving, prompts: Sequence[Sequence[int]], **settings: Any) -> TokenCost:
        timed.append(prompts)
        return measured_cost(serving, prompts, **settings)

    monkeypatch.setattr("calm_beam.evaluation.measured_cost.measured_cost", kept)
    rows = data.read_text(encoding="utf-8").splitlines(keepends=True)
    for name, some in (("first", rows[:20]), ("second", rows[20:40])):
        path = tmp_path / f"{name}.jsonl"
        path.write_text("".join(some), encoding="utf-8")
        assert _calibrate(model, path, tmp_path / name) == 0
    first, second = timed
    assert first == second
    assert {len(prompt) for prompt in first} == {24}
