"""What `calm-beam calibrate` does once its flags are parsed: run, and tell what was found."""

import time

from apache_beam.options.pipeline_options import PipelineOptions

from calm_beam.inputs.demo import embedded
from calm_beam.launch.report.command import report_after
from calm_beam.launch.report.request import ReportRequest
from calm_beam.launch.terminal import give, say, tell
from calm_beam.launch.terminal.summary import print_summary
from calm_beam.manifest import MANIFEST
from calm_beam.manifest.file_names import REPORT, RISK_TABLE
from calm_beam.outputs.timing import RunTiming
from calm_beam.storage import is_file, joined

from .job import Done, run_calibration
from .next_steps import next_commands
from .price import price_of_tests, shares_of_operations
from .request import CalibrateRequest


def calibrate(request: CalibrateRequest, options: PipelineOptions, *, began: float | None = None) -> int:
    """Calibrates, tells about it and returns the exit status of the command.

    `began` is when the command was started, in seconds since 1970; now if omitted.
    """
    began = time.time() if began is None else began
    done = run_calibration(request, options)
    if isinstance(done, str):
        tell(f"Template: {done}. It has not run.")
        return 0
    output = done.run.output
    if done.folder is None:
        say(f"--resume: {joined(output, MANIFEST)} is finished; nothing is left to do.")
        if not is_file(joined(output, REPORT)):
            say(f"its report is missing: calm-beam report --calibration={output}")
        _print(done, verbose=request.verbose)
        return 0
    try:
        _print(done, verbose=request.verbose)
    finally:
        # Last, since the manifest stands by itself: a report that fails takes nothing away, and can be built again.
        # Also if nobody reads the summary any more.
        report_after(_reported(request, output, folder=done.folder), model=done.run.source.model)
    prompt = {"prompt": embedded.PROMPT} if request.is_demo else {}
    tell("\n".join(["Next:", *(f"  {line}" for line in next_commands(done.manifest, output, **prompt))]))
    # The time of a run says nothing about one of several sweeps, or about one that was not all.
    if not done.run.source.is_stored and done.run.plan.pareto is None and request.holdout_share is None:
        RunTiming(began=began, seconds=time.time() - began).write(done.folder)
    return 0


def _print(done: Done, *, verbose: bool) -> None:
    proved = any(entry.threshold is not None for entry in done.manifest.calibrations)
    files = [joined(done.run.output, name) for name in (MANIFEST, RISK_TABLE, REPORT)]
    give({"output": done.run.output, "manifest": done.manifest.to_dict()}, is_proved=proved, files=files)
    model = done.run.source.model
    operations = shares_of_operations(done.manifest, None if model is None else model.sizes)
    print_summary(
        done.manifest,
        done.run.output,
        seconds=done.seconds,
        operations=operations,
        remarks=price_of_tests(done.manifest, operations),
        verbose=verbose,
    )


def _reported(request: CalibrateRequest, output: str, *, folder: str) -> ReportRequest:
    """Returns the report that is built at the end."""
    return ReportRequest(
        calibration=output,
        generations=folder,
        checkpoint=None if request.generations is not None else request.model_path,
        confidence=request.rules[0].confidence,
        activation=request.activation,
        relative_max_distance=request.relative_max_distance,
        vocabulary=request.vocabulary,
    )
