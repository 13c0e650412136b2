"""The plot of layers and time against quality."""

import dataclasses
import pathlib

import pytest

from calm_beam.launch.cli import main as calm_beam
from tests.calm_beam.manifest.builders import build_calibration, build_manifest
from tests.pipelines import write_model, write_vocabulary
from tools.pictures.tradeoff import Point, draw, measure_times, proved_threshold, read_points

_FULL = Point(confidence="", threshold=None, layers=8, quality=0.8, standard_error=0.01)


def test_the_table_of_the_command_is_drawn(tmp_path: pathlib.Path) -> None:
    """The table of `evaluate --experiment=tradeoff` is read, timed if it can be served, and drawn."""
    model = write_model(tmp_path / "model", vocabulary=write_vocabulary(tmp_path / "v.model"))
    data = tmp_path / "data.jsonl"
    data.write_text("".join(f'{{"input": "the cat sees {n}", "references": ["a dog"]}}\n' for n in range(4)))
    argv = ["evaluate", "--experiment=tradeoff", f"--checkpoint={model}", f"--data={data}", "--max_decode_length=4"]
    argv += ["--confidence=softmax", "--thresholds=0.9,0.1", "--metric=token_f1", f"--output={tmp_path / 'out'}"]
    assert calm_beam(argv) == 0
    points = read_points(tmp_path / "out" / "tradeoff.csv")
    assert points[0].confidence == ""
    assert points[0].threshold is None
    assert {(point.confidence, point.threshold) for point in points[1:3]} == {("softmax", 0.9), ("softmax", 0.1)}
    times = measure_times(points[:3], model=str(model), data=str(data), prompts=2)
    assert set(times) == set(points[1:3])
    assert min(times.values()) > 0
    draw(points, times, proved=("proved", [points[1]]), path=tmp_path / "plot.svg")
    assert (tmp_path / "plot.svg").read_text().startswith("<?xml")


def test_the_threshold_of_a_promise() -> None:
    """A promise's threshold is that of the entry with its tolerance."""
    entry = build_calibration()
    manifest = build_manifest(calibrations=(entry, build_calibration(delta=0.6)))
    assert proved_threshold(manifest, consistency=entry.consistency, delta=entry.delta) == entry.threshold == 0.8
    with pytest.raises(ValueError, match="not enough values"):
        proved_threshold(manifest, consistency=entry.consistency, delta=0.7)


def test_lines_are_named_after_measures_and_exit_layers() -> None:
    """Points of fewer exit layers are on a line of their own."""
    every = Point(confidence="softmax", threshold=0.8, layers=4, quality=0.7, standard_error=0.01)
    fewer = dataclasses.replace(every, min_exit_layer=2, exit_interval=3)
    assert fewer.rule.exit_layers(8) == (2, 5, 8)
    assert (every.series, fewer.series) == ("softmax", "softmax, every 3 layers")


def test_equal_points_give_equal_plots(tmp_path: pathlib.Path) -> None:
    """The plot's file has no date and no random ids, so it changes only when the figures do."""
    points = [
        Point(confidence="static", threshold=0.5, layers=4, quality=0.7, standard_error=0.01),
        Point(confidence="static", threshold=1.0, layers=8, quality=0.8, standard_error=0.01),
    ]
    for name in ("one.svg", "two.svg"):
        draw([_FULL, *points], {points[0]: 0.6, points[1]: 1.0}, proved=("proved", [points[0]]), path=tmp_path / name)
    assert (tmp_path / "one.svg").read_bytes() == (tmp_path / "two.svg").read_bytes()
