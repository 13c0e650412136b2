"""Runs `calm-beam decode` after its flags are parsed."""

import json
import os
from collections.abc import Iterator, Sequence
from typing import Any

from apache_beam.options.pipeline_options import PipelineOptions

from calm_beam.launch.flags import as_usage
from calm_beam.launch.flags.shared_options import find_data, find_output
from calm_beam.launch.run_sweep import prepare_task, run_sweep
from calm_beam.launch.runners import Workers
from calm_beam.launch.runners.dataflow import paths_by_flag
from calm_beam.launch.runners.workers import passing_folder, shared_place
from calm_beam.launch.terminal import tell
from calm_beam.outputs import DecodeJob, Generation, read_generations
from calm_beam.outputs.rows import write_in_data_order
from calm_beam.outputs.sharding import default_shards
from calm_beam.storage import base_name, replacing
from calm_beam.text import counted

from .request import DecodeRequest


def decode(request: DecodeRequest, options: PipelineOptions) -> int:
    """Decodes the requested data, prints a summary and returns the exit status of the command."""
    with as_usage():
        asked = None if request.output is None else os.fspath(request.output)
        output = find_output(asked, overwrite=request.overwrite)
        paths = {"checkpoint": request.named_model, "vocabulary": request.vocabulary, "data": request.patterns}
        workers = Workers.prepared(
            options,
            accelerator=request.device,
            paths=paths_by_flag({**paths, "output": output}),
            num_shards=lambda: request.num_shards or default_shards(find_data(request)),
        )
        workers.refuse_template(command="decode")
        run = prepare_task(
            request, request.settings, runs_here=workers.are_here, compares_texts=False
        ).without_weights()
        pipeline = workers.new_pipeline()
        # Next to the output, so that both are on the same disk.
        place = shared_place(workers, next_to=output)
    with passing_folder(place, name=f".{base_name(output)}.") as folder:
        with workers.shown_progress() as progress:
            run_sweep(pipeline, run, folder=folder, workers=workers, progress=progress)
        prompts, failed = _write(
            output, DecodeJob.shard_files(folder), thresholds=run.settings.thresholds, overwrite=request.overwrite
        )
    tell(f"{counted(prompts, 'prompt')} at {counted(len(run.settings.thresholds), 'threshold')} and in full: {output}")
    if failed:
        tell(f"{counted(failed, 'prompt')} could not be decoded; under `failure`, a row says why.")
    return 0


def _write(output: str, shards: Sequence[str], *, thresholds: Sequence[float], overwrite: bool) -> tuple[int, int]:
    """Writes the rows of all prompts; returns the number of prompts, and how many of them failed."""
    prompts = failed = 0

    def text_of(generation: Generation) -> str:
        nonlocal prompts, failed
        prompts += 1
        failed += generation.failure is not None
        return "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in _rows(generation, thresholds))

    generations = (item for path in shards for item in read_generations(path))
    with replacing(output, overwrite=overwrite) as temporary, open(temporary, "wb") as file:
        write_in_data_order(file, generations, text_of=text_of, folder=os.fspath(temporary.parent))
    return prompts, failed


def _rows(generation: Generation, thresholds: Sequence[float]) -> Iterator[dict[str, Any]]:
    """Yields the rows of one prompt; one row with the reason if it could not be decoded."""
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
