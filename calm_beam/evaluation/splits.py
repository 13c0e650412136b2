"""Repeated random splits of a set into a calibration and a test part, with everything summed in one pass.

The set consists of stored generations of several exit rules to compare, of the same model and data.

Every independent unit (an example, or a cluster of them) draws for every trial, independently, whether it belongs to
the calibration part: from a hash of the seed and its key. So membership needs no list of all units and does not depend
on sharding or order, and equal data split equally whichever measure decoded them. The share is that of the expected
sizes; actual ones vary like a binomial (at 5,000 units and 80 %: 4,000 +- 28). That voids nothing: sizes and losses are
independent, so that, whatever the sizes, both parts are i.i.d. draws, independent of each other, and each test uses
its own n. An exact 80 : 20 would need all keys sorted for every trial.

The trials of one set share its units, so they are not independent of each other.

The counts of every output at every threshold are whole numbers, so sums over any part of a set are exact.
"""

import dataclasses
import hashlib
from collections.abc import Callable, Sequence
from typing import Self

import numpy as np

from calm_beam.decoding.settings import DecodeSettings
from calm_beam.errors import UsageError, naming
from calm_beam.evaluation.flops import DecoderSizes, flops_appendix_b, flops_calm_table, full_model_flops
from calm_beam.exits.rule import ExitRule
from calm_beam.manifest import Objective
from calm_beam.metrics.corpus_bleu import NUM_COUNTS, bleu_counts
from calm_beam.outputs import DecodeJob, FinishedSweep, Generation, Output, stored_examples
from calm_beam.outputs.folder import SweepHome
from calm_beam.outputs.totals import CalibrationTotals, Layout
from calm_beam.risk.evidence import Evidence, RiskTotals
from calm_beam.storage import absolute


@dataclasses.dataclass(frozen=True, kw_only=True)
class Splits:
    """The parameters of repeated splits.

    Attributes:
      trials: Number of splits, at least 1.
      calibration_share: Probability that a unit is in the calibration part, in (0, 1).
      seed: Decides all splits; fewer trials give the first splits of more trials.
    """

    trials: int
    calibration_share: float
    seed: int

    def __post_init__(self) -> None:
        if self.trials < 1:
            raise ValueError(f"trials must be at least 1, got {self.trials}.")
        if not 0 < self.calibration_share < 1:
            raise ValueError(
                f"calibration_share must be in (0, 1), got {self.calibration_share}. It is a fraction: for 80 % pass "
                "0.8."
            )

    def parts(self, keys: Sequence[str]) -> np.ndarray:
        """Returns the membership of units in each trial's calibration part, and in the whole set.

        Args:
          keys: One per unit, distinct over the set.

        Returns:
          shape (units, trials + 1), bool; the last column is True.
        """
        size = 8 * self.trials
        drawn = b"".join(hashlib.shake_256(f"{self.seed}\n{key}".encode()).digest(size) for key in keys)
        uniform = np.frombuffer(drawn, ">u8").reshape(len(keys), self.trials)
        is_in_calibration = uniform < np.uint64(round(self.calibration_share * 2**64))
        return np.column_stack([is_in_calibration, np.ones(len(keys), bool)])


