"""What `calm-beam decode` does once its flags are parsed."""

import argparse
import json
import tempfile
from collections.abc import Iterator, Sequence
from typing import Any

import apache_beam as beam
from apache_beam.options.pipeline_options import PipelineOptions

from calm_beam.counted import counted
from calm_beam.generations import Generation, read_generations
from calm_beam.generations.folder import shard_files
from calm_beam.launch.flags import UsageError, as_usage
from calm_beam.launch.flags.data import find_output
from calm_beam.launch.runners import is_local, make_runner, run_pipeline
from calm_beam.launch.setup_run import prepare_run
from calm_beam.launch.terminal import tell
from calm_beam.launch.terminal.progress import shown_progress
from calm_beam.storage import base_name, is_cloud_path, parent, replacing
from calm_beam.transforms import DecodeExamples, ReadExamples


def decode(flags: argparse.Namespace, options: PipelineOptions) -> int:
    """Decodes as the flags say, tells about it and returns the exit status of the command."""
    with as_usage():
        output = find_output(flags.output, overwrite=flags.overwrite)
        if not is_local(options):
            raise UsageError("decode writes one file and runs on this machine: leave --runner out.")
        run = prepare_run(flags, needs_references=False).without_weights()
        pipeline = beam.Pipeline(runner=make_runner(options), options=options)
    # Beside the output, so that the same disk has to hold both.
    beside = None if is_cloud_path(output) else parent(output)
    with tempfile.TemporaryDirectory(prefix=f".{base_name(output)}.", dir=beside) as folder:
        assignment = run.assignment(folder)
        with shown_progress(enabled=True) as progress:
            _ = (
                pipeline
                | "ReadExamples" >> ReadExamples(run.data, num_shards=run.num_shards, progress=progress)
                | "DecodeExamples" >> DecodeExamples(assignment, progress)
            )
            run_pipeline(pipeline)
        generations = [item for path in shard_files(folder) for item in read_generations(path)]
        generations.sort(key=lambda generation: (generation.example.file_index, generation.example.line))
        with (
            replacing(output, overwrite=flags.overwrite) as temporary,
            open(temporary, "w", encoding="utf-8") as file,
        ):
            for generation in generations:
                for row in _rows(generation, run.settings.thresholds):
                    file.write(json.dumps(row, ensure_ascii=False) + "\n")
    failed = sum(generation.failure is not None for generation in generations)
    tell(
        f"{counted(len(generations), 'prompt')} at {counted(len(run.settings.thresholds), 'threshold')} and in "
        f"full: {output}"
    )
    if failed:
        tell(f"{counted(failed, 'prompt')} could not be decoded; under `failure`, a row says why.")
    return 0


def _rows(generation: Generation, thresholds: Sequence[float]) -> Iterator[dict[str, Any]]:
    """Yields the rows of one prompt; one row that says why, if it could not be decoded."""
    if generation.failure is not None:
        yield {"id": generation.example.id, "failure": generation.failure}
        return
    for threshold, output in zip((None, *thresholds), generation.outputs, strict=True):
        yield {
            "id": generation.example.id,
            "threshold": threshold,
            "tokens": output.tokens,
            "text": output.text,
            "exit_layers": output.exit_layers,
            "confidences": output.confidences,
        }
