"""`calm-beam calibrate`: the main job, as a Beam pipeline.

With no flags it calibrates the embedded model on the embedded data. Writes `manifest.json`, `risk_table.csv` and
`generations/` into `--output`, and `failures.jsonl` where examples failed.

Generations are kept while they are made: when a run fails or is killed, the same command with `--resume` decodes the
missing shards only. `--generations=DIR` calibrates generations that are there already, for other metrics, tolerances or
tests, or a coarser grid: no model is needed, and nothing is decoded.

Who calibrates the same data again and again until the result pleases chooses by the data what was promised before
seeing them. Several tolerances and metrics belong into one call: its manifest lists them all, and `--joint` lets them
hold together.
"""

import argparse
import dataclasses
import datetime
import sys
import time
from collections.abc import Callable, Sequence

import apache_beam as beam

from calm_beam.calibration import Plan, RunRecord, Spec, all_specs
from calm_beam.calibration.plan import block_ends
from calm_beam.calibration.publish import REPORT, EarlierResult
from calm_beam.calibration.specs import LOSSES
from calm_beam.decoding.settings import DecodeSettings, descending_grid, uniform_grid
from calm_beam.demo import embedded
from calm_beam.generation_folder import Completion, DecodeJob, StoredGenerations
from calm_beam.manifest import MANIFEST, ManifestError, read_manifest
from calm_beam.metrics.registry import METRICS, checked_score, get_metric
from calm_beam.risk.fwer import PROCEDURES
from calm_beam.risk.pvalues import P_VALUES
from calm_beam.storage import absolute, check_writable, is_file, joined, make_folder
from calm_beam.transforms import CalibrateGenerations, DecodeExamples, ReadExamples
from calm_beam.transforms.progress import ProgressLog

from .dataflow import add_job_flags, job_paths, prepare_job, template_location
from .flags import (
    FlagParser,
    UsageError,
    add_decode_flags,
    naming,
    numbers,
    parse_flags,
    texts,
    whole_number,
)
from .generations import (
    after_failure,
    begin_generations,
    find_generations,
    keep_last_generations,
    next_generations,
)
from .progress import shown_progress
from .report import report_after
from .run_metrics import metrics_in_words
from .runners import PipelineError, is_local, make_runner, may_report_progress, run_pipeline
from .summary import print_summary
from .versions import run_versions

# What decides generations cannot be chosen for those that are there already.
_DECODING_FLAGS = (
    "--checkpoint",
    "--vocabulary",
    "--extra_ids",
    "--data",
    "--data_format",
    "--task_prefix",
    "--max_input_length",
    "--on_long",
    "--max_decode_length",
    "--batch_size",
    "--token_budget",
    "--confidence",
    "--schedule",
    "--tau",
    "--state_propagation",
    "--token_from",
    "--min_exit_layer",
    "--exit_interval",
    "--num_shards",
    "--model_copies",
    "--accelerator",
    "--sweep",
    "--resume",
)


@dataclasses.dataclass(frozen=True, kw_only=True)
class _Part:
    """Generations at the upper part of the grid, or at all of it.

    Attributes:
      job: What they are generations of.
      folder: Makes their folder ready and returns it.
      completions: Adds what makes them complete to a pipeline: reading and decoding, or nothing.
    """

    job: DecodeJob
    folder: Callable[[], str]
    completions: Callable[[beam.Pipeline, str, ProgressLog], beam.PCollection]


@dataclasses.dataclass(frozen=True, kw_only=True)
class _Source:
    """Where the generations of a run come from.

    Attributes:
      job: What all of them are generations of.
      settings: The job's, with the grid that is calibrated.
      parts: What is made ready one after the other, each with more of the grid, until no test goes on.
    """

    job: DecodeJob
    settings: DecodeSettings
    parts: tuple[_Part, ...]


