"""Evaluation runs: their scores by example, and the losses of candidates against a baseline.

A run's files, --direction or the metric's name says whether higher or lower scores are better. A score that is read the
wrong way round would prove the opposite of the truth. So there is no default: if neither the files nor the name says
it, the user must.
"""

import collections
import dataclasses
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Self

import numpy as np

from calm_beam.errors import UsageError
from calm_beam.risk.losses import losses_of_scores
from calm_beam.risk.testing import LossesError
from calm_beam.storage import base_name, exists, is_file, joined, list_files
from calm_beam.text import counted

from . import HIGHER, LOWER
from .frameworks import FRAMEWORKS, ScoredExample, ScoreFormat, format_of, glob_of
from .tables import LossRow, named, value_in_words

# Folder levels above a log: output, model, its organisation, date.
_LEVELS = 5


@dataclasses.dataclass(frozen=True, kw_only=True)
class Run:
    """An evaluation run, as a user names it.

    Attributes:
      name: The setting that it was made with.
      path: Its log of examples.
      format: The framework that wrote the log.
    """

    name: str
    path: str
    format: ScoreFormat

    @classmethod
    def found(cls, text: str, *, task: str | None) -> Self:
        """Returns the run for a text `RUN` or `NAME=RUN`, where RUN is a log or a folder with one.

        Args:
          text: The text.
          task: The task whose log to take if the folder has several.

        Raises:
          LossesError: If there is no log, or if there are several.
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
        """Returns the task of the scored examples, as the log names it."""
        return self.format.task(self.path)

    def higher_is_better(self, metric: str) -> bool | None:
        """Returns what the run's files, other than by scores, say about a metric; None if nothing."""
        return self.format.higher_is_better(self.path, metric)


@dataclasses.dataclass(frozen=True, kw_only=True)
class RunScores:
    """The scores of a run by one metric.

    Attributes:
      metric: The metric, as the log names it.
      scores: By example, each in [0, 1].
      contents: By example, a digest of the question, if the log has it.
      clusters: By example, the cluster it was drawn with; empty if clusters are not requested.
      higher_is_better: What the run's files or grades say about the metric; None if nothing.
    """

    metric: str
    scores: Mapping[str, float]
    contents: Mapping[str, str]
    clusters: Mapping[str, str]
    higher_is_better: bool | None

    @classmethod
    def read(cls, run: Run, *, metric: str | None, cluster_key: str | None = None) -> Self:
        """Returns the scores of a run.

        Args:
          run: The run.
          metric: The log's name of it, or the part of that before a comma; None if the log has only one.
          cluster_key: Path of the cluster in the record of an example; None if clusters are not requested.

        Raises:
          LossesError: If the metric is missing, also for a single example, an example is there twice, or a score is not
            a number in [0, 1].
        """
        gathered = _Gathered(run.path)
        for example in run.format.examples(run.path, cluster_key=cluster_key):
            gathered.add(example)
        if not gathered.ids:
            raise LossesError(f"{run.path}: holds no examples.")
        chosen = _chosen_metric(metric, list(gathered.by_metric), path=run.path)
        scores = gathered.scores(chosen)
        said = run.higher_is_better(chosen)
        return cls(
            metric=chosen,
            scores=scores,
            contents=gathered.contents,
            clusters=gathered.clusters,
            higher_is_better=True if said is None and gathered.graded[chosen] == len(scores) else said,
        )


