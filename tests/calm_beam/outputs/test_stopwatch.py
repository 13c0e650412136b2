"""The time of a shard is measured in laps of the decoder's steps."""

import pathlib

import pytest

from calm_beam.decoding.engine import Work
from calm_beam.outputs import StoredGenerations, stored_shard, write_generations
from calm_beam.outputs.timing import read_timings
from calm_beam.outputs.worker import ShardStopwatch
from tests.calm_beam.outputs.test_job import build_job


class _Decoder:
    """Does one step a second."""

    slots = 7

    def __init__(self) -> None:
        self.work = Work(prompts=3, steps=100, layer_rows=1000)
        self.now = 50.0

    def step(self, rows: int) -> None:
        self.work += Work(steps=1, layer_rows=rows)
        self.now += 1.0


def test_laps_have_four_steps_or_more(tmp_path: pathlib.Path) -> None:
    """A lap ends with the first output after its fourth step; earlier counts are not in it."""
    decoder = _Decoder()
    job = build_job()
    where = StoredGenerations(directory=str(tmp_path), job=job)
    with ShardStopwatch(decoder, num_branches=3, clock=lambda: decoder.now) as watch:
        for steps in (1, 4, 0, 6, 2):
            for _ in range(steps):
                decoder.step(10)
            watch.lap()
    write_generations(where.shard_path(1), [], shard=1, digest="sha256:1")
    stored = stored_shard(where.shard_path(1))
    watch.write_timing(where, stored, load_seconds=2.0)
    (timing,) = read_timings(str(tmp_path), [stored])
    assert [(lap.steps, lap.rows, lap.seconds) for lap in timing.laps] == [(5, 50, 5.0), (6, 60, 6.0)]
    assert (timing.steps, timing.rows, timing.seconds) == (13, 130, 13.0)
    assert (timing.lanes, timing.slots, timing.load_seconds) == (3, 7, 2.0)
    assert timing.bytes == pathlib.Path(where.shard_path(1)).stat().st_size
    assert timing.peak_bytes > 2**20
    assert timing.cores >= 1
    assert len(timing.worker) == 32


def test_a_store_that_refuses_the_file_ends_nothing(tmp_path: pathlib.Path) -> None:
    """If the store refuses the file, there is no timing, and no error."""
    decoder = _Decoder()
    where = StoredGenerations(directory=str(tmp_path / "gone"), job=build_job())
    with ShardStopwatch(decoder, num_branches=3, clock=lambda: decoder.now) as watch:
        pass
    (tmp_path / "here.parquet").touch()
    write_generations(tmp_path / "here.parquet", [], digest="sha256:1")
    watch.write_timing(where, stored_shard(str(tmp_path / "here.parquet")), load_seconds=0.0)
    assert not (tmp_path / "gone").exists()


def test_compiling_is_told_apart() -> None:
    """XLA's compilation while the timer runs is counted separately."""
    import jax
    import jax.numpy as jnp

    decoder = _Decoder()
    with ShardStopwatch(decoder, num_branches=1) as watch:
        jax.jit(lambda x: jnp.sin(x) * 3.25)(jnp.ones(17)).block_until_ready()
        assert watch._compiling.seconds() > 0
    assert watch._compiling.seconds() == pytest.approx(watch._compiling.seconds())
