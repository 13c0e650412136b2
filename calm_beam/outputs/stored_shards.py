"""The life of a shard: taken over if it is already stored, else stored once, and counted when all shards are there."""

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
    """Refuses folders that a worker cannot see, or that hold shards of other data.

    Raises:
      OutputsError: If a folder has other shards than these, or is missing.
    """
    job, directory = assignment.job, assignment.directory
    if isinstance(assignment, AnswerAssignment):
        # The launcher wrote it before the run.
        if not is_file(joined(directory, job.FILE)):
            raise OutputsError(
                f"{directory}: workers find no {job.FILE} there, which the machine that started the run has written. "
                "With --output, name a folder that all of them see: on Cloud Storage or on a shared disk."
            )
        if type(job).read(directory).digest() != job.digest():
            raise OutputsError(f"{directory}: another run has begun there meanwhile. Choose another folder.")
    above = assignment.above if isinstance(assignment, SweepAssignment) else None
    for folder, of_folder in ((directory, job), *(((above.directory, above.job),) if above is not None else ())):
        # The launcher made it before the run; on Cloud Storage, folders need not be made.
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
    """Returns the shard that is already stored; None if none is.

    Args:
      assignment: The assignment to decode.
      shard: Number of the shard.
      examples: The shard's examples in the current data, in their order.
      reads_all: Whether to look for damage in the whole file, and not only in its description.

    Raises:
      OutputsError: If it holds other examples, or is damaged.
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
            f"{reason.rstrip('.')}. Go on with --on_error={words.lenient}, or {words.redo} with --overwrite."
        )
    return whole_shard(path) if reads_all else stored


def check_above(assignment: AnyAssignment, shard: int, *, examples: Sequence[Example]) -> None:
    """Refuses a shard of the upper part of the grid that holds other examples; does nothing without such a part.

    Outputs of different prompts must not be joined in one generation.

    Args:
      assignment: The assignment to decode.
      shard: Number of the shard.
      examples: The shard's examples in the current data, in their order.

    Raises:
      OutputsError: If it holds other examples, or is missing.
    """
    if not isinstance(assignment, SweepAssignment) or assignment.above is None:
        return
    above = assignment.above
    path = above.shard_path(shard)
    if not is_file(path):
        raise OutputsError(
            f"{path}: is missing, although the data give {counted(len(examples), 'example')} for this shard: they "
            "have changed since the upper part of the grid was decoded. Restore them, or decode again with --overwrite."
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
    """Stores the outcomes of a shard's examples, and returns the shard that is then stored.

    A stored shard is never replaced: if two workers decode the same shard, the first one counts.

    Args:
      assignment: The assignment that was decoded.
      shard: Number of the shard.
      examples: Its examples, in their order.
      outcomes: Outcomes by id: `Generation` for a sweep, else `Answered`.
      losses: The measured losses of answers, by id.
      engine: The engine as text, if the run could not know its workers' instructions; else None.

    Raises:
      OutputsError: If the stored shard was decoded by another engine, or holds other examples.
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
    # Read back from the file, not from memory.
    return whole_shard(path)


def check_one_engine(folder: str, engine: str) -> None:
    """Refuses to decode into a folder in which another engine has decoded a shard.

    Args:
      folder: Folder of generations.
      engine: The engine as text.

    Raises:
      OutputsError: If a shard there was decoded by another engine.
    """
    for path in DecodeJob.shard_files(folder)[:1]:
        other = stored_shard(path).engine
        if other is not None and other != engine:
            raise OutputsError(mixed_engines(other, engine))


def publish_shard(assignment: AnyAssignment, shard: int) -> None:
    """Writes the published file of a stored shard, if users read another file than the stored one.

    An existing file is rewritten with the same bytes, since no digest shows whether it is damaged.

    Raises:
      OutputsError: If the shard is damaged; then nothing is written.
      OSError: If the file cannot be written.
    """
    source, published = (
        path(assignment.directory, shard) for path in (assignment.job.shard_path, assignment.job.published_path)
    )
    if published != source:
        publish_rows(source, published)


def finish(assignment: AnyAssignment, shards: Sequence[StoredShard], *, examples: int) -> Finished:
    """Writes the lists that accompany answers, then the mark of success, and returns the mark.

    A repeated step writes the same files again.

    Args:
      assignment: The assignment that was decoded.
      shards: The stored shards; one that was decoded twice may come twice.
      examples: Number of examples that were read.

    Raises:
      OutputsError: If the shards do not hold each example that was read once.
      DataError: If more examples failed than allowed.
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
    """Writes the lists of failures, and of losses by entry, from shards in order of number."""
    job, folder = assignment.job, assignment.directory
    failures = [failure for shard in shards for failure in shard.failures]
    _write_lines(joined(folder, FAILURES), [dataclasses.asdict(failure) for failure in failures])
    for calibration in assignment.watched():
        rows = [
            # The form that `loss_row` reads.
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
    """Writes rows as JSON lines; writes no file if there are none."""
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
    """Returns the description in a shard's file; refuses a file with other examples."""
    stored, words = stored_shard(path), job.WORDS
    if stored.digest != job.shard_digest(shard, examples=examples):
        change = "" if isinstance(stored, AnsweredShard) else _change(stored_examples(path), examples)
        raise OutputsError(
            f"{path}: was {words.made} from other {words.example}s than the data give now for shard {shard} of "
            f"{job.num_shards}, so the data have changed since{change}. Restore them, or {words.redo} with --overwrite."
        )
    return stored


def _change(before: Sequence[Example], now: Sequence[Example]) -> str:
    """Returns in parentheses how the first changed example differs; empty if none has changed."""
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
    """Returns an example's fields, without references that are derived from token ids when prompts are encoded.

    The field on repeated prompts is omitted too.
    """
    fields = dataclasses.asdict(example)
    del fields["repeats_prompt"]
    if example.reference_ids is not None:
        del fields["references"]
    return fields
