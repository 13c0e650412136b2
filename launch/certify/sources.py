"""The losses that the flags of a sweep name."""

import argparse
import dataclasses
import itertools
from collections.abc import Iterator, Sequence

from calm_beam.calibration.loss_table import LossTable
from calm_beam.inputs.losses.direction import known_direction, settled_direction
from calm_beam.inputs.losses.rows import LossRow, RowReading
from calm_beam.inputs.losses.runs import Run, RunScores, losses_of_runs
from calm_beam.inputs.losses.tables import read_rows, table_files
from calm_beam.launch.flags import UsageError, naming
from calm_beam.launch.terminal import say


@dataclasses.dataclass(frozen=True, kw_only=True)
class Source:
    """A sweep with where it came from.

    Attributes:
      sweep: Its losses.
      loss: What they are: `given`, `signed` or `relu`.
      patterns: Files or runs, as the user named them.
      listed: The candidates in the order in which they were listed; None where losses were given.
      baseline: The run that scores were compared with; None where losses were given.
      task: Task of the scores, if one was named.
      metric: Metric of the scores; None where losses were given.
      direction: Which scores of it are better; None where losses were given.
    """

    sweep: LossTable
    loss: str
    patterns: tuple[str, ...]
    listed: tuple[str, ...] | None = None
    baseline: str | None = None
    task: str | None = None
    metric: str | None = None
    direction: str | None = None


def read_source(
    flags: argparse.Namespace, *, loss: str | None, group_key: str | None, cluster_key: str | None
) -> Source:
    """Returns the losses that flags name, all read and found complete.

    Args:
      flags: Those of `add_sweep_flags`.
      loss: What the losses are; None for the default.
      group_key: Column that names the group, if groups are asked for.
      cluster_key: Column that names the cluster, likewise; of scores, the field of a log's record of an example.

    Raises:
      UsageError: If the flags name nothing, or two things, or do not go together.
      LossesError: If losses or scores are not whole; names examples.
      DataError: If a pattern matches no file, or one is damaged.
    """
    if (flags.losses is None) == (flags.baseline is None):
        raise UsageError("name either the losses (--losses) or the scores (--baseline and --candidates).")
    if flags.losses is not None:
        for name in ("candidates", "task", "metric", "direction"):
            if getattr(flags, name) is not None:
                raise UsageError(f"--{name} belongs to --baseline, and --losses is given: leave one of them out.")
        return _of_losses(flags, loss=loss, group_key=group_key, cluster_key=cluster_key)
    if flags.candidates is None:
        raise UsageError("--candidates is missing: the runs that are compared with --baseline.")
    if group_key is not None:
        raise UsageError("--group_key names a column of --losses, and scores have none: leave it out.")
    return _of_scores(flags, loss=loss, cluster_key=cluster_key)


def loss_of_losses(loss: str | None) -> str:
    """Returns what losses are that were given: `given` or `signed`.

    Raises:
      UsageError: If they are to be something else.
    """
    if loss == "relu":
        raise UsageError("--loss=relu is made of scores. Of --losses it is given (in [0, 1]) or signed (in [-1, 1]).")
    return loss or "given"


def rows_of_losses(
    patterns: Sequence[str], *, loss: str, group_key: str | None = None, cluster_key: str | None = None
) -> Iterator[LossRow]:
    """Returns the rows of all files that patterns name, found now and read as they are asked for.

    Args:
      patterns: As `--losses` has them.
      loss: `given` or `signed`.
      group_key: Column that names the group, if rows are to say it.
      cluster_key: Column that names the cluster, likewise.

    Raises:
      LossesError: If a file has no format; later, if it is damaged or a row is not one.
      DataError: If a pattern matches no file; later, if one is damaged.
    """
    reading = RowReading(lowest=-1.0 if loss == "signed" else 0.0, group_key=group_key, cluster_key=cluster_key)
    with naming("--losses"):
        files = table_files(patterns, reading)
    return itertools.chain.from_iterable(read_rows(path, reading) for path in files)


def _of_losses(
    flags: argparse.Namespace, *, loss: str | None, group_key: str | None, cluster_key: str | None
) -> Source:
    loss = loss_of_losses(loss)
    rows = rows_of_losses(flags.losses, loss=loss, group_key=group_key, cluster_key=cluster_key)
    return Source(sweep=LossTable.of(rows), loss=loss, patterns=flags.losses)


def _of_scores(flags: argparse.Namespace, *, loss: str | None, cluster_key: str | None) -> Source:
    if loss == "given":
        raise UsageError("--loss=given is of --losses. Of scores it is signed or relu.")
    loss = loss or "signed"
    with naming("--baseline"):
        baseline = Run.found(flags.baseline, task=flags.task)
    with naming("--candidates"):
        runs = [Run.found(text, task=flags.task) for text in flags.candidates]
    names = tuple(run.name for run in runs)
    if twice := next((name for name in names if names.count(name) > 1), None):
        raise UsageError(f"--candidates: two are called {twice!r}. Name them: NAME=RUN,NAME=RUN.")
    task = baseline.task()
    for run in runs:
        if run.task() != task:
            raise UsageError(
                f"--candidates {run.path}: is of task {run.task()!r}, and the baseline of {task!r}. Examples of two "
                "tasks may have the same ids, and are not the same. Evaluate both on one task, or name it (--task)."
            )
    scores = RunScores.read(baseline, metric=flags.metric, cluster_key=cluster_key)
    direction = _direction(flags, baseline, scores, runs)
    joined_by_id: list[str] = []

    def read_candidates() -> Iterator[tuple[Run, RunScores]]:
        for run in runs:
            theirs = RunScores.read(run, metric=scores.metric, cluster_key=cluster_key)
            if not scores.contents.keys() & theirs.contents.keys():
                joined_by_id.append(run.name)
            yield run, theirs

    sweep = LossTable.of(losses_of_runs(scores, read_candidates(), loss=loss, direction=direction))
    if joined_by_id:
        say(
            f"caution: the logs of the baseline and of {', '.join(joined_by_id)} do not both say what was asked, so "
            "examples are joined by their ids alone. See to it yourself that the same id is the same question."
        )
    return Source(
        sweep=sweep,
        loss=loss,
        patterns=(flags.baseline, *flags.candidates),
        listed=names,
        baseline=flags.baseline,
        task=task,
        metric=scores.metric,
        direction=direction,
    )


def _direction(flags: argparse.Namespace, baseline: Run, scores: RunScores, runs: Sequence[Run]) -> str:
    """Returns which scores are better, and says so."""
    said = {baseline.path: scores.higher_is_better}
    said |= {run.path: run.higher_is_better(scores.metric) for run in runs}
    known = {path: each for path, each in said.items() if each is not None}
    direction = settled_direction(scores.metric, said=known, asked=flags.direction)
    source = "as the logs say" if known else "as --direction says" if flags.direction else "by its name"
    say(f"{scores.metric}: a {direction} score is better, {source}")
    by_name = known_direction(scores.metric)
    if by_name not in (None, direction):
        say(f"caution: of what is usually called {scores.metric}, a {by_name} score is better.")
    return direction
