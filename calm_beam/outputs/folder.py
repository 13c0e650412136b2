"""Output folders: start one, resume one, clean up after a failure, or find one again.

A calibration's `<output>/generations/<fingerprint of model and settings>/` holds

    decode.json                              what is decoded, how, and from what; written before anything is decoded
    generations-00000-of-00004.parquet       one file a shard that has examples
    complete.json                            the mark of success: every shard with its size and digest

A sequential calibration that stops before the end of its data leaves `round-00001.json`, ..., with the counts of each
round, and `stopped.json` instead of the mark, with the shards that it has counted. Losses decided which shards those
are, so only anytime-valid tests can use them.

The `<output>/` of `calm-beam generate` holds

    generate.json                          what is answered, by what, in which form; written before anything is decoded
    answers-00000-of-00004.parquet         one file a shard that has prompts; or answers-....jsonl.gz, and then parts/
    failures.jsonl                         prompts without an answer, if there are some
    losses.jsonl                           losses of prompts that the full model has answered too, if any were asked for
    complete.json                          the mark of success: every shard, and counts of all answers

Files are written atomically. A run that dies leaves its finished shards; another run takes them over if they belong to
the same job and the same examples. Files whose names begin with a dot are leftovers of a killed process and are never
read.
"""

import contextlib
import glob
import os
import re
from collections.abc import Callable, Sequence
from typing import ClassVar, Generic, TypeVar

