"""Calibrations that test after every round, and stop when enough is proved."""

import dataclasses
import json
import pathlib
import shutil

import pytest

from calm_beam.launch.calibrate import sources
from calm_beam.launch.cli import main
from calm_beam.manifest import Manifest, read_manifest
from calm_beam.outputs import COMPLETE, STOPPED
from calm_beam.outputs.sharding import shard_in_order
from calm_beam.risk.pvalues import P_VALUES
from tests.calm_beam.calibration.builders import build_example
from tests.pipelines import SHORT_FLAGS, id_rows, without_engine, without_time, write_model, write_rows
from tests.sampling import sampled

_ROWS = 120
_ROUND = 20


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> pathlib.Path:
    """A tiny random model without a vocabulary."""
    return write_model(tmp_path_factory.mktemp("sequential") / "model")


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> pathlib.Path:
    """Prompts of token ids in clusters of three."""
    rows = [{**row, "page": index // 3} for index, row in enumerate(id_rows(_ROWS))]
    return write_rows(tmp_path_factory.mktemp("sequential") / "rows.jsonl", rows)


@pytest.fixture(scope="module")
def whole(model: pathlib.Path, data: pathlib.Path, tmp_path_factory: pytest.TempPathFactory) -> pathlib.Path:
    """The output of a run without a rule to stop."""
    output = tmp_path_factory.mktemp("sequential") / "whole"
    assert _calibrate(model, data, output) == 0
    return output


@pytest.fixture(scope="module")
def stopped(
    model: pathlib.Path, data: pathlib.Path, whole: pathlib.Path, tmp_path_factory: pytest.TempPathFactory
) -> pathlib.Path:
    """The output of a run that its rule has stopped; tests that go on with it take a copy."""
    _, layers = _place_to_stop(whole)
    output = tmp_path_factory.mktemp("sequential") / "stopped"
    assert _calibrate(model, data, output, f"--stop_at_layers={layers}") == 0
    return output


def _calibrate(model: pathlib.Path, data: pathlib.Path, output: pathlib.Path, *flags: str) -> int:
    return main(
        [
            "calibrate",
            f"--checkpoint={model}",
            f"--data={data}",
            f"--output={output}",
            *SHORT_FLAGS,
            "--num_shards=24",
            "--consistency=textual,risk",
            "--metric=token_f1",
            "--delta=0.3,0.7",
            "--epsilon=0.2",
            "--sequential",
            f"--round_examples={_ROUND}",
            *flags,
        ]
    )


def _manifest(output: pathlib.Path) -> Manifest:
    return read_manifest(output / "manifest.json")


def _folder(output: pathlib.Path) -> pathlib.Path:
    (folder,) = (output / "generations").iterdir()
    return folder


def _shard(name: str) -> int:
    return shard_in_order(build_example(id=name), salt="calm-beam/0", num_shards=24)


def _place_to_stop(whole: pathlib.Path) -> tuple[int, float]:
    """Returns a round before the last, and the layers of its costliest entry, which were above before."""
    looks = zip(*(entry.looks or () for entry in _manifest(whole).calibrations), strict=True)
    layers = [max(look.layers for look in of_round) for of_round in looks]
    number = next(index for index in range(1, len(layers) - 1) if layers[index] < min(layers[:index]))
    return number + 1, layers[number]


def test_without_a_rule_all_data_count(whole: pathlib.Path) -> None:
    """Without a rule every round is tested, all data count, and the best of all looks is proved."""
    manifest = _manifest(whole)
    assert manifest.sequential is not None
    assert manifest.sequential.ended_by == "end_of_data"
    assert manifest.sequential.rounds == manifest.sequential.of_rounds > 3
    assert manifest.data.examples == manifest.sequential.of_examples == _ROWS
    # The number in the data, wherever they are: every seventh row repeats the one before it.
    assert manifest.data.duplicates == _ROWS // 7
    assert (_folder(whole) / COMPLETE).exists()
    assert {entry.p_value for entry in manifest.calibrations} == {"signed_mixture"}
    assert any(entry.threshold is not None for entry in manifest.calibrations)
    for entry in manifest.calibrations:
        assert entry.looks is not None
        assert [look.n for look in entry.looks][-1] == _ROWS


def test_a_rule_stops_it(
    model: pathlib.Path,
    data: pathlib.Path,
    whole: pathlib.Path,
    tmp_path: pathlib.Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """It stops in the first round after which the rule holds; up to there all looks are those of the whole run."""
    number, layers = _place_to_stop(whole)
    assert _calibrate(model, data, tmp_path / "out", f"--stop_at_layers={layers}") == 0
    printed = capsys.readouterr()
    manifest = _manifest(tmp_path / "out")
    assert manifest.sequential is not None
    assert (manifest.sequential.rounds, manifest.sequential.ended_by) == (number, "stop_at_layers")
    assert manifest.data.examples < _ROWS
    assert f"{manifest.data.examples:,} of {_ROWS} examples" in printed.err
    assert "no promise used more than" in " ".join(printed.out.split())
    assert (_folder(tmp_path / "out") / STOPPED).exists()
    assert not (_folder(tmp_path / "out") / COMPLETE).exists()
    for entry, other in zip(manifest.calibrations, _manifest(whole).calibrations, strict=True):
        assert entry.looks is not None
        assert other.looks is not None
        assert [(look.n, look.threshold, look.layers) for look in entry.looks] == [
            (look.n, look.threshold, look.layers) for look in other.looks[:number]
        ]
    page = (tmp_path / "out" / "report.html").read_text(encoding="utf-8")
    assert "The proof, round by round" in page
    assert main(["inspect", str(tmp_path / "out")]) == 0
    assert f"ended after round {number} of" in " ".join(capsys.readouterr().out.split())


def test_it_can_be_continued(
    model: pathlib.Path,
    data: pathlib.Path,
    whole: pathlib.Path,
    stopped: pathlib.Path,
    tmp_path: pathlib.Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """Another rule continues with the rest of the data, to the result of an uninterrupted run, and says from where."""
    number, layers = _place_to_stop(whole)
    output = shutil.copytree(stopped, tmp_path / "out")
    plan = _manifest(output).plan
    assert _calibrate(model, data, output, f"--stop_at_layers={layers}", "--resume") == 0
    assert "is finished; nothing is left to do" in capsys.readouterr().err
    assert _calibrate(model, data, output, "--resume") == 0
    manifest = _manifest(output)
    assert manifest.sequential is not None
    assert plan is not None
    (before,) = manifest.sequential.continues
    assert (before.rounds, before.ended_by, before.plan) == (number, "stop_at_layers", plan.digest)
    without_history = dataclasses.replace(manifest, sequential=dataclasses.replace(manifest.sequential, continues=()))
    assert without_time(without_history) == without_time(_manifest(whole))
    assert (output / "risk_table.csv").read_bytes() == (whole / "risk_table.csv").read_bytes()
    assert (_folder(output) / COMPLETE).exists()
    assert not (_folder(output) / STOPPED).exists()
    # No rule can continue: there are no data left.
    assert _calibrate(model, data, output, "--stop_gain=50%", "--resume") == 2
    assert "is finished, and was asked for something else" in capsys.readouterr().err


def test_a_stopped_sample_is_for_no_other_test(
    model: pathlib.Path,
    data: pathlib.Path,
    stopped: pathlib.Path,
    tmp_path: pathlib.Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """A stopped sample is refused by --generations and other tests, since losses have decided its size."""
    output = shutil.copytree(stopped, tmp_path / "out")
    capsys.readouterr()
    assert main(["calibrate", f"--generations={output}", f"--output={tmp_path / 'again'}", "--metric=token_f1"]) == 2
    assert "Other tests of them would prove nothing" in capsys.readouterr().err
    assert _calibrate(model, data, output, "--delta=0.5", "--resume") == 2
    printed = capsys.readouterr().err
    assert "Another rule to stop may take it further" in printed
    assert "--generations" not in printed
    # So is a run that did not finish.
    (output / "manifest.json").unlink()
    assert _calibrate(model, data, output, "--delta=0.5", "--resume") == 1
    printed = capsys.readouterr().err
    assert "Neither can be changed once losses have been seen" in printed
    assert "--resume goes on from there" not in printed


def test_an_unfinished_run_goes_on(
    model: pathlib.Path, data: pathlib.Path, whole: pathlib.Path, tmp_path: pathlib.Path
) -> None:
    """Counted rounds are kept, an uncounted one is counted, and the result is the same."""
    output = tmp_path / "out"
    shutil.copytree(whole, output)
    for name in ("manifest.json", "risk_table.csv"):
        (output / name).unlink()
    folder = _folder(output)
    (folder / COMPLETE).unlink()
    (folder / "round-00003.json").unlink()
    kept = {path: path.stat().st_mtime_ns for path in (*folder.glob("*.parquet"), *folder.glob("round-0000[12].json"))}
    assert _calibrate(model, data, output, "--resume") == 0
    assert {path: path.stat().st_mtime_ns for path in kept} == kept
    assert without_time(_manifest(output)) == without_time(_manifest(whole))
    assert (output / "risk_table.csv").read_bytes() == (whole / "risk_table.csv").read_bytes()


def test_counted_outputs_that_were_lost_end_the_run(
    model: pathlib.Path,
    data: pathlib.Path,
    whole: pathlib.Path,
    tmp_path: pathlib.Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """A run whose counted outputs are lost ends with an error."""
    output = tmp_path / "out"
    shutil.copytree(whole, output)
    (output / "manifest.json").unlink()
    sorted(_folder(output).glob("*.parquet"))[0].unlink()
    assert _calibrate(model, data, output, "--resume") == 1
    assert "is missing, or not what was counted in round 1" in capsys.readouterr().err


def test_data_that_changed_are_refused(
    model: pathlib.Path,
    whole: pathlib.Path,
    tmp_path: pathlib.Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """A stopped run does not continue with other examples than it has counted."""
    rows = [{**row, "page": index // 3} for index, row in enumerate(id_rows(_ROWS))]
    data = write_rows(tmp_path / "rows.jsonl", rows)
    _, layers = _place_to_stop(whole)
    assert _calibrate(model, data, tmp_path / "out", f"--stop_at_layers={layers}") == 0
    write_rows(data, [{**row, "input_ids": [5, 1]} for row in rows])
    assert _calibrate(model, data, tmp_path / "out", f"--stop_at_layers={layers}", "--resume") == 2
    assert "the data have changed since" in capsys.readouterr().err
    assert _calibrate(model, data, tmp_path / "out", "--resume") == 1
    assert "was decoded from other examples than the data give now" in capsys.readouterr().err


@pytest.mark.parametrize("change", ["fewer", "more"])
def test_data_that_would_be_divided_otherwise_are_refused(
    change: str,
    model: pathlib.Path,
    tmp_path: pathlib.Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """If changed shards to come would leave out or repeat an example, the run ends."""
    rows = sorted(id_rows(_ROWS), key=lambda row: _shard(row["id"]))
    data = write_rows(tmp_path / "rows.jsonl", rows)
    output = tmp_path / "out"
    flags = ("--consistency=textual", "--delta=0.7")
    assert _calibrate(model, data, output, *flags, "--stop_at_threshold=0.9") == 0
    counted = {shard["shard"] for shard in json.loads((_folder(output) / STOPPED).read_text())["shards"]}
    new = [{**row, "id": f"new-{row['id']}"} for row in id_rows(100, seed=1)]
    changed = {"fewer": rows[:-20], "more": [*rows, *(row for row in new if _shard(row["id"]) not in counted)]}
    assert not {_shard(row["id"]) for row in rows[-20:]} & counted
    write_rows(data, changed[change])
    before = (output / "manifest.json").read_bytes()
    capsys.readouterr()
    assert _calibrate(model, data, output, *flags, "--resume") == 1
    assert "they would be divided into other rounds" in capsys.readouterr().err
    assert (output / "manifest.json").read_bytes() == before
    assert not (_folder(output) / COMPLETE).exists()


def test_a_metric_that_changed_is_refused(
    model: pathlib.Path,
    data: pathlib.Path,
    tmp_path: pathlib.Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """A metric whose source has changed is refused: one risk is not made of two metrics."""
    source = tmp_path / "changing_metric.py"
    text = "def score(candidate, references):\n    return float(candidate in references) * 0.9 + 0.1\n"
    source.write_text(text)
    monkeypatch.syspath_prepend(tmp_path)
    flags = ("--metric=changing_metric:score", "--consistency=textual", "--delta=0.95")
    assert _calibrate(model, data, tmp_path / "out", *flags, "--stop_at_threshold=0.9") == 0
    source.write_text(text.replace("0.9", "0.8"))
    assert _calibrate(model, data, tmp_path / "out", *flags, "--resume") == 1
    assert "one risk must not be made of two metrics" in capsys.readouterr().err
    source.write_text(text)
    assert _calibrate(model, data, tmp_path / "out", *flags, "--resume") == 0


def test_a_lazy_run_that_was_killed_at_its_end_is_finished(
    model: pathlib.Path, data: pathlib.Path, tmp_path: pathlib.Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Folders of intermediate blocks are no part of the result, whether they were removed or not."""
    flags = ("--sweep=lazy", "--delta=0.7", "--stop_at_threshold=0.5")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sources.DecodedSource, "finish", lambda _: None)
        assert _calibrate(model, data, tmp_path / "out", *flags) == 0
    assert len(list((tmp_path / "out" / "generations").iterdir())) > 1
    capsys.readouterr()
    assert _calibrate(model, data, tmp_path / "out", *flags, "--resume") == 0
    assert "is finished; nothing is left to do" in capsys.readouterr().err


@pytest.mark.parametrize("stops", sampled([False, True], keep=[1]), ids=["whole", "stopped"])
def test_lazy_sweeps_prove_the_same(
    stops: bool,
    model: pathlib.Path,
    data: pathlib.Path,
    whole: pathlib.Path,
    stopped: pathlib.Path,
    tmp_path: pathlib.Path,
) -> None:
    """A lazy sequential sweep gives the manifest of the whole grid."""
    of_all = stopped if stops else whole
    flags = [f"--stop_at_layers={_place_to_stop(whole)[1]}"] if stops else []
    assert _calibrate(model, data, tmp_path / "lazy", "--sweep=lazy", *flags) == 0
    assert without_time(_manifest(tmp_path / "lazy")) == without_time(_manifest(of_all))
    full, lazy = ((folder / "risk_table.csv").read_text().splitlines() for folder in (of_all, tmp_path / "lazy"))
    assert set(lazy) <= set(full)


def test_a_lazy_run_that_stopped_is_continued(
    model: pathlib.Path, data: pathlib.Path, whole: pathlib.Path, tmp_path: pathlib.Path
) -> None:
    """A lazy run that stopped continues from the lowest part of the grid, which alone is left."""
    flags = ("--sweep=lazy", "--delta=0.8")
    assert _calibrate(model, data, tmp_path / "out", *flags, "--stop_at_threshold=0.9") == 0
    assert _calibrate(model, data, tmp_path / "out", *flags, "--stop_at_threshold=0.5", "--resume") == 0
    assert _calibrate(model, data, tmp_path / "direct", *flags, "--stop_at_threshold=0.5") == 0
    manifest, direct = _manifest(tmp_path / "out"), _manifest(tmp_path / "direct")
    assert manifest.sequential is not None
    without_history = dataclasses.replace(manifest, sequential=dataclasses.replace(manifest.sequential, continues=()))
    assert without_time(without_history) == without_time(direct)


def test_clusters_are_counted_whole(model: pathlib.Path, data: pathlib.Path, tmp_path: pathlib.Path) -> None:
    """Every cluster is within one round, and its mean counts."""
    assert _calibrate(model, data, tmp_path / "out", "--cluster_key=page", "--stop_at_threshold=0.9") == 0
    manifest = _manifest(tmp_path / "out")
    assert manifest.data.clusters is not None
    assert manifest.data.examples == 3 * manifest.data.clusters
    assert all(entry.looks and entry.looks[-1].n == manifest.data.clusters for entry in manifest.calibrations)


def test_the_order_is_that_of_the_seed(
    model: pathlib.Path, data: pathlib.Path, whole: pathlib.Path, tmp_path: pathlib.Path
) -> None:
    """Another seed draws other rounds of the same data."""
    assert _calibrate(model, data, tmp_path / "out", "--seed=1") == 0
    one, other = _manifest(whole), _manifest(tmp_path / "out")
    assert one.data.fingerprint == other.data.fingerprint
    assert one.calibrations[0].looks != other.calibrations[0].looks
    assert json.loads((_folder(whole) / "decode.json").read_text())["order"] == "calm-beam/0"


@pytest.mark.slow
@pytest.mark.parametrize(
    "flags",
    [
        ("--direct_num_workers=2", "--direct_running_mode=multi_processing"),
        ("--direct_num_workers=2", "--direct_running_mode=multi_threading"),
    ],
    ids=["processes", "threads"],
)
def test_every_runner_stops_alike(
    flags: tuple[str, ...], model: pathlib.Path, data: pathlib.Path, whole: pathlib.Path, tmp_path: pathlib.Path
) -> None:
    """The manifest is the same for any number of workers and any order."""
    number, layers = _place_to_stop(whole)
    rule = f"--stop_at_layers={layers}"
    assert _calibrate(model, data, tmp_path / "here", rule) == 0
    assert _calibrate(model, data, tmp_path / "there", rule, *flags) == 0
    there = _manifest(tmp_path / "there")
    assert without_engine(without_time(there)) == without_engine(without_time(_manifest(tmp_path / "here")))
    assert there.sequential is not None
    assert there.sequential.rounds == number


@pytest.mark.parametrize("name", sorted(set(P_VALUES) - {"signed_mixture"}))
def test_p_values_that_may_not_be_watched_are_refused(
    name: str, model: pathlib.Path, data: pathlib.Path, tmp_path: pathlib.Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """p-values that are not valid at every round are refused before decoding, with the reason."""
    flags = (f"--p_value={name}", "--consistency=textual", "--metric=exact_match")
    assert _calibrate(model, data, tmp_path / "out", *flags) == 2
    assert f"p_value {name} holds for a number of examples that is fixed beforehand" in capsys.readouterr().err
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (("--stop_gain=2",), "expected a share above 0 and below 1, such as 2% or 0.02, got '2'"),
        (("--stop_gain=x%",), "expected a share above 0 and below 1"),
        (("--stop_at_threshold=-0.1",), "stop_at_threshold must be a number in [0, 1], got -0.1"),
        (("--stop_at_layers=0.5",), "stop_at_layers must be a finite number of at least 1, got 0.5"),
        (("--round_examples=0",), "expected a whole number of at least 1, got '0'"),
        (("--generations=somewhere",), "decides what is decoded, and --generations=somewhere is decoded already"),
        (("--thresholds=0.9,0.5", "--stop_at_threshold=0.4"), "the lowest threshold of the grid is 0.5"),
    ],
)
def test_rules_that_make_no_sense_are_refused(
    flags: tuple[str, ...],
    message: str,
    model: pathlib.Path,
    data: pathlib.Path,
    tmp_path: pathlib.Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """Stopping rules that make no sense are refused before decoding, with what was expected."""
    assert _calibrate(model, data, tmp_path / "out", *flags) == 2
    assert message in capsys.readouterr().err
    assert not (tmp_path / "out").exists()


def test_rules_belong_to_sequential(capsys: pytest.CaptureFixture[str], tmp_path: pathlib.Path) -> None:
    """A stopping rule without --sequential is refused."""
    assert main(["calibrate", f"--output={tmp_path / 'out'}", "--stop_gain=2%"]) == 2
    assert "--stop_gain belongs to --sequential, which is missing." in capsys.readouterr().err
