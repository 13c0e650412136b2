"""The calibration itself: what `calm-beam calibrate` and `calm_beam.calibrate` both run."""

import dataclasses
import functools
import itertools
import time
from collections.abc import Sequence

from apache_beam.options.pipeline_options import PipelineOptions

from calm_beam.calibration.guarantee import default_tests_in_words
from calm_beam.calibration.plan import earlier_forms, gone_on_with
from calm_beam.inputs import read_examples
from calm_beam.inputs.set_parts import CALIBRATING, Split
from calm_beam.launch.flags import UsageError, as_usage
from calm_beam.launch.runners import make_runner
from calm_beam.launch.terminal import say
from calm_beam.manifest import MANIFEST, EarlierPlan, Manifest, Plan, plans_in_words, read_manifest
from calm_beam.manifest.plan_list import PlanList
from calm_beam.outputs import DecodeJob, FinishedSweep
from calm_beam.outputs.fingerprint import content_sum_of, fingerprint_text
from calm_beam.outputs.folder import SweepHome
from calm_beam.outputs.shard_order import shard_in_order, with_unique_ids
from calm_beam.storage import joined

from .confirm import ConfirmedRun
from .kept_cost import write_cost
from .prepare import prepare
from .request import CalibrateRequest
from .run import CalibrationRun
from .sequential import SequentialRun, can_continue
from .sources import Block
from .variants import VariantsRun


@dataclasses.dataclass(frozen=True, kw_only=True)
class Done:
    """A calibration that has come to its end.

    Attributes:
      run: What was run.
      manifest: What it found.
      folder: Its generations; None where nothing was left to do.
      seconds: What it took.
    """

    run: CalibrationRun
    manifest: Manifest
    folder: str | None
    seconds: float


def run_calibration(request: CalibrateRequest, options: PipelineOptions) -> Done | str:
    """Prepares and runs a calibration, and publishes its result; the main job of the command, and of Python.

    Args:
      request: What is asked for.
      options: Of the pipelines, among them their runner; what they leave open is filled in.

    Returns:
      What was found; or where the job is written down as a template, which has not run.

    Raises:
      UsageError: If anything that was asked for is wrong; nothing has been written.
      PipelineError: If a pipeline fails; says what is left, and how to go on.
      KeyboardInterrupt: If it is interrupted; says the same.
    """
    with as_usage():
        run = prepare(request, options)
        continued = None
        if request.resume and run.earlier.manifest:
            manifest = read_manifest(joined(run.output, MANIFEST))
            if not can_continue(manifest, run.plan):
                _check_is_done(run, request, manifest)
                return Done(run=run, manifest=manifest, folder=None, seconds=0)
            continued = manifest
        make_runner(options)
        # Before an earlier result is taken away, which shows what was asked for it.
        plans = PlanList(run.source.home)
        if request.resume:
            plan = gone_on_with(run.plan, plans.plans(), is_open=request.leaves_tests_open)
            run = dataclasses.replace(run, plan=plan)
        first = run.source.next_block()
        asked = run.source.data.asked(run.plan, plans, command=run.source.command)
        earlier = plans.ask(asked, is_answered=_shows_losses_early(run, request))
        run = dataclasses.replace(run, provenance=dataclasses.replace(run.provenance, earlier_plans=earlier))
        if run.provenance.cost is not None:
            write_cost(run.output, run.provenance.cost, model=run.source.job.model.fingerprint)
    # Now, so that a log can show later what had been settled by then.
    _say_plan(run.plan, earlier, is_default=request.leaves_tests_open)
    start = time.monotonic()
    if request.holdout_share is None:
        finished = _executed(run, request, first=first, continued=continued)
    else:
        finished = ConfirmedRun(run).execute(lambda chooses: _executed(chooses, request, first=first))
    if finished is None:
        assert run.workers.template is not None
        return run.workers.template
    try:
        plans.answer(asked)
    except UsageError as error:
        # The manifest stands, and shows by itself that there was an answer.
        say(f"caution: {error}")
    manifest, folder = finished
    seconds = time.monotonic() - start
    if manifest.cost is not None and manifest.cost.was_measured:
        # Here, since it loads JAX.
        from .speed import with_speeds

        manifest = with_speeds(run, manifest, request)
    return Done(run=run, manifest=manifest, folder=folder, seconds=seconds)


