"""Runs of a prepared calibration: by blocks of the grid, by rounds of examples, or for several variants.

One pipeline decodes each block of the grid. Several variants share a sweep where they can, and one pipeline tests all
of them.

A sequential calibration evaluates its tests after every round of examples, and stops when enough is proved. Every round
is a pipeline, and so is every part of the grid that becomes worth decoding with `--sweep=lazy`. The counts of a round
are stored in a file next to its generations, so a resumed run knows everything that the first one knew.
"""

import contextlib
import dataclasses
import time
from collections.abc import Callable, Collection, Sequence
from typing import Self

import apache_beam as beam

from calm_beam.calibration.plan import layout_of
from calm_beam.calibration.publish import EarlierResult, RunProvenance, publish
from calm_beam.calibration.result import has_ended, with_example_risks
from calm_beam.calibration.rounds import Round, Watched, counted_rounds, proved_objectives, scored_by, watched
from calm_beam.calibration.variants import variants_together
from calm_beam.launch.runners import PipelineError, Workers, run_pipeline
from calm_beam.launch.runners.run import (
    RunMetrics,
    clipped_in_words,
    empty_references_in_words,
    metrics_in_words,
    what_is_left_told,
    work_in_words,
)
from calm_beam.launch.terminal import say, say_detail
from calm_beam.launch.terminal.progress import SCORING
from calm_beam.manifest import MANIFEST, EarlierEnd, Manifest, Objective, Plan, SequentialRecord, read_manifest
from calm_beam.outputs import STOPPED, DecodeJob, FinishedSweep, OutputsError
from calm_beam.outputs.folder import SweepHome
from calm_beam.outputs.scoring import Scoring
from calm_beam.storage import is_file, joined, make_folder, remove_file
from calm_beam.text import counted
from calm_beam.transforms import CalibrateGenerations, CalibrateVariants, WriteManifest

from .sources import Block, DecodedSource, Source, VariantsSource

