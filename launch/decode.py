"""`calm-beam decode`: the sweep alone, one JSONL row per prompt and threshold.

Rows come in the order of the data, the full model (threshold null) before the thresholds in descending order.
"""

import json
import tempfile
from collections.abc import Iterator, Sequence
from typing import Any

import apache_beam as beam

from calm_beam.counted import counted
from calm_beam.generations import Generation, read_generations
from calm_beam.generations.folder import shard_files
from calm_beam.storage import base_name, is_cloud_path, parent, replacing
from calm_beam.transforms import DecodeExamples, ReadExamples

from .flags import FlagParser, UsageError, add_decode_flags, as_usage, parse_flags
from .flags.data import find_output
from .runners import is_local, make_runner, run_pipeline
from .setup_run import prepare_run
from .terminal import tell
from .terminal.progress import shown_progress


def main(argv: Sequence[str]) -> int:
    """Runs the command and returns its exit status."""
    parser = FlagParser(prog="calm-beam decode", description=(__doc__ or "").split("\n\n")[0])
    add_decode_flags(parser, default_grid_step=None)
    # What is printed is looked at, and compared.
    parser.set_defaults(exit_head="exact")
    parser.add_argument("--output", help="JSONL file to write")
    with as_usage():
        flags, options = parse_flags(parser, argv)
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
                | "ReadExamples" >> ReadExamples(run.data, num_shards=flags.num_shards, progress=progress)
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
