"""The life of a shard: taken over if it is stored already, else stored once, and counted when all are there."""

import dataclasses
import json
from collections.abc import Mapping, Sequence
from typing import Any

from calm_beam.inputs.examples import DataError, Example
from calm_beam.manifest.files import FAILURES
from calm_beam.storage import is_cloud_path, is_file, is_folder, joined, remove_file, replacing
from calm_beam.text import counted

from .finished import Finished, check_failures, each_once, failure_limit, finished_of, mixed_engines
from .job import DecodeJob, Job, OutputsError, SettingAssignment
from .request import AnswerAssignment, Assignment, SweepAssignment
from .rows import (
    Generation,
    publish_rows,
    read_generations,
    stored_examples,
    stored_failures,
    write_generations,
    write_outcomes,
)
from .shards import AnsweredShard, ProbedLoss, StoredShard, stored_shard, whole_shard

AnyAssignment = Assignment | SettingAssignment


def check_folder(assignment: AnyAssignment, shards: Sequence[int]) -> None:
    """Refuses folders that a worker does not see, or that hold other shards than these: those are of other data.

    Raises:
      OutputsError: If one does, or is not there.
    """
    job, directory = assignment.job, assignment.directory
    if isinstance(assignment, AnswerAssignment):
        # It was written before the run.
        if not is_file(joined(directory, job.FILE)):
            raise OutputsError(
                f"{directory}: workers find no {job.FILE} there, which the machine that started the run has written. "
                "With --output, name a folder that all of them see: on Cloud Storage or on a shared disk."
            )
        if type(job).read(directory).digest() != job.digest():
            raise OutputsError(f"{directory}: another run has begun there meanwhile. Choose another folder.")
    above = assignment.above if isinstance(assignment, SweepAssignment) else None
    for folder, of_folder in ((directory, job), *(((above.directory, above.job),) if above is not None else ())):
        # It was made before the run; on Cloud Storage, folders are there by themselves.
        if not is_cloud_path(folder) and not is_folder(folder):
            raise OutputsError(
                f"{folder}: workers do not see this folder, which is on the disk of the machine that started the run. "
                "With --output, or --temp_location for what is only read back, name one that all of them see: on Cloud "
                "Storage or on a shared disk."
            )
        of_folder.check_files(folder, shards)


def taken_over(
    assignment: AnyAssignment, shard: int, *, examples: Sequence[Example], reads_all: bool = True
) -> StoredShard | None:
    """Returns the shard that is stored already, None if none is.

    Args:
      assignment: What is to be decoded.
      shard: Number of the shard.
      examples: What the data give for it now, in their order.
      reads_all: Whether to look for damage in all of it, and not only at what it says about itself.

    Raises:
      OutputsError: If it is of other examples, or damaged.
      DataError: If it has failures, which are not allowed now.
    """
    path, words = assignment.shard_path(shard), assignment.job.WORDS
    if not is_file(path):
        return None
    stored = _checked_shard(path, assignment.job, shard=shard, examples=examples)
    if stored.failed and assignment.on_error == "fail":
        name, reason = _failures(path, stored)[0]
        raise DataError(
            f"{path}: holds {counted(stored.failed, words.example)} that could not be {words.made}, {name} first: "
            f"{reason.rstrip('.')}. Go on with --on_error={words.lenient}, or {words.anew} with --overwrite."
        )
    return whole_shard(path) if reads_all else stored


def check_above(assignment: AnyAssignment, shard: int, *, examples: Sequence[Example]) -> None:
    """Refuses a shard of the upper part of the grid that is of other examples; without such a part, nothing is wrong.

    Outputs of different prompts must not meet in one generation.

    Args:
      assignment: What is to be decoded.
      shard: Number of the shard.
      examples: What the data give for it now, in their order.

    Raises:
      OutputsError: If it is of other examples, or missing.
    """
    if not isinstance(assignment, SweepAssignment) or assignment.above is None:
        return
    above = assignment.above
    path = above.shard_path(shard)
    if not is_file(path):
        raise OutputsError(
            f"{path}: is missing, although the data give {counted(len(examples), 'example')} for this shard: they "
            "have changed since the upper part of the grid was decoded. Restore them, or decode anew with --overwrite."
        )
    _checked_shard(path, above.job, shard=shard, examples=examples)


def generations_above(
    assignment: AnyAssignment, shard: int, *, examples: Sequence[Example]
) -> Mapping[str, Generation] | None:
    """Returns the generations of a shard at the upper part of the grid, by id; None if there is no such part.

    Arguments and errors are those of `check_above`.
    """
    if not isinstance(assignment, SweepAssignment) or assignment.above is None:
        return None
    check_above(assignment, shard, examples=examples)
    generations = read_generations(assignment.above.shard_path(shard))
    return {generation.example.id: generation for generation in generations}


def store_shard(
    assignment: AnyAssignment,
    shard: int,
    *,
    examples: Sequence[Example],
    outcomes: Sequence[Any],
    losses: Sequence[ProbedLoss] = (),
    engine: str | None = None,
) -> StoredShard:
    """Stores what the examples of a shard have become, and returns what is stored then.

    What is stored is never replaced: of two workers that decode the same shard, the first one counts.

    Args:
      assignment: What is decoded.
      shard: Number of the shard.
      examples: Its examples, in their order.
      outcomes: By id, what became of them: `Generation` of a sweep, else `Answered`.
      losses: Of answers, those that were measured, by id.
      engine: As in `StoredShard`.

    Raises:
      OutputsError: If another engine has decoded what is there, or it is of other examples.
      OSError: If it cannot be written.
    """
    path, digest = assignment.shard_path(shard), assignment.job.shard_digest(shard, examples=examples)
    try:
        if isinstance(assignment, AnswerAssignment):
            write_outcomes(path, outcomes, shard=shard, digest=digest, losses=losses, has_groups=assignment.has_groups)
        else:
            if engine is not None:
                check_one_engine(assignment.directory, engine)
            write_generations(path, outcomes, shard=shard, digest=digest, engine=engine, overwrite=False)
    except FileExistsError:
        _checked_shard(path, assignment.job, shard=shard, examples=examples)
    # As it was stored, not as it is remembered.
    return whole_shard(path)


