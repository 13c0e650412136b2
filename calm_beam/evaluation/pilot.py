"""A pilot: a small calibration, read back with its timing and its measured losses.

The losses forecast when a sequential calibration may stop.
"""

import dataclasses
import re
import time
from collections.abc import Callable, Iterator

import numpy as np

from calm_beam.errors import UsageError, naming
from calm_beam.inputs.examples import prompt_size
from calm_beam.manifest import MANIFEST, Calibration, Manifest, Objective, read_manifest
from calm_beam.metrics.registry import METRICS, get_metric
from calm_beam.outputs import DecodeJob, FinishedSweep, Generation, StoredShard, read_generations
from calm_beam.outputs.folder import SweepHome
from calm_beam.outputs.scoring import score_by_policy
from calm_beam.outputs.timing import RunTiming, ShardTiming, read_run_timing, read_timings
from calm_beam.risk.sample_size import ExpectedStop, expected_stop, looks_at
from calm_beam.storage import absolute, is_file, joined, parent

from .cost import Job, Pilot, PilotShard

# The part that identifies a kind of device in its names in Dataflow and JAX.
_TELLING = re.compile(r"\b([alt]\d+|h\d+|v\d+[a-z]?|cpu)\b")
# Outputs are read back until there are this many examples, from two shards at least.
_ENOUGH_EXAMPLES = 5000


@dataclasses.dataclass(frozen=True, kw_only=True)
class EntryLosses:
    """The losses that a pilot has measured for one entry of its manifest.

    Attributes:
      entry: The entry.
      losses: shape (examples, thresholds), int64 in units of 2^-32, in the testing order; None if the entry's metric is
        not built in: a user's metric is imported only where the user names it.
      is_of_its_exits: Whether the entry's threshold is one of the exits that the losses were measured with.
    """

    entry: Calibration
    losses: np.ndarray | None
    is_of_its_exits: bool


@dataclasses.dataclass(frozen=True, kw_only=True)
class PilotRun:
    """A pilot that was read back.

    Attributes:
      pilot: Its timing.
      examples: Number of its examples, timed or not.
      timed: Number of timed shards, and number of all shards.
      has_run_timing: Whether the time of the whole run is known.
      thresholds: The testing order.
      entries: Entries of its manifest; none if there is no manifest.
      clusters: Whether the independent units are clusters.
    """

    pilot: Pilot
    examples: int
    timed: tuple[int, int]
    has_run_timing: bool
    thresholds: tuple[float, ...]
    entries: tuple[EntryLosses, ...]
    clusters: bool


def read_pilot(path: str) -> PilotRun:
    """Returns the pilot in a calibration's output directory, or in the folder of its generations.

    Raises:
      UsageError: If there is no pilot, or it has no timing.
      OutputsError: If it is not complete.
      ManifestError: If its manifest cannot be trusted.
    """
    with naming("--pilot"):
        folder = SweepHome(absolute(path)).only_folder(flag="--pilot")
        job = DecodeJob.read(folder)
        if job.part is not None:
            raise UsageError(
                f"--pilot {path}: was made with --holdout_share, and what confirming takes is not forecast. Make a "
                "pilot without it: its forecast is about the examples that choose."
            )
        finished = FinishedSweep.read(folder, job)
        timings = _checked(read_timings(folder, finished.shards), folder, job=job)
        manifest = _manifest(path, folder)
        run = read_run_timing(folder)
    objectives = tuple(
        dict.fromkeys(entry.objective for entry in (manifest.calibrations if manifest else ()) if _is_ours(entry))
    )
    thresholds = manifest.plan.thresholds if manifest and manifest.plan else job.settings.thresholds
    on_error = manifest.plan.on_error if manifest and manifest.plan else "fail"
    read = _read_back(folder, job, finished.shards, objectives, thresholds=thresholds, on_error=on_error)
    entries = tuple(
        EntryLosses(
            entry=entry,
            losses=read.losses[:, objectives.index(entry.objective)] if _is_ours(entry) else None,
            is_of_its_exits=entry.variant is None
            or all(getattr(job.settings.rule, name) == value for name, value in entry.variant.fields_of_rule().items()),
        )
        for entry in (manifest.calibrations if manifest else ())
    )
    start, end = _outside(timings, run, scoring=read.seconds * finished.examples)
    none = np.zeros(0, np.int64)
    return PilotRun(
        pilot=Pilot(
            shards=tuple(PilotShard(timing=timing, lengths=read.lengths.get(timing.shard, none)) for timing in timings),
            start_seconds=start,
            end_seconds=end,
            score_seconds=read.seconds,
            workers=len({timing.worker for timing in timings}),
        ),
        examples=finished.examples,
        timed=(len(timings), len(finished.shards)),
        has_run_timing=run is not None,
        thresholds=thresholds,
        entries=entries,
        clusters=job.cluster_key is not None,
    )


