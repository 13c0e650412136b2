"""The folder that answers are written to: begun, gone on with, or cleared.

`<output>/` holds

    generate.json                          what is answered, by what, in which form; written before anything is decoded
    answers-00000-of-00004.parquet         one file a shard that has prompts; or answers-....jsonl.gz, and then parts/
    failures.jsonl                         prompts without an answer, if there are some
    losses.jsonl                           losses of prompts that the full model has answered too, if any were asked for
    complete.json                          the mark of success: every shard, and counts of all answers

Files are written whole or not at all. A run that dies leaves the shards it finished, and another run takes them over
if they are of the same job and the same prompts. Files whose names begin with a dot are what a killed process left.
"""

import contextlib
import glob
import os
import re
from collections.abc import Callable, Iterable

from calm_beam.errors import UsageError
from calm_beam.manifest import MANIFEST
from calm_beam.storage import (
    base_name,
    is_cloud_path,
    is_file,
    joined,
    list_files,
    make_folder,
    remove_file,
)
from calm_beam.text.counted import counted

from .assignment import AnswerAssignment
from .job import JOB, AnswerJob
from .paths import COMPLETE, FAILURES, PARTS, shard_files
from .shards import AnswersError

_LOSSES_NAME = re.compile(r"losses(-\d{5,})?\.jsonl")


def begin_answers(output: str, job: AnswerJob, *, resume: bool, overwrite: bool, tell: Callable[[str], None]) -> None:
    """Makes a folder ready for the answers of a job, whose `generate.json` is there then.

    Args:
      output: The folder; made if it is not there.
      job: What is to be answered.
      resume: Whether to go on with what a run of the same job has left.
      overwrite: Whether to take away what is there, the mark of success before all else.
      tell: Takes sentences about what was found.

    Raises:
      UsageError: If there is something that neither allows, or that is of another job.
      OSError: If files cannot be written or removed.
    """
    _check_ours(output)
    if overwrite:
        _clear(output)
    shards = shard_files(output)
    if shards and not resume:
        state = "answers" if is_file(joined(output, COMPLETE)) else "answers of a run that did not finish"
        raise UsageError(
            f"--output {output}: holds {state} ({extent(output)}). Pass --resume to go on with them, --overwrite to "
            "begin anew, or choose another folder."
        )
    if shards:
        _check_same_job(output, job)
        _remove_temporary_files(output)
        tell(f"--resume: found {extent(output)} in {output}; those of unchanged prompts stay as they are")
        return
    if resume:
        tell(f"--resume: {output} holds no answers yet; starting from the beginning")
    # What a run without a finished shard has left says nothing.
    _clear(output)
    for folder in (output, joined(output, PARTS)) if job.output_format != "parquet" else (output,):
        make_folder(folder)
    try:
        job.write(output)
    except FileExistsError:
        raise UsageError(f"--output {output}: another run has begun there meanwhile. Choose another folder.") from None


def begun_shards(output: str) -> int | None:
    """Returns into how many shards a run divides its prompts that has begun in a folder; None if none has."""
    if shard_files(output):
        with contextlib.suppress(AnswersError):
            return AnswerJob.read(output).num_shards
    return None


def check_folder(assignment: AnswerAssignment, shards: Iterable[int]) -> None:
    """Refuses a folder that a worker does not see, that is another job's, or that holds files of other shards.

    Raises:
      AnswersError: If it is so. What is left over is of other prompts.
    """
    directory, job = assignment.directory, assignment.job
    # It was written before the run.
    if not is_file(joined(directory, JOB)):
        raise AnswersError(
            f"{directory}: workers find no {JOB} there, which the machine that started the run has written. With "
            "--output, name a folder that all of them see: on Cloud Storage or on a shared disk."
        )
    if AnswerJob.read(directory).digest() != job.digest():
        raise AnswersError(f"{directory}: another run has begun there meanwhile. Choose another folder.")
    numbers = list(shards)
    expected = {path(shard) for path in (assignment.shard_path, assignment.published_path) for shard in numbers}
    strange = [path for path in shard_files(directory) if path not in expected]
    if strange:
        raise AnswersError(
            f"{strange[0]}: the data have no prompt for this file, so it holds answers to other data. Restore them, or "
            "answer anew with --overwrite."
        )


def after_failure(output: str, *, is_over: bool) -> str:
    """Returns in words what a run that failed has left; nothing where no shard was finished.

    Then nothing stays on disk either, if it `is_over`: workers elsewhere may go on for a while.
    """
    if shard_files(output):
        return f"{extent(output)} in {output}: --resume goes on from there."
    if is_over:
        _clear(output)
        if not is_cloud_path(output):
            # Only if they are empty: other things may be kept there.
            with contextlib.suppress(OSError):
                os.rmdir(joined(output, PARTS))
            with contextlib.suppress(OSError):
                os.rmdir(output)
    return ""


def extent(output: str) -> str:
    """Returns in words how far a run has come."""
    names = {base_name(path).partition(".")[0] for path in shard_files(output)}
    try:
        return f"{len(names)} of at most {counted(AnswerJob.read(output).num_shards, 'shard')} answered"
    except AnswersError:
        return f"{counted(len(names), 'shard')} answered"


def _check_same_job(output: str, job: AnswerJob) -> None:
    """Refuses to go on with what another run has begun."""
    try:
        differing = job.differences(AnswerJob.read(output))
    except AnswersError as error:
        raise UsageError(f"--resume: {error} Pass --overwrite to begin anew.") from error
    if differing:
        raise UsageError(
            f"--resume: {output} was begun in another way: {'; '.join(differing)}. Answers of different runs are never "
            "mixed: repeat that run as it was, or pass --overwrite to begin anew."
        )


def _clear(output: str) -> None:
    """Removes what a run writes, and nothing else: the mark of success first, and last what tells whose the rest is."""
    remove_file(joined(output, COMPLETE))
    for path in (*shard_files(output), *_losses_files(output)):
        remove_file(path)
    remove_file(joined(output, FAILURES))
    _remove_temporary_files(output)
    remove_file(joined(output, JOB))


def _losses_files(output: str) -> list[str]:
    found = list_files(joined(glob.escape(output), "losses*.jsonl"))
    return [path for path in found if _LOSSES_NAME.fullmatch(base_name(path))]


def _check_ours(output: str) -> None:
    """Refuses a folder in which others have files of the names that a run writes, and removes when it begins."""
    if is_file(joined(output, JOB)):
        return
    others = [joined(output, name) for name in (COMPLETE, FAILURES, MANIFEST) if is_file(joined(output, name))]
    others += [*shard_files(output), *_losses_files(output)]
    if others:
        raise UsageError(
            f"--output {output}: holds {base_name(others[0])}, and no {JOB} that says it is of this command. Choose "
            "another folder."
        )


def _remove_temporary_files(output: str) -> None:
    """Removes what a killed process has left of files that it was writing."""
    for folder in (output, joined(output, PARTS)):
        for name in ("answers-*", "losses*", FAILURES, COMPLETE, JOB):
            for path in list_files(joined(glob.escape(folder), f".{name}.*.tmp")):
                remove_file(path)
