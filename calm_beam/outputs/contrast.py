"""Whether a metric tells outputs apart on a set of examples. If it does not, its losses are 0 whatever exits do.

Two things are taken for a metric that tells nothing:

* The full model scores 0 on every example (in risk consistency against the references, in textual consistency against
  its own output). Then nothing can get worse. Mostly the two texts are not of one kind: token ids and words, or a
  language whose letters the metric does not read.
* No output of any example scores otherwise than the full model's, though some differ from it, *and* the metric does not
  tell answers of different examples apart either: where the full model does best, its outputs for other examples score
  the same. That is what a metric does which gives one constant, or looks at the references alone.

A model that never changes its outputs, or one whose changes a metric rightly passes over (commas, or another right
answer), is not refused: there, outputs of different examples do score differently. Nor does the number of examples
matter. In doubt a metric is refused: where the full model's outputs are all one, or where a metric of the output alone
finds nothing in any of them, the data do not show that it works.

Besides, a metric is refused that does not see the texts of more than a tenth of the examples (`unseen.py`).
"""

import dataclasses
import itertools
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from typing import Self

from calm_beam.inputs.examples import Example
from calm_beam.manifest import Objective
from calm_beam.metrics.registry import Metric, MetricError, checked_score

from .unseen import Unseen, merged_unseen, quoted

# Held, one after the other, against the references of another example.
_MOST_SAMPLES = 8


