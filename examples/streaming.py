r"""Answers a stream of prompts under a manifest, and watches window by window whether the promise is kept.

    calm-beam calibrate --confidence=softmax --output=demo
    python examples/streaming.py --manifest=demo/manifest.json --consistency=textual --delta=0.05

Two hours of prompts of the demo data pass in half a minute. The full model answers every one of them as well, to
measure what the answer loses; in production a hundredth will do. The losses of each window count when it has ended.
"""

import argparse
import itertools
from collections.abc import Sequence

import apache_beam as beam
from apache_beam.ml.inference.base import RunInference
from apache_beam.options.pipeline_options import PipelineOptions, StandardOptions
from apache_beam.testing.test_stream import TestStream
from apache_beam.transforms import window

from calm_beam import transforms
from calm_beam.inputs import read_examples
from calm_beam.inputs.demo import embedded

_PROMPTS = 24
_SECONDS_BETWEEN = 300
_WINDOW_SECONDS = 3600


def source() -> beam.PTransform:
    """Returns a stream of prompts with ids and timestamps, as a message service would bring them.

    With Pub/Sub, where the attribute `id` names a message, this is

        beam.io.ReadFromPubSub(subscription="projects/P/subscriptions/S", with_attributes=True, id_label="id")

    followed by

        beam.Map(lambda message: transforms.NamedPrompt(id=message.attributes["id"], prompt=message.data.decode()))
    """
    stream = TestStream()
    for number, example in enumerate(itertools.islice(read_examples(str(embedded.CALIBRATION_SET)), _PROMPTS)):
        at = number * _SECONDS_BETWEEN
        prompt = transforms.NamedPrompt(id=example.id, prompt=example.input or "")
        stream = stream.advance_watermark_to(at).add_elements([window.TimestampedValue(prompt, at)])
    return stream.advance_watermark_to_infinity()


def main(argv: Sequence[str] | None = None) -> None:
    """Answers the stream and prints answers, states and alarms; unknown flags are passed to Beam."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--manifest", required=True)
    for name in ("model", "consistency", "metric"):
        parser.add_argument(f"--{name}")
    parser.add_argument("--delta", type=float)
    flags, rest = parser.parse_known_args(argv)
    handler = transforms.EarlyExitModelHandler(
        flags.manifest,
        flags.model,
        consistency=flags.consistency,
        metric=flags.metric,
        delta=flags.delta,
        probe_share=1,
        probe_salt="a secret",
    )
    options = PipelineOptions(rest)
    options.view_as(StandardOptions).streaming = True
    with beam.Pipeline(options=options) as pipeline:
        answers = (
            pipeline
            | "Prompts" >> source()
            | "Windows" >> beam.WindowInto(window.FixedWindows(_WINDOW_SECONDS))
            | "Answer" >> RunInference(handler.with_postprocess_fn(transforms.require_answer))
        )
        _ = answers | "Answers" >> beam.Map(lambda result: print(f"answer: {result.inference.text}"))
        watched = answers | transforms.SampledLosses() | transforms.MonitorRisk(alpha=0.05)
        _ = watched.states | "States" >> beam.Map(lambda risk: print(f"window: {risk}"))
        _ = watched.alarms | "Alarms" >> beam.Map(lambda risk: print(f"broken: {risk}"))
        _ = watched.missing_alarms | "Missing" >> beam.Map(lambda risk: print(f"broken, or losses missing: {risk}"))


if __name__ == "__main__":
    main()