UNCONFIRMED = "unconfirmed"
"""Folder in an output directory of what was chosen, until it is confirmed."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class CalibrationRun:
    """A calibration that has passed all checks that are possible before a worker starts.

    Attributes:
      source: Where generations come from.
      plan: The hypotheses to test.
      provenance: The other contents of the manifest.
      output: Output directory.
      earlier: The result that `output` held before.
      overwrites: Whether that is removed.
      scoring: How losses are computed.
      workers: The workers of the pipelines.
      is_unconfirmed: Whether its thresholds still need to be confirmed, and so are not a result yet.
    """

    source: Source
    plan: Plan
    provenance: RunProvenance
    output: str
    earlier: EarlierResult
    overwrites: bool
    scoring: Scoring
    workers: Workers
    is_unconfirmed: bool = False

    @property
    def result(self) -> str:
        """Directory of the result."""
        return joined(self.output, UNCONFIRMED) if self.is_unconfirmed else self.output

    def execute(self, first: Block) -> tuple[Manifest, str] | None:
        """Runs pipelines until no test goes on.

        Args:
          first: The first block, whose folder is ready.

        Returns:
          The manifest and the folder of its generations; None if the pipeline was only written down as a template.

        Raises:
          PipelineError: If a pipeline fails; says what is left, and how to resume.
          KeyboardInterrupt: If it is interrupted; says the same.
        """
        start = time.monotonic()
        block = first
        with self.what_is_left_told(lambda: block.stored.directory):
            make_folder(self.result)
            for number in range(self.source.blocks):
                block = self.source.next_block() if number else first
                metrics = self._run_pipeline(block)
                if self.workers.template:
                    return None
                self.tell(metrics, seconds=time.monotonic() - start)
                if is_file(joined(self.result, MANIFEST)):
                    break
            manifest = self.published()
            self.source.finish()
        return manifest, block.stored.directory

    def _run_pipeline(self, block: Block) -> RunMetrics | None:
        is_part = self.source.blocks > 1
        if is_part:
            say(f"thresholds down to {block.thresholds[-1]:g} of {self.plan.thresholds[-1]:g}")
        pipeline = self.workers.new_pipeline()
        settings = {"first": SCORING} if self.source.is_stored else {}
        with self.workers.shown_progress(**settings) as progress:
            _ = (
                block.make(pipeline, progress)
                | "CalibrateGenerations"
                >> CalibrateGenerations(
                    plan=self.plan,
                    # Taken before any example is decoded, and compared with what was tested at the end.
                    plan_digest=self.plan.digest,
                    provenance=self.provenance,
                    stored=block.stored,
                    tested=len(block.thresholds) if is_part else len(self.plan.thresholds),
                    scoring=self.scoring,
                )
                | "WriteManifest" >> WriteManifest(self.result, self.replaced())
            )
            return run_pipeline(pipeline)

    def replaced(self) -> EarlierResult:
        """Returns the result to be replaced: none if this run decodes, since decoding removed it before."""
        return self.earlier if self.source.is_stored or not self.overwrites else EarlierResult()

    def tell(self, metrics: RunMetrics | None, *, seconds: float | None) -> None:
        """Prints a pipeline's counters; `seconds` is None for one that has decoded nothing."""
        if seconds is not None and not self.source.is_stored:
            say(metrics_in_words(metrics, seconds=seconds))
            if work := work_in_words(metrics):
                say_detail(work)
        for sentence in (clipped_in_words(metrics), empty_references_in_words(metrics)):
            if sentence:
                say(sentence)

    def published(self) -> Manifest:
        """Returns the manifest that this run has published, and removes unfinished files of killed workers.

        Raises:
          PipelineError: If another run has published. Between two blocks of the grid, no file of this run stops it.
        """
        path = joined(self.result, MANIFEST)
        manifest = read_manifest(path)
        if (manifest.created, manifest.plan) != (self.provenance.created, self.plan):
            raise PipelineError(
                f"{path}: another run has published it meanwhile. Choose another --output, or pass --overwrite."
            )
        # A runner that tried again after a worker was killed leaves what that worker was writing.
        SweepHome(self.output).remove_temporary_files()
        return manifest

    def what_is_left_told(self, folder: Callable[[], str]) -> contextlib.AbstractContextManager[None]:
        """Adds to errors what is left in the folder, and how to resume; adds nothing for stored generations."""
        return what_is_left_told(lambda: "" if self.source.is_stored else self._left(folder()), but=OutputsError)

    def that_chooses(self) -> Self:
        """Returns the run that chooses the thresholds, which are confirmed afterwards."""
        return dataclasses.replace(
            self, plan=self.plan.that_chooses(), earlier=EarlierResult(), overwrites=False, is_unconfirmed=True
        )

    def _left(self, folder: str) -> str:
        return SweepHome(self.output).after_failure(folder, is_over=self.workers.are_here)


@dataclasses.dataclass(frozen=True)
class VariantsRun:
    """A calibration of several variants.

    Attributes:
      run: What is calibrated; every block of its source is a variant, in the plan's order.
    """

    run: CalibrationRun

    def execute(self, first: Block) -> tuple[Manifest, str]:
        """Decodes every variant and publishes the result; returns it, and the generations of the first entry's variant.

        Args:
          first: The first variant, whose folder is ready.

        Raises:
          PipelineError: As `CalibrationRun.execute`.
          KeyboardInterrupt: Likewise.
        """
        run, blocks = self.run, [first]
        pareto = run.plan.pareto
        assert pareto is not None
        with run.what_is_left_told(lambda: _last_with_shards(blocks)):
            make_folder(run.result)
            blocks += [run.source.next_block() for _ in pareto.variants[1:]]
            for together in variants_together(pareto.variants, run.source.settings):
                say(f"one sweep of {'; '.join(pareto.variants[place].in_words() for place in together)}")
                self._decode([blocks[place] for place in together])
            self._calibrate(blocks)
            manifest = run.published()
        chosen = manifest.calibrations[0].variant or pareto.variants[0]
        return manifest, blocks[pareto.variants.index(chosen)].stored.directory

    def _decode(self, blocks: Sequence[Block]) -> None:
        run, start = self.run, time.monotonic()
        pipeline = run.workers.new_pipeline()
        assert isinstance(run.source, VariantsSource)
        with run.workers.shown_progress() as progress:
            _ = run.source.decode_together(blocks, pipeline, progress)
            metrics = run_pipeline(pipeline)
        run.tell(metrics, seconds=time.monotonic() - start)

    def _calibrate(self, blocks: Sequence[Block]) -> None:
        run, stored = self.run, [block.stored for block in blocks]
        pipeline = run.workers.new_pipeline()
        sweeps = tuple(
            pipeline | f"TakeVariant{index}" >> beam.Create([FinishedSweep.read(each.directory, each.job)])
            for index, each in enumerate(stored)
        )
        _ = (
            sweeps
            | "CalibrateVariants"
            >> CalibrateVariants(
                plan=run.plan,
                # Taken before any example is decoded, and compared with what was tested at the end.
                plan_digest=run.plan.digest,
                provenance=run.provenance,
                stored=stored,
                scoring=run.scoring,
            )
            | "WriteManifest" >> WriteManifest(run.result, run.replaced())
        )
        with run.workers.shown_progress(first=SCORING):
            metrics = run_pipeline(pipeline)
        run.tell(metrics, seconds=None)


