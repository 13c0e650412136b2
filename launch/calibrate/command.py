"""A calibration from request to report: the job that `calm-beam calibrate` and `calm_beam.calibrate` both run.

The command then prints the result, the cost of the exit tests at the chosen thresholds, and commands to paste that use
the manifest.
"""

import dataclasses
import functools
import itertools
import operator
import os
import shlex
import time
from collections.abc import Iterator, Sequence

from apache_beam.options.pipeline_options import PipelineOptions

from calm_beam.calibration.guarantee import Guarantee, default_tests_in_words
from calm_beam.calibration.plan import earlier_forms, gone_on_with
from calm_beam.errors import UsageError
from calm_beam.evaluation.flops import shares_of_operations
from calm_beam.exits.measures import MEASURES
from calm_beam.exits.rule import ExitRule
from calm_beam.inputs import read_examples
from calm_beam.inputs.demo import embedded
from calm_beam.inputs.set_parts import CALIBRATING, Split
from calm_beam.launch.flags import as_usage
from calm_beam.launch.flags.requests import calling
from calm_beam.launch.report.command import report_after
from calm_beam.launch.report.request import ReportRequest
from calm_beam.launch.runners import make_runner
from calm_beam.launch.terminal import give, say, say_detail, tell
from calm_beam.launch.terminal.summary import print_summary
from calm_beam.manifest import (
    MANIFEST,
    PROMISE,
    Calibration,
    EarlierPlan,
    Manifest,
    Plan,
    answered_before,
    has_too_few,
    plan_command,
    plans_in_words,
    read_manifest,
)
from calm_beam.manifest.files import REPORT, RISK_TABLE
from calm_beam.manifest.plan_list import PlanList
from calm_beam.outputs import DecodeJob, FinishedSweep
from calm_beam.outputs.folder import SweepHome
from calm_beam.outputs.sharding import shard_in_order, with_unique_ids
from calm_beam.outputs.timing import RunTiming
from calm_beam.outputs.totals import content_sum_of, fingerprint_text
from calm_beam.storage import is_file, joined
from calm_beam.text import printable_line

from .auto import write_cost
from .confirm import ConfirmedRun
from .own_decoder import calibrate_decoder, or_decoder
from .prepare import prepare
from .request import CalibrateRequest
from .run import CalibrationRun, SequentialRun, VariantsRun, can_continue
from .sources import Block


@dataclasses.dataclass(frozen=True, kw_only=True)
class Done:
    """A finished calibration.

    Attributes:
      run: The calibration that ran.
      manifest: The result.
      folder: Folder of its generations; None if nothing was left to do.
    """

    run: CalibrationRun
    manifest: Manifest
    folder: str | None


def run_calibration(request: CalibrateRequest, options: PipelineOptions) -> Done | str:
    """Prepares and runs a calibration, and publishes its result; the command and `calibrate` both call it.

    Args:
      request: What is asked for.
      options: Options of the pipelines, including the runner; missing ones get defaults.

    Returns:
      The finished calibration; or the location of a template, if the job was only written and not run.

    Raises:
      UsageError: If anything in the request is wrong; nothing has been written.
      PipelineError: If a pipeline fails; says what is left, and how to resume.
      KeyboardInterrupt: If it is interrupted; says the same.
    """
    with as_usage():
        run = prepare(request, options)
        continued = None
        if request.resume and run.earlier.manifest:
            manifest = read_manifest(joined(run.output, MANIFEST))
            if not can_continue(manifest, run.plan):
                _check_is_done(run, request, manifest)
                return Done(run=run, manifest=manifest, folder=None)
            continued = manifest
        make_runner(options)
        # Listed before an earlier result is removed, which shows its plan.
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
    may_change = not _shows_losses_early(run, request)
    _say_plan(run.plan, earlier, is_default=request.leaves_tests_open, may_change=may_change)
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
        # The manifest is published, and shows by itself that the plan was tested.
        say(f"caution: {error}")
    manifest, folder = finished
    if manifest.cost is not None and manifest.cost.was_measured:
        # Imported here, since it loads JAX.
        from .speed import with_speeds

        manifest = with_speeds(run, manifest, request)
    return Done(run=run, manifest=manifest, folder=folder)


def _say_plan(plan: Plan, earlier: Sequence[EarlierPlan], *, is_default: bool, may_change: bool) -> None:
    """Prints what has to be known of the plan, and earlier plans for the same outputs.

    The plan itself is in a file by now, before any loss is seen.

    Args:
      plan: The plan.
      earlier: The earlier plans.
      is_default: Whether no p-value is named.
      may_change: Whether the run shows no loss before it has ended, so that it may go on by another plan.
    """
    say_detail(f"plan {plan.digest}")
    if is_default:
        say_detail(default_tests_in_words(plan.tests))
    if words := plans_in_words(earlier):
        say(words)
    if plan.leaves_choice_open:
        now = " (stop this run, and go on with that flag and --resume)" if may_change else ""
        say(
            f"{len(plan.tests)} promises hold each by itself, not all together, and picking one after seeing their "
            f"losses voids it: name it before, with --serve, or pass --joint{now}."
        )