@dataclasses.dataclass(frozen=True, kw_only=True)
class SplitTotals:
    """Sums over the calibration part of every trial and over the whole set; merging is exact in any order.

    Attributes:
      whole: Totals of the whole set, without losses: they show that every example was counted exactly once.
      losses: Sums of the layout's rows; its parts are the splits and then the whole set.
      counts: Sums of counts over outputs, the full model's first; the same parts.
      units: Number of units in each of these parts, as sums of ones: one row, one threshold.
    """

    whole: CalibrationTotals
    losses: RiskTotals
    counts: RiskTotals
    units: RiskTotals

    @classmethod
    def zero(cls, layout: Layout, splits: Splits, *, count_rows: int) -> Self:
        """Returns the sums over no units."""
        parts = splits.trials + 1
        return cls(
            whole=CalibrationTotals.zero(layout),
            losses=RiskTotals.zero(parts=parts, rows=len(layout.rows), thresholds=layout.thresholds),
            counts=RiskTotals.zero(parts=parts, rows=count_rows, thresholds=1 + layout.thresholds),
            units=RiskTotals.zero(parts=parts, rows=1, thresholds=1),
        )

    @classmethod
    def of_units(
        cls,
        keys: Sequence[str],
        fixed_losses: np.ndarray,
        *,
        counts: np.ndarray,
        layout: Layout,
        splits: Splits,
        scored: int | None = None,
    ) -> Self:
        """Returns the sums over some units; the whole set's totals have only the number of examples.

        Args:
          keys: One per unit: ids of examples, or names of clusters.
          fixed_losses: shape (units, objectives, thresholds), int64 in units of 2^-32.
          counts: shape (units, count rows, 1 + thresholds), int64.
          layout: Layout of the sums of losses.
          splits: How units are split.
          scored: Number of examples that the units contain; None if each unit is one.
        """
        parts = splits.parts(keys)
        scored = len(keys) if scored is None else scored
        return cls(
            whole=dataclasses.replace(CalibrationTotals.zero(layout), scored=scored),
            losses=RiskTotals.of_parts(layout.values(fixed_losses), parts),
            counts=RiskTotals.of_parts(counts, parts),
            units=RiskTotals.of_parts(np.ones((len(keys), 1, 1), np.int64), parts),
        )

    def merge(self, other: Self) -> Self:
        """Returns the sums over both sets of units together."""
        return type(self)(
            whole=self.whole.merge(other.whole),
            losses=self.losses.merge(other.losses),
            counts=self.counts.merge(other.counts),
            units=self.units.merge(other.units),
        )

    @property
    def sizes(self) -> np.ndarray:
        """Number of units in the calibration part of each trial, and then in the whole set; shape (trials + 1,)."""
        return np.asarray(self.units.sums[:, 0, 0])

    def calibration_part(self, trial: int, objective: Objective) -> Evidence:
        """Returns the evidence of a trial's calibration part about a loss; trial -1 is the whole set."""
        return self._evidence(objective, n=self.sizes[trial], sums=self.losses.sums[trial])

    def test_part(self, trial: int, objective: Objective) -> Evidence:
        """Returns the evidence of the rest of the set about a loss."""
        sizes, sums = self.sizes, self.losses.sums
        return self._evidence(objective, n=sizes[-1] - sizes[trial], sums=sums[-1] - sums[trial])

    def test_counts(self, trial: int) -> np.ndarray:
        """Returns the counts over outputs of a trial's test part; shape (count rows, 1 + thresholds), int64."""
        return np.asarray(self.counts.sums[-1] - self.counts.sums[trial])

    def whole_counts(self) -> np.ndarray:
        """Returns the counts over all outputs; shape (count rows, 1 + thresholds), int64."""
        return np.asarray(self.counts.sums[-1])

    def _evidence(self, objective: Objective, *, n: np.int64, sums: np.ndarray) -> Evidence:
        return Evidence(n=int(n), sums=self.whole.layout.sums_of(objective, sums))


_BASIC = ("tokens", "layers", "cut")
_FLOPS = ("flops_appendix_b", "flops_calm_table", "flops_full")
BLEU_ROWS = tuple(f"bleu_{index}" for index in range(NUM_COUNTS))


@dataclasses.dataclass(frozen=True, kw_only=True)
class OutputCounter:
    """Counts outputs: tokens, layers, outputs cut at the maximum length, and optional counts.

    Attributes:
      max_decode_length: Largest number of tokens of an output.
      end_ids: Token ids that end an output.
      rule: The exit rule.
      sizes: Sizes of the model; None omits FLOPs.
      with_bleu: Whether to count the n-grams of BLEU; all examples then have references.
    """

    max_decode_length: int
    end_ids: tuple[int, ...]
    rule: ExitRule
    sizes: DecoderSizes | None = None
    with_bleu: bool = False

    @property
    def rows(self) -> tuple[str, ...]:
        """Names of the rows of `counts`, in order. `flops_full` is the cost of the same tokens at full depth."""
        return (*_BASIC, *(_FLOPS if self.sizes else ()), *(BLEU_ROWS if self.with_bleu else ()))

    def counts(self, generation: Generation, *, lanes: int, source_length: Callable[[], int]) -> np.ndarray:
        """Returns the counts of one example; all 0 if it failed, since then it has no outputs.

        Args:
          generation: Outputs of the full model and at each threshold.
          lanes: Number of outputs: the full model's and one per threshold.
          source_length: Returns the number of tokens of the prompt as the encoder saw it; called if FLOPs are counted.

        Returns:
          Shape (rows, lanes), int64.
        """
        counts = np.zeros((len(self.rows), lanes), np.int64)
        if generation.failure is not None:
            return counts
        basic = [self._basic(output) for output in generation.outputs]
        counts[: len(_BASIC)] = np.array(basic).T
        start = len(_BASIC)
        if self.sizes:
            counts[start : start + len(_FLOPS)] = self._flops(generation, source_length())
            start += len(_FLOPS)
        if self.with_bleu:
            texts = [output.text for output in generation.outputs]
            # Cached, since many thresholds give the same text.
            found = {text: bleu_counts(text, generation.example.references) for text in dict.fromkeys(texts)}
            counts[start:] = np.stack([found[text] for text in texts], axis=1)
        return counts

    def _basic(self, output: Output) -> tuple[int, int, int]:
        is_cut = len(output.tokens) >= self.max_decode_length and output.tokens[-1] not in self.end_ids
        return len(output.tokens), sum(output.exit_layers), int(is_cut)

    def _flops(self, generation: Generation, source_length: int) -> np.ndarray:
        assert self.sizes is not None
        full, *early = (output.exit_layers for output in generation.outputs)
        complete = {
            tokens: full_model_flops(tokens, self.sizes, source_length=source_length).sum()
            for tokens in {len(exits) for exits in (full, *early)}
        }
        exits_found = {
            exits: tuple(
                count(exits, self.sizes, source_length=source_length, rule=self.rule).sum()
                for count in (flops_appendix_b, flops_calm_table)
            )
            for exits in dict.fromkeys(early)
        }
        # The full model tests nothing.
        columns = [(complete[len(full)],) * 3, *((*exits_found[exits], complete[len(exits)]) for exits in early)]
        return np.array(columns, np.int64).T


