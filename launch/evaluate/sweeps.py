"""Sweeps and files of experiments. Sweeps of a sample are read back and removed; sweeps of a whole set stay.

The output directory of an experiment holds its tables. It is replaced atomically.
"""

import copy
import csv
import dataclasses
import os
import time
from collections.abc import Mapping, Sequence

from apache_beam.options.pipeline_options import DirectOptions, PipelineOptions, PortableOptions

from calm_beam.errors import CalmBeamError, UsageError
from calm_beam.evaluation.performance import Variant
from calm_beam.inputs.examples import Example
from calm_beam.launch.flags import naming
from calm_beam.launch.flags.shared_options import find_data, find_folder
from calm_beam.launch.run_sweep import prepare_task, run_sweep
from calm_beam.launch.runners import PipelineError, Workers
from calm_beam.launch.runners.dataflow import paths_by_flag
from calm_beam.launch.runners.run import metrics_in_words, what_is_left_told, work_in_words
from calm_beam.launch.runners.workers import passing_folder
from calm_beam.launch.terminal import say, say_detail
from calm_beam.manifest import MANIFEST
from calm_beam.outputs import DecodeJob, Generation, OutputsError, read_generations
from calm_beam.outputs.folder import SweepHome
from calm_beam.outputs.prepared import PreparedSweep
from calm_beam.outputs.sharding import default_shards, shards_for
from calm_beam.report.line_chart import why_no_figures
from calm_beam.storage import check_writable, exists, is_file, joined, remove_file, replacing
from calm_beam.transforms.examples import DivideExamples
from calm_beam.transforms.metrics import ProgressLog

from .request import Result, SampleRequest, SplitsRequest, SweptRequest

_SWEEPS = "sweeps"


def sweep_workers(request: SweptRequest, options: PipelineOptions) -> Workers | None:
    """Returns the workers that decode the sample; None where this process does, without a pipeline.

    Raises:
      UsageError: As `Workers.prepared`.
    """
    workers = Workers.prepared(
        options,
        accelerator=request.device,
        # The sample is read here, and what is found is written here.
        paths=paths_by_flag({"checkpoint": request.model_path, "vocabulary": request.vocabulary}),
        num_shards=lambda: _shards_of(request),
    )
    workers.refuse_template(command="evaluate")
    direct, portable = options.view_as(DirectOptions), options.view_as(PortableOptions)
    # A pool of workers may be of one.
    is_alone = workers.are_here and direct.direct_num_workers == 1 and not portable.environment_type
    # Checks the rest of Beam's flags too.
    workers.new_pipeline()
    return None if is_alone else workers


def prepared_sample(request: SampleRequest, *, runs_here: bool) -> PreparedSweep:
    """Returns the sweep of a sample; argument and errors as in `prepare_task`."""
    shards = _shards_of(request) if isinstance(request, SweptRequest) else None
    return prepare_task(request, request.settings, runs_here=runs_here, num_shards=shards)


def _shards_of(request: SweptRequest) -> int:
    """Returns the parts into which a sample is divided."""
    return request.num_shards or shards_for(request.max_examples)


def decoded_by(
    workers: Workers,
    examples: Sequence[Example],
    variant: Variant,
    *,
    run: PreparedSweep,
    place: str,
    progress: ProgressLog,
) -> list[Generation]:
    """Returns what workers decode by one way of exiting; where a prompt fails, all ends.

    Args:
      workers: Who decodes.
      examples: The sample.
      variant: How tokens exit, and at which thresholds.
      run: All else that decides the outputs.
      place: Of `shared_place`.
      progress: Where workers report.

    Raises:
      PipelineError: If it did not succeed.
    """
    settings = dataclasses.replace(run.settings, rule=variant.rule, thresholds=variant.thresholds)
    sweep = dataclasses.replace(run, request=dataclasses.replace(run.request, settings=settings))
    pipeline = workers.new_pipeline()
    read = pipeline | "DivideExamples" >> DivideExamples(examples, num_shards=sweep.num_shards)
    with passing_folder(place, name="calm-beam-evaluate-") as folder:
        run_sweep(pipeline, sweep, folder=folder, workers=workers, progress=progress, examples=read)
        return [item for path in DecodeJob.shard_files(folder) for item in read_generations(path)]


