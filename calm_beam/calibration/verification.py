"""Verification: tests of a manifest's promises on fresh examples, and whether examples are fresh.

Examples that calibrated or confirmed a manifest do not test its promises.

Two questions are put to the fresh losses at each promised threshold, and they are not each other's opposite.

Is the promise *broken*: do they prove that the risk exceeds delta? The null is "the risk is at most delta", and Holm's
procedure over all entries bounds the chance of reporting a kept promise as broken by alpha.

Is it *proved again*: would they, alone, have accepted the threshold at the entry's epsilon? The null is "the risk
exceeds delta", as in calibration.

Each question is answered conservatively: a failed example has loss 1 for the second, and the lowest possible loss
for the first.

With few examples the answer to both is no: the run is inconclusive. That is why a failure to prove again is not
called broken. A threshold whose risk is just below delta can hardly ever be proved again, but that does not make it
wrong.
"""

import dataclasses
import math
import sys
from collections.abc import Iterable, Mapping, Sequence
from typing import Generic, NamedTuple, Self, TypeVar

import numpy as np

from calm_beam.inputs.examples import DataError, Example
from calm_beam.inputs.set_parts import CALIBRATING, CONFIRMING, Split
from calm_beam.inputs.vocabularies.vocabulary import Vocabulary
from calm_beam.manifest import AskedTest, Calibration, Manifest, Objective
from calm_beam.metrics.registry import Metric
from calm_beam.outputs import Generation, StoredPrompt, stored_prompts
from calm_beam.outputs.metric_checks import Contrast, Unseen
from calm_beam.outputs.scoring import score_by_policy
from calm_beam.outputs.totals import content_sum_of, fingerprint_text
from calm_beam.risk.fwer import holm_test
from calm_beam.risk.losses import LOSS_SCALE
from calm_beam.risk.pvalues import excess_p_values, p_values_of

from .loss_table import LossTable


@dataclasses.dataclass(frozen=True, kw_only=True)
class FreshLosses:
    """The losses of fresh examples at promised thresholds.

    Attributes:
      objectives: The losses that were computed.
      thresholds: Descending.
      table: float64, shape (units, objectives, thresholds), in betting order; units are examples, or clusters of them.
        Failed examples have loss 1.
      lenient_table: The same, except that failed examples have the lowest possible loss: they prove no excess of risk.
      examples: Number of examples.
      failed: Number of examples that could not be decoded or scored.
      unseen: Examples with texts that a metric does not see, by metric.
      by_group: Both tables of the group's examples alone, for every requested group with fresh examples.
    """

    objectives: tuple[Objective, ...]
    thresholds: tuple[float, ...]
    table: np.ndarray
    lenient_table: np.ndarray
    examples: int
    failed: int
    unseen: tuple[Unseen, ...] = ()
    by_group: Mapping[str, tuple[np.ndarray, np.ndarray]] = dataclasses.field(default_factory=dict)

    @classmethod
    def of(
        cls,
        generations: Iterable[Generation],
        entries: Sequence[Calibration],
        *,
        metrics: Mapping[str, Metric],
        salt: str,
        on_error: str,
    ) -> Self:
        """Returns the losses of examples decoded at the thresholds of the entries.

        Args:
          generations: Outputs of the full model, and then at every promised threshold, descending. If the first has a
            cluster, all have, and losses are averaged within clusters.
          entries: The promises; each has a threshold. An entry of a group is about that group's examples alone.
          metrics: Metrics by name, at least those of the entries.
          salt: Decides the betting order.
          on_error: `fail` or `worst_case`, for examples that cannot be scored.

        Raises:
          DataError: If there are no examples, or one lacks references that are needed.
          MetricError: If a metric fails and `on_error` is `fail`, or its scores show no differences, or it does not see
            the texts (see `Contrast`).
          EvidenceError: If there are too many losses to keep.
        """
        objectives = tuple(dict.fromkeys(entry.objective for entry in entries))
        thresholds = promised_thresholds(entries)
        lowest = np.array([-LOSS_SCALE if objective.is_signed else 0 for objective in objectives])[:, None]
        units: list[_Unit] = []
        strict: list[np.ndarray] = []
        lenient: list[np.ndarray] = []
        failed = 0
        contrast = Contrast()
        for generation in generations:
            scored = score_by_policy(
                generation, objectives, metrics=metrics, num_thresholds=len(thresholds), on_error=on_error
            )
            has_failed = scored.generation.failure is not None
            contrast = Contrast.merged((contrast, scored.contrast))
            units.append(_Unit.of(scored.generation.example))
            strict.append(scored.losses)
            lenient.append(np.broadcast_to(lowest, scored.losses.shape) if has_failed else scored.losses)
            failed += has_failed
        if not units:
            raise DataError("there are no fresh examples.")
        contrast.check(objectives, metrics.__getitem__)
        tables = [_table_of(units, losses) for losses in (strict, lenient)]

        def in_order(group: str | None) -> tuple[np.ndarray, np.ndarray]:
            of_group = (table.in_betting_order(salt=salt, order=table.settings, group=group) for table in tables)
            one, other = (part.reshape(len(part), *strict[0].shape) for part in of_group)
            return one, other

        table, lenient_table = in_order(None)
        groups = dict.fromkeys(entry.group for entry in entries if entry.group is not None)
        return cls(
            objectives=objectives,
            thresholds=thresholds,
            table=table,
            lenient_table=lenient_table,
            examples=len(units),
            failed=failed,
            unseen=contrast.unseen,
            by_group={group: in_order(group) for group in groups if tables[0].rows_of(group).size},
        )

    def has_any(self, entry: Calibration) -> bool:
        """Returns whether there are losses for an entry: a group may have no fresh examples."""
        return entry.group is None or entry.group in self.by_group

    def at(self, entry: Calibration, *, lenient: bool = False) -> np.ndarray:
        """Returns the losses for an entry, shape (units,)."""
        assert entry.threshold is not None
        tables = (self.table, self.lenient_table) if entry.group is None else self.by_group[entry.group]
        table = tables[lenient]
        return table[:, self.objectives.index(entry.objective), self.thresholds.index(entry.threshold)]


