"""The losses of a request: read from files, or computed from scores or outputs."""

import dataclasses
import itertools
import os
from collections.abc import Iterator, Sequence

from calm_beam.calibration.loss_table import LossTable, SweptSettings
from calm_beam.inputs.losses import HIGHER
from calm_beam.inputs.losses.runs import Run, RunScores, known_direction, losses_of_runs, settled_direction
from calm_beam.inputs.losses.tables import LossRow, RowReading, read_rows, table_files
from calm_beam.launch.flags import UsageError, naming
from calm_beam.launch.terminal import say
from calm_beam.manifest import Objective
from calm_beam.metrics import Metric
from calm_beam.metrics.registry import DEFAULT_METRIC, get_metric, is_bleurt
from calm_beam.options import listed

from .request import SweepSource


@dataclasses.dataclass(frozen=True, kw_only=True)
class Source:
    """A sweep with its origin.

    Attributes:
      sweep: The losses.
      loss: Kind of the losses: `given`, `signed` or `relu`.
      patterns: Files or runs, as the user named them.
      listed: The candidates in the order in which they were listed; None if losses were given.
      baseline: The run that scores were compared with; None if losses were given.
      reference: Name of the setting that losses are relative to; None if losses were given, or a tested setting has
        the same name.
      task: Task of the scores, if one was named.
      metric: Metric of the scores; None if losses were given.
      direction: Which scores of the metric are better; None if losses were given.
      swept: The outputs that losses were computed from; None if losses or scores were given.
      consistency: What the outputs were compared with.
    """

    sweep: LossTable
    loss: str
    patterns: tuple[str, ...]
    listed: tuple[str, ...] | None = None
    baseline: str | None = None
    reference: str | None = None
    task: str | None = None
    metric: str | None = None
    direction: str | None = None
    swept: SweptSettings | None = None
    consistency: str | None = None


def read_losses(
    source: SweepSource, *, loss: str, group_key: str | None = None, cluster_key: str | None = None
) -> Source:
    """Returns the losses of a request, read and checked to be complete; `rows_of_losses` describes the arguments.

    Raises:
      LossesError: If losses are incomplete; names examples.
      DataError: If a pattern matches no file, or one is damaged.
    """
    patterns = listed(source.losses)
    rows = rows_of_losses(patterns, loss=loss, group_key=group_key, cluster_key=cluster_key)
    return Source(sweep=LossTable.of(rows), loss=loss, patterns=patterns)


def rows_of_losses(
    patterns: Sequence[str], *, loss: str, group_key: str | None = None, cluster_key: str | None = None
) -> Iterator[LossRow]:
    """Returns the rows of all files that match patterns; files are listed now and read lazily.

    Args:
      patterns: Patterns of files, in the syntax of `--losses`.
      loss: `given` or `signed`.
      group_key: Column of the group; None if rows need none.
      cluster_key: Column of the cluster; None if rows need none.

    Raises:
      LossesError: If a file's format is unknown; during reading, if it is damaged or a row is invalid.
      DataError: If a pattern matches no file; during reading, if a file is damaged.
    """
    reading = RowReading(lowest=-1.0 if loss == "signed" else 0.0, group_key=group_key, cluster_key=cluster_key)
    with naming("--losses"):
        files = table_files(patterns, reading)
    return itertools.chain.from_iterable(read_rows(path, reading) for path in files)


def read_outputs(
    source: SweepSource,
    *,
    loss: str,
    consistency: str,
    metric: str | None,
    group_key: str | None,
    cluster_key: str | None,
) -> Source:
    """Returns the losses computed from the outputs of a request.

    Args:
      source: The options that name the outputs.
      loss: `given` for textual consistency, `signed` or `relu` for risk.
      consistency: What outputs are compared with.
      metric: Metric that scores them; None for the default.
      group_key: Key of the data that holds the group, if groups have their own tests.
      cluster_key: Key of the data that holds the cluster, if clusters are the units.

    Raises:
      UsageError: If there are no outputs, or they were read with other keys.
      OutputsError: If outputs are incomplete or damaged.
      MetricError: If there is no such metric, or it fails; names the example.
      DataError: If references are needed, and an example has none.
    """
    assert source.outputs is not None, "the outputs are named"
    swept = SweptSettings.read(os.fspath(source.outputs))
    job = swept.job
    name, scores = scoring_metric(metric)
    if group_key is not None and group_key != job.group_key:
        raise UsageError(
            f"--group_key={group_key}: the examples were read with group_key={job.group_key!r}. Sweep again with that "
            "key."
        )
    if cluster_key != job.cluster_key:
        raise UsageError(
            f"--cluster_key={cluster_key}: the examples were read with cluster_key={job.cluster_key!r}, which says "
            "what was drawn independently. Pass the same."
        )
    objective = Objective(consistency, name, loss="dissimilarity" if loss == "given" else loss)
    table = swept.table(objective, scores, has_groups=group_key is not None, has_clusters=cluster_key is not None)
    return Source(
        sweep=table,
        loss=loss,
        patterns=job.patterns,
        listed=swept.tested,
        baseline=job.settings[0],
        reference=job.settings[0],
        metric=name,
        direction=HIGHER,
        swept=swept,
        consistency=consistency,
    )


