"""Forecasts of cost recover a decoder's known rates, and intervals have their coverage."""

import dataclasses
import itertools

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from calm_beam.evaluation.cost import (
    Cost,
    Interval,
    Job,
    Pilot,
    PilotShard,
    Rates,
    fitted_rates,
    forecast,
    makespan,
    steps_taken,
)
from calm_beam.outputs.timing import Lap
from tests.calm_beam.outputs.builders import build_timing

_STEP_SECONDS, _ROW_SECONDS, _EXAMPLE_SECONDS = 0.005, 1e-5, 0.001
_SLOTS = 64


def _shard(number: int, examples: int, *, noise: float = 0.0, seed: int = 0) -> PilotShard:
    """Returns a shard of a decoder of these rates, whose examples have 100 rows a step and 10 to 40 steps."""
    generator = np.random.default_rng((seed, number))
    lengths = np.sort(generator.integers(10, 41, size=examples))[::-1].copy()
    steps = steps_taken(lengths, slots=_SLOTS)
    running = [int((lengths > step).sum()) for step in range(steps)]
    rows = [100 * count * int(lengths.sum()) // max(1, sum(running)) for count in running]
    laps = []
    for start in range(0, steps, 4):
        some = rows[start : start + 4]
        seconds = _STEP_SECONDS * len(some) + _ROW_SECONDS * sum(some)
        laps.append(Lap(steps=len(some), rows=sum(some), seconds=seconds * (1 + noise * generator.standard_normal())))
    seconds = sum(lap.seconds for lap in laps) + _EXAMPLE_SECONDS * examples
    return PilotShard(
        timing=build_timing(
            shard=number,
            examples=examples,
            slots=_SLOTS,
            seconds=seconds + 3.0 * (number == 0),
            compile_seconds=3.0 * (number == 0),
            cpu_seconds=seconds,
            steps=steps,
            rows=sum(rows),
            laps=tuple(laps),
            bytes=1000 * examples + 10 * number,
        ),
        lengths=lengths,
    )


def _pilot(*sizes: int, noise: float = 0.0, seed: int = 0) -> Pilot:
    shards = tuple(_shard(number, size, noise=noise, seed=seed) for number, size in enumerate(sizes))
    return Pilot(shards=shards, start_seconds=10.0, end_seconds=2.0, score_seconds=0.002, workers=1)


_PILOT = _pilot(60, 50, 70, 55)


def test_rates_are_found_again() -> None:
    """Laps of different sizes separate the time of a step from that of a row."""
    rates = Rates.of(_PILOT.shards)
    assert rates.step_seconds == pytest.approx(_STEP_SECONDS, rel=1e-6)
    assert rates.row_seconds == pytest.approx(_ROW_SECONDS, rel=1e-6)
    assert rates.example_seconds == pytest.approx(_EXAMPLE_SECONDS, rel=1e-6)


def test_a_large_shard_is_forecast_from_small_ones() -> None:
    """Rates hold at any size, while seconds per example fall: a mean of the pilot's would be far off."""
    rates = Rates.of(_PILOT.shards)
    for examples in (60, 600, 2000, 20_000):
        true = _shard(9, examples).timing.steady_seconds
        assert rates.shard_seconds(examples) == pytest.approx(true, rel=0.06)
    assert rates.shard_seconds(2000) / 2000 < 0.95 * rates.shard_seconds(10) / 10
    assert rates.shard_seconds(0) == 0


def test_decoders_that_count_no_steps_are_forecast_by_the_example() -> None:
    """Without laps, time grows in proportion to the examples."""
    shards = [
        dataclasses.replace(shard, timing=dataclasses.replace(shard.timing, laps=(), steps=0))
        for shard in _PILOT.shards
    ]
    rates = Rates.of(shards)
    steady = sum(shard.timing.steady_seconds for shard in shards)
    assert rates.shard_seconds(470) == pytest.approx(2 * steady)


def test_rates_are_never_negative() -> None:
    """If the laps suggest a negative rate, the other rate explains all of the time."""
    assert fitted_rates([]) == (0.0, 0.0)
    falling = [Lap(steps=4, rows=rows, seconds=1 - rows / 1000) for rows in (100, 300, 600)]
    assert fitted_rates(falling)[1] == pytest.approx(0, abs=1e-9)
    rising = [Lap(steps=steps, rows=100 * steps * steps, seconds=100.0 * steps * steps) for steps in (1, 2, 5)]
    assert fitted_rates(rising) == (pytest.approx(0, abs=1e-9), pytest.approx(1.0))
    alike = [Lap(steps=4, rows=100, seconds=1.0)] * 3
    assert 4 * fitted_rates(alike)[0] + 100 * fitted_rates(alike)[1] == pytest.approx(1.0)


@given(
    lengths=st.lists(st.integers(min_value=1, max_value=9), min_size=1, max_size=30),
    slots=st.integers(min_value=1, max_value=8),
)
def test_steps_lie_between_their_bounds(lengths: list[int], slots: int) -> None:
    """Steps are at least those of the longest output or of full batches, and at most one output more."""
    steps = steps_taken(np.array(lengths), slots=slots)
    assert max(max(lengths), sum(lengths) / slots) <= steps <= sum(lengths) / slots + max(lengths)


@given(
    seconds=st.lists(st.floats(min_value=0, max_value=100), min_size=1, max_size=20),
    workers=st.integers(min_value=1, max_value=6),
)
def test_more_workers_never_end_later(seconds: list[float], workers: int) -> None:
    """More workers never end later, and one worker takes the sum."""
    assert makespan(seconds, workers=workers + 1) <= makespan(seconds, workers=workers) + 1e-9
    assert makespan(seconds, workers=1) == pytest.approx(sum(seconds))


# Each takes most of a second: a forecast draws its intervals.
@settings(max_examples=30)
@given(
    examples=st.integers(min_value=100, max_value=10**6),
    factor=st.integers(min_value=2, max_value=5),
    workers=st.integers(min_value=1, max_value=40),
)
def test_cost_grows_with_examples_and_falls_with_workers(examples: int, factor: int, workers: int) -> None:
    """Time and bytes grow with examples and fall with workers; every interval contains the expected value."""
    cost = forecast(_PILOT, Job(examples=examples, workers=workers, num_shards=64))
    larger = forecast(_PILOT, Job(examples=factor * examples, workers=workers, num_shards=64))
    faster = forecast(_PILOT, Job(examples=examples, workers=workers + 1, num_shards=64))
    assert cost.seconds.value < larger.seconds.value
    assert cost.bytes.value < larger.bytes.value
    assert faster.seconds.value <= cost.seconds.value
    for interval in (cost.seconds, cost.decode_seconds, cost.worker_seconds, cost.bytes):
        assert interval.low is not None
        assert interval.high is not None
        assert interval.low <= interval.value <= interval.high
    assert cost.worker_seconds.value == pytest.approx(workers * cost.seconds.value)
    assert 0 <= cost.idle < 1


def test_what_a_run_takes_is_the_sum_of_its_parts() -> None:
    """A run's time is the sum of start, compilation, shards, scoring and end, each once."""
    cost = forecast(_PILOT, Job(examples=2000, workers=1, num_shards=4))
    shards = Rates.of(_PILOT.shards)
    assert cost.decode_seconds.value == pytest.approx(3.0 + 4 * shards.shard_seconds(500), rel=0.01)
    assert cost.seconds.value == pytest.approx(cost.decode_seconds.value + 12.0 + 2000 * 0.002)
    assert cost.bytes.value == pytest.approx(2000 * 1000, rel=0.001)
    assert cost.idle == pytest.approx(0)


def test_one_shard_gives_no_interval() -> None:
    """One shard gives no interval, since there is none to compare it with."""
    cost = forecast(_pilot(60), Job(examples=2000, workers=1, num_shards=4))
    assert cost.seconds.low is cost.seconds.high is cost.bytes.low is None
    assert cost.seconds.value > 12


def test_workers_of_a_machine_share_its_cores() -> None:
    """Two processes that keep a core busy each are as fast on two cores as one; four take twice the time."""
    costs = [
        forecast(_PILOT, Job(examples=4000, workers=4, num_shards=8, workers_per_machine=count)) for count in (1, 2, 4)
    ]
    one, two, four = (cost.decode_seconds.value for cost in costs)
    # Processor time is without compilation.
    busy = _PILOT.busy_cores
    assert one == pytest.approx(two / max(1.0, busy))
    assert four == pytest.approx(one * max(1.0, 4 * busy / 2))


def test_another_device_decodes_faster_and_compiles_no_faster() -> None:
    """Another device's factor applies to decoding, not to compilation."""
    one = forecast(_PILOT, Job(examples=4000, workers=1, num_shards=4)).decode_seconds.value
    ten = forecast(_PILOT, Job(examples=4000, workers=1, num_shards=4, speedup=10)).decode_seconds.value
    assert ten - 3.0 == pytest.approx((one - 3.0) / 10)


def test_idle_workers_are_seen() -> None:
    """Three workers with four shards wait for the fourth."""
    waits = [forecast(_PILOT, Job(examples=8000, workers=3, num_shards=count)).idle for count in (4, 48)]
    assert waits[0] > 0.25
    assert waits[1] < 0.05


@pytest.mark.slow
def test_intervals_hold_the_truth_as_often_as_they_say() -> None:
    """Of 200 pilots with noise, about 90 % have an interval that contains the run's time without noise."""
    job = Job(examples=4000, workers=1, num_shards=4)
    truth = forecast(_pilot(*[1000] * 4), job).decode_seconds.value
    held = 0
    for seed in range(200):
        found = forecast(_pilot(60, 50, 70, 55, noise=0.2, seed=seed), job).decode_seconds
        assert found.low is not None
        assert found.high is not None
        held += found.low <= truth <= found.high
    assert 160 <= held <= 198


def test_intervals_change_their_unit() -> None:
    """Both ends scale with the expected value; unknown ends stay unknown."""
    assert Interval(value=2.0, low=1.0, high=4.0).times(3).plus(1) == Interval(value=7.0, low=4.0, high=13.0)
    assert Interval(value=2.0).plus(1).low is None


def test_costs_are_values() -> None:
    """Two forecasts from the same pilot are equal."""
    job = Job(examples=5000, workers=2, num_shards=8)
    first, second = itertools.repeat(forecast(_PILOT, job), 2)
    assert isinstance(first, Cost)
    assert first == second == forecast(_PILOT, job)
