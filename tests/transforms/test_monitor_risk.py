"""Pipelines monitor promises as `calm-beam monitor` does."""

import dataclasses
import json
import pathlib
import random
import re
from collections.abc import Sequence
from typing import Any

import apache_beam as beam
import pytest
from apache_beam.options.pipeline_options import PipelineOptions, StandardOptions
from apache_beam.runners.direct.direct_runner import BundleBasedDirectRunner
from apache_beam.runners.portability.fn_api_runner import FnApiRunner
from apache_beam.testing import test_stream
from apache_beam.transforms import trigger, window
from apache_beam.transforms.window import TimestampedValue

from calm_beam.launch.cli import main
from calm_beam.manifest import write_manifest
from calm_beam.risk.monitor import RiskMonitor, SampledLoss, WatchedPromise, WatchedRisk, in_fixed_order
from calm_beam.transforms import MonitorRisk
from tests.builders import build_checkpoint
from tests.calm_beam.serving.builders import build_entry, build_served_manifest
from tests.pipelines import CONFIG
from tests.transforms.served import Collect, collected

_MANIFEST = build_served_manifest(
    build_checkpoint(CONFIG), (build_entry(0.2, delta=0.1), build_entry(0.5, delta=0.2), build_entry(None, delta=0.01))
)
_GOOD, _BAD = (WatchedPromise.of(_MANIFEST, entry) for entry in _MANIFEST.calibrations[:2])


def _losses(promise: WatchedPromise, *, mean: float, count: int = 60, seed: int = 0) -> list[SampledLoss]:
    draw = random.Random(seed)
    return [
        SampledLoss(id=f"{seed}-{number}", value=float(draw.random() < mean), failure=None, promise=promise)
        for number in range(count)
    ]


_LOSSES = [*_losses(_GOOD, mean=0.02), *_losses(_BAD, mean=0.9)]


def _monitored(
    folder: pathlib.Path, source: beam.PTransform, *steps: beam.PTransform, options: Sequence[str] = (), **settings: Any
) -> tuple[dict[tuple[int, float | None], WatchedRisk], list[WatchedRisk], dict[str, int]]:
    """Returns states by entry and end of their window, alarms, and counters."""
    is_stream = isinstance(source, test_stream.TestStream)
    pipeline_options = PipelineOptions(list(options))
    pipeline_options.view_as(StandardOptions).streaming = is_stream
    runner = BundleBasedDirectRunner() if is_stream else FnApiRunner()
    pipeline = beam.Pipeline(runner=runner, options=pipeline_options)
    losses = pipeline | source
    for number, step in enumerate(steps):
        losses = losses | f"Step{number}" >> step
    monitored = losses | MonitorRisk(**settings)
    for name, output in monitored._asdict().items():
        (folder / name).mkdir(parents=True)
        _ = output | f"Collect{name}" >> beam.ParDo(Collect(str(folder / name)))
    result = pipeline.run()
    result.wait_until_finish()
    counters = {counter.key.metric.name: counter.committed for counter in result.metrics().query()["counters"]}
    states = {(state.promise.calibration, state.end): state for state in collected(folder / "states")}
    assert len(states) == len(list((folder / "states").iterdir()))
    return states, collected(folder / "alarms"), counters


