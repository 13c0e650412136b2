"""The cost of a run, forecast from the shards of a pilot.

A step of the decoder takes a fixed time, and every row that goes through a layer in the step takes more:

    seconds = step_seconds * steps + row_seconds * rows

Rows grow with the examples. Steps do not: as many prompts as the decoder has slots share their steps, so
a small shard costs more per example than a large one. Both rates are fitted to the laps of the pilot's shards; the
steps of a shard of another size are counted by assigning outputs as long as the pilot's to the slots.

The pilot's shards are a sample: the forecast is repeated without each of them, and intervals follow from how
much it changes (the jackknife).
"""

import dataclasses
import heapq
import math
from collections.abc import Callable, Sequence

import numpy as np
from scipy import stats

from calm_beam.outputs.timing import Lap, ShardTiming

# Coverage of an interval, if only the choice of shards is random.
CONFIDENCE = 0.9
# Examples whose steps are counted one by one; larger shards are extrapolated at the same rate.
_MOST_COUNTED = 4096


@dataclasses.dataclass(frozen=True, kw_only=True)
class Interval:
    """A forecast with its interval.

    Attributes:
      value: The expected value.
      low: Lower end of the interval; None if unknown.
      high: Upper end; None if unknown.
    """

    value: float
    low: float | None = None
    high: float | None = None

    def __post_init__(self) -> None:
        assert self.low is None or self.high is None or self.low <= self.value <= self.high

    def times(self, factor: float) -> "Interval":
        """Returns the interval in another unit; the factor is at least 0."""
        return self._mapped(lambda value: value * factor)

    def plus(self, constant: float) -> "Interval":
        """Returns the interval with a known constant added."""
        return self._mapped(lambda value: value + constant)

    def _mapped(self, change: Callable[[float], float]) -> "Interval":
        return Interval(
            value=change(self.value),
            low=None if self.low is None else change(self.low),
            high=None if self.high is None else change(self.high),
        )


@dataclasses.dataclass(frozen=True, kw_only=True)
class PilotShard:
    """The measurements of one shard of a pilot.

    Attributes:
      timing: Its timing.
      lengths: int, shape (examples,). Steps for which each example keeps a slot: tokens of its longest output, in the
        order in which prompts are started.
    """

    timing: ShardTiming
    lengths: np.ndarray


@dataclasses.dataclass(frozen=True, kw_only=True)
class Rates:
    """The decoding speed of a worker.

    Attributes:
      step_seconds: Time of a step, whatever its number of rows.
      row_seconds: Additional time of a row, through one layer.
      example_seconds: Time of an example outside its steps: encoding, and writing outputs.
      rows: Rows per example.
      slots: Largest number of prompts in a batch.
      lengths: Lengths of all shards as in `PilotShard`, in the order of a single shard with all of them.
    """

    step_seconds: float
    row_seconds: float
    example_seconds: float
    rows: float
    slots: int
    lengths: np.ndarray

    @classmethod
    def of(cls, shards: Sequence[PilotShard]) -> "Rates":
        """Returns the rates of some shards, at least one, that reproduce their total time.

        Source: least squares of laps; rates are not negative.
        """
        timings = [shard.timing for shard in shards]
        examples = sum(timing.examples for timing in timings)
        # These include a shard's end, which no lap has.
        steps, rows = sum(timing.steps for timing in timings), sum(timing.rows for timing in timings)
        laps = [lap for timing in timings for lap in timing.laps]
        in_laps = sum(lap.seconds for lap in laps)
        steady = sum(timing.steady_seconds for timing in timings)
        lengths = _merged([shard.lengths for shard in shards])
        step_seconds, row_seconds = fitted_rates(laps)
        decoding = step_seconds * steps + row_seconds * rows
        if not laps or not decoding:
            # Decoders that run every layer for every branch count no steps.
            return cls(
                step_seconds=0.0,
                row_seconds=0.0,
                example_seconds=steady / examples,
                rows=rows / examples,
                slots=timings[0].slots,
                lengths=lengths,
            )
        scale = min(1.0, steady / decoding) if in_laps > steady else 1.0
        return cls(
            step_seconds=scale * step_seconds,
            row_seconds=scale * row_seconds,
            example_seconds=max(0.0, steady - scale * decoding) / examples,
            rows=rows / examples,
            slots=timings[0].slots,
            lengths=np.concatenate([shard.lengths for shard in shards]),
        )

    def shard_seconds(self, examples: int) -> float:
        """Returns the seconds for a shard with this many examples, without compiling."""
        if not examples:
            return 0.0
        each = self.row_seconds * self.rows + self.example_seconds
        return self.step_seconds * self._steps(examples) + each * examples

    def _steps(self, examples: int) -> float:
        if not self.step_seconds:
            return 0.0
        counted = min(examples, max(_MOST_COUNTED, 4 * self.slots))
        places = np.linspace(0, len(self.lengths) - 1, counted).round().astype(int)
        steps = float(steps_taken(self.lengths[places], slots=self.slots))
        # A full batch continues at the same rate.
        return steps + (examples - counted) * float(self.lengths.mean()) / self.slots