class _Unit(NamedTuple):
    """The names of an example, its group (empty if it has none) and its cluster."""

    id: str
    group: str
    cluster: str | None

    @classmethod
    def of(cls, example: Example) -> Self:
        """Returns the names of an example, so that the rest of it can be freed."""
        return cls(example.id, example.group or "", example.cluster)


def _table_of(units: Sequence[_Unit], fixed_losses: Sequence[np.ndarray]) -> LossTable:
    """Returns a loss table from each example's losses, shape (objectives, thresholds); settings are numbered."""
    # [examples, objectives * thresholds], exact: no loss has more than 33 digits.
    losses = np.stack(fixed_losses).reshape(len(units), -1) / LOSS_SCALE
    return LossTable(
        ids=tuple(unit.id for unit in units),
        settings=tuple(map(str, range(losses.shape[1]))),
        losses=losses,
        groups=tuple(unit.group for unit in units),
        clusters=None if units[0].cluster is None else tuple(str(unit.cluster) for unit in units),
    )


_P = TypeVar("_P", bound=AskedTest)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Verdict(Generic[_P]):
    """The result of testing one promise.

    Attributes:
      entry: The promise.
      risk: Mean fresh loss.
      p_value: p-value for "the risk exceeds delta".
      excess_p_value: p-value for "the risk is at most delta".
      is_broken: Whether `excess_p_value` is small enough, among those of all entries.
    """

    entry: _P
    risk: float
    p_value: float
    excess_p_value: float
    is_broken: bool

    @property
    def is_proved_again(self) -> bool:
        """Whether the fresh examples alone would have accepted the threshold."""
        return self.p_value <= self.entry.epsilon


def verify(losses: FreshLosses, entries: Sequence[Calibration], *, alpha: float) -> tuple[Verdict[Calibration], ...]:
    """Returns a verdict on each entry.

    Args:
      losses: Losses of examples drawn independently of those that the manifest was calibrated on.
      entries: The entries that the losses are for, of groups with fresh examples (`FreshLosses.has_any`).
      alpha: Allowed probability of reporting a kept promise as broken, in (0, 1).

    Raises:
      EvidenceError: If an entry's p-value is for losses of 0 and 1, and there are others.
      ValueError: If alpha is out of range.

    Source: ours; see the module docstring. Losses are rounded up to a multiple of 2^-32, so that "broken" means a risk
    above delta - 2.4e-10.
    """
    return verify_each([losses] * len(entries), entries, alpha=alpha)


def verify_each(
    losses: Sequence[FreshLosses], entries: Sequence[Calibration], *, alpha: float
) -> tuple[Verdict[Calibration], ...]:
    """Returns a verdict on each entry, as `verify` does, for entries that were decoded in several ways.

    Args:
      losses: For each entry, losses that were computed for it, among others that are decoded alike.
      entries: The entries, of groups with fresh examples.
      alpha: Allowed probability of reporting a kept promise as broken, over all entries together, in (0, 1).

    Raises:
      EvidenceError: If an entry's p-value is for losses of 0 and 1, and there are others.
      ValueError: If alpha is out of range.
    """
    return judged(
        entries,
        [
            (of_entry.at(entry), of_entry.at(entry, lenient=True))
            for of_entry, entry in zip(losses, entries, strict=True)
        ],
        alpha=alpha,
    )