@pytest.mark.parametrize("seed", [0, 1])
def test_a_batch_gives_what_the_command_gives(
    seed: int, tmp_path: pathlib.Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """However losses are shuffled and divided, states equal those of `calm-beam monitor` to the last bit."""
    shuffled = [*_LOSSES]
    random.Random(seed).shuffle(shuffled)
    states, alarms, counters = _monitored(tmp_path / "out", beam.Create(shuffled), beam.Reshuffle(num_buckets=1 + seed))
    assert alarms == [states[1, None]]
    assert counters["monitored-losses"] == len(_LOSSES)
    assert counters["risk-alarms"] == 1
    write_manifest(_MANIFEST, tmp_path / "manifest.json")
    for promise, delta in ((_GOOD, 0.1), (_BAD, 0.2)):
        rows = [loss.to_row() for loss in in_fixed_order(loss for loss in _LOSSES if loss.promise == promise)]
        path, kept = tmp_path / "losses.jsonl", tmp_path / f"state-{delta}.json"
        path.write_text("".join(json.dumps(row) + "\n" for row in rows))
        flags = [f"--manifest={tmp_path}", f"--delta={delta}", f"--losses={path}", f"--state={kept}"]
        assert main(["monitor", *flags]) == (3 if promise == _BAD else 0)
        found = RiskMonitor.from_dict(json.loads(kept.read_text())["monitor"])
        assert found == states[promise.calibration, None].monitor


def test_missing_losses_have_an_alarm_of_their_own(tmp_path: pathlib.Path) -> None:
    """Missing losses prove nothing: they raise an alarm of their own, and counters distinguish the two."""
    missing = [
        dataclasses.replace(loss, value=1.0, failure="no references: none had come")
        if number % 3 == 0
        else dataclasses.replace(loss, value=0.0)
        for number, loss in enumerate(_losses(_GOOD, mean=0))
    ]
    states, alarms, counters = _monitored(tmp_path / "out", beam.Create([*missing, *_losses(_BAD, mean=0.9)]))
    assert alarms == [states[1, None]]
    assert collected(tmp_path / "out" / "missing_alarms") == [states[0, None]]
    assert (states[0, None].missing, states[0, None].is_new_alarm) == (20, False)
    assert [counters[name] for name in ("missing-losses", "risk-alarms", "missing-loss-alarms")] == [20, 1, 1]


def test_rows_of_a_probe_are_taken(tmp_path: pathlib.Path) -> None:
    """Rows as a probe writes them name their entry by the manifest."""
    expected, _, _ = _monitored(tmp_path / "values", beam.Create(_LOSSES))
    rows = [loss.to_row() for loss in _LOSSES]
    write_manifest(_MANIFEST, tmp_path / "manifest.json")
    for name, manifest in (("value", _MANIFEST), ("path", str(tmp_path / "manifest.json"))):
        found, _, _ = _monitored(tmp_path / name, beam.Create(rows), manifest=manifest)
        assert found == expected


@pytest.mark.parametrize(
    ("row", "message"),
    [
        ({**_LOSSES[0].to_row(), "manifest": "sha256:0"}, "was measured for another manifest or entry"),
        ({**_LOSSES[0].to_row(), "calibration": 2}, "was measured for another manifest or entry"),
        ({"id": "a", "loss": 0.5}, "the row of a loss has the keys id, loss, failure, manifest, calibration"),
        ({**_LOSSES[0].to_row(), "loss": 1.5}, "losses"),
        ({**_LOSSES[0].to_row(), "failure": 3}, "failure must be a text, or None where the loss was measured; got 3"),
    ],
)
def test_other_rows_end_the_run(row: dict[str, Any], message: str, tmp_path: pathlib.Path) -> None:
    """Losses of another promise, of an entry without a risk, or out of range are refused."""
    with pytest.raises(Exception, match=message):
        _monitored(tmp_path / "out", beam.Create([row]), manifest=_MANIFEST)


def test_a_request_counts_once(tmp_path: pathlib.Path) -> None:
    """A message that is delivered again adds nothing; of two losses of one request the smaller counts."""
    larger = dataclasses.replace(_LOSSES[3], value=1.0)
    assert _LOSSES[3].value == 0
    expected, _, _ = _monitored(tmp_path / "once", beam.Create(_LOSSES))
    found, _, _ = _monitored(tmp_path / "again", beam.Create([larger, *_LOSSES, *_LOSSES[:9]]))
    assert found == expected


def _stream(windows: Sequence[Sequence[SampledLoss]], *, size: int = 10) -> test_stream.TestStream:
    """Returns a stream with losses in every window, of which those of the next come before the watermark."""
    stream = test_stream.TestStream()
    for number, losses in enumerate(windows):
        values = [TimestampedValue(loss, number * size + place % size) for place, loss in enumerate(losses)]
        half = len(values) // 2
        stream = stream.add_elements(values[half:])
        if number:
            stream = stream.advance_watermark_to(number * size)
        stream = stream.add_elements(values[:half])
    return stream.advance_watermark_to_infinity()


_WINDOWS = [_losses(_BAD, mean=mean, count=20, seed=seed) for seed, mean in enumerate((0.0, 0.1, 1.0, 1.0, 0.0))]


def test_windows_of_a_stream_follow_one_another(tmp_path: pathlib.Path) -> None:
    """After each window the state is that of all losses so far, and the alarm is raised once."""
    states, alarms, _ = _monitored(tmp_path / "out", _stream(_WINDOWS), beam.WindowInto(window.FixedWindows(10)))
    expected, monitor = {}, None
    for number, losses in enumerate(_WINDOWS):
        state = WatchedRisk.after(losses, before=monitor, alpha=0.05, end=10.0 * (number + 1))
        expected[1, state.end], monitor = state, state.monitor
    assert states == expected
    assert [state.end for state in alarms] == [30.0]


def test_windows_in_a_batch_are_those_of_the_stream(tmp_path: pathlib.Path) -> None:
    """Stored losses give the states that they gave as a stream."""
    windows = beam.WindowInto(window.FixedWindows(10))
    streamed, _, _ = _monitored(tmp_path / "stream", _stream(_WINDOWS), beam.WindowInto(window.FixedWindows(10)))
    values = [
        TimestampedValue(loss, 10 * number + place % 10)
        for number, losses in enumerate(_WINDOWS)
        for place, loss in enumerate(losses)
    ]
    random.Random(3).shuffle(values)
    stored, alarms, counters = _monitored(
        tmp_path / "batch", beam.Create(values), beam.Map(lambda value: value), windows
    )
    assert stored == streamed
    assert [state.end for state in alarms] == [30.0]
    assert (counters["monitored-losses"], counters["risk-alarms"]) == (100, 1)


def test_what_cannot_be_watched_is_refused(tmp_path: pathlib.Path) -> None:
    """Windows that overlap, streams without windows, and other alphas are refused before a run."""
    with pytest.raises(ValueError, match=re.escape("alpha must be in (0, 1), got 5.")):
        MonitorRisk(alpha=5)
    for windows in (window.SlidingWindows(10, 5), window.Sessions(10)):
        with pytest.raises(ValueError, match=f"in the global one; got {type(windows).__name__}"):
            _monitored(tmp_path / type(windows).__name__, beam.Create(_LOSSES), beam.WindowInto(windows))
    for name, changes in (
        ("trigger", {"trigger": trigger.AfterCount(1), "accumulation_mode": trigger.AccumulationMode.DISCARDING}),
        ("lateness", {"allowed_lateness": 60}),
    ):
        with pytest.raises(ValueError, match="windows of losses must end once, when the watermark passes"):
            _monitored(tmp_path / name, beam.Create(_LOSSES), beam.WindowInto(window.FixedWindows(10), **changes))
    with pytest.raises(ValueError, match="losses of a stream never end: put them into windows"):
        _monitored(tmp_path / "stream", _stream(_WINDOWS))
