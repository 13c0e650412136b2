"""When a sequential calibration may stop, forecast from the losses of a pilot."""

import dataclasses
from collections.abc import Iterator

from calm_beam.manifest import Calibration
from calm_beam.risk.sample_size import ExpectedStop, expected_stop, looks_at

from .cost import Job
from .pilot import EntryLosses, PilotRun


@dataclasses.dataclass(frozen=True, kw_only=True)
class StopForecast:
    """When a guarantee may be proved.

    Attributes:
      entry: Of the pilot, about the same losses.
      delta: Risk tolerance, the entry's or another.
      epsilon: Allowed probability of error, likewise.
      stop: When that may be; None where the entry's losses are not known.
    """

    entry: Calibration
    delta: float
    epsilon: float
    stop: ExpectedStop | None

    @property
    def is_as_asked(self) -> bool:
        """Whether the pilot was asked for the same."""
        return (self.delta, self.epsilon) == (self.entry.delta, self.entry.epsilon)

    @property
    def saved(self) -> float | None:
        """Share of the examples that the middle one of simulated runs saves; None where nothing is known."""
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
) -> list[StopForecast]:
    """Returns when a sequential calibration may stop, for what the entries of the pilot guarantee, each once.

    Args:
      run: The pilot, whose examples are drawn independently.
      job: The run that is planned.
      delta: Risk tolerance of all; None for the entries' own.
      epsilon: Allowed probability of error of all; None for the entries' own.
      power: Share of whole runs that are to prove what is forecast.
      replications: Simulated calibrations.
      seed: Of the simulation.
    """
    looks = looks_at(job.examples, first=round_examples(job))
    found = []
    for each, own_delta, own_epsilon in _asked(run, delta=delta, epsilon=epsilon):
        stop = None
        if each.losses is not None:
            stop = expected_stop(
                each.losses,
                delta=own_delta,
                epsilon=own_epsilon,
                looks=looks,
                power=power,
                replications=replications,
                seed=seed,
            )
        found.append(StopForecast(entry=each.entry, delta=own_delta, epsilon=own_epsilon, stop=stop))
    return found


def _asked(run: PilotRun, *, delta: float | None, epsilon: float | None) -> Iterator[tuple[EntryLosses, float, float]]:
    """Yields entries about different losses, with the tolerances that are planned for."""
    found: dict[tuple[object, ...], tuple[EntryLosses, float, float]] = {}
    for each in run.entries:
        entry = each.entry
        if entry.group is not None:
            # Of a group there would be a share of the examples, which a pilot knows too little of.
            continue
        asked = (entry.delta if delta is None else delta, entry.epsilon if epsilon is None else epsilon)
        key = (entry.consistency, entry.metric, entry.known_loss, *asked)
        if key not in found or asked == (entry.delta, entry.epsilon):
            found[key] = (each, *asked)
    yield from found.values()


def round_examples(job: Job) -> int:
    """Returns the examples of a round in which every worker has a shard."""
    return max(1, job.examples * min(job.workers, job.num_shards) // job.num_shards)
