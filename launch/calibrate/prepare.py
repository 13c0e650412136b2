"""Checks of a calibration request before any worker starts: all refusals happen here."""

import dataclasses
import functools
import os
from collections.abc import Callable, Sequence

from apache_beam.options.pipeline_options import PipelineOptions

from calm_beam.calibration.asked_data import groups_in_words
from calm_beam.calibration.guarantee import specs_of
from calm_beam.calibration.plan import PlanTerms, settled_plan
from calm_beam.calibration.publish import EarlierResult, RunProvenance
from calm_beam.decoding.settings import DecodeSettings
from calm_beam.inputs.preview import check_parts_of_data, count_examples
from calm_beam.launch.flags import UsageError, naming
from calm_beam.launch.flags.shared_options import checked_metrics, find_data, find_folder, metric_settings
from calm_beam.launch.runners import Workers
from calm_beam.launch.runners.dataflow import paths_by_flag
from calm_beam.launch.terminal import say
from calm_beam.manifest import MANIFEST, AskedTest, CostRecord, ParetoPlan, least_units, too_few_in_words
from calm_beam.manifest.files import FAILURES, REPORT, RISK_TABLE
from calm_beam.outputs.scoring import Scoring
from calm_beam.outputs.sharding import default_shards
from calm_beam.storage import check_writable, joined

from .confirm import refuse_left_confirmation
from .request import MEASURE, CalibrateRequest
from .run import CalibrationRun
from .sources import DecodedSource, Source, begun_shards, decoded_source, prepared_sweep, stored_source

_ONE_WAY = "exits: softmax at every layer"


def prepare(request: CalibrateRequest, options: PipelineOptions) -> CalibrationRun:
    """Returns the run, after all checks that are possible before a worker starts."""
    if request.is_demo:
        say("no --checkpoint and no --data: calibrating the demo model on the demo data")
    stored = None if request.generations is None else stored_source(request, request.generations)
    workers = Workers.prepared(
        options,
        accelerator=request.device,
        paths=_workers_paths(request),
        num_shards=lambda: stored.job.num_shards if stored else _asked_shards(request),
    )
    settings_of_metrics = metric_settings(request)
    full_names = dict(zip(request.metrics, checked_metrics(request.metrics, settings_of_metrics), strict=True))
    # Errors in these are reported before the model is loaded.
    specs = specs_of(request.asked_of(full_names), joint=request.joint)
    output, earlier = _checked_output(request)
    request, why_one_way = settled_exits(request, workers)
    source: Source | None = stored
    cost = None
    is_warned = False
    if source is None:
        request, cost, source, is_warned = _decoded(request, output, earlier=earlier, workers=workers, tests=specs)
    _check_servable(source.settings)
    if request.part is not None:
        _check_confirmable(source, request, output=output, workers=workers)
    if request.variants and workers.template:
        raise UsageError(
            "every variant is a pipeline of its own, and a template is only one. Give one value of each list."
        )
    if (source.blocks > 1 or request.sequential) and workers.template:
        given = "--sequential" if request.sequential else "--sweep=lazy"
        raise UsageError(f"{given} decides between pipelines what to decode, which a template cannot.")
    names: list[str] = []
    if request.group_key is not None:
        # Only names are read: no loss has been seen.
        groups = source.data.groups()
        say(groups_in_words(groups, key=request.group_key))
        names = [group.name for group in groups]
    plan = settled_plan(
        # The request includes the candidates, if the tool has chosen some.
        request.asked_of(full_names),
        source.job,
        source.data,
        groups=names,
        joint=request.joint,
        serve=request.serve,
        terms=PlanTerms(
            seed=request.seed,
            on_error=request.on_error,
            sequential=request.stop_plan,
            pareto=request.pareto,
            holdout_share=request.holdout_share,
            near_ties=request.near_ties,
        ),
        settings=source.settings,
    )
    if plan.sequential is not None:
        # The rule may wait for something that never comes.
        plan.sequential.rule(plan.thresholds)
    # Printed after all checks, so that a refusal is one line.
    if why_one_way is not None:
        say(why_one_way)
    if not is_warned:
        warn_of_too_few(plan.tests, source.data.examples, plan.pareto)
    provenance = RunProvenance.of_job(source.job, plan.tests, settings=source.settings)
    return CalibrationRun(
        source=source,
        plan=plan,
        provenance=dataclasses.replace(provenance, cost=cost),
        output=output,
        earlier=earlier,
        overwrites=request.overwrite,
        scoring=Scoring(max_failures=request.max_failures, metric_settings=settings_of_metrics),
        workers=workers,
    )


