"""Timings are stored next to shards, and read for the shards that they belong to."""

import dataclasses
import json
import pathlib
import re

import pytest

from calm_beam.outputs import OutputsError, StoredShard
from calm_beam.outputs.timing import RunTiming, read_run_timing, read_timings
from tests.calm_beam.outputs.builders import build_timing


def _shard(number: int, digest: str = "sha256:1") -> StoredShard:
    return StoredShard(shard=number, examples=10, failed=0, digest=digest)


def test_what_is_written_is_read(tmp_path: pathlib.Path) -> None:
    """Timings read back in the order of the shards, and no other files are left."""
    timings = [build_timing(shard=number, digest="sha256:1") for number in (0, 2)]
    for timing in timings:
        timing.write(str(tmp_path), num_shards=4)
    assert read_timings(str(tmp_path), [_shard(2), _shard(0), _shard(3)]) == (timings[1], timings[0])
    assert sorted(path.name for path in tmp_path.iterdir()) == [
        "timing-00000-of-00004.json",
        "timing-00002-of-00004.json",
    ]


def test_timings_of_something_else_are_left_out(tmp_path: pathlib.Path) -> None:
    """Timings of a shard that was decoded again, or of another version, count as missing."""
    timing = build_timing(shard=0, digest="sha256:1")
    timing.write(str(tmp_path), num_shards=4)
    assert read_timings(str(tmp_path), [_shard(0, "sha256:2")]) == ()
    path = tmp_path / "timing-00000-of-00004.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), "schema": "calm-beam/timing/v0"}))
    assert read_timings(str(tmp_path), [_shard(0)]) == ()


def test_damaged_timings_are_named(tmp_path: pathlib.Path) -> None:
    """A timing that cannot be read is an error that names the file, not a missing one."""
    build_timing(shard=0, digest="sha256:1").write(str(tmp_path), num_shards=4)
    path = tmp_path / "timing-00000-of-00004.json"
    content = json.loads(path.read_text())
    for changed in (
        b"",
        b"{",
        b"[]",
        b"{}",
        b"\xff\x00",
        b"[" * 100_000,
        json.dumps({**content, "seconds": "1"}).encode(),
        json.dumps({**content, "seconds": -1}).encode(),
        json.dumps({**content, "laps": [{}]}).encode(),
        json.dumps({**content, "laps": 5}).encode(),
        json.dumps({key: value for key, value in content.items() if key != "laps"}).encode(),
    ):
        path.write_bytes(changed)
        with pytest.raises(OutputsError, match=rf"^{re.escape(str(path))}: is damaged \(.*\)\. Remove it"):
            read_timings(str(tmp_path), [_shard(0)])


def test_a_folder_that_cannot_be_written_ends_nothing(tmp_path: pathlib.Path) -> None:
    """A timing that cannot be written is silently dropped, and the run continues."""
    build_timing().write(str(tmp_path / "missing"), num_shards=4)
    RunTiming(began=1.0, seconds=2.0).write(str(tmp_path / "missing"))
    assert not list(tmp_path.iterdir())


def test_the_timing_of_a_run(tmp_path: pathlib.Path) -> None:
    """A run's timing reads back; a missing one, or one of another version, is None; a damaged one is named."""
    assert read_run_timing(str(tmp_path)) is None
    RunTiming(began=1.0, seconds=2.5).write(str(tmp_path))
    found = read_run_timing(str(tmp_path))
    assert found == RunTiming(began=1.0, seconds=2.5)
    assert found.ended == 3.5
    (tmp_path / "timing-run.json").write_text('{"schema": "calm-beam/timing/v0"}')
    assert read_run_timing(str(tmp_path)) is None
    for damaged in ('{"schema": "calm-beam/timing/v1"}', "{", '{"schema": "calm-beam/timing/v1", "began": []}'):
        (tmp_path / "timing-run.json").write_text(damaged)
        with pytest.raises(OutputsError, match=r"timing-run\.json: is damaged \("):
            read_run_timing(str(tmp_path))


def test_steady_time_is_without_compiling() -> None:
    """Steady time is without compilation, and never below 0."""
    timing = build_timing()
    assert timing.steady_seconds == timing.seconds - timing.compile_seconds
    assert dataclasses.replace(timing, compile_seconds=timing.seconds + 1).steady_seconds == 0
