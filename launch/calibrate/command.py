"""What `calm-beam calibrate` does once its flags are parsed: check everything, run, tell."""

import argparse
import dataclasses
import functools
import itertools
import time
from collections.abc import Iterator, Sequence

from apache_beam.options.pipeline_options import PipelineOptions

from calm_beam.calibration.file_names import FAILURES, REPORT, RISK_TABLE
from calm_beam.calibration.fingerprint import content_sum_of, fingerprint_text
from calm_beam.calibration.groups import groups_in_words
from calm_beam.calibration.guarantee import all_specs, default_tests_in_words, place_of_served
from calm_beam.calibration.plan import as_settled_before, gone_on_with, plan_of_job, single_losses
from calm_beam.calibration.provenance import RunProvenance
from calm_beam.calibration.publish import EarlierResult
from calm_beam.decoding.settings import DecodeSettings
from calm_beam.inputs import read_examples
from calm_beam.inputs.set_parts import CALIBRATING, SetPart
from calm_beam.launch.flags import UsageError, as_usage, naming
from calm_beam.launch.flags.data import asked_shards, reading_of
from calm_beam.launch.flags.metrics import checked_metrics, metric_settings
from calm_beam.launch.report.command import report_after
from calm_beam.launch.runners import Workers, make_runner
from calm_beam.launch.runners.dataflow import job_paths
from calm_beam.launch.terminal import say, tell
from calm_beam.launch.terminal.summary import print_summary
from calm_beam.manifest import (
    MANIFEST,
    EarlierPlan,
    Manifest,
    ManifestError,
    ParetoPlan,
    Plan,
    PlannedTest,
    SequentialPlan,
    plans_in_words,
    read_manifest,
)
from calm_beam.manifest.plan_list import PlanList
from calm_beam.metrics.registry import METRICS, is_binary, is_bleurt
from calm_beam.outputs import DecodeJob, FinishedSweep
from calm_beam.outputs.folder import SweepHome
from calm_beam.outputs.shard_order import shard_in_order, with_unique_ids
from calm_beam.outputs.timing import RunTiming
from calm_beam.risk.pvalues import P_VALUES
from calm_beam.storage import absolute, check_writable, is_file, joined

from .confirm import ConfirmedRun, check_parts_of_data, refuse_left_confirmation
from .flags import fill_in_defaults
from .price import price_of_tests
from .run import CalibrationRun
from .sequential import SequentialRun, can_continue
from .sources import Block, DecodedSource, Source, decoded_source, stored_source
from .variants import VariantsRun

# Flags of what workers read or write.
_WORKERS_PATHS = ("checkpoint", "vocabulary", "data", "generations", "bleurt_checkpoint", "output")


def calibrate(flags: argparse.Namespace, options: PipelineOptions, *, began: float | None = None) -> int:
    """Calibrates as the flags of `calibrate_parser` say, tells about it and returns the exit status of the command.

    `began` is when the command was started, in seconds since 1970; now if omitted.
    """
    began = time.time() if began is None else began
    with as_usage():
        fill_in_defaults(flags)
        run = _prepared(flags, options)
        continued = None
        if flags.resume and run.earlier.manifest:
            manifest = read_manifest(joined(run.output, MANIFEST))
            if not can_continue(manifest, run.plan):
                return _say_what_is_done(run, flags, manifest)
            continued = manifest
        make_runner(options)
        # Before an earlier result is taken away, which shows what was asked for it.
        plans = PlanList(run.source.home)
        if flags.resume and flags.p_value is None:
            run = dataclasses.replace(run, plan=gone_on_with(run.plan, plans.plans()))
        first = run.source.next_block()
        asked = run.source.asked_plan(run.plan, plans)
        earlier = plans.ask(asked, is_answered=_shows_losses_early(run, flags))
        run = dataclasses.replace(run, provenance=dataclasses.replace(run.provenance, earlier_plans=earlier))
    # Now, so that a log can show later what had been settled by then.
    _say_plan(run.plan, earlier, is_default=flags.p_value is None)
    start = time.monotonic()
    if flags.confirm_share is None:
        finished = _executed(run, flags, first=first, continued=continued)
    else:
        finished = ConfirmedRun(run).execute(lambda chooses: _executed(chooses, flags, first=first))
    if finished is None:
        tell(f"Template: {run.workers.template}. It has not run.")
        return 0
    try:
        plans.answer(asked)
    except UsageError as error:
        # The manifest stands, and shows by itself that there was an answer.
        say(f"caution: {error}")
    manifest, folder = finished
    try:
        print_summary(manifest, run.output, seconds=time.monotonic() - start, remarks=_remarks(run, manifest))
    finally:
        # Last, since the manifest stands by itself: a report that fails takes nothing away, and can be built again.
        # Also if nobody reads the summary any more.
        report_after(run.output, folder, calibrate_flags=flags, model=run.source.model)
    # The time of a run says nothing about one of several sweeps, or about one that was not all.
    if not run.source.is_stored and not flags.variants and flags.confirm_share is None:
        RunTiming(began=began, seconds=time.time() - began).write(folder)
    return 0


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


