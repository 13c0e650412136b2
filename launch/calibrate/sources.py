"""Sources of the generations of a calibration: decoded now, in one block or several, or stored before."""

import dataclasses
import functools
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Protocol

import apache_beam as beam

from calm_beam.calibration.asked_data import AskedData, DecodedExamples, FilesToDecode
from calm_beam.calibration.plan import block_ends
from calm_beam.calibration.publish import EarlierResult, withdraw
from calm_beam.calibration.rounds import has_rounds
from calm_beam.calibration.variants import variants_together
from calm_beam.decoding.memory import checked_least_tokens
from calm_beam.decoding.settings import DecodeSettings
from calm_beam.evaluation.flops import DecoderSizes
from calm_beam.launch.flags import UsageError, as_usage, naming
from calm_beam.launch.report.command import ReportedModel
from calm_beam.launch.run_sweep import decoded, prepare_request, reading
from calm_beam.launch.runners import Workers
from calm_beam.launch.terminal import say
from calm_beam.manifest import Plan
from calm_beam.manifest.plan_list import home_of
from calm_beam.outputs import DecodeJob, FinishedSweep, StoredGenerations
from calm_beam.outputs.folder import SweepHome, check_may_choose
from calm_beam.outputs.request import SweepAssignment, SweepRequest
from calm_beam.outputs.scoring import Scoring
from calm_beam.storage import absolute
from calm_beam.transforms import CountRounds
from calm_beam.transforms.metrics import ProgressLog

from .request import CalibrateRequest

if TYPE_CHECKING:
    from calm_beam.outputs.prepared import PreparedSweep


@dataclasses.dataclass(frozen=True, kw_only=True)
class Block:
    """Generations at the upper part of the grid, or at all of it.

    Attributes:
      stored: The generations, with their present or future folder.
      make: Adds steps that give the `FinishedSweep` to a pipeline: reading and decoding, or the stored one.
      assignment: The assignment of the workers; None if nothing is decoded.
    """

    stored: StoredGenerations
    make: Callable[[beam.Pipeline, ProgressLog], beam.PCollection]
    assignment: SweepAssignment | None = None

    @property
    def thresholds(self) -> tuple[float, ...]:
        """The part of the grid."""
        return self.stored.thresholds


class Source(Protocol):
    """The source of the generations of a run.

    Attributes:
      job: The decode job of all generations.
      settings: The job's settings, with the grid that is calibrated.
      model: The parts of the model that the report needs; None if it has not been loaded.
      is_stored: Whether the generations were stored before.
      blocks: How often `next_block` may be called.
      home: Directory that lists the plans for these generations.
      data: The data that those plans are about.
      command: The command that asks.
    """

    job: DecodeJob
    settings: DecodeSettings
    model: ReportedModel | None
    is_stored: bool
    blocks: int
    home: str
    data: AskedData
    command: str

    def next_block(self) -> Block:
        """Returns the next block, with more of the grid than the last, and makes its folder ready."""
        ...

    def finish(self) -> None:
        """Removes the files that the last block does not need."""
        ...