def check_one_engine(folder: str, engine: str) -> None:
    """Refuses to decode into a folder by another engine than has decoded a shard that is there.

    Args:
      folder: Of generations.
      engine: As in `StoredShard`.

    Raises:
      OutputsError: If it is another one.
    """
    for path in DecodeJob.shard_files(folder)[:1]:
        other = stored_shard(path).engine
        if other is not None and other != engine:
            raise OutputsError(mixed_engines(other, engine))


def publish_shard(assignment: AnyAssignment, shard: int) -> None:
    """Writes the file of a stored shard that users read, where that is another one.

    Even where there is one, since no digest tells whether it is damaged: it gets the same bytes.

    Raises:
      OutputsError: If the shard is damaged; nothing is written then.
      OSError: If the file cannot be written.
    """
    source, published = (
        path(assignment.directory, shard) for path in (assignment.job.shard_path, assignment.job.published_path)
    )
    if published != source:
        publish_rows(source, published)


def finish(assignment: AnyAssignment, shards: Sequence[StoredShard], *, examples: int) -> Finished:
    """Writes what is listed besides answers, and then the mark of success, which it returns.

    A step that is run again writes the same once more.

    Args:
      assignment: What was decoded.
      shards: As they were stored; one that was decoded twice may come twice.
      examples: Number of examples that were read.

    Raises:
      OutputsError: If the shards do not hold the examples that were read, each once.
      DataError: If more examples failed than may.
      OSError: If a file cannot be written.
    """
    job = assignment.job
    finished = finished_of(type(job)).of(shards, job=job.digest(), examples=examples)
    once = each_once(shards, words=job.WORDS)
    limit = failure_limit(assignment.max_failures, examples=examples)
    if finished.failed > limit:
        failing = [(assignment.shard_path(shard.shard), shard) for shard in once if shard.failed]
        failures = [failure for path, shard in failing for failure in _failures(path, shard)]
        check_failures(sorted(failures), failed=finished.failed, limit=limit)
    if isinstance(assignment, AnswerAssignment):
        _write_lists(assignment, [shard for shard in once if isinstance(shard, AnsweredShard)])
    finished.write(assignment.directory)
    return finished


def _write_lists(assignment: AnswerAssignment, shards: Sequence[AnsweredShard]) -> None:
    """Writes the lists of failures, and of losses by entry, of shards that are given by number."""
    job, folder = assignment.job, assignment.directory
    failures = [failure for shard in shards for failure in shard.failures]
    _write_lines(joined(folder, FAILURES), [dataclasses.asdict(failure) for failure in failures])
    for calibration in assignment.watched():
        rows = [
            # As `loss_row` has it.
            {
                "id": loss.id,
                "loss": loss.loss,
                "failure": loss.failure,
                "manifest": job.manifest,
                "calibration": calibration,
            }
            for shard in shards
            for loss in shard.losses
            if loss.calibration == calibration
        ]
        _write_lines(job.losses_path(folder, calibration), rows)


def _write_lines(path: str, rows: Sequence[Mapping[str, Any]]) -> None:
    """Writes rows as JSON lines; of none there is no file."""
    if not rows:
        remove_file(path)
        return
    with replacing(path) as temporary:
        temporary.write_text("".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows), encoding="utf-8")


def _failures(path: str, stored: StoredShard) -> list[tuple[str, str]]:
    """Returns id and reason of every example of a shard that could not be decoded."""
    if isinstance(stored, AnsweredShard):
        return [(failure.id, failure.reason) for failure in stored.failures]
    return stored_failures(path)


def _checked_shard(path: str, job: Job, *, shard: int, examples: Sequence[Example]) -> StoredShard:
    """Returns what the file of a shard says about itself, and refuses one that is of other examples."""
    stored, words = stored_shard(path), job.WORDS
    if stored.digest != job.shard_digest(shard, examples=examples):
        change = "" if isinstance(stored, AnsweredShard) else _change(stored_examples(path), examples)
        raise OutputsError(
            f"{path}: was {words.made} from other {words.example}s than the data give now for shard {shard} of "
            f"{job.num_shards}, so the data have changed since{change}. Restore them, or {words.anew} with --overwrite."
        )
    return stored


def _change(before: Sequence[Example], now: Sequence[Example]) -> str:
    """Returns in parentheses what happened to the first example that is not as it was; nothing if all are."""
    old, new = ({example.id: _as_given(example) for example in examples} for examples in (before, now))
    for name in sorted(old | new):
        if name not in new:
            return f" (example {name!r} is gone)"
        if name not in old:
            return f" (example {name!r} is new)"
        changed = [field for field in old[name] if old[name][field] != new[name][field]]
        if changed:
            return f" (example {name!r} has another {' and another '.join(changed)})"
    return ""


def _as_given(example: Example) -> dict[str, Any]:
    """Returns an example's fields, but for references that are made of token ids once prompts are encoded.

    Nor is it told what others have the same prompt.
    """
    fields = dataclasses.asdict(example)
    del fields["repeats_prompt"]
    if example.reference_ids is not None:
        del fields["references"]
    return fields