def _shows_losses_early(run: CalibrationRun, flags: argparse.Namespace) -> bool:
    """Returns whether something of what is found may be seen before the run has ended."""
    return run.source.is_stored or flags.sequential or flags.sweep == "lazy" or flags.confirm_share is not None


def _executed(
    run: CalibrationRun, flags: argparse.Namespace, *, first: Block, continued: Manifest | None = None
) -> tuple[Manifest, str] | None:
    """Decodes and calibrates; returns what `CalibrationRun.execute` does."""
    if flags.sequential:
        return SequentialRun(run, continued=continued).execute(first)
    if flags.variants:
        return VariantsRun(run).execute(first)
    return run.execute(first)


def _prepared(flags: argparse.Namespace, options: PipelineOptions) -> CalibrationRun:
    """Returns the run, all of which has been found good that can be before a worker starts."""
    stored = None if flags.generations is None else stored_source(flags)
    if flags.resume and flags.num_shards is None:
        flags.num_shards = SweepHome(absolute(flags.output)).begun_shards()
    workers = Workers.prepared(
        options,
        accelerator=flags.accelerator,
        paths=job_paths(flags, _WORKERS_PATHS),
        num_shards=lambda: stored.job.num_shards if stored else asked_shards(flags),
    )
    _check_groups(flags)
    metrics = checked_metrics(flags.metric, metric_settings(flags))
    _specs(flags, metrics)
    output, earlier = _checked_output(flags)
    source: Source = stored or decoded_source(flags, output, earlier=earlier, workers=workers)
    _check_servable(source.settings)
    if flags.part is not None:
        _check_confirmable(source, flags, output=output, workers=workers)
    if flags.variants and workers.template:
        raise UsageError(
            "every variant is a pipeline of its own, and a template is only one. Give one value of each list."
        )
    if (source.blocks > 1 or flags.sequential) and workers.template:
        given = "--sequential" if flags.sequential else "--sweep=lazy"
        raise UsageError(f"{given} decides between pipelines what to decode, which a template cannot.")
    names: list[str] = []
    if flags.group_key is not None:
        # By names alone: no loss has been seen.
        groups = source.groups()
        say(groups_in_words(groups, key=flags.group_key))
        names = [group.name for group in groups]
    losses = None
    if flags.p_value is None:
        losses = single_losses(source, thresholds=len(source.settings.thresholds) * max(1, len(flags.variants)))
    specs = _specs(flags, metrics, groups=names, losses=losses)
    serve = None if flags.serve is None else place_of_served(flags.serve, specs)
    plan = plan_of_job(
        specs,
        source.job,
        settings=source.settings,
        joint_epsilon=flags.epsilon[0] if flags.joint else None,
        seed=flags.seed,
        on_error=flags.on_error,
        sequential=_sequential(flags),
        pareto=ParetoPlan(variants=flags.variants, choosing_share=flags.choosing_share) if flags.variants else None,
        confirm_share=flags.confirm_share,
        near_ties=flags.near_ties,
        serve=serve,
    )
    if plan.sequential is not None:
        # It may wait for what never comes.
        plan.sequential.rule(plan.thresholds)
    return CalibrationRun(
        source=source,
        plan=plan,
        provenance=RunProvenance.of_job(source.job, specs, settings=source.settings),
        output=output,
        earlier=earlier,
        overwrites=flags.overwrite,
        max_failures=flags.max_failures,
        metric_settings=metric_settings(flags),
        workers=workers,
    )


def _check_confirmable(source: Source, flags: argparse.Namespace, *, output: str, workers: Workers) -> None:
    """Refuses what cannot be confirmed, before anything is decoded."""
    if workers.template:
        raise UsageError(
            "--confirm_share decodes at thresholds that are chosen first, by a pipeline of its own, and a template is "
            "only one. Leave it out."
        )
    try:
        source.settings.rule.check_served()
    except ValueError as error:
        raise UsageError(f"--confirm_share: {error}") from error
    assert isinstance(source, DecodedSource)
    check_parts_of_data(source.sweep.data, flags.part)
    if not flags.resume and not flags.overwrite:
        refuse_left_confirmation(output)


def _sequential(flags: argparse.Namespace) -> SequentialPlan | None:
    if not flags.sequential:
        return None
    try:
        return SequentialPlan(
            round_examples=flags.round_examples,
            stop_at_threshold=flags.stop_at_threshold,
            stop_at_layers=flags.stop_at_layers,
            stop_gain=flags.stop_gain,
        )
    except ManifestError as error:
        raise UsageError(f"--{error}.") from error


