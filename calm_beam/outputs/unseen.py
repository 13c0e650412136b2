"""Texts that a metric does not see: how many examples have some, and when they are too many for a promise.

A metric compares tokens. Two different texts without any token score 0 (`calm_beam.metrics.best_reference`). A text of
which the tokeniser drops most letters is compared by what is left of it: to `rouge_l`, two Russian sentences with the
same year are equal. A few such examples are counted and shown. Of more, the losses are about something else than the
texts, and the run ends.
"""

import contextlib
import dataclasses
import itertools
from collections.abc import Callable, Iterable, Sequence
from typing import Self

from calm_beam.extras import MissingExtraError
from calm_beam.manifest import UnseenRecord
from calm_beam.metrics.registry import METRICS, MetricError
from calm_beam.metrics.sight import Sight
from calm_beam.text import counted

_MOST_SHARE = 10
"""The run ends above one of so many examples."""

# Which metrics see such texts is tried on so many.
_MOST_SAMPLES = 8
_LONGEST_SHOWN = 120


@dataclasses.dataclass(frozen=True, kw_only=True, order=True)
class UnseenText:
    """What a metric did not see of an example.

    Attributes:
      id: Of the example.
      text: An output, or a reference, of the example.
      against: The text that it was compared with; itself where most of its letters are dropped.
    """

    id: str
    text: str
    against: str


@dataclasses.dataclass(frozen=True, kw_only=True)
class Unseen:
    """Examples with texts that a metric does not see; merging is exact, associative and commutative.

    Attributes:
      metric: Name of the metric.
      no_token: Number of examples with an output that the metric cannot tell from a text that it is held against:
        they differ, and the metric sees no token of either.
      few_letters: Number of examples where the tokeniser drops more than half of the letters of the full model's
        output, or of a text that it is held against.
      no_token_samples: Of those examples, some with the smallest ids.
      few_letters_samples: Likewise.
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
        """Returns what a metric does not see of an example, or nothing.

        Args:
          metric: Its name.
          sight: How it sees a text.
          example_id: Id of the example.
          compared: Outputs, the full model's first, and the texts that they are held against; for each kind of
            consistency that is asked for.
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
        """Returns what the metric does not see of both sets of examples together."""
        return self._with_samples_of(
            other, no_token=self.no_token + other.no_token, few_letters=self.few_letters + other.few_letters
        )

    def larger(self, other: Self) -> Self:
        """Returns the larger of two counts of the same examples, which were decoded in two ways."""
        return self._with_samples_of(
            other, no_token=max(self.no_token, other.no_token), few_letters=max(self.few_letters, other.few_letters)
        )

    def _with_samples_of(self, other: Self, *, no_token: int, few_letters: int) -> Self:
        return dataclasses.replace(
            self,
            no_token=no_token,
            few_letters=few_letters,
            no_token_samples=_smallest(self.no_token_samples, other.no_token_samples),
            few_letters_samples=_smallest(self.few_letters_samples, other.few_letters_samples),
        )

    def check(self, *, examples: int) -> None:
        """Raises if these are more than a tenth of the examples.

        Raises:
          MetricError: If they are; names an example, and the metrics that see it.
        """
        if _MOST_SHARE * self.no_token > examples:
            first = self.no_token_samples[0]
            raise MetricError(
                f'metric "{self.metric}" says nothing here: in {self.no_token} of {counted(examples, "example")} it '
                "sees no token of two texts that differ, so that it cannot tell how alike they are. Example "
                f"{quoted(first.id)}: {quoted(first.text)} was compared with {quoted(first.against)}. "
                f"{_advice(self.no_token_samples)} Look at what the model writes, too: where it writes nothing, "
                "prompts may lack a chat template."
            )
        if _MOST_SHARE * self.few_letters > examples:
            first = self.few_letters_samples[0]
            raise MetricError(
                f'metric "{self.metric}" says too little here: in {self.few_letters} of '
                f"{counted(examples, 'example')} its tokeniser drops more than half of the letters and digits of a "
                f"text, and compares the rest. Example {quoted(first.id)}: {quoted(first.text)}. "
                f"{_advice(self.few_letters_samples)}"
            )

    def record(self) -> UnseenRecord:
        """Returns what a manifest says of it."""
        return UnseenRecord(metric=self.metric, no_token=self.no_token, few_letters=self.few_letters)


def merged_unseen(parts: Iterable[Sequence[Unseen]]) -> tuple[Unseen, ...]:
    """Returns what metrics do not see of several sets of examples together, by metric in ascending order."""
    return _by_metric(parts, Unseen.merge)


def largest_unseen(variants: Iterable[Sequence[Unseen]]) -> tuple[Unseen, ...]:
    """Returns the largest counts of the same examples that were decoded in several ways, by metric ascending."""
    return _by_metric(variants, Unseen.larger)


def _by_metric(parts: Iterable[Sequence[Unseen]], both: Callable[[Unseen, Unseen], Unseen]) -> tuple[Unseen, ...]:
    found: dict[str, Unseen] = {}
    for one in itertools.chain.from_iterable(parts):
        found[one.metric] = both(found[one.metric], one) if one.metric in found else one
    return tuple(of_metric for _, of_metric in sorted(found.items()))


def _smallest(one: tuple[UnseenText, ...], other: tuple[UnseenText, ...]) -> tuple[UnseenText, ...]:
    return tuple(sorted({*one, *other})[:_MOST_SAMPLES])


def _advice(samples: Sequence[UnseenText]) -> str:
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
    """Returns a text of an example as messages quote it, cut where it is long."""
    return repr(text if len(text) <= _LONGEST_SHOWN else f"{text[:_LONGEST_SHOWN]}…")