def _merged(lengths: Sequence[np.ndarray]) -> np.ndarray:
    """Returns the lengths of all shards, in the order in which a single shard would start them."""
    places = np.concatenate([(np.arange(len(each)) + 0.5) / max(1, len(each)) for each in lengths])
    merged: np.ndarray = np.concatenate(lengths)[np.argsort(places, kind="stable")]
    return merged


def fitted_rates(laps: Sequence[Lap]) -> tuple[float, float]:
    """Returns seconds per step and seconds per row, neither of them negative; zeros without laps.

    Source: least squares.

    >>> laps = [Lap(steps=4, rows=100, seconds=0.5), Lap(steps=4, rows=300, seconds=0.7)]
    >>> [round(rate, 6) for rate in fitted_rates(laps)]
    [0.1, 0.001]
    """
    if not laps:
        return 0.0, 0.0
    steps, rows, seconds = (np.array([getattr(lap, name) for lap in laps], float) for name in _LAP)
    total = np.array([[steps @ steps, steps @ rows], [steps @ rows, rows @ rows]])
    if np.linalg.matrix_rank(total) == 2:
        by_step, by_row = np.linalg.solve(total, [steps @ seconds, rows @ seconds])
        if by_step >= 0 and by_row >= 0:
            return float(by_step), float(by_row)
    # With only one positive rate: the one that explains more.
    alone = [(float(each @ seconds / (each @ each)), index) for index, each in enumerate((steps, rows)) if each.any()]
    errors = [(float(((seconds - rate * (steps, rows)[index]) ** 2).sum()), rate, index) for rate, index in alone]
    _, rate, index = min(errors)
    return (rate, 0.0) if index == 0 else (0.0, rate)


_LAP = ("steps", "rows", "seconds")


def steps_taken(lengths: np.ndarray, *, slots: int) -> int:
    """Returns the number of steps until all outputs have ended, if each output that ends frees its slot for the next.

    Args:
      lengths: int, shape (examples,). Steps of each, in the order in which they start.
      slots: Number of slots.

    >>> steps_taken(np.array([3, 2, 2, 1]), slots=2)
    4
    """
    ends = [0] * min(slots, len(lengths))
    for length in lengths.tolist():
        heapq.heapreplace(ends, ends[0] + length)
    return max(ends, default=0)


def makespan(seconds: Sequence[float], *, workers: int) -> float:
    """Returns the time at which the last shard is done, if workers take shards one by one.

    >>> makespan([2.0, 2.0, 2.0], workers=2)
    4.0
    """
    free = [0.0] * max(1, min(workers, len(seconds)))
    for each in seconds:
        heapq.heapreplace(free, free[0] + each)
    return max(free)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Pilot:
    """The measurements of a pilot that its cost depends on.

    Attributes:
      shards: The timed shards, at least one.
      start_seconds: Time before the first shard: starting, loading, and reading the data.
      end_seconds: Time after the last shard, without scoring.
      score_seconds: Time to read an example back and score it.
      workers: Number of processes that decoded.
    """

    shards: tuple[PilotShard, ...]
    start_seconds: float
    end_seconds: float
    score_seconds: float
    workers: int

    @property
    def examples(self) -> int:
        """Number of examples in the timed shards."""
        return sum(shard.timing.examples for shard in self.shards)

    @property
    def compile_seconds(self) -> float:
        """Seconds that a worker spends on compiling."""
        return sum(shard.timing.compile_seconds for shard in self.shards) / self.workers

    @property
    def busy_cores(self) -> float:
        """Number of cores that a process keeps busy."""
        seconds = sum(shard.timing.seconds for shard in self.shards)
        return sum(shard.timing.cpu_seconds for shard in self.shards) / seconds if seconds else 1.0

    @property
    def peak_bytes(self) -> int:
        """The peak memory of a process."""
        return max(shard.timing.peak_bytes for shard in self.shards)

    @property
    def device(self) -> str:
        """The kind of device; several kinds are comma-separated."""
        return ", ".join(sorted({shard.timing.device for shard in self.shards}))


