"""Variants that differ in measures and exit layers: one sweep of all gives what a sweep of each gives."""

import csv
import dataclasses
import json
import pathlib

import pytest

from calm_beam.calibration.publish import EarlierResult
from calm_beam.launch.cli import main
from calm_beam.manifest import Manifest, Variant, read_manifest
from calm_beam.outputs import DecodeJob, Generation, read_generations
from calm_beam.serving import Generator
from tests.pipelines import CONFIG, SETTINGS, SHORT_FLAGS, id_rows, without_time, write_model, write_rows

_CONFIG = dataclasses.replace(CONFIG, exit_classifier=2)
_ASKED = ("--metric=token_f1", "--delta=0.45,0.6", "--epsilon=0.2")
_LISTS = ("--confidence=softmax,state,classifier", "--min_exit_layer=2", "--exit_interval=1,2")
_VARIANTS = tuple(
    Variant(confidence=measure, min_exit_layer=2, exit_interval=interval)
    for measure in ("softmax", "state", "classifier")
    for interval in (1, 2)
)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> pathlib.Path:
    """A tiny random model with an exit classifier."""
    return write_model(tmp_path_factory.mktemp("rules") / "model", config=_CONFIG)


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> pathlib.Path:
    """Prompts of token ids."""
    return write_rows(tmp_path_factory.mktemp("rules") / "rows.jsonl", id_rows(60))


@pytest.fixture(scope="module")
def together(model: pathlib.Path, data: pathlib.Path, tmp_path_factory: pytest.TempPathFactory) -> pathlib.Path:
    """The output of a calibration of six variants in one sweep."""
    output = tmp_path_factory.mktemp("rules") / "out"
    assert _calibrate(model, data, output, *_LISTS) == 0
    return output


def _calibrate(model: pathlib.Path, data: pathlib.Path, output: pathlib.Path, *flags: str) -> int:
    base = ["calibrate", f"--checkpoint={model}", f"--data={data}", f"--output={output}"]
    return main([*base, *SHORT_FLAGS, *_ASKED, *flags])


def _manifest(output: pathlib.Path) -> Manifest:
    return read_manifest(output / "manifest.json")


def test_one_sweep_stores_what_six_do(
    model: pathlib.Path,
    data: pathlib.Path,
    together: pathlib.Path,
    tmp_path: pathlib.Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Manifest, risk table and every stored output, with confidences, equal those of one sweep per variant."""
    monkeypatch.setattr(
        "calm_beam.launch.calibrate.run.variants_together",
        lambda variants, settings: [[place] for place in range(len(variants))],
    )
    apart = tmp_path / "apart"
    assert _calibrate(model, data, apart, *_LISTS) == 0
    assert without_time(_manifest(apart)) == without_time(_manifest(together))
    assert (apart / "risk_table.csv").read_bytes() == (together / "risk_table.csv").read_bytes()
    folders = sorted(path.name for path in (together / "generations").iterdir())
    assert len(folders) == len(_VARIANTS)
    assert folders == sorted(path.name for path in (apart / "generations").iterdir())
    shards = 0
    for folder in folders:
        for path in (together / "generations" / folder).glob("*.parquet"):
            assert list(read_generations(path)) == list(read_generations(apart / "generations" / folder / path.name))
            shards += 1
    assert shards >= len(_VARIANTS)


def test_a_killed_sweep_goes_on(
    model: pathlib.Path, data: pathlib.Path, together: pathlib.Path, tmp_path: pathlib.Path
) -> None:
    """After a kill, only the shards that some variants lack are decoded, and nothing else changes."""
    output = tmp_path / "out"
    assert _calibrate(model, data, output, *_LISTS) == 0
    for name in ("manifest.json", "risk_table.csv", "report.html"):
        (output / name).unlink()
    kept = {}
    for place, folder in enumerate(sorted((output / "generations").iterdir())):
        (folder / "complete.json").unlink()
        shard = min(folder.glob("*.parquet"))
        if place % 2:
            shard.unlink()
        else:
            kept[shard] = shard.stat().st_mtime_ns
    assert _calibrate(model, data, output, *_LISTS, "--resume") == 0
    assert without_time(_manifest(output)) == without_time(_manifest(together))
    assert (output / "risk_table.csv").read_bytes() == (together / "risk_table.csv").read_bytes()
    assert {shard: shard.stat().st_mtime_ns for shard in kept} == kept


def test_manifest_table_and_report_name_the_rules(together: pathlib.Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Each names measure and exit layers of a variant, and the manifest is read back as it was written."""
    manifest = _manifest(together)
    assert manifest.plan is not None
    assert manifest.plan.pareto is not None
    assert manifest.plan.pareto.variants == _VARIANTS
    with (together / "risk_table.csv").open(newline="") as file:
        rows = list(csv.DictReader(file))
    assert {(row["confidence"], row["min_exit_layer"], row["exit_interval"]) for row in rows} == {
        (variant.confidence, str(variant.min_exit_layer), str(variant.exit_interval)) for variant in _VARIANTS
    }
    page = (together / "report.html").read_text(encoding="utf-8")
    chosen = [entry.variant for entry in manifest.calibrations if entry.variant is not None]
    assert chosen
    for variant in chosen:
        assert variant.in_words() in page
    assert main(["inspect", str(together)]) == 0
    assert "state, from layer 2 in steps of 2" in " ".join(capsys.readouterr().out.split())


def test_each_entry_is_served_by_its_own_rule(together: pathlib.Path, model: pathlib.Path) -> None:
    """Tokens and exit layers are those that its variant's sweep stored at its threshold."""
    manifest, served = _manifest(together), 0
    stored: dict[tuple[str | None, int, int | None], list[Generation]] = {}
    for folder in (together / "generations").iterdir():
        rule = DecodeJob.read(str(folder)).settings.rule
        items = [item for path in folder.glob("*.parquet") for item in read_generations(path)]
        stored[rule.confidence, rule.min_exit_layer, rule.exit_interval] = items
    for entry in manifest.calibrations:
        if entry.variant is None or entry.threshold is None:
            continue
        variant = entry.variant
        generator = Generator.from_manifest(manifest, model, delta=entry.delta)
        for item in stored[variant.confidence, variant.min_exit_layer, variant.exit_interval][:6]:
            output = item.outputs[1 + SETTINGS.thresholds.index(entry.threshold)]
            assert item.example.input_ids is not None
            answer = generator.generate(item.example.input_ids)
            assert (answer.tokens, answer.exit_layers) == (output.tokens, output.exit_layers)
            served += 1
    assert served


def test_a_file_of_the_first_kind_names_no_measure(
    model: pathlib.Path, data: pathlib.Path, tmp_path: pathlib.Path
) -> None:
    """If variants share measure and distance, neither is written for each of them, as in earlier manifests."""
    output = tmp_path / "out"
    assert _calibrate(model, data, output, "--min_exit_layer=1,2") == 0
    variants = json.loads((output / "manifest.json").read_text())["plan"]["pareto"]["variants"]
    assert variants == [{"min_exit_layer": 1}, {"min_exit_layer": 2}]
    header = (output / "risk_table.csv").read_text().splitlines()[0]
    assert "confidence" not in header
    assert "exit_interval" not in header
    assert EarlierResult.found_in(str(output)).manifest