def _shows_losses_early(run: CalibrationRun, request: CalibrateRequest) -> bool:
    """Returns whether losses may be seen before the run has ended."""
    return run.source.is_stored or request.sequential or request.sweep == "lazy" or request.holdout_share is not None


def _executed(
    run: CalibrationRun, request: CalibrateRequest, *, first: Block, continued: Manifest | None = None
) -> tuple[Manifest, str] | None:
    """Decodes and calibrates; returns the result of `CalibrationRun.execute`."""
    if request.sequential:
        return SequentialRun(run, continued=continued).execute(first)
    if run.plan.pareto is not None:
        return VariantsRun(run).execute(first)
    return run.execute(first)


def _check_is_done(run: CalibrationRun, request: CalibrateRequest, manifest: Manifest) -> None:
    """Checks that an existing result is the requested one, and prints that nothing is left to do.

    Raises:
      UsageError: If the existing result is another one.
    """
    path, job, plan = joined(run.output, MANIFEST), run.source.job, run.plan
    if manifest.plan is not None and manifest.plan.most_confirmed == 1:
        # An earlier version confirmed the chosen threshold alone.
        plan = dataclasses.replace(plan, confirm_path=None)
    if manifest.plan in earlier_forms(plan, is_open=request.leaves_tests_open):
        plan = manifest.plan
    if manifest.plan != plan or manifest.data.patterns != job.patterns:
        ended = manifest.sequential
        if manifest.plan is not None and manifest.plan.confirm_share is not None:
            raise UsageError(
                f"--resume: {path} is finished, and was asked for something else. The examples that confirm have been "
                "looked at, and could not confirm what is chosen now: take fresh data and another --output. "
                "--overwrite begins again, which proves something only if nobody has seen what was found here."
            )
        if ended is not None and ended.rounds < ended.of_rounds:
            raise UsageError(
                f"--resume: {path} stopped after {ended.rounds} of {ended.of_rounds} rounds, and was asked for "
                "something else. Another rule to stop may take it further, with all else as it was; other tests need "
                "another --output, or --overwrite."
            )
        raise UsageError(
            f"--resume: {path} is finished, and was asked for something else. A question after its results were "
            "seen needs fresh examples and another --output. --overwrite begins again, and the manifest then says what "
            "had been asked before."
        )
    confirmed, part = manifest.confirmation, request.part
    confirms = None if part is None else part.that_confirms()
    if manifest.data.fingerprint != _data_fingerprint(run, request, part=part) or (
        confirmed is not None and confirmed.data.fingerprint != _data_fingerprint(run, request, part=confirms)
    ):
        raise UsageError(
            f"--resume: {path} is finished, and the data have changed since: it is about the examples that were there. "
            "Restore them, calibrate the new ones with another --output, or pass --overwrite to begin again."
        )
    say(f"--resume: {path} is finished; nothing is left to do.")
    # The run may have been killed while it wrote its report.
    SweepHome(run.output).remove_temporary_files()