@dataclasses.dataclass(frozen=True, kw_only=True)
class Job:
    """A planned run.

    Attributes:
      examples: Number of examples, at least 1.
      workers: Number of processes that decode, at least 1.
      num_shards: Number of shards, at least 1.
      workers_per_machine: Number of processes that share the cores of a machine.
      speedup: Decoding speed relative to the pilot.
    """

    examples: int
    workers: int
    num_shards: int
    workers_per_machine: int = 1
    speedup: float = 1.0


@dataclasses.dataclass(frozen=True, kw_only=True)
class Cost:
    """The expected cost of a run.

    Attributes:
      seconds: Wall-clock time from start to end.
      decode_seconds: Time during which shards are decoded.
      worker_seconds: Total time of all workers, each from start to end.
      bytes: Size of the generations.
      peak_bytes: Memory of a worker process.
      idle: Share of the decoding time in which workers wait for the last shard.
    """

    seconds: Interval
    decode_seconds: Interval
    worker_seconds: Interval
    bytes: Interval
    peak_bytes: int
    idle: float


def forecast(pilot: Pilot, job: Job) -> Cost:
    """Returns the expected cost of a run, with intervals if the pilot has two shards or more.

    Args:
      pilot: The measurements.
      job: The planned run.

    Source: ours; the intervals are those of the delete-one jackknife with Student's t, of logarithms (Efron and
    Tibshirani, 1993, chapter 11), widened for the chance of the run's own examples.
    """
    decoding, idle = _decode_seconds(pilot.shards, pilot, job=job)
    without = [_decode_seconds(others, pilot, job=job)[0] for others in _all_but_one(pilot.shards)]
    decode = _jackknifed(decoding, without, pilot=pilot, job=job)
    size = _bytes(pilot.shards)
    sizes = [_bytes(others) for others in _all_but_one(pilot.shards)]
    scoring = pilot.score_seconds * job.examples / min(job.workers, job.num_shards)
    total = decode.plus(pilot.start_seconds + pilot.end_seconds + scoring)
    return Cost(
        seconds=total,
        decode_seconds=decode,
        worker_seconds=total.times(job.workers),
        bytes=_jackknifed(size, sizes, pilot=pilot, job=job).times(job.examples),
        peak_bytes=pilot.peak_bytes,
        idle=idle,
    )


def _all_but_one(shards: Sequence[PilotShard]) -> list[list[PilotShard]]:
    return [[*shards[:index], *shards[index + 1 :]] for index in range(len(shards))] if len(shards) > 1 else []


def _decode_seconds(shards: Sequence[PilotShard], pilot: Pilot, *, job: Job) -> tuple[float, float]:
    """Returns the time from the first shard to the last, and the share of it in which workers wait."""
    rates = Rates.of(shards)
    # A process alone on its machine uses all cores; several processes share them.
    cores = min(shard.timing.cores for shard in pilot.shards)
    slower = max(1.0, job.workers_per_machine * pilot.busy_cores / cores)
    # Hashes fill shards unevenly. The draw has a fixed seed.
    sizes = np.random.default_rng(0).multinomial(job.examples, np.full(job.num_shards, 1 / job.num_shards))
    known = {size: slower * rates.shard_seconds(size) for size in _rounded(sizes)}
    seconds = [known[size] for size in _rounded(sizes)]
    workers = min(job.workers, job.num_shards)
    steady = makespan(seconds, workers=workers)
    compiling = slower * pilot.compile_seconds
    idle = 1 - sum(seconds) / (steady * job.workers) if steady else 0.0
    return compiling + steady / job.speedup, max(0.0, idle)


def _rounded(sizes: np.ndarray) -> list[int]:
    """Returns sizes rounded to three digits, so that few distinct ones remain."""
    return [int(float(f"{size:.3g}")) for size in sizes.tolist()]


def _bytes(shards: Sequence[PilotShard]) -> float:
    return sum(shard.timing.bytes for shard in shards) / sum(shard.timing.examples for shard in shards)


def _jackknifed(value: float, without: Sequence[float], *, pilot: Pilot, job: Job) -> Interval:
    """Returns a forecast with the jackknife interval from forecasts without each shard."""
    count = len(without)
    if count < 2 or value <= 0 or min(without) <= 0:
        return Interval(value=value)
    logarithms = np.log(without)
    variance = (count - 1) / count * float(((logarithms - logarithms.mean()) ** 2).sum())
    variance *= 1 + pilot.examples / job.examples
    width = float(stats.t.ppf((1 + CONFIDENCE) / 2, count - 1)) * math.sqrt(variance)
    return Interval(value=value, low=value * math.exp(-width), high=value * math.exp(width))
