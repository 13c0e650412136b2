"""Runs of an evaluation: their scores, example by example, and the losses of candidates against a baseline."""

import dataclasses
import glob
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Self

import numpy as np

from calm_beam.counted import counted
from calm_beam.risk.losses import losses_of_scores
from calm_beam.risk.setting_sums import LossesError
from calm_beam.storage import base_name, exists, is_cloud_path, is_file, joined, list_files

from .frameworks import FRAMEWORKS, ScoreFormat, format_of
from .rows import LossRow
from .shown import named

# Folders above a log: of the output, the model, its organisation, the date.
_LEVELS = 5


@dataclasses.dataclass(frozen=True, kw_only=True)
class Run:
    """A run of an evaluation, as a user names it.

    Attributes:
      name: The setting that it was made with.
      path: Its log of single examples.
      format: The framework that has written that.
    """

    name: str
    path: str
    format: ScoreFormat

    @classmethod
    def found(cls, text: str, *, task: str | None) -> Self:
        """Returns the run that a text names: `RUN`, or `NAME=RUN`, where RUN is a log or a folder that holds one.

        Args:
          text: The text.
          task: Which log of a folder is meant, where there are several.

        Raises:
          LossesError: If there is none, or several.
        """
        name, sign, place = text.partition("=")
        if not sign or exists(text):
            name, place = "", text
        path = place if is_file(place) else _log_in(place, task=task)
        found = format_of(path)
        if task is not None and found.task(path) != task:
            raise LossesError(f"{path}: is of task {found.task(path)!r}, not of --task={task}.")
        return cls(name=name or base_name(place.rstrip("/")), path=path, format=found)

    def task(self) -> str:
        """Returns the task whose examples were scored, as the log calls it."""
        return self.format.task(self.path)


@dataclasses.dataclass(frozen=True, kw_only=True)
class RunScores:
    """The scores of a run by one metric.

    Attributes:
      metric: The metric, as the log calls it.
      scores: By example, each in [0, 1].
      contents: By example, what tells it from others of its id; of those where the log says so.
    """

    metric: str
    scores: Mapping[str, float]
    contents: Mapping[str, str]

    @classmethod
    def read(cls, run: Run, *, metric: str | None) -> Self:
        """Returns the scores of a run.

        Args:
          run: The run.
          metric: As the log calls it, or what that has before a comma; None where the log has one only.

        Raises:
          LossesError: If the metric is not there, or not for every example, or an example is there twice, or a score is
            not a number in [0, 1].
        """
        by_metric: dict[str, dict[str, object]] = {}
        contents: dict[str, str] = {}
        ids: dict[str, None] = {}
        repeated: dict[str, dict[str, None]] = {}
        for example in run.format.examples(run.path):
            ids[example.id] = None
            if example.content is not None and contents.setdefault(example.id, example.content) != example.content:
                raise LossesError(f"{run.path}: id {example.id!r} is of two different examples.")
            for name, score in example.scores.items():
                of_metric = by_metric.setdefault(name, {})
                if example.id in of_metric:
                    repeated.setdefault(name, {})[example.id] = None
                of_metric[example.id] = score
        if not ids:
            raise LossesError(f"{run.path}: holds no examples.")
        chosen = _chosen_metric(metric, list(by_metric), path=run.path)
        if chosen in repeated:
            raise LossesError(
                f"{run.path}: scores {named(repeated[chosen], 'id')} several times. Every example "
                "needs one score in every run."
            )
        scores = by_metric[chosen]
        if missing := [name for name in ids if name not in scores]:
            raise LossesError(f"{run.path}: has no {chosen} for {named(missing, 'id')}.")
        for name, score in scores.items():
            if not isinstance(score, int | float) or not 0 <= score <= 1:
                raise LossesError(
                    f"{run.path}: {chosen} of example {name!r} must be a number in [0, 1], got {score!r:.80}. "
                    "Scores on other scales: write the losses to a file for --losses."
                )
        # True and False are scores too.
        return cls(metric=chosen, scores={name: float(score) for name, score in scores.items()}, contents=contents)  # type: ignore[arg-type]


def losses_of_runs(baseline: RunScores, candidates: Iterable[tuple[Run, RunScores]], *, loss: str) -> Iterator[LossRow]:
    """Yields the losses of candidates against a baseline.

    Args:
      baseline: Scores of the run that others are compared with.
      candidates: Those of the others.
      loss: `signed` (baseline's score minus the candidate's) or `relu` (what is positive of that).

    Raises:
      LossesError: If a candidate lacks an example, has another, or a different one of the same id; names them.
    """
    for run, theirs in candidates:
        missing = [name for name in baseline.scores if name not in theirs.scores]
        extra = [name for name in theirs.scores if name not in baseline.scores]
        if missing or extra:
            parts = [f"lacks {named(missing, 'id')} of the baseline"] if missing else []
            parts += [f"has {named(extra, 'id')} that the baseline lacks"] if extra else []
            raise LossesError(
                f"{run.path}: {' and '.join(parts)}. Every example needs a score in every run: those that are left out "
                "may be the ones that fail."
            )
        changed = [name for name, content in theirs.contents.items() if baseline.contents.get(name, content) != content]
        if changed:
            raise LossesError(
                f"{run.path}: gives {named(changed, 'id')} to other examples than the baseline does. Evaluate both "
                "on the same data."
            )
        names = list(theirs.scores)
        losses = losses_of_scores(
            loss,
            early_score=np.array([theirs.scores[name] for name in names]),
            full_score=np.array([baseline.scores[name] for name in names]),
        )
        for name, value in zip(names, losses.tolist(), strict=True):
            yield LossRow(name, run.name, value)


def _log_in(folder: str, *, task: str | None) -> str:
    """Returns the one log in a folder, of a task if one is named."""
    start = folder if is_cloud_path(folder) else glob.escape(folder)
    found: dict[str, str] = {}
    for format_ in FRAMEWORKS.values():
        for pattern in format_.files:
            for level in range(_LEVELS):
                paths = list_files(joined(start, *["*"] * level, pattern))
                found.update((path, format_.task(path)) for path in paths if format_.is_of(path))
    if not found:
        raise LossesError(
            f"{folder}: {'no such file or folder' if not exists(folder) else 'holds no scores of single examples'}. "
            f"Expected a log of {', '.join(FRAMEWORKS)}, or a folder with one: RUN, or NAME=RUN."
        )
    of_task = [path for path, name in found.items() if task is None or name == task]
    if len(of_task) == 1:
        return of_task[0]
    tasks = ", ".join(sorted(set(found.values())))
    if not of_task:
        raise LossesError(f"{folder}: has no log of --task={task}, only of {tasks}.")
    remedy = f"Name the task (--task), one of {tasks}" if task is None and len(set(found.values())) > 1 else "Name one"
    raise LossesError(f"{folder}: holds {counted(len(of_task), 'log')}. {remedy}; there are {', '.join(of_task[:5])}.")


def _chosen_metric(asked: str | None, known: Sequence[str], *, path: str) -> str:
    """Returns the metric that is meant, as the log calls it."""
    if asked in known:
        return asked  # type: ignore[return-value]
    found = [name for name in known if asked is None or name.partition(",")[0] == asked]
    if len(found) == 1:
        return found[0]
    there = "; ".join(known) or "none"
    if asked is None:
        raise LossesError(f"{path}: name the metric (--metric), one of: {there}.")
    raise LossesError(f"{path}: {'has no' if not found else 'has several'} metric {asked!r}. There are: {there}.")
