"""The generations of a calibration: begun, gone on with, or found again."""

import contextlib
import glob
import os
from collections.abc import Callable, Sequence

from calm_beam.calibration.publish import EarlierResult, withdraw
from calm_beam.errors import UsageError, os_error_in_words
from calm_beam.generations import GenerationsError
from calm_beam.generations.folder import COMPLETE, JOB, STOPPED, DecodeJob, shard_files
from calm_beam.inputs.set_parts import CONFIRMING
from calm_beam.storage import (
    is_cloud_path,
    is_file,
    joined,
    list_files,
    make_folder,
    parent,
    refuse_links,
    remove_file,
    remove_folder,
)
from calm_beam.text.counted import counted

_FOLDER = "generations"


def begin_generations(
    output: str,
    jobs: Sequence[DecodeJob],
    *,
    resume: bool,
    overwrite: bool,
    earlier: EarlierResult,
    tell: Callable[[str], None],
) -> str:
    """Returns the folder that a run decodes into first, whose `decode.json` then says what for.

    Generations are written where they stay, so that those of a run that dies are not lost. An earlier result is taken
    away before the first of them is written, its manifest before all else.

    Args:
      output: Output directory; made if it is not there.
      jobs: What is decoded, one after the other, each into a folder of its own.
      resume: Whether to go on with what an unfinished run has left.
      overwrite: Whether to take away what is there.
      earlier: The result that was there when the run was asked for, which alone is taken away.
      tell: Takes sentences about what was found.

    Raises:
      UsageError: If there is something that neither allows, or that is not of this job.
      OSError: If files cannot be written, or another run has published a result meanwhile.
    """
    try:
        # Now, and not when the first of them is removed, after hours.
        for folder in (*(generations_folder(output, job) for job in jobs), *_folders(output)):
            refuse_links(folder, inside=output)
    except OSError as error:
        raise UsageError(f"--output {os_error_in_words(error)}") from error
    if overwrite:
        withdraw(output, earlier)
        _remove_folders(_folders(output), output)
    found = _folders(output)
    if found and not resume:
        raise UsageError(
            f"--output {output}: holds generations of a run that did not finish ({_extent(found[0])}). Pass --resume "
            "to go on with it, --overwrite to begin anew, or choose another directory."
        )
    if found:
        _check_same_run(found, output, jobs=jobs)
    # One may have been killed before it had a job, so that no folder tells of it.
    remove_temporary_files(output)
    if found:
        for folder in found:
            tell(f"--resume: found {_extent(folder)} in {folder}; those of unchanged examples stay as they are")
    else:
        if resume:
            tell(f"--resume: {output} holds no generations yet; starting from the beginning")
        # What runs without a finished shard have left says nothing.
        _remove_folders(_begun_folders(output), output)
    return next_generations(output, jobs[0])


def begun_shards(output: str) -> int | None:
    """Returns into how many shards a run divides its data that has begun in an output directory; None if none has."""
    for folder in _folders(output):
        with contextlib.suppress(GenerationsError):
            return DecodeJob.read(folder).num_shards
    return None


def next_generations(output: str, job: DecodeJob) -> str:
    """Returns the folder that a run which has begun decodes a job into."""
    folder = generations_folder(output, job)
    if not is_file(joined(folder, JOB)):
        make_folder(folder)
        job.write(folder)
    return folder


def generations_folder(output: str, job: DecodeJob) -> str:
    """Returns the folder of a job's generations, which may not be there."""
    return joined(output, _FOLDER, job.outputs())


def remove_temporary_files(output: str) -> None:
    """Removes what a killed process has left, in an output directory and its generations, of files it was writing."""
    for below in ((), (_FOLDER, "*")):
        for path in list_files(joined(glob.escape(output), *below, ".*.tmp")):
            remove_file(path)


def keep_last_generations(output: str, jobs: Sequence[DecodeJob]) -> None:
    """Removes the folders of all jobs but the last: its generations hold those of the others."""
    _remove_folders([generations_folder(output, job) for job in jobs[:-1]], output)


