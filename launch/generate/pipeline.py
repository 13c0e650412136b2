"""Answering prompts in shards by a Beam pipeline, for `calm-beam generate` and `calm_beam.generate`.

Everything is checked before the pipeline runs.
"""

import contextlib
import dataclasses
import functools
import os
import shlex
import time
from collections.abc import Iterator
from typing import TYPE_CHECKING

from apache_beam.options.pipeline_options import PipelineOptions

from calm_beam.errors import UsageError
from calm_beam.inputs.examples import DataError
from calm_beam.launch.flags import as_usage, naming
from calm_beam.launch.flags.requests import calling
from calm_beam.launch.flags.shared_options import (
    check_precision,
    find_files,
    find_manifest,
    metric_settings,
    one_entry,
)
from calm_beam.launch.runners import Workers, run_pipeline
from calm_beam.launch.runners.dataflow import paths_by_flag
from calm_beam.launch.runners.run import PipelineError, RunMetrics, stored_in_words, what_is_left_told
from calm_beam.launch.terminal import say, say_detail, tell
from calm_beam.manifest import Calibration, Manifest, ManifestError, read_manifest
from calm_beam.manifest.files import FAILURES
from calm_beam.options.option import shared
from calm_beam.outputs import COMPLETE, FinishedAnswers, OutputsError
from calm_beam.outputs.folder import AnswerHome
from calm_beam.outputs.request import AnswerAssignment, AnswerRequest
from calm_beam.outputs.sharding import prompt_shards
from calm_beam.serving.answer import Tally
from calm_beam.storage import absolute, check_writable, is_file, joined
from calm_beam.text import counted, printable_line
from calm_beam.transforms.decode import DecodeExamples
from calm_beam.transforms.examples import ReadPrompts

from .request import SHOWS_WHAT_IS_PRINTED, GenerateRequest, entry_with_layers, unknown_groups

if TYPE_CHECKING:
    from calm_beam.outputs.prepared import PreparedAnswers


def answer_all(request: GenerateRequest, options: PipelineOptions) -> int:
    """Answers what is asked for, and returns the exit status of the command."""
    done = answer_in_shards(request, options)
    if isinstance(done, str):
        tell(f"Template: {done}. It has not run.")
    return 0


def answer_in_shards(request: GenerateRequest, options: PipelineOptions) -> FinishedAnswers | str:
    """Answers files of prompts into a folder, and prints a summary; the command and `generate` both call it.

    Args:
      request: The request.
      options: Options of the pipeline, including the runner; missing ones get defaults.

    Returns:
      The answers; or the location of a template, if the job was only written and not run.

    Raises:
      UsageError: If anything that was asked for is wrong; nothing has been written.
      PipelineError: If the pipeline fails; says what is left, and how to go on.
    """
    with as_usage():
        _check_flags(request)
    manifest = read_manifest(find_manifest(request.manifest))
    check_precision(request, manifest.decode)
    with as_usage(), _unreadable_rows_told(request):
        workers, prepared, output = _prepared(request, options, manifest)
    assignment = prepared.assignment(output)
    for entry in _entries(prepared):
        say(entry_with_layers(entry, num_layers=prepared.num_layers))
    start = time.monotonic()
    home = AnswerHome(output)
    home.begin([prepared.job], resume=request.resume, overwrite=request.overwrite, tell=say)
    left = functools.partial(home.after_failure, output, is_over=workers.are_here)
    with what_is_left_told(left, but=OutputsError), _unreadable_rows_told(request):
        metrics = _run(prepared, assignment, workers=workers)
        if workers.template:
            return workers.template
        finished = FinishedAnswers.read(output, prepared.job)
        # A runner that tried again after a worker was killed leaves what that worker was writing.
        home.remove_temporary_files()
    _tell(finished, assignment, manifest=request.manifest, metrics=metrics, seconds=time.monotonic() - start)
    return finished


