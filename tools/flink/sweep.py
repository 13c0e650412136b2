"""Sweeps a decoder that answers at once, and certifies its outputs, so that only the pipeline takes time.

    python -m tools.flink.sweep rows.jsonl swept --num-shards=8 --runner=FlinkRunner --job_endpoint=localhost:8099 ...

Unknown flags are passed to Beam.
"""

import argparse
import pathlib
import sys
from collections.abc import Mapping, Sequence

import apache_beam as beam
from apache_beam.options.pipeline_options import PipelineOptions

import calm_beam as calm
from calm_beam.launch.runners import make_runner, run_pipeline
from calm_beam.transforms import ReadExamples, SettingOutput, SweepWith

_SETTINGS = (64, 16, 4)


def main(argv: Sequence[str] | None = None) -> int:
    """Sweeps and certifies; returns 0."""
    parser = argparse.ArgumentParser(prog="python -m tools.flink.sweep", description=(__doc__ or "").split("\n")[0])
    parser.add_argument("data", type=pathlib.Path)
    parser.add_argument("output", type=pathlib.Path)
    parser.add_argument("--num-shards", type=int, default=4)
    flags, words = parser.parse_known_args(argv)
    options = PipelineOptions(words)
    pipeline = beam.Pipeline(runner=make_runner(options), options=options)
    read = ReadExamples(str(flags.data), num_shards=flags.num_shards)
    _ = pipeline | read | SweepWith(cut, settings=_SETTINGS, output=str(flags.output), decoder_name="cut 1")
    run_pipeline(pipeline)
    calm.certify(outputs=str(flags.output), metric="token_f1", delta=0.6, output=str(flags.output / "certified"))
    return 0


def cut(prompts: list[str], settings: tuple[int, ...]) -> Mapping[int, list[SettingOutput]]:
    """Returns the first characters of prompts, as many as a setting says; each costs 1."""
    return {
        setting: [SettingOutput(text=prompt[:setting], cost=min(setting, len(prompt))) for prompt in prompts]
        for setting in settings
    }


if __name__ == "__main__":
    sys.exit(main())
