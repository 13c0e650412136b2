"""The stored generations that `calm-beam evaluate` compares, and the model that they are of."""

import dataclasses
from collections.abc import Sequence

from calm_beam.checkpoints import Checkpoint, CheckpointError, Declared, load_checkpoint
from calm_beam.decoding.settings import DecodeSettings
from calm_beam.exits.rule import ExitRule
from calm_beam.launch.flags import UsageError, naming
from calm_beam.launch.terminal import say
from calm_beam.manifest import ManifestError
from calm_beam.outputs import DecodeJob, FinishedSweep, stored_examples
from calm_beam.outputs.folder import SweepHome
from calm_beam.serving.agreement import check_model, check_vocabulary, recorded_vocabulary
from calm_beam.storage import absolute
from calm_beam.vocabularies.vocabulary import Vocabulary, VocabularyError


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


@dataclasses.dataclass(frozen=True, kw_only=True)
class ModelOfGenerations:
    """The model that generations are of, for what cannot be told from them alone.

    Attributes:
      checkpoint: The model.
      vocabulary: Its vocabulary; None where there was none.
      vocabulary_path: Where that was read.
    """

    checkpoint: Checkpoint
    vocabulary: Vocabulary | None
    vocabulary_path: str | None


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
        settings.arithmetic.dtype,
        settings.arithmetic.matmul_precision,
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


def find_model(
    measure: StoredMeasure, *, checkpoint: str | None, declared: Declared, vocabulary: str | None
) -> ModelOfGenerations | None:
    """Returns the model that generations are of; None if it is no longer where it was, and no other place was named.

    Args:
      measure: The generations.
      checkpoint: Where the user says that it is; None looks where it was.
      declared: What its files do not say of it.
      vocabulary: The same for the vocabulary; None looks in and beside the checkpoint.

    Raises:
      UsageError: If what is found where the user says is missing or another one.
    """
    job = measure.job
    try:
        loaded = load_checkpoint(checkpoint or job.model.uri, declared=declared)
        path = vocabulary or (loaded.vocabulary_uri if job.vocabulary else None)
        opened = recorded_vocabulary(job.vocabulary, loaded, path=path)
        of = f"what is stored in {measure.folder}"
        check_model(job.model, loaded, of=of)
        check_vocabulary(job.vocabulary, opened, checkpoint=loaded, of=of)
    except (CheckpointError, VocabularyError, ManifestError, OSError) as error:
        if checkpoint or vocabulary:
            raise UsageError(f"--checkpoint {checkpoint or job.model.uri}: {error}") from error
        say(f"operations are not counted: {error} Pass --checkpoint to have them counted.")
        return None
    return ModelOfGenerations(
        checkpoint=loaded, vocabulary=opened, vocabulary_path=absolute(path) if opened and path else None
    )
