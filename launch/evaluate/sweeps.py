"""The sweeps of an experiment on workers that Beam's flags name."""

import argparse
import dataclasses
from collections.abc import Sequence

from apache_beam.options.pipeline_options import DirectOptions, PipelineOptions, PortableOptions

from calm_beam.evaluation.performance import Variant
from calm_beam.inputs.examples import Example
from calm_beam.launch.run_sweep import run_sweep
from calm_beam.launch.runners import Workers
from calm_beam.launch.runners.dataflow import job_paths
from calm_beam.launch.runners.shared_folder import passing_folder
from calm_beam.outputs import Generation, read_generations
from calm_beam.outputs.prepared import PreparedSweep
from calm_beam.outputs.shard_count import shards_for
from calm_beam.transforms.examples import DivideExamples
from calm_beam.transforms.progress import ProgressLog

# Flags of what workers read: the sample is read here, and what is found is written here.
_WORKERS_PATHS = ("checkpoint", "vocabulary")


def sweep_workers(flags: argparse.Namespace, options: PipelineOptions) -> Workers | None:
    """Returns the workers that decode the sample; None where this process does, without a pipeline.

    Raises:
      UsageError: As `Workers.prepared`.
    """
    if flags.num_shards is None:
        flags.num_shards = shards_for(flags.max_examples)
    workers = Workers.prepared(
        options,
        accelerator=flags.accelerator,
        paths=job_paths(flags, _WORKERS_PATHS),
        num_shards=lambda: flags.num_shards,
    )
    workers.refuse_template(command="evaluate")
    direct, portable = options.view_as(DirectOptions), options.view_as(PortableOptions)
    # A pool of workers may be of one.
    is_alone = workers.are_here and direct.direct_num_workers == 1 and not portable.environment_type
    # Checks the rest of Beam's flags too.
    workers.new_pipeline()
    return None if is_alone else workers


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
        shards = run_sweep(pipeline, read, sweep=sweep, folder=folder, workers=workers, progress=progress)
        return [generation for path in shards for generation in read_generations(path)]