def main(argv: Sequence[str]) -> int:
    """Runs the command and returns its exit status."""
    parser = _parser()
    try:
        flags, options = parse_flags(parser, argv)
        _fill_in_defaults(flags)
        stored = None if flags.generations is None else _stored_source(flags, argv)
        prepare_job(
            options,
            accelerator=flags.accelerator,
            paths=job_paths(flags),
            num_shards=stored.job.num_shards if stored else flags.num_shards,
        )
        specs = _specs(flags)
        output, earlier = _checked_output(flags)
        source = stored or _decoded_source(flags, output, earlier)
        _check_servable(source.settings)
        plan = _plan(flags, source, specs)
        if flags.resume and earlier.manifest:
            return _say_what_is_done(output, plan, source.job)
        if len(source.parts) > 1 and template_location(options):
            raise UsageError("--sweep=lazy decides between pipelines what to decode, which a template cannot.")
        make_runner(options)
        folder = source.parts[0].folder()
    except (UsageError, ValueError) as error:
        print(f"calm-beam calibrate: {error}", file=sys.stderr)
        return 2
    except OSError as error:
        print(f"calm-beam calibrate: {error}", file=sys.stderr)
        return 1
    # Now, so that a log can show later what had been settled by then.
    print(f"plan {plan.record().digest}", file=sys.stderr)
    record = _record(source)
    start = time.monotonic()
    try:
        make_folder(output)
        for place, part in enumerate(source.parts):
            if place:
                folder = part.folder()
            thresholds = part.job.settings.thresholds
            if len(source.parts) > 1:
                print(f"thresholds down to {thresholds[-1]:g} of {plan.thresholds[-1]:g}", file=sys.stderr)
            pipeline = beam.Pipeline(runner=make_runner(options), options=options)
            with shown_progress(enabled=may_report_progress(options)) as progress:
                _ = part.completions(pipeline, folder, progress) | "CalibrateGenerations" >> CalibrateGenerations(
                    plan=plan,
                    # Taken before any example is decoded, and compared with what was tested at the end.
                    plan_digest=plan.record().digest,
                    record=record,
                    stored=StoredGenerations(directory=folder, num_shards=part.job.num_shards, thresholds=thresholds),
                    tested=len(thresholds) if len(source.parts) > 1 else len(plan.thresholds),
                    output=output,
                    # What decodes has taken an earlier result away before.
                    earlier=earlier if stored or not flags.overwrite else EarlierResult(),
                    max_failures=flags.max_failures,
                )
                metrics = run_pipeline(pipeline)
            if template := template_location(options):
                print(f"Template: {template}. It has not run.")
                return 0
            if not stored:
                print(metrics_in_words(metrics, seconds=time.monotonic() - start), file=sys.stderr)
            if is_file(joined(output, MANIFEST)):
                keep_last_generations(output, [part.job for part in source.parts[: place + 1]])
                break
        manifest = read_manifest(joined(output, MANIFEST))
    except (PipelineError, ManifestError, OSError) as error:
        left = "" if stored else after_failure(output, folder, is_over=is_local(options))
        print(f"calm-beam calibrate: {error} {left}".rstrip(), file=sys.stderr)
        return 1
    except KeyboardInterrupt as interrupt:
        # What goes on elsewhere has left nothing yet, and says so itself.
        if stored or interrupt.args:
            raise
        raise KeyboardInterrupt(after_failure(output, folder, is_over=is_local(options))) from interrupt
    print_summary(manifest, output, seconds=time.monotonic() - start)
    # Last, since the manifest stands by itself: a report that fails takes nothing away, and can be built again.
    report_after(output, folder, checkpoint=flags.checkpoint, vocabulary=flags.vocabulary)
    return 0


