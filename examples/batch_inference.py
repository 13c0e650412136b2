r"""Answers prompts, one per line, under a manifest: JSON lines with the text and the number of decoder layers saved.

    python examples/batch_inference.py --manifest=demo/manifest.json \
        --consistency=textual --delta=0.05 --prompts=prompts.txt --answers=answers

The entry of the manifest is chosen by `--consistency`, `--metric` and `--delta`, as far as there are several.
`--model` is the folder of the model; by default the one that the manifest names.
"""

import argparse
import json
from collections.abc import Sequence

import apache_beam as beam
from apache_beam.ml.inference.base import PredictionResult, RunInference
from apache_beam.options.pipeline_options import PipelineOptions

from calm_beam import transforms


def row(result: PredictionResult) -> str:
    """Returns a line of JSON."""
    answer = result.inference
    return json.dumps({"prompt": result.example, "answer": answer.text, "layers_saved": answer.layers_saved})


def main(argv: Sequence[str] | None = None) -> None:
    """Reads prompts, answers them, and writes the answers; unknown flags are passed to Beam."""
    parser = argparse.ArgumentParser()
    for name in ("manifest", "prompts", "answers"):
        parser.add_argument(f"--{name}", required=True)
    for name in ("model", "consistency", "metric"):
        parser.add_argument(f"--{name}")
    parser.add_argument("--delta", type=float)
    flags, options = parser.parse_known_args(argv)
    handler = transforms.EarlyExitModelHandler(
        flags.manifest, flags.model, consistency=flags.consistency, metric=flags.metric, delta=flags.delta
    )
    with beam.Pipeline(options=PipelineOptions(options)) as pipeline:
        _ = (
            pipeline
            | beam.io.ReadFromText(flags.prompts)
            | RunInference(handler.with_postprocess_fn(transforms.require_answer))
            | beam.Map(row)
            | beam.io.WriteToText(flags.answers, file_name_suffix=".jsonl")
        )


if __name__ == "__main__":
    main()