def judged(
    entries: Sequence[_P],
    losses: Sequence[tuple[np.ndarray, np.ndarray]],
    *,
    alpha: float,
) -> tuple[Verdict[_P], ...]:
    """Returns a verdict on every promise, for thresholds or other settings.

    Args:
      entries: The promises.
      losses: For each promise, fresh losses of independent units in betting order, shape (units,), and the same with
        the lowest possible losses for failed examples; both are equal if no example failed.
      alpha: Chance of reporting a kept promise as broken, in (0, 1).

    Raises:
      EvidenceError: If an entry's p-value is for losses of 0 and 1, and there are others.
      ValueError: If alpha is out of range.
    """
    p_values, excess = np.ones(len(entries)), np.ones(len(entries))
    for index, (entry, (strict, lenient)) in enumerate(zip(entries, losses, strict=True)):
        p_values[index] = p_values_of(strict, p_value=entry.p_value, delta=entry.delta, epsilon=entry.epsilon)
        excess[index] = excess_p_values(lenient, p_value=entry.p_value, delta=entry.delta, is_signed=entry.is_signed)
    is_broken = holm_test(excess, epsilon=alpha).rejected
    return tuple(
        Verdict(
            entry=entry,
            risk=math.fsum(losses[index][0]) / len(losses[index][0]),
            p_value=float(p_values[index]),
            excess_p_value=float(excess[index]),
            is_broken=bool(is_broken[index]),
        )
        for index, entry in enumerate(entries)
    )


def promised_thresholds(entries: Sequence[Calibration]) -> tuple[float, ...]:
    """Returns the thresholds of the entries, each once, descending; "never exit" needs none."""
    return tuple(sorted({entry.threshold for entry in entries if entry.threshold is not None}, reverse=True))


def is_calibration_set(examples: Sequence[Example], manifest: Manifest) -> bool:
    """Returns whether examples are exactly those that calibrated a manifest, or those that confirmed it.

    Args:
      examples: The examples, with unique ids.
      manifest: The manifest.
    """
    return bool(_fingerprints(examples, manifest) & _used_fingerprints(manifest))


def count_known_prompts(
    examples: Sequence[Example], shards: Sequence[str], *, vocabulary: Vocabulary | None, task_prefix: str
) -> int:
    """Returns the number of examples whose prompts also occur in stored generations.

    Args:
      examples: Fresh ones.
      shards: Files of generations.
      vocabulary: Vocabulary of the model; None where prompts are token ids.
      task_prefix: Text put before every textual prompt.
    """
    known = {
        _whole_prompt(prompt, vocabulary, task_prefix=task_prefix) for path in shards for prompt in stored_prompts(path)
    }
    return sum(
        _whole_prompt((example.input, example.input_ids, example.earlier), vocabulary, task_prefix=task_prefix) in known
        for example in examples
    )


def _fingerprints(examples: Sequence[Example], manifest: Manifest) -> set[str]:
    """Returns the fingerprints of all examples, and of each part if the set has a holdout."""
    share = None if manifest.plan is None else manifest.plan.confirm_share
    sets = [examples]
    if manifest.plan is not None and share is not None:
        parts = [Split(name=name, confirm_share=share, salt=manifest.plan.salt) for name in (CALIBRATING, CONFIRMING)]
        sets += [[example for example in examples if part.takes(example)] for part in parts]
    return {fingerprint_text(content_sum_of(some)) for some in sets if some}


def _used_fingerprints(manifest: Manifest) -> set[str]:
    confirmed = () if manifest.confirmation is None else (manifest.confirmation.data.fingerprint,)
    return {manifest.data.fingerprint, *confirmed}


def _whole_prompt(
    prompt: StoredPrompt, vocabulary: Vocabulary | None, *, task_prefix: str
) -> str | tuple[int, ...] | None:
    """Returns a prompt as token ids where possible: a prompt given as text may be stored as ids."""
    text, ids, earlier = prompt
    if text is None or vocabulary is None:
        return text if ids is None else ids
    ids, _ = vocabulary.encode_prompt(task_prefix + text, room=sys.maxsize, earlier=earlier or ())
    return ids