def _decoded_source(flags: argparse.Namespace, output: str, earlier: EarlierResult) -> _Source:
    """Returns generations that are decoded now, all or the missing ones."""
    # Here, since it needs JAX, which calibrating stored generations does not.
    from .setup_run import prepare_run

    needs_references = "risk" in flags.consistency
    run = prepare_run(flags, needs_references=needs_references, cluster_key=flags.cluster_key)
    job = run.job(flags, cluster_key=flags.cluster_key)
    ends = block_ends(len(job.settings.thresholds)) if flags.sweep == "lazy" else (len(job.settings.thresholds),)
    runs = [run.with_upper_part(end) for end in ends]
    jobs = [each.job(flags, cluster_key=flags.cluster_key) for each in runs]
    folders: list[str] = []

    def part(place: int) -> _Part:
        def folder() -> str:
            if place:
                folders.append(next_generations(output, jobs[place]))
            else:
                folders.append(
                    begin_generations(output, jobs, resume=flags.resume, overwrite=flags.overwrite, earlier=earlier)
                )
            return folders[-1]

        def decode(pipeline: beam.Pipeline, folder: str, progress: ProgressLog) -> beam.PCollection:
            above = None
            if place:
                thresholds = jobs[place - 1].settings.thresholds
                above = StoredGenerations(
                    directory=folders[place - 1], num_shards=flags.num_shards, thresholds=thresholds
                )
            plan = runs[place].plan(flags, folder, job=jobs[place])
            return (
                pipeline
                | "ReadExamples"
                >> ReadExamples(run.paths, flags.num_shards, needs_references, progress, flags.cluster_key)
                | "DecodeExamples"
                >> DecodeExamples(
                    dataclasses.replace(plan, above=above, goes_on=place + 1 < len(jobs)),
                    progress,
                    accelerator_hint=flags.accelerator.hint() if flags.accelerator else None,
                    needs_accelerator=flags.accelerator is not None,
                )
            )

        return _Part(job=jobs[place], folder=folder, completions=decode)

    return _Source(job=job, settings=job.settings, parts=tuple(part(place) for place in range(len(jobs))))


def _stored_source(flags: argparse.Namespace, argv: Sequence[str]) -> _Source:
    """Returns generations that are stored completely."""
    given = next((name for name in _DECODING_FLAGS if any(arg.split("=")[0] == name for arg in argv)), None)
    if given is not None:
        raise UsageError(
            f"{given} decides what is decoded, and --generations={flags.generations} is decoded already: leave one out."
        )
    with naming("--generations"):
        folder = find_generations(absolute(flags.generations))
        job = DecodeJob.read(folder)
        completion = Completion.read(folder, job)
    if flags.cluster_key != job.cluster_key:
        raise UsageError(
            f"--cluster_key is {flags.cluster_key}, but the generations in {folder} were read with {job.cluster_key}: "
            "what is drawn independently is no choice of the calibration. "
            + ("Leave it out." if job.cluster_key is None else f"Pass --cluster_key={job.cluster_key}.")
        )
    if completion.failed and flags.on_error == "fail":
        raise UsageError(
            f"{completion.failed} of the examples in {folder} could not be decoded. Pass --on_error=worst_case to "
            "count them with loss 1 at every threshold."
        )
    return _Source(
        job=job,
        settings=dataclasses.replace(job.settings, thresholds=_part_of_grid(flags, job.settings.thresholds)),
        parts=(
            _Part(
                job=job,
                folder=lambda: folder,
                completions=lambda pipeline, _, __: pipeline | "TakeGenerations" >> beam.Create([completion]),
            ),
        ),
    )


def _part_of_grid(flags: argparse.Namespace, stored: tuple[float, ...]) -> tuple[float, ...]:
    """Returns the thresholds asked for, all of which must be stored; all of those if none are asked for."""
    if flags.thresholds is not None and flags.grid_step is not None:
        raise UsageError(f"--thresholds and --grid_step={flags.grid_step:g} both give a grid: leave one of them out.")
    if flags.thresholds is not None:
        grid = descending_grid(flags.thresholds)
    elif flags.grid_step is not None:
        grid = uniform_grid(flags.grid_step)
    else:
        return stored
    missing = [f"{threshold:g}" for threshold in grid if threshold not in stored]
    if missing:
        raise UsageError(
            f"thresholds {', '.join(missing)} were not decoded: take some of "
            f"{', '.join(f'{threshold:g}' for threshold in stored)}, or decode anew."
        )
    return grid