def is_same_device(accelerator: str, device: str) -> bool:
    """Returns whether Dataflow's name of an accelerator and JAX's name of a device mean the same.

    >>> is_same_device("nvidia-l4", "NVIDIA L4"), is_same_device("nvidia-l4", "cpu")
    (True, False)
    >>> is_same_device("nvidia-tesla-t4", "Tesla T4"), is_same_device("tpu-v6e-slice", "TPU v6 lite")
    (True, True)
    """
    ours, theirs = ({found.rstrip("e") for found in _TELLING.findall(name.lower())} for name in (accelerator, device))
    return accelerator.lower() == device.lower() or (bool(ours) and ours == theirs)


def _checked(timings: tuple[ShardTiming, ...], folder: str, *, job: DecodeJob) -> tuple[ShardTiming, ...]:
    timings = tuple(timing for timing in timings if timing.examples)
    if not timings:
        raise UsageError(
            f"--pilot {folder}: holds no timings of its shards: they were removed, or are of another version of "
            "calm-beam. Run the pilot with this one."
        )
    if timings[0].lanes < 1 + len(job.settings.thresholds):
        raise UsageError(
            f"--pilot {folder}: was decoded with --sweep=lazy, and its timings are of its last thresholds alone. Run "
            "the pilot without."
        )
    return timings


def _manifest(path: str, folder: str) -> Manifest | None:
    """Returns the manifest in the named directory, or in the one above a named folder of generations."""
    for directory in (path, parent(parent(folder))):
        if is_file(joined(directory, MANIFEST)):
            return read_manifest(joined(directory, MANIFEST))
    return None


def _is_ours(entry: Calibration) -> bool:
    return entry.metric in METRICS


@dataclasses.dataclass(frozen=True, kw_only=True)
class _ReadBack:
    """The measurements from stored outputs.

    Attributes:
      losses: shape (examples, objectives, thresholds), int64 in units of 2^-32.
      lengths: Lengths by shard, as in `PilotShard`.
      seconds: Time to read and score an example.
    """

    losses: np.ndarray
    lengths: dict[int, np.ndarray]
    seconds: float


def _read_back(
    folder: str,
    job: DecodeJob,
    shards: tuple[StoredShard, ...],
    objectives: tuple[Objective, ...],
    *,
    thresholds: tuple[float, ...],
    on_error: str,
) -> _ReadBack:
    metrics = {objective.metric: get_metric(objective.metric) for objective in objectives}
    for metric in metrics.values():
        # The first score imports the metric's packages, which is not timed.
        metric("a text", ("another text",))
    lanes = (0, *(1 + job.settings.thresholds.index(threshold) for threshold in thresholds))
    losses: list[np.ndarray] = []
    lengths: dict[int, np.ndarray] = {}
    start = time.perf_counter()
    for shard in shards:
        if len(lengths) >= 2 and len(losses) >= _ENOUGH_EXAMPLES:
            break
        found = []
        for generation in read_generations(job.shard_path(folder, shard.shard)):
            if generation.failure is None:
                found.append((-_prompt_size(generation), max(len(output.tokens) for output in generation.outputs)))
                generation = dataclasses.replace(generation, outputs=tuple(generation.outputs[lane] for lane in lanes))
            scored = (
                score_by_policy(
                    generation, objectives, metrics=metrics, num_thresholds=len(thresholds), on_error=on_error
                )
                if objectives
                else None
            )
            losses.append(scored.losses if scored else np.zeros((0, len(thresholds)), np.int64))
        # Long prompts are started first.
        found.sort(key=lambda pair: pair[0])
        lengths[shard.shard] = np.array([steps for _, steps in found], np.int64)
    return _ReadBack(
        losses=np.stack(losses), lengths=lengths, seconds=(time.perf_counter() - start) / max(1, len(losses))
    )


