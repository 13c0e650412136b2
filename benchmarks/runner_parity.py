"""Whether prompts have the same answers however they are served: alone, in batches, by RunInference, on every runner.

The answers of `Generator.generate`, one prompt at a time, are what all others are compared with: tokens and exit
layers. Other shapes of matrices round otherwise, so that a confidence that all but equals its threshold can fall on
either side: every difference is listed with its distance, and the exit status is 1 if rounding does not explain one.

    python -m benchmarks.runner_parity --manifest=calibration --checkpoint=model/ --data=prompts.jsonl.gz --delta=0.05
"""

import argparse
import itertools
import json
import pathlib
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import apache_beam as beam
from apache_beam.ml.inference.base import PredictionResult, RunInference
from apache_beam.runners.portability.fn_api_runner import FnApiRunner

from calm_beam.decoding.compilation import use_compilation_cache
from calm_beam.inputs import Reading, read_examples
from calm_beam.inputs.examples import numbered_lines
from calm_beam.launch.cli import main as calm_beam
from calm_beam.launch.flags.shared_options import find_manifest
from calm_beam.manifest import read_manifest
from calm_beam.outputs import Output, read_answers
from calm_beam.serving import Answer, Generator
from calm_beam.transforms import EarlyExitModelHandler
from tests.worker_pools import flags_of_two_workers

from .machine import describe_machine
from .serving_parity import difference

Answers = Mapping[str, Any]
_COMPARED = ("text", "tokens", "exit_layers", "confidences")
_RUNNERS = ("processes", "job service")


def main() -> int:
    """Prints how many answers differ from those of prompts alone; returns 1 if one is no near tie."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--manifest", required=True)
    parser.add_argument("--checkpoint", required=True)
    parser.add_argument("--data", required=True, help="JSONL")
    parser.add_argument("--prompts", type=int, default=5000)
    parser.add_argument("--consistency")
    parser.add_argument("--metric")
    parser.add_argument("--delta", type=float)
    parser.add_argument("--runners", default=",".join(_RUNNERS))
    flags = parser.parse_args()
    use_compilation_cache()
    promise = {
        name: value for name in ("consistency", "metric", "delta") if (value := getattr(flags, name)) is not None
    }
    manifest = find_manifest(flags.manifest)
    generator = Generator.from_manifest(read_manifest(manifest), flags.checkpoint, **promise)
    entry = generator.entry
    thresholds = None if entry.threshold is None else entry.threshold_by_position
    examples = list(itertools.islice(read_examples(flags.data, Reading()), flags.prompts))
    prompts = {example.id: example.input or "" for example in examples}
    print(f"{describe_machine()}\nthreshold {entry.threshold}, {len(prompts)} prompts", flush=True)
    alone, seconds = _timed(lambda: {name: generator.generate(prompt) for name, prompt in prompts.items()})
    print(f"alone: {seconds:.0f} s", flush=True)
    far = 0
    for way, answers in _ways(flags, manifest, generator=generator, prompts=prompts, promise=promise):
        found, seconds = _timed(answers)
        far += _compare(way, alone, found, thresholds=thresholds, seconds=seconds)
    return 1 if far else 0


def _ways(
    flags: argparse.Namespace,
    manifest: str,
    *,
    generator: Generator,
    prompts: Mapping[str, str],
    promise: Mapping[str, Any],
) -> Iterator[tuple[str, Callable[[], Answers]]]:
    """Yields the ways to answer prompts besides one by one."""
    names, texts = list(prompts), list(prompts.values())
    for size in (8, 64, None):
        batched = Generator.from_manifest(generator.manifest, flags.checkpoint, **promise, batch_size=size)
        yield (
            f"generate_batch, {size or 'as many as recommended'} at a time",
            lambda batched=batched: dict(zip(names, batched.generate_batch(texts), strict=True)),  # type: ignore[misc]
        )
    yield "RunInference", lambda: _by_inference(EarlyExitModelHandler(manifest, flags.checkpoint, **promise), prompts)
    for kind in flags.runners.split(","):
        yield f"generate, {kind}", lambda kind=kind: _by_command(kind, flags, promise)  # type: ignore[misc]


def _by_inference(handler: EarlyExitModelHandler, prompts: Mapping[str, str]) -> Answers:
    with tempfile.TemporaryDirectory() as folder:
        with beam.Pipeline(runner=FnApiRunner()) as pipeline:
            _ = (
                pipeline
                | beam.Create(sorted(set(prompts.values())))
                | RunInference(handler)
                | beam.Map(_line)
                | beam.io.WriteToText(f"{folder}/answers")
            )
        lines = (line for part in pathlib.Path(folder).iterdir() for line in part.read_text("utf-8").splitlines())
        by_prompt = {row["prompt"]: row for row in map(json.loads, lines)}
    return {name: by_prompt[prompt] for name, prompt in prompts.items()}


def _line(result: PredictionResult) -> str:
    answer = result.inference
    return json.dumps({"prompt": result.example, **{name: getattr(answer, name) for name in _COMPARED}})


def _by_command(kind: str, flags: argparse.Namespace, promise: Mapping[str, Any]) -> Answers:
    with tempfile.TemporaryDirectory() as folder, flags_of_two_workers(kind) as workers:
        some = pathlib.Path(folder, "prompts.jsonl")
        with open(flags.data, "rb") as raw:
            lines = itertools.islice(numbered_lines(raw, path=flags.data), flags.prompts)
            some.write_bytes(b"".join(line.rstrip(b"\n") + b"\n" for _, line in lines))
        output = f"{folder}/answers/"
        asked = [f"--{name}={value}" for name, value in promise.items()]
        command = ["generate", f"--manifest={flags.manifest}", f"--checkpoint={flags.checkpoint}", f"--input={some}"]
        status = calm_beam([*command, f"--output={output}", *asked, *workers])
        if status:
            raise SystemExit(status)
        return {row["id"]: row for row in read_answers(output)}


def _compare(
    way: str, alone: Mapping[str, Answer], found: Answers, *, thresholds: Sequence[float] | None, seconds: float
) -> int:
    """Prints how many answers differ, and returns how many of them rounding does not explain."""
    if found.keys() != alone.keys():
        raise AssertionError(f"{way}: {len(found)} answers to {len(alone)} prompts")
    differences = []
    for name, answer in alone.items():
        differs = difference(name, _output(answer), served=_output(found[name]), thresholds=thresholds)
        if differs is not None:
            differences.append(differs)
    for differs in differences:
        print(differs.in_words())
    far = sum(not differs.is_near_tie for differs in differences)
    print(
        f"{way}: {len(differences)} of {len(alone)} answers differ, {far} by no near tie; {seconds:.0f} s", flush=True
    )
    return far


def _output(answer: Answer | Mapping[str, Any]) -> Output:
    values = answer if isinstance(answer, Mapping) else vars(answer)
    return Output(
        text=values["text"],
        tokens=tuple(values["tokens"]),
        exit_layers=tuple(values["exit_layers"]),
        confidences=tuple(values["confidences"]),
    )


def _timed(work: Callable[[], Answers]) -> tuple[Answers, float]:
    start = time.perf_counter()
    return work(), time.perf_counter() - start


if __name__ == "__main__":
    sys.exit(main())
