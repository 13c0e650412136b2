"""External decoders for sweeps, whose answers can be computed by hand."""

import argparse
import pathlib
import time
from collections.abc import Mapping
from typing import Any

import apache_beam as beam
from apache_beam.options.pipeline_options import PipelineOptions
from apache_beam.runners.portability.fn_api_runner import FnApiRunner

from calm_beam.transforms import ReadExamples, SettingOutput, SweepWith
from tests.pipelines import write_rows

SETTINGS = ("all", 4, 2)
NAME = "cut 1"


def cut(prompts: list[str], settings: tuple[Any, ...]) -> Mapping[Any, list[Any]]:
    """Returns the prompts themselves under `all`, and that many of their words under a number; a word costs 1."""
    words = {setting: None if setting == "all" else setting for setting in settings}
    return {setting: [_cut(prompt, words[setting]) for prompt in prompts] for setting in settings}


def slow(prompts: list[str], settings: tuple[Any, ...]) -> Mapping[Any, list[Any]]:
    """Returns the output of `cut`, so slowly that a kill interrupts it."""
    time.sleep(0.1 * len(prompts))
    return cut(prompts, settings)


def _cut(prompt: str, words: int | None) -> SettingOutput:
    kept = prompt.split()[:words]
    return SettingOutput(text=" ".join(kept), cost=len(kept))


def write_texts(path: pathlib.Path, count: int = 24) -> pathlib.Path:
    """Writes prompts of one to eight words, each with itself as its reference, and returns the file."""
    texts = [" ".join(f"w{index}{place}" for place in range(1 + index % 8)) for index in range(count)]
    return write_rows(
        path, [{"id": f"e{index}", "input": text, "references": [text]} for index, text in enumerate(texts)]
    )


def sweep(data: pathlib.Path, output: pathlib.Path, *, decoder: Any = cut, processes: int = 1, **asked: Any) -> None:
    """Sweeps a decoder over a file into a directory, in this process or in several."""
    flags = ["--direct_running_mode=multi_processing", f"--direct_num_workers={processes}"] if processes > 1 else []
    settings = {"settings": SETTINGS, "decoder_name": NAME, **asked}
    with beam.Pipeline(runner=FnApiRunner(), options=PipelineOptions(flags)) as pipeline:
        _ = pipeline | ReadExamples(str(data), num_shards=6) | SweepWith(decoder, output=str(output), **settings)


def main() -> None:
    """Sweeps the slow decoder in two worker processes, for tests that kill them."""
    parser = argparse.ArgumentParser()
    parser.add_argument("data", type=pathlib.Path)
    parser.add_argument("output", type=pathlib.Path)
    parser.add_argument("--resume", action="store_true")
    given = parser.parse_args()
    sweep(given.data, given.output, decoder=slow, processes=2, batch_size=2, resume=given.resume)


if __name__ == "__main__":
    main()