@contextlib.contextmanager
def _unreadable_rows_told(request: GenerateRequest) -> Iterator[None]:
    """Adds to errors of data why `--on_error=list` did not list them, if it was asked for."""
    try:
        yield
    except (DataError, PipelineError) as error:
        is_about_data = isinstance(error, DataError) or error.cause is DataError
        if request.on_error != "list" or not is_about_data:
            raise
        why = "--on_error=list is about prompts that cannot be decoded: a row that cannot be read ends the run."
        words = f"{error} {why}"
        raise (DataError(words) if isinstance(error, DataError) else PipelineError(words, cause=DataError)) from error


def _check_flags(request: GenerateRequest) -> None:
    if request.prompt is not None:
        raise UsageError("--prompt is answered at once. Leave it out, or name a file: --output=answers.jsonl.")
    if request.input is None:
        raise UsageError("--input is missing: files of prompts, which are answered into the folder of --output.")
    if request.show_layers:
        raise UsageError(SHOWS_WHAT_IS_PRINTED)
    if request.resume and request.overwrite:
        raise UsageError("--resume goes on with what is there, --overwrite begins again: leave one of them out.")


def _prepared(
    request: GenerateRequest, options: PipelineOptions, manifest: Manifest
) -> "tuple[Workers, PreparedAnswers, str]":
    """Returns the workers, the checked answers to make, and the output folder, before any worker starts."""
    # Here, since it needs JAX, and what is wrong with flags needs none of it.
    from calm_beam.outputs.prepared import prepare_answers

    output = _checked_output(request)
    assert request.input is not None, "it was checked"
    data = find_files("--input", [request.input], reading=request.prompt_reading)
    num_shards = request.num_shards
    if request.resume and num_shards is None:
        num_shards = AnswerHome(output).begun_shards()
    paths = {"vocabulary": request.vocabulary, "input": request.input, "bleurt_checkpoint": request.bleurt_checkpoint}
    workers = Workers.prepared(
        options,
        accelerator=request.device,
        paths=paths_by_flag({"checkpoint": request.model_of(manifest), **paths, "output": request.output}),
        num_shards=lambda: num_shards or prompt_shards(data),
    )
    # Now, since what it refuses must not come after files were written.
    workers.new_pipeline()
    try:
        prepared = prepare_answers(_asked(request, manifest, num_shards=num_shards), data, runs_here=workers.are_here)
    except (ManifestError, OSError) as error:
        # The manifest is sound; what was asked for is not in it, or it is about another model.
        raise UsageError(str(error)) from error
    for sentence in prepared.assumed:
        say(f"note: {sentence}")
    say_detail(prepared.memory)
    if prepared.other_engine:
        say(f"caution: {prepared.other_engine}")
    return workers, prepared, output


def _checked_output(request: GenerateRequest) -> str:
    with naming("--output"):
        # Absolute, since workers have folders of their own.
        output = absolute(request.output or "")
        if is_file(output):
            raise UsageError(f"--output {request.output}: is a file, expected a folder.")
        check_writable(joined(output, COMPLETE))
    return output


def _asked(request: GenerateRequest, manifest: Manifest, *, num_shards: int | None) -> AnswerRequest:
    """Returns the requested answers with `num_shards` shards; None chooses by the size of the data."""
    own = {
        "manifest": manifest,
        "model": request.named_model,
        "choice": one_entry(request, manifest),
        "metric_settings": metric_settings(request),
        "num_shards": num_shards,
    }
    return AnswerRequest(**{**shared(request, AnswerRequest), **own})


def _entries(prepared: "PreparedAnswers") -> list[Calibration]:
    """Returns the entries by which prompts may be answered."""
    if prepared.job.group_key is None:
        return [prepared.entry]
    return [prepared.entry, *prepared.request.manifest.of_same_promise(prepared.entry)]


def _run(prepared: "PreparedAnswers", assignment: AnswerAssignment, *, workers: Workers) -> RunMetrics | None:
    pipeline = workers.new_pipeline()
    with workers.shown_progress() as progress:
        _ = (
            pipeline
            | "ReadPrompts" >> ReadPrompts(prepared.data, num_shards=prepared.job.num_shards, progress=progress)
            | "AnswerPrompts" >> DecodeExamples([assignment], progress, devices=workers.devices)
        )
        return run_pipeline(pipeline)


