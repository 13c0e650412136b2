"""Whether a metric sees the texts of a set of examples, and whether its scores distinguish outputs. If not, a run ends.

A metric compares tokens. Two different texts without any token score 0 (`calm_beam.metrics.best_reference`). If the
tokeniser drops most letters of a text, the metric compares only the rest: to `rouge_l`, two Russian sentences with the
same year are equal. A few such examples are counted and shown. If a metric does not see the texts of more than a tenth
of the examples, the losses do not measure the texts, and the metric is refused.

If scores do not distinguish outputs, losses are 0 whatever exits do. A metric counts as uninformative in two cases.

First, the full model scores 0 on every example (in risk consistency against the references, in textual consistency
against its output). Then nothing can get worse. Usually the two texts are of different kinds: token ids and words, or a
language whose letters the metric does not read.

Second, no output of any example has another score than the full model's, though some differ from it, *and* the metric
does not distinguish answers of different examples either: on the example where the full model does best, its outputs
for other examples score the same. A metric does that if it is constant, or looks only at the references.

A model that never changes its outputs is not refused, nor is one whose changes a metric rightly ignores (commas, or
another right answer): there, outputs of different examples do have different scores. The number of examples does not
matter. In doubt a metric is refused: if the full model's outputs are all equal, or if a metric of the output alone
finds nothing in any of them, the data do not show that it works.
"""

import contextlib
import dataclasses
import itertools
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from typing import Self

from calm_beam.extras import MissingExtraError
from calm_beam.inputs.examples import Example
from calm_beam.manifest import Objective, UnseenRecord
from calm_beam.metrics import Sight
from calm_beam.metrics.registry import METRICS, Metric, MetricError, checked_score
from calm_beam.text import counted

_MOST_SHARE = 10
"""The run ends if more than one in this many examples is affected."""

# The number of samples that are tried with other metrics, to recommend one.
_MOST_UNSEEN_SAMPLES = 8
_LONGEST_SHOWN = 120


@dataclasses.dataclass(frozen=True, kw_only=True, order=True)
class UnseenText:
    """A text of an example that a metric does not see.

    Attributes:
      id: Id of the example.
      text: An output, or a reference, of the example.
      against: The text that it was compared with; `text` itself if most of its letters are dropped.
    """

    id: str
    text: str
    against: str


@dataclasses.dataclass(frozen=True, kw_only=True)
class Unseen:
    """Examples with texts that a metric does not see; merging is exact, associative and commutative.

    Attributes:
      metric: Name of the metric.
      no_token: Number of examples with an output that the metric cannot distinguish from the text it is compared with:
        the two differ, and the metric sees no token of either.
      few_letters: Number of examples where the tokeniser drops more than half of the letters of the full model's
        output, or of a text that it is compared with.
      no_token_samples: Some of the `no_token` examples, with the smallest ids.
      few_letters_samples: Some of the `few_letters` examples, with the smallest ids.
    """

    metric: str
    no_token: int = 0
    few_letters: int = 0
    no_token_samples: tuple[UnseenText, ...] = ()
    few_letters_samples: tuple[UnseenText, ...] = ()

    @classmethod
    def of(
        cls, metric: str, sight: Sight, *, example_id: str, compared: Iterable[tuple[Sequence[str], Sequence[str]]]
    ) -> tuple[Self, ...]:
        """Returns the texts of an example that a metric does not see, as counts of one example, or nothing.

        Args:
          metric: The metric's name.
          sight: How the metric sees a text.
          example_id: Id of the example.
          compared: Outputs, the full model's first, and the texts that they are compared with; one pair for each kind
            of consistency in use.
        """
        no_token: tuple[UnseenText, ...] = ()
        few_letters: tuple[UnseenText, ...] = ()
        for outputs, against in compared:
            blind = next((text for text in outputs if sight.is_blind(text, against)), None)
            if blind is not None and not no_token:
                reference = next(text for text in against if not sight.sees(text))
                no_token = (UnseenText(id=example_id, text=blind, against=reference),)
            dropped = next((text for text in (outputs[0], *against) if sight.drops_letters(text)), None)
            if dropped is not None and not few_letters:
                few_letters = (UnseenText(id=example_id, text=dropped, against=dropped),)
        if not no_token and not few_letters:
            return ()
        found = cls(
            metric=metric,
            no_token=len(no_token),
            few_letters=len(few_letters),
            no_token_samples=no_token,
            few_letters_samples=few_letters,
        )
        return (found,)

    def merge(self, other: Self) -> Self:
        """Returns the counts over both sets of examples together."""
        return self._with_samples_of(
            other, no_token=self.no_token + other.no_token, few_letters=self.few_letters + other.few_letters
        )

    def larger(self, other: Self) -> Self:
        """Returns the larger of two counts of the same examples, decoded in two ways."""
        return self._with_samples_of(
            other, no_token=max(self.no_token, other.no_token), few_letters=max(self.few_letters, other.few_letters)
        )

    def _with_samples_of(self, other: Self, *, no_token: int, few_letters: int) -> Self:
        return dataclasses.replace(
            self,
            no_token=no_token,
            few_letters=few_letters,
            no_token_samples=_smallest_unseen(self.no_token_samples, other.no_token_samples),
            few_letters_samples=_smallest_unseen(self.few_letters_samples, other.few_letters_samples),
        )

    def check(self, *, examples: int) -> None:
        """Raises if more than a tenth of the examples are affected.

        Raises:
          MetricError: If so; names an example, and the metrics that see it.
        """
        if _MOST_SHARE * self.no_token > examples:
            first = self.no_token_samples[0]
            raise MetricError(
                f'metric "{self.metric}" says nothing here: in {self.no_token} of {counted(examples, "example")} it '
                "sees no token of two texts that differ, so that it cannot tell how alike they are. Example "
                f"{quoted(first.id)}: {quoted(first.text)} was compared with {quoted(first.against)}. "
                f"{_unseen_advice(self.no_token_samples)} Look at what the model writes, too: where it writes nothing, "
                "prompts may lack a chat template."
            )
        if _MOST_SHARE * self.few_letters > examples:
            first = self.few_letters_samples[0]
            raise MetricError(
                f'metric "{self.metric}" says too little here: in {self.few_letters} of '
                f"{counted(examples, 'example')} its tokeniser drops more than half of the letters and digits of a "
                f"text, and compares the rest. Example {quoted(first.id)}: {quoted(first.text)}. "
                f"{_unseen_advice(self.few_letters_samples)}"
            )

    def record(self) -> UnseenRecord:
        """Returns the manifest's record of these counts."""
        return UnseenRecord(metric=self.metric, no_token=self.no_token, few_letters=self.few_letters)