def _say_what_is_done(run: CalibrationRun, flags: argparse.Namespace, manifest: Manifest) -> int:
    """Says that there is nothing left to do, or that what is done is something else; returns the exit status."""
    path, job, plan = joined(run.output, MANIFEST), run.source.job, run.plan
    if manifest.plan is not None and manifest.plan.most_confirmed == 1:
        # As an earlier version asked it: of the chosen threshold alone.
        plan = dataclasses.replace(plan, confirm_path=None)
    if flags.p_value is None and manifest.plan == as_settled_before(plan):
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
    confirmed = manifest.confirmation
    if manifest.data.fingerprint != _data_fingerprint(run, flags, part=flags.part) or (
        confirmed is not None
        and confirmed.data.fingerprint != _data_fingerprint(run, flags, part=flags.part.that_confirms())
    ):
        raise UsageError(
            f"--resume: {path} is finished, and the data have changed since: it is about the examples that were there. "
            "Restore them, calibrate the new ones with another --output, or pass --overwrite to begin anew."
        )
    say(f"--resume: {path} is finished; nothing is left to do.")
    # It may have been killed while it wrote its report.
    SweepHome(run.output).remove_temporary_files()
    if not is_file(joined(run.output, REPORT)):
        say(f"its report is missing: calm-beam report --calibration={run.output}")
    print_summary(manifest, run.output, seconds=0, remarks=_remarks(run, manifest))
    return 0


def _remarks(run: CalibrationRun, manifest: Manifest) -> Iterator[str]:
    return price_of_tests(manifest, None if run.source.model is None else run.source.model.sizes)


def _data_fingerprint(run: CalibrationRun, flags: argparse.Namespace, *, part: SetPart | None) -> str:
    """Returns what a manifest calls the data as they are now, or a part of them, or as much as was counted."""
    job = run.source.job
    reading = reading_of(
        flags,
        cluster_key=flags.cluster_key,
        # Generations may have groups that nothing was asked of.
        group_key=job.group_key,
        needs_references="risk" in flags.consistency,
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


def _check_groups(flags: argparse.Namespace) -> None:
    """Refuses what groups cannot be told apart by, before anything is read."""
    if flags.group_key is None:
        return
    if flags.cluster_key is not None:
        raise UsageError(
            "--group_key and --cluster_key cannot be given together: a cluster may hold prompts of several groups. "
            "Leave one of them out."
        )
    if flags.p_value is not None and P_VALUES[flags.p_value].needs_table:
        raise UsageError(
            f"--p_value={flags.p_value} needs every single loss, and those of groups are only summed. Take another "
            "one, or leave --group_key out."
        )


def _specs(
    flags: argparse.Namespace, metrics: Sequence[str], *, groups: Sequence[str] = (), losses: int | None = None
) -> tuple[PlannedTest, ...]:
    fractional = [name for name in metrics if (name in METRICS and not is_binary(name)) or is_bleurt(name)]
    if flags.p_value is not None and not P_VALUES[flags.p_value].takes_fractions and fractional:
        # Losses in between would be found, but only after everything was decoded.
        raise UsageError(
            f"--p_value={flags.p_value} is for losses of 0 and 1 only, and those of {fractional[0]} lie in between. "
            "Take hoeffding_bentkus, or --metric=exact_match."
        )
    if flags.sweep == "lazy" and flags.procedure != "fixed_sequence":
        raise UsageError(
            f"--sweep=lazy stops where fixed sequence testing fails; --procedure={flags.procedure} looks at thresholds "
            "below. Leave one of them out."
        )
    return all_specs(
        consistencies=flags.consistency,
        metrics=metrics,
        deltas=flags.delta,
        epsilons=flags.epsilon,
        tails=flags.tail,
        risk_loss=flags.risk_loss,
        p_value=flags.p_value,
        procedure=flags.procedure,
        groups=groups,
        joint=flags.joint,
        is_clustered=flags.cluster_key is not None,
        losses=losses,
    )


def _check_servable(settings: DecodeSettings) -> None:
    """Refuses what a manifest has no word for, and warns of what can be certified but not served."""
    rule = settings.rule
    if rule.token_from == "last_layer":
        raise UsageError(
            "--token_from=last_layer takes every token from the full model, so there is nothing to calibrate. decode "
            "accepts it."
        )
    if rule.needs_full_model():
        say(
            f"caution: confidence {rule.confidence} with state propagation {rule.state_propagation} runs every layer "
            "for every token. The manifest is for analysis; nothing can be served by it."
        )


def _checked_output(flags: argparse.Namespace) -> tuple[str, EarlierResult]:
    """Returns the directory to write to, and the result that it holds now."""
    with naming("--output"):
        # Absolute, since workers have folders of their own.
        output = absolute(flags.output)
        if is_file(output):
            raise UsageError(f"--output {output}: is a file, expected a directory.")
        earlier = EarlierResult.found_in(output)
        # Each of them, since what is in the way of the last would otherwise be found after hours.
        for name in (MANIFEST, RISK_TABLE, FAILURES, REPORT):
            check_writable(joined(output, name))
    if flags.resume and flags.overwrite:
        raise UsageError("--resume goes on with what is there, --overwrite begins anew: leave one of them out.")
    if earlier.manifest and not flags.overwrite and not flags.resume:
        raise UsageError(f"--output {output}: holds a manifest already. Choose another directory, or pass --overwrite.")
    return output, earlier