def warn_of_too_few(
    tests: Sequence[AskedTest], count: Callable[..., int | None], pareto: ParetoPlan | None = None
) -> bool:
    """Warns of promises that so few examples cannot prove, and returns whether there are some.

    Args:
      tests: The promises.
      count: Returns the number of examples; None if there are more than `at_most`.
      pareto: How several variants are tested, if there are some.
    """
    units = count(at_most=max(least_units(test, pareto) for test in tests) - 1)
    words = "" if units is None else too_few_in_words(tests, units, pareto)
    if words:
        say(f"caution: {words}")
    return bool(words)


def settled_exits(request: CalibrateRequest, workers: Workers) -> tuple[CalibrateRequest, str | None]:
    """Returns a request in which the tool chooses how tokens exit only if it can, and a line why it does not.

    Args:
      request: The request. There is no line if it names a measure or layers, or asks for the choice.
      workers: The workers of the pipelines.
    """
    if request.exits is not None or request.candidates or request.says_rule:
        return request, None
    if request.generations is not None:
        return request, f"exits: as they were decoded, since {request.against_auto}"
    if request.says_exits is not None:
        return request, f"{_ONE_WAY}, since --{request.says_exits} says how tokens exit"
    if request.against_auto is not None:
        return request, f"{_ONE_WAY}, since {request.against_auto}"
    if workers.template:
        why = "every way of exiting is a pipeline of its own, and a template is only one"
        return _by_one_way(request), f"{_ONE_WAY}, since {why}"
    return request, None


def _by_one_way(request: CalibrateRequest) -> CalibrateRequest:
    return dataclasses.replace(request, confidence=(MEASURE,))


def _decoded(
    request: CalibrateRequest, output: str, *, earlier: EarlierResult, workers: Workers, tests: Sequence[AskedTest]
) -> tuple[CalibrateRequest, CostRecord | None, Source, bool]:
    """Returns the source that decodes now, with the candidates of the request and the cost of a token by each.

    Before it measures for minutes, it warns of `tests` that no candidate could prove on so few examples; the last value
    returned is whether it did.
    """
    sweep, cost, is_warned = prepared_sweep(request, output, workers=workers), None, False
    if request.is_auto:
        # Imported here, since it needs JAX.
        from .auto import CannotChooseError, with_candidates

        is_warned = warn_of_too_few(tests, functools.partial(count_examples, sweep.data))
        try:
            request, cost = with_candidates(request, sweep, output=output, runs_here=workers.are_here)
        except CannotChooseError as error:
            if request.exits is not None:
                raise UsageError(f"--exits=auto: {error}.") from error
            say(f"{_ONE_WAY}, since {error}")
            request = _by_one_way(request)
            # Prepared again, since the grid may have changed.
            sweep = prepared_sweep(request, output, workers=workers)
    source = decoded_source(request, sweep, output=output, earlier=earlier, workers=workers)
    return request, cost, source, is_warned


def _check_confirmable(source: Source, request: CalibrateRequest, *, output: str, workers: Workers) -> None:
    """Refuses a calibration that cannot be confirmed, before anything is decoded."""
    if workers.template:
        raise UsageError(
            "--holdout_share decodes at thresholds that are chosen first, by a pipeline of its own, and a template is "
            "only one. Leave it out."
        )
    try:
        source.settings.rule.check_served()
    except ValueError as error:
        raise UsageError(f"--holdout_share: {error}") from error
    assert isinstance(source, DecodedSource)
    assert request.part is not None
    check_parts_of_data(source.sweep.data, request.part)
    if not request.resume and not request.overwrite:
        refuse_left_confirmation(output)


def _workers_paths(request: CalibrateRequest) -> list[tuple[str, str | None]]:
    """Returns the paths that workers read or write, each with its flag."""
    model = None if request.generations is not None else request.named_model or request.model_path
    return paths_by_flag(
        {
            "checkpoint": model,
            "vocabulary": request.vocabulary,
            "data": request.patterns,
            "generations": request.generations,
            "bleurt_checkpoint": request.bleurt_checkpoint,
            "output": os.fspath(request.output),
        }
    )


def _asked_shards(request: CalibrateRequest) -> int:
    """Returns the number of shards of the data; raises UsageError or OSError like `find_files`."""
    asked = begun_shards(request, find_folder(request.output))
    if asked is not None:
        return asked
    return default_shards(find_data(request), round_examples=request.examples_of_a_round)


def _check_servable(settings: DecodeSettings) -> None:
    """Refuses settings that a manifest cannot express, and warns of those that can be certified but not served."""
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


def _checked_output(request: CalibrateRequest) -> tuple[str, EarlierResult]:
    """Returns the directory to write to, and the result that it holds now."""
    output = find_folder(request.output)
    with naming("--output"):
        earlier = EarlierResult.found_in(output)
        # All are checked now: otherwise a blocked last file would be found only after hours.
        for name in (MANIFEST, RISK_TABLE, FAILURES, REPORT):
            check_writable(joined(output, name))
    earlier.check_may_go(output, overwrite=request.overwrite or request.resume)
    return output, earlier
