"""Calibration with a holdout: some examples choose thresholds, and the holdout confirms them with the serving decoder.

Until then the chosen thresholds are stored in `unconfirmed/`, as a calibration of the examples that chose them; the
result replaces it. Every step is a separate pipeline, so that workers hold one model at a time.
"""

import dataclasses
import time
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING

import apache_beam as beam

from calm_beam.calibration.confirmation import confirmed_outcome, thresholds_to_confirm
from calm_beam.calibration.plan import set_part
from calm_beam.calibration.publish import EarlierResult, publish, read_failures
from calm_beam.calibration.result import CalibrationOutcome, RiskRow, read_risk_table
from calm_beam.errors import UsageError
from calm_beam.inputs.set_parts import CONFIRMING
from calm_beam.launch.run_sweep import decoded
from calm_beam.launch.runners import Workers, run_pipeline
from calm_beam.launch.terminal import say
from calm_beam.manifest import MANIFEST, Manifest, Plan, Variant, read_manifest
from calm_beam.manifest.files import RISK_TABLE
from calm_beam.outputs import FinishedSweep, StoredGenerations
from calm_beam.outputs.folder import SweepHome
from calm_beam.outputs.request import BATCH
from calm_beam.outputs.scoring import Scoring
from calm_beam.storage import joined, remove_folder
from calm_beam.transforms import ConfirmThresholds, WriteManifest

from .run import UNCONFIRMED, CalibrationRun
from .sources import DecodedSource

if TYPE_CHECKING:
    from calm_beam.outputs.prepared import PreparedSweep

CONFIRMATION = "confirmation"
"""Folder in an output directory whose `generations/` are those of the examples that confirm."""


@dataclasses.dataclass(frozen=True)
class ConfirmedRun:
    """A calibration whose thresholds are confirmed once they are chosen.

    Attributes:
      run: What is calibrated.
    """

    run: CalibrationRun

    def execute(self, choose: Callable[[CalibrationRun], tuple[Manifest, str] | None]) -> tuple[Manifest, str] | None:
        """Chooses, confirms and publishes; returns the result of `CalibrationRun.execute`.

        Args:
          choose: Executes the run that chooses.

        Raises:
          PipelineError: If a pipeline fails; says what is left, and how to resume.
          KeyboardInterrupt: If it is interrupted; says the same.
        """
        run = self.run
        assert isinstance(run.source, DecodedSource)
        remove_left(run.output, overwrite=run.overwrites)
        found = choose(run.that_chooses())
        assert found is not None, "templates are refused"
        _, folder = found
        with run.what_is_left_told(lambda: folder):
            confirm(
                run.plan,
                run.source.sweep,
                output=run.output,
                earlier=run.replaced(),
                workers=run.workers,
                scoring=run.scoring,
                tell=run.tell,
            )
            return run.published(), folder


