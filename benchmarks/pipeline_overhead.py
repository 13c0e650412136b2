"""The cost of the pipeline around the sweep: the same prompts decoded bare, and calibrated.

Bare is a loop over `generate` that writes its results, on a model that is loaded. The pipeline is the whole command
`calm-beam calibrate`, in one process: with the checks before it, reading, grouping by prompt, decoding, writing,
scoring, summing and testing. Its work other than decoding is then repeated piece by piece.

    python -m benchmarks.pipeline_overhead --prompts=10000 --checkpoint=model/ --data=calibration.jsonl.gz

`--fake_decoder` puts made-up outputs in the place of the sweep: the rest is the pipeline alone, measured in
seconds.
"""

import argparse
import contextlib
import dataclasses
import importlib
import io
import itertools
import json
import pathlib
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from unittest import mock

import apache_beam as beam
import numpy as np
from apache_beam.options.pipeline_options import PipelineOptions

from calm_beam.calibration.guarantee import every_guarantee, specs_of
from calm_beam.calibration.plan import layout_of, plan_of
from calm_beam.checkpoints import Checkpoint, load_checkpoint
from calm_beam.decoding.branches import PromptResult, Request, sweep_branches
from calm_beam.decoding.decoder import Decoder
from calm_beam.decoding.engine import Work
from calm_beam.decoding.memory import keep_freed_memory
from calm_beam.decoding.settings import DecodeSettings
from calm_beam.exits.rule import ExitRule
from calm_beam.exits.thresholds import uniform_grid
from calm_beam.inputs.demo import embedded
from calm_beam.inputs.examples import Example, parse_examples
from calm_beam.inputs.prompts import encode_prompt
from calm_beam.inputs.vocabularies.vocabulary import Vocabulary
from calm_beam.launch.cli import main as calm_beam
from calm_beam.launch.runners import make_runner, run_pipeline
from calm_beam.manifest import EngineRecord
from calm_beam.metrics.registry import get_metric
from calm_beam.outputs import Generation, read_generations, write_generations
from calm_beam.outputs.generate import generate
from calm_beam.outputs.scoring import score_by_policy
from calm_beam.outputs.totals import CalibrationTotals
from calm_beam.transforms import ReadExamples

from .machine import describe_machine

_METRIC = "rouge_l"
_SCORED_AT_ONCE = 64


@dataclasses.dataclass
class _Time:
    """Seconds by the clock, and of all threads of this process."""

    wall: float = 0.0
    cpu: float = 0.0


@contextlib.contextmanager
def _measured(times: dict[str, _Time], part: str) -> Iterator[None]:
    wall, cpu = time.perf_counter(), time.process_time()
    yield
    total = times.setdefault(part, _Time())
    total.wall += time.perf_counter() - wall
    total.cpu += time.process_time() - cpu