def merged_unseen(parts: Iterable[Sequence[Unseen]]) -> tuple[Unseen, ...]:
    """Returns the counts over several sets of examples together, by metric in ascending order."""
    return _by_metric(parts, Unseen.merge)


def largest_unseen(variants: Iterable[Sequence[Unseen]]) -> tuple[Unseen, ...]:
    """Returns the largest counts of the same examples, decoded in several ways, by metric in ascending order."""
    return _by_metric(variants, Unseen.larger)


def _by_metric(parts: Iterable[Sequence[Unseen]], both: Callable[[Unseen, Unseen], Unseen]) -> tuple[Unseen, ...]:
    found: dict[str, Unseen] = {}
    for one in itertools.chain.from_iterable(parts):
        found[one.metric] = both(found[one.metric], one) if one.metric in found else one
    return tuple(of_metric for _, of_metric in sorted(found.items()))


def _smallest_unseen(one: tuple[UnseenText, ...], other: tuple[UnseenText, ...]) -> tuple[UnseenText, ...]:
    return tuple(sorted({*one, *other})[:_MOST_UNSEEN_SAMPLES])


def _unseen_advice(samples: Sequence[UnseenText]) -> str:
    seeing = [name for name, metric in METRICS.items() if all(_sees(metric.sight, sample) for sample in samples)]
    if not seeing:
        return "None of the metrics that come with calm-beam sees such texts."
    return f"Metrics that see such texts: {', '.join(seeing)}."


def _sees(sight: Sight, sample: UnseenText) -> bool:
    # Metrics that cannot run here are not recommended.
    with contextlib.suppress(MissingExtraError):
        texts = (sample.text, sample.against)
        return any(map(sight.sees, texts)) and not any(map(sight.drops_letters, texts))
    return False


def quoted(text: str) -> str:
    """Returns a text of an example as messages quote it; a long one is cut."""
    return repr(text if len(text) <= _LONGEST_SHOWN else f"{text[:_LONGEST_SHOWN]}…")


# Each of these is compared with the references of another example.
_MOST_SAMPLES = 8


@dataclasses.dataclass(frozen=True, kw_only=True)
class Sample:
    """Texts of one example.

    Attributes:
      id: Id of the example.
      full: The full model's output.
      references: References of the example; empty if it has none.
      other: The first output that differs from the full model's; None if none does.
    """

    id: str
    full: str
    references: tuple[str, ...]
    other: str | None

    @classmethod
    def of(cls, example: Example, texts: Sequence[str]) -> Self:
        """Returns the sample of an example, given its outputs, the full model's first."""
        full, *early = texts
        other = next((text for text in early if text != full), None)
        return cls(id=example.id, full=full, references=example.references, other=other)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Contrast:
    """A summary of what the scores of some examples distinguish; merging is exact, associative and commutative.

    Attributes:
      examples: Number of examples with scores; those that failed have none.
      best: For each objective, the highest score of the full model, and the smallest id that has it.
      moves: For each objective, whether an output has another score than the full model's of the same example.
      samples: Examples with different outputs of the full model: the smallest id of each output, and of these the
        smallest ones.
      changed: The smallest id among examples with an output that differs from the full model's.
      unseen: By metric, ascending, how many examples have texts that it does not see; metrics that see all are omitted.
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
          scores: For each objective, the scores of the outputs.
          unseen: The texts of it that metrics do not see, one item per metric.
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
        """Returns the contrast of several sets together; without any, the contrast of no examples."""
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
        """Raises if a metric is uninformative or does not see the texts of too many examples; see the module docstring.

        Args:
          objectives: The objectives of the scores.
          metric_of: Returns a metric by its name; called only if the metric is in doubt.
          among: The objectives to check; None for all.

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
          MetricError: If there is one; names an example, and the metrics that see it.
        """
        for found in self.unseen:
            if found.metric in metrics:
                found.check(examples=self.examples)

    def _tells_from_others(self, objective: Objective, metric: Metric, *, score: float, best: Sample) -> bool:
        """Returns whether an output of another example would have another score in place of the best one."""
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
            f"examples, its outputs compared with {against}, so that nothing could get worse. Example "
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
