"""Timings for tests."""

from typing import Any

from calm_beam.outputs.timing import Lap, ShardTiming


def build_timing(**changes: Any) -> ShardTiming:
    """Returns the timing of a shard of ten examples, with some fields changed."""
    fields: dict[str, Any] = {
        "shard": 0,
        "digest": "sha256:1",
        "examples": 10,
        "lanes": 3,
        "slots": 8,
        "began": 100.0,
        "seconds": 4.0,
        "compile_seconds": 1.0,
        "cpu_seconds": 5.0,
        "load_seconds": 0.5,
        "steps": 20,
        "rows": 400,
        "padded_rows": 40,
        "projections": 300,
        "tokens": 90,
        "laps": (Lap(steps=4, rows=200, seconds=0.8), Lap(steps=16, rows=200, seconds=2.0)),
        "bytes": 5000,
        "peak_bytes": 2**30,
        "worker": "a",
        "device": "cpu",
        "cores": 2,
    }
    return ShardTiming(**{**fields, **changes})