def _say_what_is_done(output: str, plan: Plan, job: DecodeJob) -> int:
    """Says that there is nothing left to do, or that what is done is something else; returns the exit status."""
    path = joined(output, MANIFEST)
    try:
        manifest = read_manifest(path)
    except (ManifestError, OSError) as error:
        print(f"calm-beam calibrate: {error}", file=sys.stderr)
        return 1
    if manifest.plan != plan.record() or manifest.data.patterns != job.patterns:
        raise UsageError(
            f"--resume: {path} is finished, and was asked for something else. For other metrics, tolerances or tests "
            f"of the same generations pass --generations={output} and another --output; to begin anew, --overwrite."
        )
    print(f"--resume: {path} is finished; nothing is left to do.", file=sys.stderr)
    if not is_file(joined(output, REPORT)):
        print(f"its report is missing: calm-beam report --calibration={output}", file=sys.stderr)
    print_summary(manifest, output, seconds=0)
    return 0


def _parser() -> FlagParser:
    parser = FlagParser(prog="calm-beam calibrate", description=(__doc__ or "").split("\n\n")[0])
    add_decode_flags(parser, default_grid_step=0.05)
    add_job_flags(parser)
    goal = parser.add_argument_group("guarantee (lists are comma-separated; every combination is one manifest entry)")
    goal.add_argument("--consistency", type=texts, help="textual, risk; default: textual (embedded model: both)")
    goal.add_argument(
        "--metric", type=texts, help="rouge_l (default), rouge_l_unicode, token_f1, exact_match, module:function"
    )
    goal.add_argument("--delta", type=numbers, help="risk tolerances in (0, 1); default: 0.1")
    goal.add_argument(
        "--epsilon", type=numbers, default=(0.05,), help="allowed probabilities of error in (0, 1); default: 0.05"
    )
    goal.add_argument(
        "--joint", action="store_true", help="let all entries hold together, with probability 1 - epsilon"
    )
    test = parser.add_argument_group("test")
    test.add_argument(
        "--risk_loss",
        choices=LOSSES["risk"],
        help="for risk consistency; relu is the paper's; default: signed, or relu if --p_value needs losses in [0, 1]",
    )
    test.add_argument(
        "--p_value",
        choices=tuple(P_VALUES),
        help="test of one threshold; default: signed_mixture for signed losses, else hoeffding_bentkus",
    )
    test.add_argument(
        "--procedure", choices=tuple(PROCEDURES), default="fixed_sequence", help="test of the grid of thresholds"
    )
    test.add_argument("--cluster_key", help="key of a row that names its cluster, where examples are drawn in clusters")
    test.add_argument("--seed", type=whole_number(0), default=0, help="of the order in which wsr bets on examples")
    goal.add_argument("--output", default="calibration", help="directory for manifest, risk table and generations")
    test.add_argument(
        "--sweep",
        choices=("full", "lazy"),
        default="full",
        help="lazy decodes the grid in blocks from the top, until no guarantee's test goes on: the same manifest "
        "entries for less work, with generations of the upper thresholds only",
    )
    again = parser.add_argument_group("going on")
    again.add_argument(
        "--resume",
        action="store_true",
        help="go on with a run that was killed or failed: decode the missing shards only",
    )
    again.add_argument(
        "--generations",
        metavar="DIR",
        help="calibrate the generations of an earlier run, its --output or a folder below generations/, and decode "
        "nothing; --thresholds or --grid_step may take a part of its grid",
    )
    return parser