def _say_plan(plan: Plan, earlier: Sequence[EarlierPlan], *, is_default: bool) -> None:
    """Says what is settled, and what was asked of the outputs before; `is_default` if no p-value is named."""
    say(f"plan {plan.digest}")
    if is_default:
        say(default_tests_in_words(plan.tests))
    if words := plans_in_words(earlier):
        say(words)
    if len(plan.tests) > 1 and plan.serve is None and plan.joint_epsilon is None:
        say(
            f"{len(plan.tests)} entries hold each alone, and the plan does not say which is served. To pick one "
            "after seeing them voids its guarantee: name it now with --serve, or pass --joint."
        )


def _shows_losses_early(run: CalibrationRun, request: CalibrateRequest) -> bool:
    """Returns whether something of what is found may be seen before the run has ended."""
    return run.source.is_stored or request.sequential or request.sweep == "lazy" or request.holdout_share is not None


def _executed(
    run: CalibrationRun, request: CalibrateRequest, *, first: Block, continued: Manifest | None = None
) -> tuple[Manifest, str] | None:
    """Decodes and calibrates; returns what `CalibrationRun.execute` does."""
    if request.sequential:
        return SequentialRun(run, continued=continued).execute(first)
    if run.plan.pareto is not None:
        return VariantsRun(run).execute(first)
    return run.execute(first)


def _check_is_done(run: CalibrationRun, request: CalibrateRequest, manifest: Manifest) -> None:
    """Says that there is nothing left to do.

    Raises:
      UsageError: If what is done is something else.
    """
    path, job, plan = joined(run.output, MANIFEST), run.source.job, run.plan
    if manifest.plan is not None and manifest.plan.most_confirmed == 1:
        # As an earlier version asked it: of the chosen threshold alone.
        plan = dataclasses.replace(plan, confirm_path=None)
    if manifest.plan in earlier_forms(plan, is_open=request.leaves_tests_open):
        plan = manifest.plan
    if manifest.plan != plan or manifest.data.patterns != job.patterns:
        ended = manifest.sequential
        if manifest.plan is not None and manifest.plan.confirm_share is not None:
            raise UsageError(
                f"--resume: {path} is finished, and was asked for something else. The examples that confirm have been "
                "looked at, and could not confirm what is chosen now: take fresh data and another --output. "
                "--overwrite begins anew, which proves something only if nobody has seen what was found here."
            )
        if ended is not None and ended.rounds < ended.of_rounds:
            raise UsageError(
                f"--resume: {path} stopped after {ended.rounds} of {ended.of_rounds} rounds, and was asked for "
                "something else. Another rule to stop may take it further, with all else as it was; other tests need "
                "another --output, or --overwrite."
            )
        raise UsageError(
            f"--resume: {path} is finished, and was asked for something else. Whatever is asked after its results were "
            "seen needs fresh examples and another --output. --overwrite begins anew, and the manifest then says what "
            "had been asked before."
        )
    confirmed, part = manifest.confirmation, request.part
    confirms = None if part is None else part.that_confirms()
    if manifest.data.fingerprint != _data_fingerprint(run, request, part=part) or (
        confirmed is not None and confirmed.data.fingerprint != _data_fingerprint(run, request, part=confirms)
    ):
        raise UsageError(
            f"--resume: {path} is finished, and the data have changed since: it is about the examples that were there. "
            "Restore them, calibrate the new ones with another --output, or pass --overwrite to begin anew."
        )
    say(f"--resume: {path} is finished; nothing is left to do.")
    # It may have been killed while it wrote its report.
    SweepHome(run.output).remove_temporary_files()


def _data_fingerprint(run: CalibrationRun, request: CalibrateRequest, *, part: Split | None) -> str:
    """Returns what a manifest calls the data as they are now, or a part of them, or as much as was counted."""
    job = run.source.job
    reading = request.reading(
        cluster_key=request.cluster_key,
        # Generations may have groups that nothing was asked of.
        group_key=job.group_key,
        needs_references=request.needs_references,
    )
    examples = (read_examples(path, reading, file_index=index) for index, path in enumerate(job.files))
    unique = with_unique_ids(itertools.chain.from_iterable(examples))
    if part is not None:
        unique = [example for example in unique if part.takes(example)]
    if job.order is not None and (part is None or part.name == CALIBRATING):
        folder = SweepHome(run.output).counted_folder()
        counted = {shard.shard for shard in FinishedSweep.read(folder, DecodeJob.read(folder), or_stopped=True).shards}
        shard_of = functools.partial(shard_in_order, salt=job.order, num_shards=job.num_shards)
        unique = [example for example in unique if shard_of(example) in counted]
    return fingerprint_text(content_sum_of(unique))