def _last_with_shards(blocks: Sequence[Block]) -> str:
    """Returns the folder of the last block that has a finished shard."""
    folders = [block.stored.directory for block in blocks]
    return next((folder for folder in reversed(folders) if DecodeJob.shard_files(folder)), folders[-1])


def can_continue(manifest: Manifest, plan: Plan) -> bool:
    """Returns whether a finished calibration differs only in its stopping rule, and has data left to decode."""
    earlier, ended = manifest.plan, manifest.sequential
    if earlier is None or ended is None or plan.sequential is None or earlier.sequential is None:
        return False
    # A holdout that was used once cannot confirm thresholds that are chosen afterwards.
    if plan.confirm_share is not None:
        return False
    with_their_rule = dataclasses.replace(plan, sequential=earlier.sequential)
    return with_their_rule == earlier and plan != earlier and ended.rounds < ended.of_rounds


@dataclasses.dataclass(frozen=True)
class SequentialRun:
    """A calibration round by round.

    Attributes:
      run: What is calibrated.
      continued: The manifest of the earlier stop that this run continues; None for a first run.
    """

    run: CalibrationRun
    continued: Manifest | None = None

    def execute(self, first: Block) -> tuple[Manifest, str]:
        """Decodes rounds until enough is proved, publishes the result, and returns it with its generations' folder.

        Args:
          first: The first block of the grid, whose folder is ready.

        Raises:
          PipelineError: As `CalibrationRun.execute`.
          KeyboardInterrupt: Likewise.
        """
        run, source = self.run, self.run.source
        assert isinstance(source, DecodedSource)
        above: list[Round] = []
        block = first
        with run.what_is_left_told(lambda: block.stored.directory):
            make_folder(run.result)
            # Skips to the block that an earlier run had reached.
            while source.is_begun_below():
                above = self._counted(block, [])
                block = source.next_block()
            rounds = self._counted(block, [])
            wanted = max(1, len(above), len(rounds))
            while True:
                if len(rounds) < wanted:
                    is_above = len(rounds) < len(above)
                    last = len(above) if is_above else wanted
                    division = next((each.division for each in (*rounds, *above)), None)
                    numbers = range(len(rounds) + 1, last + 1)
                    self._count(block, numbers, division=division, from_above=is_above)
                    rounds = self._counted(block, rounds, now=numbers)
                    continue
                tested = run.plan.upper_part(len(block.thresholds))
                found = watched([each.totals for each in rounds], tested, num_layers=run.provenance.model.layers)
                self._check(found, rounds)
                if tested.thresholds != run.plan.thresholds and not has_ended(found.calibrations):
                    say(f"thresholds below {block.thresholds[-1]:g} are decoded too")
                    block, above, rounds = source.next_block(), rounds, []
                    continue
                say(_in_words(found, rounds))
                ended_by = self._end(found, rounds)
                if ended_by is not None:
                    break
                wanted += 1
            manifest = self._publish(found, rounds, block=block, ended_by=ended_by)
            source.finish()
        return manifest, block.stored.directory

    def _count(self, block: Block, rounds: range, *, division: str | None, from_above: bool) -> None:
        """Runs a pipeline that decodes some rounds, given by number, and counts them."""
        run, source = self.run, self.run.source
        assert isinstance(source, DecodedSource)
        assert block.assignment is not None
        start = time.monotonic()
        pipeline = run.workers.new_pipeline()
        with run.workers.shown_progress() as progress:
            _ = source.count_rounds(
                pipeline,
                progress,
                assignment=block.assignment if from_above else dataclasses.replace(block.assignment, above=None),
                plan=run.plan.upper_part(len(block.thresholds)),
                scored_by=scored_by(run.plan),
                division=division,
                rounds=rounds,
                scoring=run.scoring,
            )
            metrics = run_pipeline(pipeline)
        run.tell(metrics, seconds=time.monotonic() - start)

    def _counted(self, block: Block, known: list[Round], *, now: range = range(0)) -> list[Round]:
        """Returns the rounds that are counted in a block, from `counted_rounds`."""
        plan = self.run.plan.upper_part(len(block.thresholds))
        return counted_rounds(block.stored, plan, known=known, now=now, scored_by=scored_by(self.run.plan))

    def _check(self, found: Watched, rounds: Sequence[Round]) -> None:
        """Refuses more failures than all examples may have, and metrics that prove everything as they never differ."""
        totals = found.totals
        self.run.scoring.check_failures(totals.failures, failed=totals.failed, examples=rounds[-1].examples)
        # Before an objective is proved, equal scores may be chance. Once it is proved, only other objectives need more
        # rounds, and alone it would have ended the run.
        self._check_contrast(found, among=proved_objectives(found.calibrations, self.run.plan))

    def _check_contrast(self, found: Watched, *, among: Collection[Objective] | None = None) -> None:
        found.totals.contrast.check(layout_of(self.run.plan).objectives, self.run.scoring.metric, among=among)

    def _end(self, found: Watched, rounds: Sequence[Round]) -> str | None:
        """Returns what ends the calibration now; None if nothing does."""
        return found.ended_by(self.run.plan, of_rounds=rounds[-1].rounds)

    def _publish(self, found: Watched, rounds: Sequence[Round], *, block: Block, ended_by: str) -> Manifest:
        run, folder, totals = self.run, block.stored.directory, found.totals
        self._check_contrast(found)
        shards = [shard for each in rounds for shard in each.shards]
        finished = FinishedSweep.of(shards, job=block.stored.job.digest(), examples=totals.examples)
        tested = run.plan.upper_part(len(block.thresholds))
        manifest = run.provenance.manifest(
            totals,
            with_example_risks(found.calibrations, {None: totals}, tested),
            plan=run.plan,
            digest=run.plan.digest,
            sequential=SequentialRecord(
                rounds=len(rounds),
                of_rounds=rounds[-1].rounds,
                of_examples=rounds[-1].examples,
                ended_by=ended_by,
                continues=self._continues(),
            ),
        )
        # Marked as complete only after the manifest has accepted the result.
        if totals.examples == rounds[-1].examples:
            finished.write(folder)
            remove_file(joined(folder, STOPPED))
        else:
            finished.write(folder, STOPPED)
        publish(
            run.result,
            manifest,
            rows=found.rows,
            failures=totals.failures,
            earlier=EarlierResult() if run.overwrites else run.earlier,
        )
        return manifest

    def _continues(self) -> tuple[EarlierEnd, ...]:
        if self.continued is None:
            return ()
        assert self.continued.plan is not None
        assert self.continued.sequential is not None
        ended = self.continued.sequential
        last = EarlierEnd(plan=self.continued.plan.digest, rounds=ended.rounds, ended_by=ended.ended_by)
        return (*ended.continues, last)


def _in_words(found: Watched, rounds: Sequence[Round]) -> str:
    """Returns how far the entries have come."""
    last = rounds[-1]
    chosen = sum(entry.threshold is not None for entry in found.calibrations)
    layers = sorted({f"{entry.layers:.2f}" for entry in found.calibrations}, key=float)
    return (
        f"round {last.number} of {last.rounds}: {found.totals.examples:,} of {counted(last.examples, 'example')}; "
        f"{chosen} of {counted(len(found.calibrations), 'entry', several='entries')} with a threshold, layers "
        f"{' to '.join(dict.fromkeys((layers[0], layers[-1])))}"
    )