class _FakeDecoder:
    """Gives every prompt outputs of a few random tokens, most of them the same in many branches, as real ones are."""

    def __init__(self, checkpoint: Checkpoint, num_branches: int, *, steps: int) -> None:
        self._layers = checkpoint.config.num_decoder_layers
        self._vocab_size = checkpoint.config.vocab_size
        self._num_branches = num_branches
        self._steps = steps
        self.work = Work()
        self.slots = 1
        self.engine: EngineRecord | None = None

    def decode(self, prompts: Sequence[Request]) -> Iterator[tuple[int, PromptResult]]:
        generator = np.random.default_rng(0)
        for index in range(len(prompts)):
            length = min(self._steps, 12)
            tokens = np.zeros((self._num_branches, self._steps), np.int32)
            tokens[:, :length] = generator.integers(3, self._vocab_size, size=length)
            # One in three branches has a token of its own.
            tokens[::3, length // 2] = generator.integers(3, self._vocab_size, size=len(tokens[::3]))
            exit_layers = np.where(tokens > 0, generator.integers(1, self._layers + 1, size=tokens.shape), 0)
            exit_layers[0] = np.where(tokens[0] > 0, self._layers, 0)
            yield (
                index,
                PromptResult(
                    tokens=tokens,
                    exit_layers=exit_layers.astype(np.int32),
                    confidences=generator.random(tokens.shape, np.float32),
                    lengths=np.full(self._num_branches, length),
                    is_finite=True,
                ),
            )


def main(argv: Sequence[str] | None = None) -> None:
    """Prints both times, and those of the pipeline's work other than decoding."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--checkpoint", default=str(embedded.MODEL))
    parser.add_argument("--data", default=str(embedded.CALIBRATION_SET), help="repeated if it has fewer prompts")
    parser.add_argument("--prompts", type=int, default=1000)
    parser.add_argument("--grid_step", type=float, default=0.05)
    parser.add_argument("--max_decode_length", type=int, default=48)
    parser.add_argument("--batch_size", type=int, help="default: as the command chooses")
    parser.add_argument("--num_shards", type=int, default=8)
    parser.add_argument("--fake_decoder", action="store_true")
    flags = parser.parse_args(argv)
    with tempfile.TemporaryDirectory(prefix="calm-beam-") as folder:
        _run(flags, pathlib.Path(folder))


def _run(flags: argparse.Namespace, folder: pathlib.Path) -> None:
    # As workers do: without it, large steps take twice the time.
    keep_freed_memory()
    checkpoint = load_checkpoint(flags.checkpoint)
    settings = DecodeSettings(
        rule=ExitRule(),
        thresholds=uniform_grid(flags.grid_step),
        max_input_length=512,
        max_decode_length=flags.max_decode_length,
    )
    data = _write_data(pathlib.Path(flags.data), folder / "data.jsonl", count=flags.prompts)
    fake = _FakeDecoder(checkpoint, len(settings.thresholds) + 1, steps=settings.max_decode_length)
    faked = (
        mock.patch("calm_beam.outputs.worker.Decoder", return_value=fake)
        if flags.fake_decoder
        else contextlib.nullcontext()
    )
    real = Decoder(
        checkpoint,
        sweep_branches(settings.rule, settings.thresholds, max_decode_length=settings.max_decode_length),
        max_input_length=settings.max_input_length,
        batch_size=flags.batch_size,
    )
    # The engine that workers compare with the run's record.
    fake.engine = real.engine
    bare: dict[str, _Time] = {}
    whole: dict[str, _Time] = {}
    _decode_bare(
        flags,
        data,
        checkpoint=checkpoint,
        settings=settings,
        decoder=fake if flags.fake_decoder else real,
        folder=folder,
        times=bare,
    )
    command = [
        "calibrate",
        f"--checkpoint={flags.checkpoint}",
        f"--data={data}",
        f"--grid_step={flags.grid_step}",
        f"--max_decode_length={flags.max_decode_length}",
        *([f"--batch_size={flags.batch_size}"] if flags.batch_size else []),
        f"--num_shards={flags.num_shards}",
        f"--metric={_METRIC}",
        f"--output={folder / 'calibration'}",
    ]
    # Imported now, as it is measured by itself; the first score imports what the metric needs.
    importlib.import_module("calm_beam.launch.calibrate")
    get_metric(_METRIC)("a text", ("a text",))
    with faked, contextlib.redirect_stdout(io.StringIO()), _measured(whole, "calm-beam calibrate"):
        assert calm_beam(command) == 0
    parts = _measure_parts(
        flags,
        data,
        checkpoint=checkpoint,
        settings=settings,
        shards=sorted(folder.glob("calibration/generations/*/*.parquet")),
    )
    _print(flags, bare, whole=whole["calm-beam calibrate"], parts=parts)


def _write_data(source: pathlib.Path, target: pathlib.Path, *, count: int) -> pathlib.Path:
    """Writes so many examples, with ids of their own."""
    with open(source, "rb") as raw:
        examples = list(parse_examples(raw, path=str(source)))
    with open(target, "w", encoding="utf-8") as file:
        for index, example in enumerate(itertools.islice(itertools.cycle(examples), count)):
            content = {"input": example.input} if example.input is not None else {"input_ids": example.input_ids}
            row = {"id": f"{index}", **content, "references": example.references}
            file.write(json.dumps(row, ensure_ascii=False) + "\n")
    return target


def _decode_bare(
    flags: argparse.Namespace,
    data: pathlib.Path,
    *,
    checkpoint: Checkpoint,
    settings: DecodeSettings,
    decoder: Decoder | _FakeDecoder,
    folder: pathlib.Path,
    times: dict[str, _Time],
) -> None:
    """Decodes and writes all examples, once XLA has compiled what it will need."""
    vocabulary = Vocabulary(checkpoint.vocabulary_path) if checkpoint.vocabulary_path else None
    with open(data, "rb") as raw:
        examples = list(parse_examples(raw, path=str(data)))

    def decoded(some: Sequence[Example]) -> list[Generation]:
        vocab_size = checkpoint.config.vocab_size
        prompts = [
            encode_prompt(example, vocabulary, settings=settings, vocab_size=vocab_size, on_long="truncate")
            for example in some
        ]
        made = generate(decoder, prompts, vocabulary=vocabulary, on_error="fail", duplicates=frozenset())
        return [generation for (generation,) in made]

    # The longest prompts and the shortest ones have all the widths between them, or nearly.
    by_length = sorted(examples, key=lambda example: len(example.input or example.input_ids or ()))
    decoded([*by_length[:4], *by_length[-4:]])
    for shard in range(flags.num_shards):
        with _measured(times, "decoding"):
            generations = decoded(examples[shard :: flags.num_shards])
        with _measured(times, "writing Parquet"):
            write_generations(folder / f"bare-{shard}.parquet", generations)


def _measure_parts(
    flags: argparse.Namespace,
    data: pathlib.Path,
    *,
    checkpoint: Checkpoint,
    settings: DecodeSettings,
    shards: Sequence[pathlib.Path],
) -> dict[str, _Time]:
    """Returns the times of the pipeline's work other than decoding and writing, each measured alone."""
    times: dict[str, _Time] = {}
    with _measured(times, "loading and hashing the model, twice"):
        for _ in range(2):
            load_checkpoint(flags.checkpoint).fingerprint()
    with _measured(times, "starting an empty pipeline"):
        _run_beam(beam.Create([0]))
    with _measured(times, "reading, checking ids, grouping by prompt"):
        _run_beam(ReadExamples(str(data), num_shards=flags.num_shards))
    with _measured(times, "reading Parquet"):
        generations = [generation for shard in shards for generation in read_generations(shard)]
    asked = every_guarantee(consistencies=("textual",), metrics=(_METRIC,), deltas=(0.1,), epsilons=(0.05,))
    specs = specs_of(asked)
    layout = layout_of(plan_of(specs, settings, model=checkpoint.fingerprint(), vocabulary=None))
    metrics = {_METRIC: get_metric(_METRIC)}
    with _measured(times, "scoring"):
        losses = [
            score_by_policy(
                generation, layout.objectives, metrics=metrics, num_thresholds=layout.thresholds, on_error="fail"
            ).losses
            for generation in generations
        ]
    with _measured(times, "summing"):
        total = CalibrationTotals.zero(layout)
        for start in range(0, len(generations), _SCORED_AT_ONCE):
            some = generations[start : start + _SCORED_AT_ONCE]
            ids = [generation.example.id for generation in some]
            stacked = np.stack(losses[start : start + _SCORED_AT_ONCE])
            of_losses = CalibrationTotals.of_losses(ids, stacked, layout=layout, salt="")
            total = total.merge(CalibrationTotals.of_examples(some, layout).merge(of_losses))
    assert total.risk.n == flags.prompts
    return times


def _run_beam(transform: beam.PTransform) -> None:
    options = PipelineOptions([])
    pipeline = beam.Pipeline(runner=make_runner(options), options=options)
    _ = pipeline | transform
    run_pipeline(pipeline)


def _print(flags: argparse.Namespace, bare: dict[str, _Time], *, whole: _Time, parts: dict[str, _Time]) -> None:
    print(describe_machine())
    decoder = "a fake decoder" if flags.fake_decoder else flags.checkpoint
    num_branches = len(uniform_grid(flags.grid_step)) + 1
    print(f"{flags.prompts} prompts, {num_branches} branches, {decoder}; seconds by the clock, and of this process")
    sweep = _Time(sum(part.wall for part in bare.values()), sum(part.cpu for part in bare.values()))
    for name, part in bare.items():
        _print_row(f"  {name}", part, sweep=sweep)
    _print_row("bare sweep", sweep, sweep=sweep)
    _print_row("calm-beam calibrate", whole, sweep=sweep)
    over = _Time(whole.wall - sweep.wall, whole.cpu - sweep.cpu)
    _print_row("overhead", over, sweep=sweep)
    for name, part in parts.items():
        _print_row(f"  {name}", part, sweep=sweep)
    rest = _Time(
        over.wall - sum(part.wall for part in parts.values()), over.cpu - sum(part.cpu for part in parts.values())
    )
    _print_row("  rest (shards, results, noise of decoding)", rest, sweep=sweep)
    start = time.perf_counter()
    subprocess.run([sys.executable, "-c", "import calm_beam.launch.calibrate"], check=True, capture_output=True)
    print(f"importing the command takes {time.perf_counter() - start:.1f} s more, once")


def _print_row(name: str, part: _Time, *, sweep: _Time) -> None:
    print(f"{name:<44} {part.wall:9.2f} {part.cpu:9.2f} {part.cpu / sweep.cpu:8.1%}")


if __name__ == "__main__":
    main()