from calm_beam.errors import UsageError, os_error_in_words
from calm_beam.inputs.set_parts import CONFIRMING
from calm_beam.manifest import Variant
from calm_beam.manifest.files import FAILURES, MANIFEST
from calm_beam.storage import (
    base_name,
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
from calm_beam.text import counted

from .finished import COMPLETE, STOPPED
from .job import PARTS, AnswerJob, DecodeJob, Job, OutputsError, SettingJob, SweptJob

_GENERATIONS = "generations"
_LOSSES_NAME = re.compile(r"losses(-\d{5,})?\.jsonl")

J = TypeVar("J", bound=Job)
G = TypeVar("G", bound=SweptJob)


class Home(Generic[J]):
    """An output directory, with the folders for one kind of outputs in it.

    Outputs are written to their final place, so that those of a run that dies are not lost.
    """

    JOB: type[J]
    PLACE: ClassVar[str]
    """The user's word for the directory."""

    def __init__(self, output: str, *, again: str = "--resume", restart: str = "pass --overwrite") -> None:
        """Keeps the directory, which need not exist.

        Args:
          output: The directory.
          again: The flag that resumes a run, as messages show it.
          restart: How to start over instead, as messages say it.
        """
        self.output = output
        self._again, self._restart = again, restart

    def begin(
        self,
        jobs: Sequence[J],
        *,
        resume: bool,
        overwrite: bool,
        tell: Callable[[str], None],
        withdraw: Callable[[], None] = lambda: None,
    ) -> str:
        """Returns the folder that a run decodes into first; its job file then describes the job.

        Args:
          jobs: Jobs to decode one after the other, each into its own folder, which is made if it is missing.
          resume: Whether to resume what a run of the same jobs has left.
          overwrite: Whether to remove what is there.
          tell: Receives sentences about what was found.
          withdraw: Removes an earlier result before the first file that it depends on is removed.

        Raises:
          UsageError: If there is something that neither flag allows, or that belongs to another job.
          OSError: If files cannot be written or removed, or if another run has published a result meanwhile.
        """
        words, output = self.JOB.WORDS, self.output
        self._check_ours(jobs)
        if overwrite:
            withdraw()
            self._remove(self._found())
        found = self._found()
        if found and not resume:
            is_finished = any(is_file(joined(folder, COMPLETE)) for folder in self._marked())
            state = words.outputs if is_finished else f"{words.outputs} of a run that did not finish"
            raise UsageError(
                f"--output {output}: holds {state} ({self._extent(found[0])}). Pass --resume to go on with them, "
                f"--overwrite to begin again, or choose another {self.PLACE}."
            )
        for folder in found:
            self._check_same_run(folder, jobs)
        # A run may have been killed before it wrote its job, so that no folder shows it.
        self.remove_temporary_files()
        for folder in found:
            tell(
                f"--resume: found {self._extent(folder)} in {folder}; those of unchanged {words.example}s stay as they "
                "are"
            )
        if not found:
            if resume:
                tell(f"--resume: {output} holds no {words.outputs} yet; starting from the beginning")
            # Leftovers of runs without a finished shard hold nothing of use.
            self._remove(self._begun())
        return self.next_folder(jobs[0])

    def next_folder(self, job: J) -> str:
        """Returns the folder for the next job of a run that has begun.

        Raises:
          UsageError: If another run has begun there meanwhile.
        """
        folder = self.folder_of(job)
        if not is_file(joined(folder, job.FILE)):
            make_folder(folder)
            try:
                job.write(folder)
            except FileExistsError:
                raise UsageError(
                    f"--output {self.output}: another run has begun there meanwhile. Choose another {self.PLACE}."
                ) from None
        return folder

    def folder_of(self, job: J) -> str:
        """Returns the folder of a job's outputs, which need not exist."""
        raise NotImplementedError

    def begun_shards(self) -> int | None:
        """Returns the number of shards of the run that has begun there; None if none has."""
        for folder in self._found():
            with contextlib.suppress(OutputsError):
                return self.JOB.read(folder).num_shards
        return None

    def after_failure(self, folder: str, *, is_over: bool) -> str:
        """Returns a sentence on what a failed run has left in a folder; empty if no shard was finished.

        Without a finished shard, the files are removed if the run `is_over`: remote workers may continue for a while.
        """
        if self.JOB.shard_files(folder):
            return f"{self._extent(folder)} in {folder}: {self._again} goes on from there."
        if is_over:
            self._remove([folder])
            if not is_cloud_path(self.output):
                # Only empty folders: users may keep other files there.
                for left in (*self._below(), self.output):
                    with contextlib.suppress(OSError):
                        os.rmdir(left)
        return ""

    def remove_temporary_files(self) -> None:
        """Removes unfinished files of a killed process."""
        raise NotImplementedError

    def _check_ours(self, jobs: Sequence[J]) -> None:
        """Refuses a directory with files that a run would write or remove but this command did not make."""
        raise NotImplementedError

    def _found(self) -> list[str]:
        """Returns the folders that hold shards."""
        raise NotImplementedError

    def _begun(self) -> list[str]:
        """Returns the folders in which decoding has begun, or may have."""
        raise NotImplementedError

    def _marked(self) -> Sequence[str]:
        """Returns the folders that have a mark once a run has finished."""
        return (self.output,)

    def _below(self) -> tuple[str, ...]:
        """Returns the folders that a run creates in the directory."""
        raise NotImplementedError

    def _remove(self, folders: Sequence[str]) -> None:
        """Removes a run's files from folders."""
        raise NotImplementedError

    def _extent(self, folder: str) -> str:
        """Returns a phrase on how far a run has come."""
        made = self.JOB.WORDS.made
        shards = len({base_name(path).partition(".")[0] for path in self.JOB.shard_files(folder)})
        try:
            return f"{shards} of at most {counted(self.JOB.read(folder).num_shards, 'shard')} {made}"
        except OutputsError:
            return f"{counted(shards, 'shard')} {made}"

    def _check_same_run(self, folder: str, jobs: Sequence[J]) -> None:
        """Refuses to resume another run."""
        own = {self.folder_of(job): job for job in jobs}
        try:
            theirs = self.JOB.read(folder)
        except OutputsError as error:
            raise UsageError(
                f"--resume: {error} {self._restart[0].upper()}{self._restart[1:]} to begin again."
            ) from error
        differences = own.get(folder, jobs[-1]).differences(theirs)
        if differences or folder not in own:
            how = "; ".join(differences) or "under another name"
            raise UsageError(
                f"--resume: {folder} was begun in another way: {how}. {self.JOB.WORDS.outputs.capitalize()} of "
                f"different runs are never mixed: repeat that run as it was, or {self._restart} to begin again."
            )


class GenerationsHome(Home[G]):
    """An output directory with one folder of generations for each decoding configuration."""

    PLACE = "directory"

    def folder_of(self, job: G) -> str:
        """Returns the folder of a job's generations, which need not exist."""
        return joined(self.output, _GENERATIONS, job.outputs())

    def keep_last(self, jobs: Sequence[G]) -> None:
        """Removes the folders of all jobs but the last, whose generations contain those of the others."""
        self._remove([self.folder_of(job) for job in jobs[:-1]])

    def counted_folder(self) -> str:
        """Returns the folder of generations that a finished calibration has counted.

        A run that was killed at the very end may have left others, for parts of the grid.

        Raises:
          UsageError: If there is none.
        """
        for folder in self._found():
            if is_file(joined(folder, COMPLETE)) or is_file(joined(folder, STOPPED)):
                return folder
        raise UsageError(f"{self.output}: holds no generations that were counted whole. Begin again with --overwrite.")

    def remove_temporary_files(self) -> None:
        """Removes unfinished files of a killed process, in the directory and its generations."""
        for below in ((), (_GENERATIONS, "*")):
            for path in list_files(joined(glob.escape(self.output), *below, ".*.tmp")):
                remove_file(path)

    def folders(self) -> list[str]:
        """Returns the folders of generations in the directory: it alone if it is one of them, as flags may name it."""
        return [self.output] if is_file(joined(self.output, self.JOB.FILE)) else self._found()

    def only_folder(self, *, flag: str = "--generations") -> str:
        """Returns the folder of generations that a flag names: the directory itself, or the only one in it.

        Args:
          flag: The flag's name, for messages.

        Raises:
          UsageError: If there is none, or if there are several.
        """
        path, found = self.output, self.folders()
        if not found:
            raise UsageError(
                f"{flag} {path}: no {self.JOB.FILE} there and no {_GENERATIONS} below it, so this is no folder of a "
                f"calibration; one of generate is not enough. Name the output directory of a calibration, or its "
                f"{_GENERATIONS}/<fingerprint>."
            )
        if len(found) > 1:
            listed = "".join(f"\n  {folder}  ({_exits_of(folder)})" for folder in found)
            raise UsageError(
                f"{flag} {path}: holds {len(found)} folders. Name one:{listed}\nA calibration sweeps several ways of "
                "exiting unless it names one, such as --confidence=softmax, which leaves one folder."
            )
        return found[0]

    def _check_ours(self, jobs: Sequence[G]) -> None:
        try:
            # Before decoding, and not hours later when the first of them is removed.
            for folder in (*(self.folder_of(job) for job in jobs), *self._found()):
                refuse_links(folder, inside=self.output)
        except OSError as error:
            raise UsageError(f"--output {os_error_in_words(error)}") from error

    def _found(self) -> list[str]:
        files = list_files(joined(glob.escape(self.output), _GENERATIONS, "*", f"{_GENERATIONS}-*.parquet"))
        return sorted({parent(path) for path in files})

    def _begun(self) -> list[str]:
        return [parent(path) for path in list_files(joined(glob.escape(self.output), _GENERATIONS, "*", self.JOB.FILE))]

    def _below(self) -> tuple[str, ...]:
        return (joined(self.output, _GENERATIONS),)

    def _remove(self, folders: Sequence[str]) -> None:
        for folder in folders:
            remove_folder(folder, inside=self.output)


class SweepHome(GenerationsHome[DecodeJob]):
    """The output directory of a calibration."""

    JOB = DecodeJob


class SettingHome(GenerationsHome[SettingJob]):
    """The output directory of a user's decoder."""

    JOB = SettingJob

    def _marked(self) -> Sequence[str]:
        # Outputs are all that such a run makes; a calibration also makes a manifest.
        return self._found()


class AnswerHome(Home[AnswerJob]):
    """The output folder of `calm-beam generate`: it holds the answers itself, and users may keep other files there."""

    JOB = AnswerJob
    PLACE = "folder"

    def next_folder(self, job: AnswerJob) -> str:
        """Returns the folder, after making `parts/` in it if users read another format than Parquet."""
        if job.published_path(self.output, 0) != job.shard_path(self.output, 0):
            make_folder(joined(self.output, PARTS))
        return super().next_folder(job)

    def folder_of(self, job: AnswerJob) -> str:
        """Returns the folder itself."""
        return self.output

    def remove_temporary_files(self) -> None:
        """Removes unfinished files of a killed process."""
        for folder in (self.output, *self._below()):
            for name in ("answers-*", "losses*", FAILURES, COMPLETE, AnswerJob.FILE):
                for path in list_files(joined(glob.escape(folder), f".{name}.*.tmp")):
                    remove_file(path)

    def _check_ours(self, jobs: Sequence[AnswerJob]) -> None:
        output = self.output
        if is_file(joined(output, AnswerJob.FILE)):
            return
        others = [joined(output, name) for name in (COMPLETE, FAILURES, MANIFEST) if is_file(joined(output, name))]
        others += [*AnswerJob.shard_files(output), *self._losses_files()]
        if others:
            raise UsageError(
                f"--output {output}: holds {base_name(others[0])}, and no {AnswerJob.FILE} that says it is of this "
                "command. Choose another folder."
            )

    def _found(self) -> list[str]:
        return [self.output] if AnswerJob.shard_files(self.output) else []

    def _begun(self) -> list[str]:
        return [self.output]

    def _below(self) -> tuple[str, ...]:
        return (joined(self.output, PARTS),)

    def _remove(self, folders: Sequence[str]) -> None:
        """Removes only the run's own files: the mark first, and last the job file, which shows whose they are."""
        if not folders:
            return
        remove_file(joined(self.output, COMPLETE))
        for path in (*AnswerJob.shard_files(self.output), *self._losses_files()):
            remove_file(path)
        remove_file(joined(self.output, FAILURES))
        self.remove_temporary_files()
        remove_file(joined(self.output, AnswerJob.FILE))

    def _losses_files(self) -> list[str]:
        found = list_files(joined(glob.escape(self.output), "losses*.jsonl"))
        return [path for path in found if _LOSSES_NAME.fullmatch(base_name(path))]


def check_may_choose(folder: str, job: DecodeJob) -> None:
    """Refuses generations of holdout examples for selection: their losses have already been used for testing.

    Args:
      folder: Folder of the generations.
      job: Their job.

    Raises:
      UsageError: If these are holdout generations.
    """
    if job.part is not None and job.part.name == CONFIRMING:
        raise UsageError(
            f"{folder}: its examples are a holdout that has already confirmed a choice. Tested again, they prove "
            "nothing: take fresh data."
        )


def _exits_of(folder: str) -> str:
    """Returns how the outputs of a folder exit, if it says so."""
    try:
        rule = DecodeJob.read(folder).settings.rule
    except (OSError, OutputsError):
        return "unknown exits"
    names = ("confidence", "tau", "min_exit_layer", "exit_interval")
    return Variant(**{name: getattr(rule, name) for name in names}).in_words()