def _prompt_size(generation: Generation) -> int:
    return prompt_size(generation.example.prompt)


def _outside(timings: tuple[ShardTiming, ...], run: RunTiming | None, *, scoring: float) -> tuple[float, float]:
    """Returns the seconds of a run before its first shard, and after its last shard without scoring."""
    loading = max(timing.load_seconds for timing in timings)
    if run is None:
        return loading, 0.0
    # Other shards belong to a run that this one resumed.
    own = [timing for timing in timings if timing.began >= run.began]
    if not own:
        return max(loading, run.seconds - scoring), 0.0
    first, last = min(timing.began for timing in own), max(timing.began + timing.seconds for timing in own)
    workers = len({timing.worker for timing in own})
    return max(0.0, first - run.began), max(0.0, run.ended - last - scoring / workers)


@dataclasses.dataclass(frozen=True, kw_only=True)
class StopForecast:
    """The forecast of when a guarantee may be proved.

    Attributes:
      entry: The pilot's entry about the same losses.
      delta: Risk tolerance, the entry's or another.
      epsilon: Allowed probability of error, the entry's or another.
      stop: The expected stop; None if the entry's losses are unknown.
      is_of_its_exits: As in `EntryLosses`.
    """

    entry: Calibration
    delta: float
    epsilon: float
    stop: ExpectedStop | None
    is_of_its_exits: bool = True

    @property
    def is_as_asked(self) -> bool:
        """Whether the pilot had the same delta and epsilon."""
        return (self.delta, self.epsilon) == (self.entry.delta, self.entry.epsilon)

    @property
    def saved(self) -> float | None:
        """Share of the examples that the median simulated run saves; None if unknown."""
        if self.stop is None:
            return None
        return 0.0 if self.stop.shares is None else 1 - self.stop.shares[0]


def stop_forecasts(
    run: PilotRun,
    job: Job,
    *,
    delta: float | None,
    epsilon: float | None,
    power: float,
    replications: int,
    seed: int,
    simulating: Callable[[Calibration, float], None] = lambda entry, delta: None,
) -> list[StopForecast]:
    """Returns when a sequential calibration may stop, once for each guarantee in the pilot's entries.

    Args:
      run: The pilot, whose examples are drawn independently.
      job: The planned run.
      delta: Risk tolerance of all; None for the entries' own.
      epsilon: Allowed probability of error of all; None for the entries' own.
      power: Share of whole runs that must prove the forecast threshold.
      replications: Number of simulated calibrations.
      seed: Seed of the simulation.
      simulating: Called with the entry and the tolerance of each simulation before it, which may take seconds.
    """
    looks = looks_at(job.examples, first=round_examples(job))
    found = []
    for each, own_delta, own_epsilon in _asked(run, delta=delta, epsilon=epsilon):
        stop = None
        if each.losses is not None:
            simulating(each.entry, own_delta)
            stop = expected_stop(
                each.losses,
                delta=own_delta,
                epsilon=own_epsilon,
                looks=looks,
                power=power,
                replications=replications,
                seed=seed,
            )
        found.append(
            StopForecast(
                entry=each.entry,
                delta=own_delta,
                epsilon=own_epsilon,
                stop=stop,
                is_of_its_exits=each.is_of_its_exits,
            )
        )
    return found


def _asked(run: PilotRun, *, delta: float | None, epsilon: float | None) -> Iterator[tuple[EntryLosses, float, float]]:
    """Yields entries about different losses, with the planned tolerances."""
    found: dict[tuple[object, ...], tuple[EntryLosses, float, float]] = {}
    for each in run.entries:
        entry = each.entry
        if entry.group is not None:
            # A group has only a share of the examples, too few in a pilot.
            continue
        asked = (entry.delta if delta is None else delta, entry.epsilon if epsilon is None else epsilon)
        key = (entry.consistency, entry.metric, entry.known_loss, *asked)
        if key not in found or asked == (entry.delta, entry.epsilon):
            found[key] = (each, *asked)
    yield from found.values()


def round_examples(job: Job) -> int:
    """Returns the number of examples of a round in which every worker has a shard."""
    return max(1, job.examples * min(job.workers, job.num_shards) // job.num_shards)
