"""Where the generations of a calibration come from: decoded now, in one part or in several, or stored before."""

import argparse
import dataclasses
from collections.abc import Callable, Sequence

import apache_beam as beam

from calm_beam.calibration.plan import block_ends
from calm_beam.calibration.publish import EarlierResult
from calm_beam.decoding.settings import DecodeSettings, descending_grid, uniform_grid
from calm_beam.efficiency.flops import DecoderSizes
from calm_beam.generations.folder import Completion, DecodeJob, StoredGenerations
from calm_beam.launch.flags import UsageError, naming
from calm_beam.launch.report import ReportedModel
from calm_beam.launch.terminal import say
from calm_beam.storage import absolute
from calm_beam.sweeps.folders import begin_generations, find_generations, next_generations
from calm_beam.transforms import DecodeExamples, ReadExamples
from calm_beam.transforms.progress import ProgressLog

# What decides generations cannot be chosen for those that are there already.
_DECODING_FLAGS = (
    "--checkpoint",
    "--vocabulary",
    "--extra_ids",
    "--activation",
    "--relative_max_distance",
    "--data",
    "--data_format",
    "--inputs_field",
    "--targets_field",
    "--seqio_task",
    "--seqio_split",
    "--seqio_module",
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
class Part:
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
class Source:
    """Where the generations of a run come from.

    Attributes:
      job: What all of them are generations of.
      settings: The job's, with the grid that is calibrated.
      parts: What is made ready one after the other, each with more of the grid, until no test goes on.
      model: What the report needs of the model; None where it has not been loaded.
    """

    job: DecodeJob
    settings: DecodeSettings
    parts: tuple[Part, ...]
    model: ReportedModel | None = None


def decoded_source(flags: argparse.Namespace, output: str, earlier: EarlierResult, *, runs_here: bool) -> Source:
    """Returns generations that are decoded now, all or the missing ones; `runs_here` as in `prepare_run`."""
    # Here, since it needs JAX, which calibrating stored generations does not.
    from calm_beam.launch.setup_run import prepare_run

    needs_references = "risk" in flags.consistency
    run = prepare_run(
        flags, needs_references=needs_references, cluster_key=flags.cluster_key, runs_here=runs_here
    ).without_weights()
    job = run.job()
    ends = block_ends(len(job.settings.thresholds)) if flags.sweep == "lazy" else (len(job.settings.thresholds),)
    runs = [run.with_upper_part(end) for end in ends]
    jobs = [each.job() for each in runs]
    folders: list[str] = []

    def part(place: int) -> Part:
        def folder() -> str:
            if place:
                folders.append(next_generations(output, jobs[place]))
            else:
                folders.append(
                    begin_generations(
                        output, jobs, resume=flags.resume, overwrite=flags.overwrite, earlier=earlier, tell=say
                    )
                )
            return folders[-1]

        def decode(pipeline: beam.Pipeline, folder: str, progress: ProgressLog) -> beam.PCollection:
            plan = dataclasses.replace(runs[place].plan(folder), goes_on=place + 1 < len(jobs))
            if place:
                upper = jobs[place - 1]
                above = StoredGenerations(
                    directory=folders[place - 1], num_shards=flags.num_shards, thresholds=upper.settings.thresholds
                )
                plan = dataclasses.replace(plan, above=above, above_job=upper.digest())
            return (
                pipeline
                | "ReadExamples" >> ReadExamples(run.data, num_shards=flags.num_shards, progress=progress)
                | "DecodeExamples"
                >> DecodeExamples(
                    plan,
                    progress,
                    accelerator_hint=flags.accelerator.hint() if flags.accelerator else None,
                    needs_accelerator=flags.accelerator is not None,
                )
            )

        return Part(job=jobs[place], folder=folder, completions=decode)

    return Source(
        job=job,
        settings=job.settings,
        parts=tuple(part(place) for place in range(len(jobs))),
        model=ReportedModel(sizes=DecoderSizes.of(run.checkpoint.config), vocabulary=run.vocabulary),
    )


def stored_source(flags: argparse.Namespace, argv: Sequence[str]) -> Source:
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
    return Source(
        job=job,
        settings=dataclasses.replace(job.settings, thresholds=_part_of_grid(flags, job.settings.thresholds)),
        parts=(
            Part(
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