def confirm(
    plan: Plan,
    sweep: "PreparedSweep",
    *,
    output: str,
    earlier: EarlierResult,
    workers: Workers,
    scoring: Scoring,
    tell: Callable[..., None] = lambda *_, **__: None,
) -> None:
    """Confirms the thresholds chosen in an output directory, and publishes the result there.

    Args:
      plan: The requested plan.
      sweep: The sweep that decoded the examples that chose.
      output: Output directory, whose `unconfirmed/` holds their calibration.
      earlier: The result that may be replaced.
      workers: The workers of the pipelines.
      scoring: How losses of the holdout are computed.
      tell: Called with a pipeline's counters and its seconds.

    Raises:
      PipelineError: If a pipeline fails.
      UsageError: If other generations are in the way.
    """
    unconfirmed, digest = joined(output, UNCONFIRMED), plan.digest
    found = CalibrationOutcome(
        manifest=read_manifest(joined(unconfirmed, MANIFEST)),
        rows=read_risk_table(joined(unconfirmed, RISK_TABLE), RiskRow),
        failures=read_failures(unconfirmed),
    )
    part, exit_head = set_part(plan, CONFIRMING), sweep.request.exit_head
    assert part is not None
    asked = thresholds_to_confirm(found.manifest.calibrations, plan)
    sweeps = {
        variant: sweep.that_confirms(thresholds, variant=variant, part=part) for variant, thresholds in asked.items()
    }
    if sweeps:
        say(_in_words(sweeps))
        stored = _begun(sweeps, joined(output, CONFIRMATION))
        confirms = ConfirmThresholds(
            found,
            plan=plan,
            plan_digest=digest,
            stored=stored,
            decoder=BATCH,
            exit_head=exit_head,
            scoring=scoring,
        )
        for number, variant in enumerate(sweeps, start=1):
            start = time.monotonic()
            pipeline = workers.new_pipeline()
            with workers.shown_progress() as progress:
                assigned = sweeps[variant].assignment(stored[variant].directory)
                last = decoded(pipeline, sweeps[variant], [assigned], workers=workers, progress=progress)
                if number == len(sweeps):
                    before = _taken(pipeline, list(stored.values())[:-1])
                    publishes = WriteManifest(output, earlier)
                    _ = (*before, last) | "ConfirmThresholds" >> confirms | "WriteManifest" >> publishes
                metrics = run_pipeline(pipeline)
            tell(metrics, seconds=time.monotonic() - start)
    else:
        outcome = confirmed_outcome(found, {}, plan=plan, digest=digest, decoder=BATCH, exit_head=exit_head)
        publish(output, outcome.manifest, rows=outcome.rows, failures=outcome.failures, earlier=earlier)
    remove_folder(unconfirmed, inside=output)


def refuse_left_confirmation(output: str) -> None:
    """Refuses an output directory with examples that confirmed thresholds chosen in another run.

    Raises:
      UsageError: If there are some.
    """
    folder = joined(output, CONFIRMATION)
    if SweepHome(folder).begun_shards() is not None:
        raise UsageError(
            f"--output {output}: holds {CONFIRMATION}/ of a run that did not finish. Pass --resume to go on with it, "
            "--overwrite to begin again, or choose another directory."
        )


def remove_left(output: str, *, overwrite: bool) -> None:
    """Removes the thresholds an earlier run chose in an output directory, and with `overwrite` the decoded holdout."""
    remove_folder(joined(output, UNCONFIRMED), inside=output)
    if overwrite:
        remove_folder(joined(output, CONFIRMATION), inside=output)


def _begun(sweeps: Mapping[Variant | None, "PreparedSweep"], output: str) -> dict[Variant | None, StoredGenerations]:
    """Returns the folders into which the holdout is decoded, with the generations of an earlier run."""
    jobs = [each.job() for each in sweeps.values()]
    home = SweepHome(output)
    home.begin(jobs, resume=home.begun_shards() is not None, overwrite=False, tell=say)
    return {
        variant: StoredGenerations(directory=home.next_folder(job), job=job)
        for variant, job in zip(sweeps, jobs, strict=True)
    }


def _taken(pipeline: beam.Pipeline, stored: Sequence[StoredGenerations]) -> list[beam.PCollection]:
    """Adds the shards that are already decoded to a pipeline."""
    return [
        pipeline | f"TakeVariant{number}" >> beam.Create([FinishedSweep.read(each.directory, each.job)])
        for number, each in enumerate(stored)
    ]


def _in_words(sweeps: Mapping[Variant | None, "PreparedSweep"]) -> str:
    """Returns a clause that says what is decoded now."""
    named = "; ".join(
        ", ".join(f"{threshold:g}" for threshold in each.settings.thresholds)
        + ("" if variant is None else f" ({variant.in_words()})")
        for variant, each in sweeps.items()
    )
    count = sum(len(each.settings.thresholds) for each in sweeps.values())
    return f"confirming {'threshold' if count == 1 else 'thresholds'} {named} by examples that chose nothing"