class DecodedSource:
    """Generations that are decoded now, all or the missing ones."""

    is_stored: bool = False
    command: str = "calibrate"

    def __init__(
        self,
        sweep: "PreparedSweep",
        blocks: Sequence["PreparedSweep"],
        request: CalibrateRequest,
        *,
        output: str,
        earlier: EarlierResult,
        workers: Workers,
    ) -> None:
        """Makes a source of decoded blocks; `earlier` is the result that was found in `output`."""
        self.job = sweep.job()
        self.settings = sweep.settings
        self.model: ReportedModel | None = ReportedModel(
            sizes=DecoderSizes.of(sweep.checkpoint.config), vocabulary=sweep.vocabulary
        )
        self.sweep = sweep
        self._sweeps = blocks
        self._jobs = [each.job() for each in blocks]
        self._begun: list[Block] = []
        self._request, self._home, self._earlier, self._workers = request, SweepHome(output), earlier, workers
        self.blocks = len(blocks)
        self.home = output
        self.data: AskedData = FilesToDecode(sweep.data)

    def next_block(self) -> Block:
        """Returns the next block, with more of the grid than the last, and makes its folder ready."""
        index = len(self._begun)
        if index:
            folder = self._home.next_folder(self._jobs[index])
        else:
            folder = self._home.begin(
                self._jobs,
                resume=self._request.resume,
                overwrite=self._request.overwrite,
                tell=say,
                withdraw=functools.partial(withdraw, self.home, self._earlier),
            )
        assignment = self._assignment(index, folder)
        block = Block(
            stored=assignment.stored, make=functools.partial(self._decode, [assignment]), assignment=assignment
        )
        self._begun.append(block)
        return block

    def _assignment(self, index: int, folder: str) -> SweepAssignment:
        """Returns the assignment of a block, which continues from the last block's generations."""
        return dataclasses.replace(
            self._sweeps[index].assignment(folder),
            above=self._begun[-1].stored if index else None,
            goes_on=index + 1 < self.blocks,
        )

    def is_begun_below(self) -> bool:
        """Returns whether an earlier run counted rounds in a later block."""
        return any(has_rounds(self._home.folder_of(job)) for job in self._jobs[len(self._begun) :])

    def finish(self) -> None:
        """Removes the folders of all blocks but the last: its generations hold those of the others."""
        self._home.keep_last([block.stored.job for block in self._begun])

    def count_rounds(
        self,
        pipeline: beam.Pipeline,
        progress: ProgressLog,
        *,
        assignment: SweepAssignment,
        plan: Plan,
        scored_by: Mapping[str, str],
        division: str | None,
        rounds: range,
        scoring: Scoring,
    ) -> beam.PCollection:
        """Adds decoding and counting some rounds, given by number, to a pipeline; the rest is as in `CountRounds`."""
        return (
            pipeline
            | "ReadExamples" >> reading(self._sweeps[0], progress)
            | "CountRounds"
            >> CountRounds(
                assignment,
                plan,
                scored_by=scored_by,
                division=division,
                first=rounds[0],
                last=rounds[-1],
                progress=progress,
                scoring=scoring,
                devices=self._workers.devices,
            )
        )

    def _decode(
        self, assignments: Sequence[SweepAssignment], pipeline: beam.Pipeline, progress: ProgressLog
    ) -> beam.PCollection:
        return decoded(pipeline, self._sweeps[0], assignments, workers=self._workers, progress=progress)


class VariantsSource(DecodedSource):
    """Generations of several variants: every block is the whole grid of one."""

    def _assignment(self, index: int, folder: str) -> SweepAssignment:
        """Returns the assignment of a variant, whose generations continue from no other's."""
        return self._sweeps[index].assignment(folder)

    def decode_together(
        self, blocks: Sequence[Block], pipeline: beam.Pipeline, progress: ProgressLog
    ) -> beam.PCollection:
        """Adds decoding several variants in one sweep to a pipeline."""
        return self._decode([block.assignment for block in blocks if block.assignment is not None], pipeline, progress)

    def finish(self) -> None:
        """Does nothing: the generations of all variants stay."""


class StoredSource:
    """Generations that are stored completely."""

    is_stored: bool = True
    model: ReportedModel | None = None
    blocks: int = 1
    command: str = "calibrate --generations"

    def __init__(self, examples: DecodedExamples, settings: DecodeSettings) -> None:
        """Makes a source of stored examples, of whose grid the thresholds of `settings` are calibrated."""
        self.job, self.settings = examples.stored.job, settings
        self.home = home_of(examples.stored.directory)
        self.data: AskedData = examples
        self._examples = examples

    def next_block(self) -> Block:
        """Returns the only block."""
        return Block(stored=self._examples.stored, make=self._take)

    def finish(self) -> None:
        """Does nothing: stored generations stay."""

    def _take(self, pipeline: beam.Pipeline, _: ProgressLog) -> beam.PCollection:
        return pipeline | "TakeGenerations" >> beam.Create([self._examples.finished])