def scoring_metric(metric: str | None) -> tuple[str, Metric]:
    """Returns the metric that scores outputs, with its name, given the requested name; None for the default.

    Raises:
      UsageError: If it needs a checkpoint.
      MetricError: If there is no such metric.
    """
    name = metric or DEFAULT_METRIC
    if is_bleurt(name):
        raise UsageError(
            f"--metric={name}: needs a checkpoint, which is not asked for here. Take another metric, or write "
            "module:function for one that loads it."
        )
    return name, get_metric(name)


def read_scores(
    source: SweepSource,
    *,
    loss: str,
    task: str | None,
    metric: str | None,
    direction: str | None,
    cluster_key: str | None,
) -> Source:
    """Returns the losses computed from the scores of a request, read and checked to be complete.

    Args:
      source: The options that name the baseline and the candidates.
      loss: How losses are computed from scores: `signed` or `relu`.
      task: Task whose log is read; None if there is one task.
      metric: Metric in the log; None if there is one metric.
      direction: Which scores are better; None reads it from the logs, or from the metric's name.
      cluster_key: Field of a log's record of an example that names its cluster, if clusters are asked for.

    Raises:
      UsageError: If runs of two tasks are named, or two of one name.
      LossesError: If scores are incomplete; names examples.
      DataError: If a run is missing or damaged.
    """
    assert source.baseline is not None, "scores are compared with it"
    path, candidates = os.fspath(source.baseline), listed(source.candidates)
    with naming("--baseline"):
        baseline = Run.found(path, task=task)
    with naming("--candidates"):
        runs = [Run.found(text, task=task) for text in candidates]
    names = tuple(run.name for run in runs)
    if twice := next((name for name in names if names.count(name) > 1), None):
        raise UsageError(f"--candidates: two are called {twice!r}. Name them: NAME=RUN,NAME=RUN.")
    task_of_all = baseline.task()
    for run in runs:
        if run.task() != task_of_all:
            raise UsageError(
                f"--candidates {run.path}: is of task {run.task()!r}, and the baseline of {task_of_all!r}. Examples of "
                "two tasks may have the same ids, and are not the same. Evaluate both on one task, or name it (--task)."
            )
    scores = RunScores.read(baseline, metric=metric, cluster_key=cluster_key)
    better = _direction(baseline, scores, runs, asked=direction)
    joined_by_id: list[str] = []

    def read_candidates() -> Iterator[tuple[Run, RunScores]]:
        for run in runs:
            theirs = RunScores.read(run, metric=scores.metric, cluster_key=cluster_key)
            if not scores.contents.keys() & theirs.contents.keys():
                joined_by_id.append(run.name)
            yield run, theirs

    sweep = LossTable.of(losses_of_runs(scores, read_candidates(), loss=loss, direction=better))
    if joined_by_id:
        say(
            f"caution: the logs of the baseline and of {', '.join(joined_by_id)} do not both say what was asked, so "
            "examples are joined by their ids alone. See to it yourself that the same id is the same question."
        )
    return Source(
        sweep=sweep,
        loss=loss,
        patterns=(path, *candidates),
        listed=names,
        baseline=path,
        reference=None if baseline.name in names else baseline.name,
        task=task_of_all,
        metric=scores.metric,
        direction=better,
    )


def _direction(baseline: Run, scores: RunScores, runs: Sequence[Run], *, asked: str | None) -> str:
    """Returns which scores are better, and prints it; `asked` is the request's value."""
    said = {baseline.path: scores.higher_is_better}
    said |= {run.path: run.higher_is_better(scores.metric) for run in runs}
    known = {path: each for path, each in said.items() if each is not None}
    direction = settled_direction(scores.metric, said=known, asked=asked)
    source = "as the logs say" if known else "as --direction says" if asked else "by its name"
    say(f"{scores.metric}: a {direction} score is better, {source}")
    by_name = known_direction(scores.metric)
    if by_name not in (None, direction):
        say(f"caution: of what is usually called {scores.metric}, a {by_name} score is better.")
    return direction