def _data_fingerprint(run: CalibrationRun, request: CalibrateRequest, *, part: Split | None) -> str:
    """Returns the fingerprint that a manifest would have for the data now: all, a part, or the examples counted."""
    job = run.source.job
    reading = request.reading(
        cluster_key=request.cluster_key,
        # Generations may have groups that no guarantee asks for.
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


# Arguments that `guarantees` and `exits` replace.
_OF_GUARANTEES = ("consistency", "metric", "delta", "epsilon", "tail", "risk_loss", "p_value", "procedure")
_OF_RULE = (
    *("confidence", "tau", "min_exit_layer", "exit_interval"),
    *("schedule", "state_propagation", "token_from", "patience"),
)


@dataclasses.dataclass(frozen=True, kw_only=True)
class CalibrateCall(CalibrateRequest):
    """A calibration as Python asks for it: every option of the command, and values that stand for several.

    Attributes:
      model: Folder of the model, as `checkpoint`.
      exits: An exit rule, which replaces `confidence`, `schedule` and their related arguments; or `auto`, the default
        unless another argument says how tokens exit, or allows only one exit rule.
      candidates: Variants to sweep, instead of every combination of lists; `exits="auto"` fills them in.
      guarantees: Guarantees, one by one, instead of lists of `consistency`, `metric`, `delta` and `epsilon`.
      options: Options of the pipelines, including the runner; the default runs in this process.
    """

    model: str | os.PathLike[str] | None = None
    guarantees: Sequence[Guarantee] | None = None
    options: PipelineOptions | None = dataclasses.field(default=None, compare=False)

    def __post_init__(self) -> None:
        if self.model is not None and self.checkpoint is not None:
            raise UsageError("model and checkpoint both name the model: leave one of them out.")
        for value, names in (("guarantees", _OF_GUARANTEES), ("exits", _OF_RULE)):
            given = None if getattr(self, value) in (None, self.AUTO) else next(filter(self.is_given, names), None)
            if given is not None:
                raise UsageError(f"{value} and {given} say the same: leave one of them out.")
        super().__post_init__()

    def has(self, partner: str) -> bool:
        """Returns whether an option is given, in any form."""
        return super().has(partner) or (partner == "checkpoint" and self.model is not None)

    @property
    def named_model(self) -> str | None:
        """Folder of the model; None if none was named."""
        return super().named_model if self.model is None else os.fspath(self.model)

    @property
    def guarantees_asked(self) -> Sequence[Guarantee] | None:
        """Guarantees that were given one by one."""
        return self.guarantees

    @property
    def rules(self) -> tuple[ExitRule, ...]:
        """The rule that was given, or every combination of the lists."""
        return (self.exits,) if isinstance(self.exits, ExitRule) else super().rules


@or_decoder(calibrate_decoder)
@calling(CalibrateCall)
def calibrate(request: CalibrateCall) -> Manifest:
    """Calibrates a model on a data set, writes the result and returns its manifest.

        manifest = calm.calibrate(
            checkpoint="checkpoints/my_t5",
            data="data/*.jsonl.gz",
            guarantees=[calm.Guarantee("textual", "rouge_l_unicode", delta=0.1, epsilon=0.05)],
            output="calibration",
        )

    `calm-beam calibrate` runs this function, whose arguments have the names of the command's options:
    `--delta=0.05,0.1` is `delta=(0.05, 0.1)`, `--resume` is `resume=True`. The command also builds the report;
    `calm-beam report` builds it from the written files. With neither model nor data, the demo model is calibrated on
    the demo data.

    With `decoder`, any decoder is swept under `settings`, and a manifest of kind `settings` is returned. Its arguments
    are those of `transforms.SweepWith` and `certify`:

        manifest = calm.calibrate(decoder=answer, settings=(4096, 1024, 256), data="questions.jsonl", delta=0.05)

    Raises:
      UsageError: If anything in the request is wrong; nothing has been written.
      PipelineError: If the pipeline fails; `resume=True` continues from its stored shards.

    Source: CALM, section "Calibrating the confidence threshold", Algorithm "Learn-then-Test".
    """
    done = run_calibration(request, request.options if request.options is not None else PipelineOptions([]))
    if isinstance(done, str):
        raise UsageError(f"the job is written down in {done} as a template, and has not run: there is no manifest yet.")
    return done.manifest


_OWN_PROMPT = "Your prompt"


def next_commands(manifest: Manifest, output: str, *, prompt: str = _OWN_PROMPT) -> Iterator[str]:
    """Yields commands that show the promises of a manifest, and answer a prompt if something was proved and holds.

    If nothing was, the second command says how many examples would do, unless no number would.

    Args:
      manifest: The result.
      output: Directory that holds it.
      prompt: The prompt to answer.
    """
    yield f"calm-beam inspect {shlex.quote(output)}"
    entry = manifest.served or next((each for each in manifest.calibrations if each.threshold is not None), None)
    if entry is not None and not answered_before(manifest.earlier_plans):
        flags = {"manifest": output, **_naming(entry, manifest), "prompt": prompt}
        words = (f"--{name}={shlex.quote(str(value))}" for name, value in flags.items())
        yield f"calm-beam generate {' '.join(words)} --show_layers"
    elif entry is None:
        yield from _forecast(manifest)


def leaves_a_choice(manifest: Manifest) -> bool:
    """Returns whether `next_commands` answers under one of several proved promises, of which none was chosen before."""
    proved = [entry for entry in manifest.calibrations if entry.threshold is not None]
    is_open = manifest.plan is None or manifest.plan.leaves_choice_open
    return len(proved) > 1 and is_open and not answered_before(manifest.earlier_plans)


def _forecast(manifest: Manifest) -> Iterator[str]:
    """Yields the command that says how many examples would prove the promise nearest to it, if more examples may."""
    hopeful: list[tuple[Calibration, float]] = []
    for entry in manifest.calibrations:
        if entry.pays is False and entry.has_proved_exits(manifest.model.layers):
            # What was proved is no faster: more examples do not help.
            continue
        risk = entry.path[0].risk
        if has_too_few(entry, manifest.data.units, manifest.pareto):
            # Of so few examples a mean says little: it may be high by chance.
            risk = min(risk, entry.delta / 2)
        if risk < entry.delta:
            hopeful.append((entry, risk))
    if hopeful:
        entry, risk = max(hopeful, key=lambda each: each[0].delta - each[1])
        yield plan_command(entry, risk=risk, level=manifest.level_of(entry))


def _naming(entry: Calibration, manifest: Manifest) -> dict[str, object]:
    """Returns flags that name an entry, each of which narrows down the entries about the same prompts."""
    left = [each for each in manifest.calibrations if each.group == entry.group]
    named: dict[str, object] = {} if entry.group is None else {"group": entry.group}
    for name in PROMISE:
        value = getattr(entry, name)
        alike = [each for each in left if getattr(each, name) == value]
        if len(alike) < len(left) and value is not None:
            named[name], left = value, alike
    # User code runs only if a flag names it.
    own = manifest.decode.confidence not in MEASURES
    return {**named, "confidence": manifest.decode.confidence} if own else named


def price_of_tests(manifest: Manifest, shares: Sequence[float | None]) -> Iterator[str]:
    """Yields a warning for promised thresholds at which exit tests cost more than exits save."""
    pairs = zip(manifest.calibrations, shares, strict=True)
    dear = [(share, entry) for entry, share in pairs if share is not None and share > 1]
    if dear:
        _, entry = max(dear, key=operator.itemgetter(0))
        yield (
            f"At some thresholds, the tests of {printable_line(manifest.decode_of(entry).confidence)} cost more "
            "operations than exits save. calm-beam suitability forecasts which layers had better exit; calibrate those "
            "on other examples, since these have been looked at."
        )


def calibrate_and_report(request: CalibrateRequest, options: PipelineOptions, *, began: float | None = None) -> int:
    """Calibrates, prints the result and returns the exit status of the command.

    `began` is when the command was started, in seconds since 1970; now if omitted.
    """
    began = time.time() if began is None else began
    done = run_calibration(request, options)
    if isinstance(done, str):
        tell(f"Template: {done}. It has not run.")
        return 0
    try:
        _print(done, seconds=None if done.folder is None else time.time() - began, verbose=request.verbose)
    finally:
        # The report comes last: if it fails, the manifest is complete, and the report can be built again. It is built
        # even if standard output is closed.
        if done.folder is None:
            _tell_report(done.run.output)
        else:
            report_after(_reported(request, done), model=done.run.source.model)
    prompt = {"prompt": embedded.PROMPT} if request.is_demo else {}
    # The folder as it was given, which is shorter than its absolute path.
    commands = next_commands(done.manifest, os.fspath(request.output), **prompt)
    tell("\n".join(["Next:", *(f"  {line}" for line in commands)]))
    if leaves_a_choice(done.manifest):
        tell(
            "It answers under one of several promises, as an example. Settle the one that you serve before its losses "
            "are seen: --serve names it, or --joint lets all of them hold together."
        )
    if answered_before(done.manifest.earlier_plans):
        tell("Before you serve it, calibrate examples that no plan has seen: other --data, and another --output.")
    # The duration says nothing about a single sweep if there were several, or about an incomplete one.
    is_single = done.run.plan.pareto is None and request.holdout_share is None
    if done.folder is not None and not done.run.source.is_stored and is_single:
        RunTiming(began=began, seconds=time.time() - began).write(done.folder)
    return 0


def _tell_report(output: str) -> None:
    """Says where the report of a run that had finished is, or how it is built."""
    report = joined(output, REPORT)
    if is_file(report):
        tell(f"Report: {report}")
    else:
        say(f"its report is missing: calm-beam report --calibration={output}")


def _print(done: Done, *, seconds: float | None, verbose: bool) -> None:
    proved = any(entry.threshold is not None for entry in done.manifest.calibrations)
    files = [joined(done.run.output, name) for name in (MANIFEST, RISK_TABLE, REPORT)]
    give({"output": done.run.output, "manifest": done.manifest.to_dict()}, is_proved=proved, files=files)
    model = done.run.source.model
    operations = shares_of_operations(done.manifest, None if model is None else model.sizes)
    print_summary(
        done.manifest,
        done.run.output,
        seconds=seconds,
        operations=operations,
        remarks=price_of_tests(done.manifest, operations),
        verbose=verbose,
    )


def _reported(request: CalibrateRequest, done: Done) -> ReportRequest:
    """Returns the request for the report that is built at the end."""
    # Of several variants, the report finds the one that it shows.
    folder = None if done.run.plan.pareto is not None else done.folder
    return ReportRequest(
        calibration=done.run.output,
        generations=folder,
        checkpoint=None if request.generations is not None else request.model_path,
        confidence=request.rules[0].confidence,
        activation=request.activation,
        relative_max_distance=request.relative_max_distance,
        vocabulary=request.vocabulary,
    )