class _Gathered:
    """The content of a log, collected example by example.

    Attributes:
      ids: Ids of all examples.
      by_metric: The scores of each metric by example, as the log has them.
      contents: By example, a digest of the question, if the log has it.
      clusters: By example, the cluster it was drawn with.
      graded: For each metric, the number of scores that are grades.
    """

    def __init__(self, path: str) -> None:
        self._path = path
        self._repeated: dict[str, dict[str, None]] = {}
        self.ids: dict[str, None] = {}
        self.by_metric: dict[str, dict[str, object]] = {}
        self.contents: dict[str, str] = {}
        self.clusters: dict[str, str] = {}
        self.graded: collections.Counter[str] = collections.Counter()

    def add(self, example: ScoredExample) -> None:
        """Adds an example.

        Raises:
          LossesError: If an earlier example of that id has another question or another cluster.
        """
        self.ids[example.id] = None
        if example.content is not None and self.contents.setdefault(example.id, example.content) != example.content:
            raise LossesError(f"{self._path}: id {value_in_words(example.id)} is of two different examples.")
        if example.cluster is not None and self.clusters.setdefault(example.id, example.cluster) != example.cluster:
            raise LossesError(f"{self._path}: example {value_in_words(example.id)} is in two clusters. Name one.")
        self.graded.update(example.graded)
        for name, score in example.scores.items():
            of_metric = self.by_metric.setdefault(name, {})
            if example.id in of_metric:
                self._repeated.setdefault(name, {})[example.id] = None
            of_metric[example.id] = score

    def scores(self, metric: str) -> dict[str, float]:
        """Returns the scores of a metric by example.

        Raises:
          LossesError: If an example has several or none, or a score is not a number in [0, 1].
        """
        if metric in self._repeated:
            raise LossesError(
                f"{self._path}: scores {named(self._repeated[metric], 'id')} several times. Every example "
                "needs one score in every run."
            )
        scores = self.by_metric[metric]
        if missing := [name for name in self.ids if name not in scores]:
            raise LossesError(f"{self._path}: has no {metric} for {named(missing, 'id')}.")
        found = {}
        for name, score in scores.items():
            # True and False count as scores.
            if not isinstance(score, int | float) or not 0 <= score <= 1:
                raise LossesError(
                    f"{self._path}: {metric} of example {value_in_words(name)} must be a number in [0, 1], got "
                    f"{value_in_words(score)}. Scores on other scales: write the losses to a file for --losses."
                )
            found[name] = float(score)
        return found


def losses_of_runs(
    baseline: RunScores, candidates: Iterable[tuple[Run, RunScores]], *, loss: str, direction: str
) -> Iterator[LossRow]:
    """Yields the losses of candidates against a baseline: by how much their scores are worse.

    Args:
      baseline: Scores of the run to compare with.
      candidates: The other runs and their scores.
      loss: `signed` (baseline's score minus the candidate's, or if lower scores are better the candidate's minus the
        baseline's) or `relu` (its positive part).
      direction: Whether higher or lower scores are better, one of `DIRECTIONS`.

    Raises:
      LossesError: If a candidate lacks an example, has an extra one, has another question or cluster under the same id,
        or says the opposite about which scores are better; names them.
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
        if theirs.higher_is_better not in (None, direction != LOWER):
            raise LossesError(
                f"{run.path}: says the opposite of what was settled: that a {direction} {theirs.metric} is better. "
                "Find out which is right, and evaluate all runs alike."
            )
        changed = [name for name, content in theirs.contents.items() if baseline.contents.get(name, content) != content]
        if changed:
            raise LossesError(
                f"{run.path}: gives {named(changed, 'id')} to other examples than the baseline does. Evaluate both "
                "on the same data."
            )
        if moved := [name for name, cluster in theirs.clusters.items() if baseline.clusters.get(name) != cluster]:
            raise LossesError(f"{run.path}: has {named(moved, 'id')} in other clusters than the baseline does.")
        names = list(theirs.scores)
        worse, better = ([scores[name] for name in names] for scores in (theirs.scores, baseline.scores))
        if direction == LOWER:
            worse, better = better, worse
        losses = losses_of_scores(loss, early_score=np.array(worse), full_score=np.array(better))
        for name, value in zip(names, losses.tolist(), strict=True):
            yield LossRow(name, run.name, value, cluster=theirs.clusters.get(name))


def _log_in(folder: str, *, task: str | None) -> str:
    """Returns the one log in a folder, of a task if one is named."""
    start = glob_of(folder)
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
    """Returns the requested metric by the log's name of it."""
    if asked in known:
        return asked  # type: ignore[return-value]
    found = [name for name in known if asked is None or name.partition(",")[0] == asked]
    if len(found) == 1:
        return found[0]
    there = "; ".join(known) or "none"
    if asked is None:
        raise LossesError(f"{path}: name the metric (--metric), one of: {there}.")
    if found:
        several = "; ".join(found)
        raise LossesError(f"{path}: {asked!r} is the name of {len(found)} metrics. Name one (--metric), of: {several}.")
    raise LossesError(f"{path}: has no metric {asked!r}. There are: {there}.")