@dataclasses.dataclass(frozen=True, kw_only=True)
class StoredMeasure:
    """Complete generations of one exit rule.

    Attributes:
      name: Unique name: the confidence measure, and more if several rules have the same.
      folder: Folder of the generations.
      job: The job that made them.
      finished: The mark that they are complete.
    """

    name: str
    folder: str
    job: DecodeJob
    finished: FinishedSweep

    @property
    def rule(self) -> ExitRule:
        """The exit rule."""
        return self.job.settings.rule


def find_measures(directories: Sequence[str]) -> tuple[StoredMeasure, ...]:
    """Returns the generations of each directory.

    Args:
      directories: Folders of generations, or output directories of calibrations that hold just one.

    Raises:
      UsageError: If there are none, or they are not of one model and the same data, decoded alike except for the exits.
      OutputsError: If they are not complete.
    """
    found = []
    for directory in directories:
        with naming("--generations"):
            folder = SweepHome(absolute(directory)).only_folder()
        job = DecodeJob.read(folder)
        found.append((folder, job, FinishedSweep.read(folder, job)))
    names = _names([job.settings.rule for _, job, _ in found])
    first_folder, first, _ = found[0]
    for folder, job, _ in found[1:]:
        for what, theirs, ours in zip(_ALIKE, _alike(job), _alike(first), strict=True):
            if theirs != ours:
                raise UsageError(
                    f"--generations: {what} is {theirs!r} in {folder}, but {ours!r} in {first_folder}. Measures are "
                    "compared on the same model and data."
                )
    return tuple(
        StoredMeasure(name=name, folder=folder, job=job, finished=finished)
        for name, (folder, job, finished) in zip(names, found, strict=True)
    )


_ALIKE = (
    "model",
    "vocabulary",
    "data",
    "cluster_key",
    "max_decode_length",
    "max_input_length",
    "task_prefix",
    "dtype",
    "matmul_precision",
)


def _alike(job: DecodeJob) -> tuple[object, ...]:
    """Returns the values that must be equal for all generations, in the order of `_ALIKE`."""
    settings: DecodeSettings = job.settings
    return (
        job.model.fingerprint,
        job.vocabulary_identity(),
        job.files,
        job.cluster_key,
        settings.max_decode_length,
        settings.max_input_length,
        settings.task_prefix,
        settings.precision.dtype,
        settings.precision.matmul_precision,
    )


def _names(rules: Sequence[ExitRule]) -> list[str]:
    """Returns short names: the confidence measure, with other distinguishing values where several have the same."""
    plain = ExitRule()
    names = []
    for rule in rules:
        name = rule.confidence
        if sum(other.confidence == rule.confidence for other in rules) > 1:
            others = [
                f"{field.name} {getattr(rule, field.name)}"
                for field in dataclasses.fields(rule)
                if field.name != "confidence" and getattr(rule, field.name) != getattr(plain, field.name)
            ]
            name = ", ".join([name, *others])
        names.append(name)
    twice = next((name for name in names if names.count(name) > 1), None)
    if twice is not None:
        raise UsageError(f"--generations: {twice} is there twice. Name each way of exiting once.")
    return names


def have_references(measure: StoredMeasure) -> bool:
    """Returns whether every example has references."""
    return all(
        example.has_references for path in DecodeJob.shard_files(measure.folder) for example in stored_examples(path)
    )