def sweep_measures(
    measures: Sequence[str], request: SplitsRequest, *, options: PipelineOptions, output: str
) -> tuple[str, ...]:
    """Decodes a whole set by every measure, one pipeline each, and returns the directories of their generations.

    A sweep that is there already is taken as it is, and one that was killed goes on.

    Args:
      measures: Confidence measures.
      request: All else that decides the outputs.
      options: Beam's.
      output: Directory, below which each measure has its own in `sweeps`.

    Raises:
      UsageError: If what was asked for is wrong.
      PipelineError: If a sweep fails.
    """
    if request.token_from == "last_layer":
        raise UsageError(
            "--token_from=last_layer takes every token from the full model, so there is nothing to compare. decode "
            "accepts it."
        )
    directories = [joined(output, _SWEEPS, measure) for measure in measures]
    homes = [SweepHome(directory, again="the same command", restart=f"remove {directory}") for directory in directories]
    num_shards = request.num_shards
    if num_shards is None:
        num_shards = next((begun for home in homes if (begun := home.begun_shards())), None)
    for measure, home in zip(measures, homes, strict=True):
        say(f"sweep {measure}")
        try:
            # A run sets what its options leave open.
            _decode_into(
                home,
                measure,
                request=request,
                num_shards=num_shards,
                options=copy.deepcopy(options),
                is_first=home is homes[0],
            )
        except (CalmBeamError, OSError) as error:
            kind = UsageError if isinstance(error, UsageError) else PipelineError
            raise kind(f"sweep {measure}: {error}") from error
    return tuple(directories)


def _decode_into(
    home: SweepHome,
    measure: str,
    *,
    request: SplitsRequest,
    num_shards: int | None,
    options: PipelineOptions,
    is_first: bool,
) -> None:
    """Decodes the whole set by one measure into a directory, which may hold some or all of it."""
    paths = {"checkpoint": request.model_path, "vocabulary": request.vocabulary, "data": request.patterns}
    workers = Workers.prepared(
        options,
        accelerator=request.device,
        paths=paths_by_flag({**paths, "output": os.fspath(request.output)}),
        num_shards=lambda: num_shards or default_shards(find_data(request)),
    )
    sweep = prepare_task(
        request,
        lambda: request.settings(measure),
        needs_references="risk" in (request.consistency or ()),
        runs_here=workers.are_here,
        num_shards=num_shards,
        tells_assumed=is_first,
    ).without_weights()
    pipeline = workers.new_pipeline()
    # Nobody has asked to resume: only what was found is news.
    tell = say if home.folders() else say_detail
    folder = home.begin([sweep.job()], resume=True, overwrite=False, tell=tell)
    start = time.monotonic()
    with (
        what_is_left_told(lambda: home.after_failure(folder, is_over=workers.are_here), but=OutputsError),
        workers.shown_progress() as progress,
    ):
        metrics = run_sweep(pipeline, sweep, folder=folder, workers=workers, progress=progress)
    say(metrics_in_words(metrics, seconds=time.monotonic() - start))
    if work := work_in_words(metrics):
        say_detail(work)


Cell = str | int | float | None


def checked_output(request: Result, files: Sequence[str]) -> str:
    """Returns the directory to write to, which holds no calibration, and none of the files unless they may go.

    Raises:
      UsageError: If it cannot be written to, or holds what must stay.
    """
    output = find_folder(request.output)
    with naming("--output"):
        if exists(joined(output, MANIFEST)):
            raise UsageError(f"--output {output}: holds a calibration. Choose another directory.")
        found = [file for file in files if exists(joined(output, file))]
        check_writable(joined(output, files[0]))
    if found and not request.overwrite:
        raise UsageError(f"--output {output}: holds {found[0]} already. Choose another directory, or pass --overwrite.")
    return output


def without_figures(output: str, figures: Sequence[str]) -> bool:
    """Returns whether figures cannot be drawn here; if so, says why, and removes those of an earlier run.

    Args:
      output: The directory of the results.
      figures: Names of the figures in it.
    """
    why = why_no_figures()
    if why is None:
        return False
    say(f"without figures, which the page has too: {why}")
    for name in figures:
        if is_file(joined(output, name)):
            remove_file(joined(output, name))
    return True


def write_rows(path: str, rows: Sequence[Mapping[str, Cell]]) -> None:
    """Writes a table as CSV, its columns those of the first row; the file appears atomically."""
    with replacing(path) as temporary, open(temporary, "w", encoding="utf-8", newline="") as file:
        writer = csv.DictWriter(file, fieldnames=list(rows[0]), lineterminator="\n")
        writer.writeheader()
        writer.writerows(rows)