def prepared_sweep(request: CalibrateRequest, output: str, *, workers: Workers) -> "PreparedSweep":
    """Returns the sweep of a request's first variant, with the weights of the model."""
    asked = sweep_request(request, num_shards=begun_shards(request, output))
    return prepare_request(asked, request.patterns, reading=request.own_reading, runs_here=workers.are_here)


def decoded_source(
    request: CalibrateRequest, sweep: "PreparedSweep", *, output: str, earlier: EarlierResult, workers: Workers
) -> DecodedSource:
    """Returns the source that decodes now.

    Args:
      request: The calibration request.
      sweep: The sweep from `prepared_sweep`.
      output: Output directory.
      earlier: The result that was found in `output`.
      workers: The workers that decode.
    """
    sweep = sweep.without_weights()
    if request.variants:
        variants = [sweep.of_variant(variant) for variant in request.variants]
        sweep = variants[0]
        for together in variants_together(request.variants, sweep.settings):
            settings = sweep.settings
            checked_least_tokens(
                request.max_cache_tokens,
                num_branches=len(together) * (1 + len(settings.thresholds)),
                steps=settings.max_decode_length,
                source=settings.max_input_length,
            )
        return VariantsSource(sweep, variants, request, output=output, earlier=earlier, workers=workers)
    whole = len(sweep.settings.thresholds)
    ends = block_ends(whole) if request.sweep == "lazy" else (whole,)
    blocks = [sweep.with_upper_part(end) for end in ends]
    return DecodedSource(sweep, blocks, request, output=output, earlier=earlier, workers=workers)


def sweep_request(request: CalibrateRequest, *, num_shards: int | None) -> SweepRequest:
    """Returns the sweep that a calibration asks for, with `num_shards` shards; None chooses by the size of the data.

    Raises:
      UsageError: If a value or a combination is wrong.
    """
    with as_usage((ValueError, OSError)):
        return SweepRequest.asked_by(
            request,
            request.settings(),
            model=request.model_path,
            num_shards=num_shards,
            order=request.order,
            round_examples=request.examples_of_a_round,
            part=request.part,
        )


def begun_shards(request: CalibrateRequest, output: str) -> int | None:
    """Returns the number of shards of a request, or of the run that it resumes; None if neither sets one."""
    if request.num_shards is None and request.resume:
        return SweepHome(output).begun_shards()
    return request.num_shards


def stored_source(request: CalibrateRequest, generations: str) -> StoredSource:
    """Returns the source of generations that are stored completely."""
    with naming("--generations"):
        folder = SweepHome(absolute(generations)).only_folder()
        job = DecodeJob.read(folder)
        check_may_choose(folder, job)
        stored = StoredGenerations(directory=folder, job=job)
        examples = DecodedExamples(stored, FinishedSweep.read(folder, job))
    if request.cluster_key != job.cluster_key:
        raise UsageError(
            f"--cluster_key is {request.cluster_key}, but the generations in {folder} were read with "
            f"{job.cluster_key}: what is drawn independently is no choice of the calibration. "
            + ("Leave it out." if job.cluster_key is None else f"Pass --cluster_key={job.cluster_key}.")
        )
    if request.group_key is not None and request.group_key != job.group_key:
        raise UsageError(
            f"--group_key is {request.group_key}, but the generations in {folder} were decoded "
            + (
                "without groups. Decode again with it, or leave it out."
                if job.group_key is None
                else f"with {job.group_key}. Pass --group_key={job.group_key}, or leave it out."
            )
        )
    examples.check_failed(request.on_error)
    settings = dataclasses.replace(job.settings, thresholds=_part_of_grid(request, job.settings.thresholds))
    return StoredSource(examples, settings)


def _part_of_grid(request: CalibrateRequest, stored: tuple[float, ...]) -> tuple[float, ...]:
    """Returns the requested thresholds, all of which must be stored; all stored ones if none are requested."""
    grid = request.grid
    if grid is None:
        return stored
    missing = [f"{threshold:g}" for threshold in grid if threshold not in stored]
    if missing:
        raise UsageError(
            f"thresholds {', '.join(missing)} were not decoded: take some of "
            f"{', '.join(f'{threshold:g}' for threshold in stored)}, or decode again."
        )
    return grid
