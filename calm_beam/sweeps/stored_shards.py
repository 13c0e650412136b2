"""What is stored of a sweep already: shards that another run has finished, and the upper part of the grid."""

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

from calm_beam.failures import check_failures, failure_limit
from calm_beam.generations import (
    FinishedSweep,
    Generation,
    GenerationsError,
    StoredGenerations,
    StoredShard,
    check_files,
    read_generations,
    shard_digest,
    stored_examples,
    stored_failures,
    stored_shard,
    whole_shard,
)
from calm_beam.inputs.examples import DataError, Example
from calm_beam.storage import is_cloud_path, is_file, is_folder
from calm_beam.text.counted import counted

from .assignment import Assignment


def check_folders(assignment: Assignment, shards: Sequence[int]) -> None:
    """Refuses folders that a worker does not see, or that hold other shards than these: those are of other data.

    Raises:
      GenerationsError: If one does, or is not there.
    """
    for stored in (assignment.stored, assignment.above):
        if stored is not None:
            # It was made before the run; on Cloud Storage, folders are there by themselves.
            if not is_cloud_path(stored.directory) and not is_folder(stored.directory):
                raise GenerationsError(
                    f"{stored.directory}: workers do not see this folder, which is on the disk of the machine that "
                    "started the run. With --output, or --temp_location for what is only read back, name one that all "
                    "of them see: on Cloud Storage or on a shared disk."
                )
            check_files(stored.directory, shards, num_shards=stored.job.num_shards)


def taken_over(
    assignment: Assignment, shard: int, *, examples: Sequence[Example], reads_all: bool = True
) -> StoredShard | None:
    """Returns the shard that is stored already, None if none is.

    Args:
      assignment: What is to be decoded.
      shard: Number of the shard.
      examples: What the data give for it now, in their order.
      reads_all: Whether to look for damage in all of it, and not only at what it says about itself.

    Raises:
      GenerationsError: If it is of other examples, or damaged.
      DataError: If it has failures, which are not allowed now.
    """
    path = assignment.stored.shard_path(shard)
    if not is_file(path):
        return None
    stored = _checked_shard(assignment.stored, shard, examples=examples)
    if stored.failed and assignment.on_error == "fail":
        name, reason = stored_failures(path)[0]
        raise DataError(
            f"{path}: holds {counted(stored.failed, 'example')} that could not be decoded, {name} first: {reason}. "
            "Go on with --on_error=worst_case, or decode anew with --overwrite."
        )
    return whole_shard(path) if reads_all else stored


def check_above(assignment: Assignment, shard: int, *, examples: Sequence[Example]) -> None:
    """Refuses a shard of the upper part of the grid that is of other examples; without such a part, nothing is wrong.

    Outputs of different prompts must not meet in one generation.

    Args:
      assignment: What is to be decoded.
      shard: Number of the shard.
      examples: What the data give for it now, in their order.

    Raises:
      GenerationsError: If it is of other examples, or missing.
    """
    above = assignment.above
    if above is None:
        return
    path = above.shard_path(shard)
    if not is_file(path):
        raise GenerationsError(
            f"{path}: is missing, although the data give {counted(len(examples), 'example')} for this shard: they "
            "have changed since the upper part of the grid was decoded. Restore them, or decode anew with --overwrite."
        )
    _checked_shard(above, shard, examples=examples)


def generations_above(
    assignment: Assignment, shard: int, *, examples: Sequence[Example]
) -> Mapping[str, Generation] | None:
    """Returns the generations of a shard at the upper part of the grid, by id; None if there is no such part.

    Arguments and errors are those of `check_above`.
    """
    check_above(assignment, shard, examples=examples)
    if assignment.above is None:
        return None
    generations = read_generations(assignment.above.shard_path(shard))
    return {generation.example.id: generation for generation in generations}


def mark_complete(assignment: Assignment, shards: Sequence[StoredShard], *, examples: int) -> FinishedSweep:
    """Writes and returns the mark of a sweep that has finished.

    Args:
      assignment: What was decoded.
      shards: As they were stored; one that was decoded twice may come twice.
      examples: Number of examples that were read.

    Raises:
      GenerationsError: If the shards do not hold the examples that were read, each once.
      DataError: If more examples failed than may.
    """
    finished = FinishedSweep.of(shards, job=assignment.job.digest(), examples=examples)
    limit = failure_limit(assignment.max_failures, examples=examples)
    if finished.failed > limit:
        failing = [assignment.stored.shard_path(shard.shard) for shard in finished.shards if shard.failed]
        failures = [failure for path in failing for failure in stored_failures(path)]
        check_failures(sorted(failures), failed=finished.failed, limit=limit)
    finished.write(assignment.stored.directory)
    return finished


def _checked_shard(generations: StoredGenerations, shard: int, *, examples: Sequence[Example]) -> StoredShard:
    """Returns what the file of a shard says about itself, and refuses one that is of other examples."""
    path, job = generations.shard_path(shard), generations.job
    stored = stored_shard(path)
    if stored.digest != shard_digest(job.digest(), stored.shard, examples=examples):
        raise GenerationsError(
            f"{path}: was decoded from other examples than the data give now for shard {stored.shard} of "
            f"{job.num_shards}, so the data have changed since{_change(stored_examples(path), examples)}. Restore "
            "them, or decode anew with --overwrite."
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
