"""Stored generations of several ways of exiting, of the same model and data, which are compared."""

import dataclasses
from collections.abc import Sequence

from calm_beam.decoding.settings import DecodeSettings
from calm_beam.errors import UsageError, naming
from calm_beam.exits.rule import ExitRule
from calm_beam.outputs import DecodeJob, FinishedSweep, stored_examples
from calm_beam.outputs.folder import SweepHome
from calm_beam.storage import absolute


@dataclasses.dataclass(frozen=True, kw_only=True)
class StoredMeasure:
    """Complete generations of one way of exiting.

    Attributes:
      name: What tells it from the others: the confidence measure, and more where several have the same.
      folder: Where they are.
      job: What they are.
      finished: That they are complete.
    """

    name: str
    folder: str
    job: DecodeJob
    finished: FinishedSweep

    @property
    def rule(self) -> ExitRule:
        """How exits are decided."""
        return self.job.settings.rule


def find_measures(directories: Sequence[str]) -> tuple[StoredMeasure, ...]:
    """Returns the generations of each directory.

    Args:
      directories: Folders of generations, or output directories of calibrations that hold just one.

    Raises:
      UsageError: If there are none, or they are not of one model and the same data, decoded alike but for the exits.
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
    """Returns what generations have to have in common, in the order of `_ALIKE`."""
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
    """Returns short names: the confidence measure, with what else is special where several have the same."""
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
