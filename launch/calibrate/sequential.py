"""A calibration that is looked at after every round of examples, and stops when enough is proved.

Every round is a pipeline, and so is every part of the grid that becomes worth decoding with `--sweep=lazy`. What a
round has counted stands in a file beside its generations, so the run knows nothing that a resumed one does not.
"""

import dataclasses
import time
from collections.abc import Collection, Sequence

from calm_beam.calibration.plan import layout_of
from calm_beam.calibration.publish import EarlierResult, publish
from calm_beam.calibration.result import has_ended, with_example_risks
from calm_beam.calibration.rounds import Round, counted_rounds, scored_by
from calm_beam.calibration.sequential import Watched, proved_objectives, watched
from calm_beam.launch.runners import run_pipeline
from calm_beam.launch.terminal import say
from calm_beam.manifest import EarlierEnd, Manifest, Objective, Plan, SequentialRecord
from calm_beam.outputs import STOPPED, FinishedSweep
from calm_beam.storage import joined, make_folder, remove_file
from calm_beam.text import counted

from .run import CalibrationRun
from .sources import Block, DecodedSource


def can_continue(manifest: Manifest, plan: Plan) -> bool:
    """Returns whether a finished calibration is the same but for the rule to stop, and has data left to decode."""
    earlier, ended = manifest.plan, manifest.sequential
    if earlier is None or ended is None or plan.sequential is None or earlier.sequential is None:
        return False
    # What has confirmed once has been looked at, and cannot confirm what is chosen after that.
    if plan.confirm_share is not None:
        return False
    with_their_rule = dataclasses.replace(plan, sequential=earlier.sequential)
    return with_their_rule == earlier and plan != earlier and ended.rounds < ended.of_rounds


@dataclasses.dataclass(frozen=True)
class SequentialRun:
    """A calibration round by round.

    Attributes:
      run: What is calibrated.
      continued: The manifest of where it had stopped before; None for a first run.
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
            # Where an earlier run has come to.
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
        """Runs a pipeline that decodes some rounds, by their numbers, and counts them."""
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
        """Returns the rounds that are counted in a block, as `counted_rounds`."""
        plan = self.run.plan.upper_part(len(block.thresholds))
        return counted_rounds(block.stored, plan, known=known, now=now, scored_by=scored_by(self.run.plan))

    def _check(self, found: Watched, rounds: Sequence[Round]) -> None:
        """Refuses more failures than may be among all examples, and metrics that prove everything and tell nothing."""
        totals = found.totals
        self.run.scoring.check_failures(totals.failures, failed=totals.failed, examples=rounds[-1].examples)
        # Earlier it may be chance. From there on only others need more rounds; alone, it would have ended there.
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
        # What the manifest refuses must not stand as complete.
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