def _names_in(text: str) -> frozenset[str]:
    return frozenset(text.split())


# Metric names that have the same meaning everywhere, in the form that `_plain` gives them.
_NAMES_OF_HIGHER = _names_in(
    """
    acc acc_norm acc_norm_nospace acc_mutual_info acc_bytes accuracy balanced_accuracy exact exact_match em qem pem
    quasi_exact_match prefix_exact_match quasi_prefix_exact_match inst_level_strict_acc inst_level_loose_acc
    prompt_level_strict_acc prompt_level_loose_acc strict_match flexible_match extractive_match math_equiv
    f1 f1_score token_f1 macro_f1 micro_f1 precision recall mcc matthews_corrcoef mrr ndcg auc roc_auc
    bleu bleu_1 bleu_4 sacrebleu chrf rouge1 rouge2 rougel rougelsum rouge_1 rouge_2 rouge_l rouge_lsum rouge_score
    meteor bertscore bert_score bleurt comet
    pass pass_1 pass_at_1 maj likely_correct correct correctness match includes choice answer pattern
    win_rate winrate success success_rate solved resolved truthfulness faithfulness helpfulness
    """
)
_NAMES_OF_LOWER = _names_in(
    """
    error error_rate errors wer cer ter mer wil word_error_rate character_error_rate
    perplexity ppl word_perplexity byte_perplexity token_perplexity bits_per_byte bpb nll loss cross_entropy
    negative_log_likelihood brier brier_score ece ece_10_bin ece_1_bin calibration_error expected_calibration_error
    mae mse rmse mean_absolute_error mean_squared_error
    toxicity toxic toxic_frac toxicity_score expected_max_toxicity max_toxicity any_toxic toxicity_rate
    hallucination hallucination_rate stereotype stereotype_score harm harmfulness harmful
    edit_distance levenshtein levenshtein_distance
    inference_runtime inference_denoised_runtime latency runtime
    """
)


def known_direction(metric: str) -> str | None:
    """Returns whether higher or lower scores of a metric are better, from its name; None if the name does not say.

    >>> known_direction("exact_match,strict-match"), known_direction("toxicity"), known_direction("quality")
    ('higher', 'lower', None)
    """
    plain = _plain(metric)
    return HIGHER if plain in _NAMES_OF_HIGHER else LOWER if plain in _NAMES_OF_LOWER else None


def settled_direction(metric: str, *, said: Mapping[str, bool], asked: str | None) -> str:
    """Returns whether higher or lower scores of a metric are better, one of `DIRECTIONS`.

    Args:
      metric: The metric, as the logs name it.
      said: For each log that says it, in itself or in a file next to it, whether higher is better.
      asked: The user's choice; None for none.

    Raises:
      LossesError: If two of these contradict each other.
      UsageError: If none says it.
    """
    first = next(iter(said.items()), None)
    if first is not None:
        path, is_higher = first
        found = HIGHER if is_higher else LOWER
        if (other := next((name for name, each in said.items() if each != is_higher), None)) is not None:
            raise LossesError(
                f"{path}: says that a {found} {metric} is better, and {other} says the opposite. Find out which of the "
                "two is right, and evaluate both alike."
            )
        if asked is not None and asked != found:
            raise LossesError(
                f"{path}: says that a {found} {metric} is better, and --direction={asked} says the opposite. Leave the "
                "flag out, or fix what the framework says about the metric."
            )
        return found
    found_or_none = asked or known_direction(metric)
    if found_or_none is None:
        raise UsageError(
            f"nothing says whether a higher or a lower {metric} is better: the logs do not, nor the files next to "
            "them, and the name is not known. Say it: --direction=higher or --direction=lower."
        )
    return found_or_none


def _plain(metric: str) -> str:
    """Returns the name of a metric without filter (after a comma), scorer (before a slash) and parameters.

    >>> _plain("grader/Exact-Match"), _plain("rougeL,none"), _plain("pass@1:8_samples")
    ('exact_match', 'rougel', 'pass')
    """
    name = metric.partition(",")[0].rpartition("/")[2]
    return re.sub(r"[\s-]+", "_", re.split("[@:]", name, maxsplit=1)[0].strip().lower())
