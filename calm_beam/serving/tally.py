"""What became of prompts, counted."""

import collections
import dataclasses
from collections.abc import Mapping
from typing import Self

from calm_beam.decoding.recorded import recorded_rule
from calm_beam.exits.measures import Need
from calm_beam.exits.token_cost import tests_at
from calm_beam.manifest import Manifest
from calm_beam.text import check_count

from .answer import Answer


@dataclasses.dataclass(frozen=True, kw_only=True)
class Tally:
    """Counts of answers; those of several parts are added.

    Attributes:
      prompts: Prompts, those that failed included.
      failed: Prompts without an answer.
      truncated: Prompts that were longer than the manifest allows, and were cut.
      tokens: Tokens of all answers.
      layers_used: Decoder layers that were run for them.
      layers_saved: Decoder layers that the full model would have run besides.
    """

    prompts: int = 0
    failed: int = 0
    truncated: int = 0
    tokens: int = 0
    layers_used: int = 0
    layers_saved: int = 0

    def __post_init__(self) -> None:
        for name in _NAMES:
            check_count(name, getattr(self, name))

    def __add__(self, other: "Tally") -> "Tally":
        return Tally(**{name: getattr(self, name) + getattr(other, name) for name in _NAMES})

    def answered(self, answer: Answer) -> Self:
        """Returns the counts with one more answer."""
        return dataclasses.replace(
            self,
            prompts=self.prompts + 1,
            truncated=self.truncated + answer.truncated,
            tokens=self.tokens + len(answer.tokens),
            layers_used=self.layers_used + answer.layers_used,
            layers_saved=self.layers_saved + answer.layers_saved,
        )

    def failing(self) -> Self:
        """Returns the counts with one more prompt that has no answer."""
        return dataclasses.replace(self, prompts=self.prompts + 1, failed=self.failed + 1)

    def in_words(self) -> str:
        """Returns the counts of answers, as the last line of a command."""
        layers = f"{self.layers_used / self.tokens:.2f} layers per token" if self.tokens else "no layers"
        saved = self.layers_saved / max(1, self.layers_used + self.layers_saved)
        return (
            f"prompts: {self.prompts}, of which cut: {self.truncated}; tokens: {self.tokens}, {layers}, {saved:.0%} of "
            "the full model's saved"
        )


def exit_tests(answer: Answer, manifest: Manifest) -> int:
    """Returns how often a confidence was asked for the tokens of an answer: what exits cost beside the layers.

    Args:
      answer: By an entry of the manifest, or by the full model, which asks nothing.
      manifest: Says by which measure that entry exits, and where.
    """
    entry = answer.entry
    if entry is None or entry.threshold is None:
        return 0
    rule = recorded_rule(manifest.decode_of(entry))
    if rule.measure().needs is Need.LAYER:
        return 0
    tokens_at = collections.Counter(answer.exit_layers)
    return sum(tokens * tests_at(layer, rule, layers=answer.num_layers) for layer, tokens in tokens_at.items())


_NAMES = tuple(field.name for field in dataclasses.fields(Tally))


def merged(left: Mapping[str | None, Tally], right: Mapping[str | None, Tally]) -> dict[str | None, Tally]:
    """Returns counts by group, added."""
    return {name: left.get(name, Tally()) + right.get(name, Tally()) for name in {**left, **right}}