def _tell(
    finished: FinishedAnswers,
    assignment: AnswerAssignment,
    *,
    manifest: str,
    metrics: RunMetrics | None,
    seconds: float,
) -> None:
    """Prints the results of all prompts, and the work of this run's workers; `manifest` is its path."""
    say(_work_in_words(metrics, seconds=seconds))
    known = {entry.group for entry in assignment.manifest.of_same_promise(assignment.entry)}
    unknown = [name for name in finished.tallies if name is not None and name not in known]
    if unknown:
        say(unknown_groups(unknown))
    for name, tally in finished.tallies.items():
        if name is not None:
            say(f"group {printable_line(name)}: {tally.in_words()}")
    for calibration, losses in finished.losses.items():
        path = assignment.job.losses_path(assignment.directory, calibration)
        named = f"--manifest={shlex.quote(manifest)} --losses={shlex.quote(path)}"
        say(f"{counted(losses, 'loss', several='losses')} measured:\n  calm-beam monitor {named}")
    probe = assignment.job.probe
    if probe is not None and not finished.losses:
        say(f"--probe_share={probe.share:.3g} drew no prompt whose loss counts: there is no file of losses to monitor.")
    total = finished.total
    if total.failed:
        say(
            f"{counted(total.failed, 'prompt')} {'has' if total.failed == 1 else 'have'} no answer: "
            f"{joined(assignment.directory, FAILURES)} says why."
        )
    say(total.in_words())


def _work_in_words(metrics: RunMetrics | None, *, seconds: float) -> str:
    if metrics is None:
        return "workers: this runner keeps no metrics."
    counters, spreads = metrics.counters, metrics.spreads
    prompts, tokens = counters.get("decoded-prompts", 0), counters.get("generated-tokens", 0)
    loads = spreads.get("model-load-msec")
    loaded = "no model was loaded" if loads is None else f"the model was loaded {counted(loads.count, 'time')}"
    return (
        f"workers: {counted(prompts, 'prompt')} answered in {seconds:.1f} s ({prompts / seconds:.1f} prompts and "
        f"{tokens / seconds:.1f} tokens a second){stored_in_words(metrics)}; {loaded}."
    )


@dataclasses.dataclass(frozen=True, kw_only=True)
class GenerateCall(GenerateRequest):
    """Answers as Python asks for them.

    Attributes:
      options: Of the pipeline, among them its runner; in this process if omitted.
    """

    options: PipelineOptions | None = dataclasses.field(default=None, compare=False)

    def __post_init__(self) -> None:
        super().__post_init__()
        if not self.is_in_shards:
            raise UsageError(
                "output must be a folder for answers in shards; if its name has a suffix, put a slash at its end. "
                "calm_beam.Generator answers prompts at once."
            )

    @property
    def is_in_shards(self) -> bool:
        """Whether `output` is a folder; without a slash, a name with a suffix may be meant for a file."""
        return super().is_in_shards or bool(self.output and not os.path.splitext(self.output)[1])


@calling(GenerateCall)
def generate(request: GenerateCall) -> Tally:
    """Answers files of prompts under a manifest, into a folder, and returns counts of the results.

        counts = calm.generate(manifest="calibration", input="prompts/*.jsonl.gz", output="answers")

    `calm-beam generate --output=answers/` runs this function, whose arguments have the names of the command's options.

    Raises:
      UsageError: If anything that was asked for is wrong; nothing has been written.
      PipelineError: If the pipeline fails; `resume=True` answers the missing prompts only.
    """
    done = answer_in_shards(request, request.options if request.options is not None else PipelineOptions([]))
    if isinstance(done, str):
        raise UsageError(f"the job is written down in {done} as a template, and has not run: there are no answers yet.")
    return done.total