def after_failure(output: str, folder: str, *, is_over: bool) -> str:
    """Returns in words what a run that failed has left; nothing where no shard was finished.

    Then nothing stays on disk either, if it `is_over`: workers elsewhere may go on for a while.
    """
    if shard_files(folder):
        return f"{_extent(folder)} in {folder}: --resume goes on from there."
    if not is_over:
        return ""
    remove_folder(folder, inside=output)
    if not is_cloud_path(output):
        # Only if they are empty: other things may be kept there.
        with contextlib.suppress(OSError):
            os.rmdir(joined(output, _FOLDER))
            os.rmdir(output)
    return ""


def find_generations(path: str) -> str:
    """Returns the folder of generations that `--generations` names: it, or an output directory that holds just one.

    Raises:
      UsageError: If there is none, or several.
    """
    if is_file(joined(path, JOB)):
        return path
    found = _folders(path)
    if not found:
        raise UsageError(
            f"--generations {path}: no {JOB} there and no {_FOLDER} below it. Name the output directory of a "
            f"calibration, or its {_FOLDER}/<fingerprint>."
        )
    if len(found) > 1:
        raise UsageError(f"--generations {path}: holds {len(found)} folders. Name one: {', '.join(found)}.")
    return found[0]


def check_may_choose(folder: str, job: DecodeJob) -> None:
    """Refuses generations of examples that have confirmed what others chose: their losses have been looked at.

    Args:
      folder: Of the generations.
      job: What they are.

    Raises:
      UsageError: If they are such.
    """
    if job.part is not None and job.part.name == CONFIRMING:
        raise UsageError(
            f"{folder}: its examples have confirmed what others chose. They have been looked at, and prove nothing "
            "more: take fresh data."
        )


def counted_generations(output: str) -> str:
    """Returns the folder of generations that a finished calibration has counted.

    A run that was killed at its very end may have left others, of parts of the grid.

    Raises:
      UsageError: If there is none.
    """
    for folder in _folders(output):
        if is_file(joined(folder, COMPLETE)) or is_file(joined(folder, STOPPED)):
            return folder
    raise UsageError(f"{output}: holds no generations that were counted whole. Begin anew with --overwrite.")


def _folders(output: str) -> list[str]:
    """Returns the folders of generations below an output directory that hold shards."""
    files = list_files(joined(glob.escape(output), _FOLDER, "*", "generations-*.parquet"))
    return sorted({parent(path) for path in files})


def _begun_folders(output: str) -> list[str]:
    """Returns the folders of generations below an output directory in which decoding was begun."""
    return [parent(path) for path in list_files(joined(glob.escape(output), _FOLDER, "*", JOB))]


def _remove_folders(folders: Sequence[str], output: str) -> None:
    for folder in folders:
        remove_folder(folder, inside=output)


def _extent(folder: str) -> str:
    """Returns in words how far a run has come."""
    shards = len(shard_files(folder))
    try:
        return f"{shards} of at most {counted(DecodeJob.read(folder).num_shards, 'shard')} decoded"
    except GenerationsError:
        return f"{counted(shards, 'shard')} decoded"


def _check_same_run(found: list[str], output: str, *, jobs: Sequence[DecodeJob]) -> None:
    """Refuses to go on with what another run has begun."""
    own = {generations_folder(output, job): job for job in jobs}
    for other in found:
        try:
            theirs = DecodeJob.read(other)
        except GenerationsError as error:
            raise UsageError(f"--resume: {error} Pass --overwrite to begin anew.") from error
        differences = own.get(other, jobs[-1]).differences(theirs)
        if differences or other not in own:
            how = "; ".join(differences) or "under another name"
            raise UsageError(
                f"--resume: {other} was begun in another way: {how}. Generations of different runs are "
                "never mixed: repeat that run as it was, or pass --overwrite to begin anew."
            )