@dataclasses.dataclass(frozen=True, kw_only=True)
class Sample:
    """Texts of one example.

    Attributes:
      id: Of the example.
      full: The full model's output.
      references: Of the example; empty if it has none.
      other: The first output that is not the full model's; None if all are.
    """

    id: str
    full: str
    references: tuple[str, ...]
    other: str | None

    @classmethod
    def of(cls, example: Example, texts: Sequence[str]) -> Self:
        """Returns the sample of an example and its outputs, the full model's first."""
        full, *early = texts
        other = next((text for text in early if text != full), None)
        return cls(id=example.id, full=full, references=example.references, other=other)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Contrast:
    """What the scores of some examples tell apart; merging is exact, associative and commutative.

    Attributes:
      examples: Number of examples with scores; those that failed have none.
      best: For each objective, the highest score of the full model, and the smallest id that has it.
      moves: For each objective, whether an output scored otherwise than the full model's of the same example.
      samples: Examples with different outputs of the full model: of each output the smallest id, of these the smallest.
      changed: The smallest id among examples with an output that is not the full model's.
      unseen: By metric, ascending, how many examples have texts that it does not see; of metrics that see all, nothing.
    """

    examples: int = 0
    best: tuple[tuple[float, Sample], ...] = ()
    moves: tuple[bool, ...] = ()
    samples: tuple[Sample, ...] = ()
    changed: Sample | None = None
    unseen: tuple[Unseen, ...] = ()

    @classmethod
    def of(
        cls,
        example: Example,
        texts: Sequence[str],
        *,
        scores: Sequence[Sequence[float]],
        unseen: Iterable[Unseen] = (),
    ) -> Self:
        """Returns the contrast of one example.

        Args:
          example: The example.
          texts: Its outputs, the full model's first.
          scores: For each objective, those of the outputs.
          unseen: What metrics do not see of it, each metric once.
        """
        sample = Sample.of(example, texts)
        return cls(
            examples=1,
            best=tuple((full, sample) for full, *_ in scores),
            moves=tuple(any(score != full for score in early) for full, *early in scores),
            samples=(sample,),
            changed=None if sample.other is None else sample,
            unseen=merged_unseen([tuple(unseen)]),
        )

    @classmethod
    def merged(cls, contrasts: Iterable[Self]) -> Self:
        """Returns the contrast of several sets together; that of no examples if there are none."""
        kept = [contrast for contrast in contrasts if contrast.examples]
        if not kept:
            return cls()
        return cls(
            examples=sum(each.examples for each in kept),
            best=tuple(
                min(of_objective, key=lambda best: (-best[0], best[1].id))
                for of_objective in zip(*(each.best for each in kept), strict=True)
            ),
            moves=tuple(map(any, zip(*(each.moves for each in kept), strict=True))),
            samples=_smallest(sample for each in kept for sample in each.samples),
            changed=min((each.changed for each in kept if each.changed), key=lambda sample: sample.id, default=None),
            unseen=merged_unseen(each.unseen for each in kept),
        )

    def check(
        self,
        objectives: Sequence[Objective],
        metric_of: Callable[[str], Metric],
        *,
        among: Collection[Objective] | None = None,
    ) -> None:
        """Raises if a metric told nothing, or does not see the texts of too many examples; see the module docstring.

        Args:
          objectives: Those of the scores.
          metric_of: Gives a metric by its name; asked only where it is in doubt.
          among: Those of them that are checked; None for all.

        Raises:
          MetricError: If there is such a metric; names an example and what was compared.
        """
        if not self.examples:
            return
        self.check_seen({objective.metric for objective in (objectives if among is None else among)})
        for objective, (score, sample), moves in zip(objectives, self.best, self.moves, strict=True):
            if among is not None and objective not in among:
                continue
            if score == 0:
                raise MetricError(self._never_right(objective))
            if not moves and self.changed is not None:
                metric = metric_of(objective.metric)
                if not self._tells_from_others(objective, metric, score=score, best=sample):
                    raise MetricError(self._never_moves(objective, metric, changed=self.changed))

    def check_seen(self, metrics: Collection[str]) -> None:
        """Raises if one of these metrics does not see the texts of too many examples.

        Raises:
          MetricError: If there is one; names an example and metrics that see it.
        """
        for found in self.unseen:
            if found.metric in metrics:
                found.check(examples=self.examples)

    def _tells_from_others(self, objective: Objective, metric: Metric, *, score: float, best: Sample) -> bool:
        """Returns whether an output of another example would score otherwise in the place of the best one."""
        against = _compared_with(objective, best)
        return any(
            checked_score(
                metric,
                objective.metric,
                candidate=other.full,
                references=against,
                example_id=f"{other.id} in place of {best.id}",
            )
            != score
            for other in self.samples
            if other.full != best.full
        )

    def _never_right(self, objective: Objective) -> str:
        sample = self.samples[0]
        compared = quoted(sample.references[0]) if objective.consistency == "risk" else "itself"
        against = "the references" if objective.consistency == "risk" else "themselves"
        return (
            f'metric "{objective.metric}" says nothing here: it gives the full model 0 on all {self.examples} '
            f"examples, its outputs held against {against}, so that nothing could get worse. Example "
            f"{quoted(sample.id)}: output {quoted(sample.full)} was compared with {compared}. {_advice(objective)}"
        )

    def _never_moves(self, objective: Objective, metric: Metric, *, changed: Sample) -> str:
        against = _compared_with(objective, changed)
        score = checked_score(
            metric, objective.metric, candidate=changed.full, references=against, example_id=changed.id
        )
        assert changed.other is not None
        return (
            f'metric "{objective.metric}" says nothing here: on all {self.examples} examples every output scores as '
            "the full model's does, though outputs differ, and the outputs of other examples score the same. Example "
            f"{quoted(changed.id)}: outputs {quoted(changed.full)} and {quoted(changed.other)}, compared with "
            f"{quoted(against[0])}, both score {score:g}. {_advice(objective)}"
        )


def _smallest(samples: Iterable[Sample]) -> tuple[Sample, ...]:
    return tuple(itertools.islice(_of_different_outputs(sorted(samples, key=lambda sample: sample.id)), _MOST_SAMPLES))


def _of_different_outputs(samples: Iterable[Sample]) -> Iterator[Sample]:
    seen = set()
    for sample in samples:
        if sample.full not in seen:
            seen.add(sample.full)
            yield sample


def _compared_with(objective: Objective, sample: Sample) -> tuple[str, ...]:
    return sample.references if objective.consistency == "risk" else (sample.full,)


def _advice(objective: Objective) -> str:
    if objective.consistency == "risk":
        return "Check the references, take another metric, or leave risk consistency out."
    return "Take another metric: 1 has to mean equal, and less the more texts differ."