def _fill_in_defaults(flags: argparse.Namespace) -> None:
    """Sets what the user left open: the embedded task where neither model nor data were named."""
    if flags.generations is None and flags.checkpoint is None and flags.data is None:
        print("no --checkpoint and no --data: calibrating the embedded model on the embedded data", file=sys.stderr)
        flags.checkpoint = str(embedded.MODEL)
        flags.data = (str(embedded.CALIBRATION_SET),)
        if flags.grid_step is None:
            flags.thresholds = flags.thresholds or embedded.THRESHOLDS
        flags.consistency = flags.consistency or ("textual", "risk")
        flags.metric = flags.metric or ("rouge_l_unicode",)
        flags.delta = flags.delta or embedded.DELTAS
    flags.consistency = flags.consistency or ("textual",)
    flags.metric = flags.metric or ("rouge_l",)
    flags.delta = flags.delta or (0.1,)


def _specs(flags: argparse.Namespace) -> tuple[Spec, ...]:
    for name in flags.metric:
        # Tried on one pair of texts: a metric that cannot be called is better known before hours of decoding.
        checked_score(get_metric(name), name, "a text", ("a text",), example_id="of the trial before the run")
    fractional = [name for name in flags.metric if name in METRICS and name != "exact_match"]
    if flags.p_value == "exact_binomial" and fractional:
        # Losses in between would be found, but only after everything was decoded.
        raise UsageError(
            f"--p_value=exact_binomial is for losses of 0 and 1 only, and those of {fractional[0]} lie in between. "
            "Take hoeffding_bentkus, or --metric=exact_match."
        )
    if flags.sweep == "lazy" and flags.procedure != "fixed_sequence":
        raise UsageError(
            f"--sweep=lazy stops where fixed sequence testing fails; --procedure={flags.procedure} looks at thresholds "
            "below. Leave one of them out."
        )
    return all_specs(
        consistencies=flags.consistency,
        metrics=flags.metric,
        deltas=flags.delta,
        epsilons=flags.epsilon,
        risk_loss=flags.risk_loss,
        p_value=flags.p_value,
        procedure=flags.procedure,
        joint=flags.joint,
    )


def _plan(flags: argparse.Namespace, source: _Source, specs: tuple[Spec, ...]) -> Plan:
    return Plan.of(
        specs,
        source.settings,
        model=source.job.model.fingerprint,
        vocabulary=source.job.vocabulary_identity(),
        joint_epsilon=flags.epsilon[0] if flags.joint else None,
        cluster_key=flags.cluster_key,
        seed=flags.seed,
        on_error=flags.on_error,
        on_long=source.job.on_long,
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
        print(
            f"caution: confidence {rule.confidence} with state propagation {rule.state_propagation} runs every layer "
            "for every token. The manifest is for analysis; nothing can be served by it.",
            file=sys.stderr,
        )


def _checked_output(flags: argparse.Namespace) -> tuple[str, EarlierResult]:
    """Returns the directory to write to, and the result that it holds now."""
    with naming("--output"):
        # Absolute, since workers have folders of their own.
        output = absolute(flags.output)
        if is_file(output):
            raise UsageError(f"--output {output}: is a file, expected a directory.")
        earlier = EarlierResult.found_in(output)
        check_writable(joined(output, MANIFEST))
    if flags.resume and flags.overwrite:
        raise UsageError("--resume goes on with what is there, --overwrite begins anew: leave one of them out.")
    if earlier.manifest and not flags.overwrite and not flags.resume:
        raise UsageError(f"--output {output}: holds a manifest already. Choose another directory, or pass --overwrite.")
    return output, earlier


def _record(source: _Source) -> RunRecord:
    created = datetime.datetime.now(datetime.UTC).replace(microsecond=0)
    return RunRecord(
        created=created.isoformat().replace("+00:00", "Z"),
        model=source.job.model,
        vocabulary=source.job.vocabulary,
        settings=source.settings,
        patterns=source.job.patterns,
        software=run_versions(source.job.software),
    )
