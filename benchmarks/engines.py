"""The native engine against XLA, in turns: prefill, and single prompts of small models from end to end.

Models are the demo model, a random T5 of the paper's dimensions, and a random decoder-only model of SmolLM2's with
fewer layers. Prompts are random token ids, of two lengths for each width: all of it, and a little over half.

    python -m benchmarks.engines
    python -m benchmarks.engines --models=demo --widths=32,64
"""

import argparse
import dataclasses
import pathlib
import time
from collections.abc import Callable, Sequence

import jax
import numpy as np

from calm_beam.checkpoints import Checkpoint, load_checkpoint
from calm_beam.decoding.branches import Branch
from calm_beam.decoding.cpu import NativeSources
from calm_beam.decoding.device_groups import device_groups
from calm_beam.decoding.engine import Slots
from calm_beam.decoding.kv_cache import SingleBranches
from calm_beam.decoding.single_prompts import single_prompt_decoder
from calm_beam.decoding.weights import Weights
from calm_beam.decoding.xla.engine import sources_by_width
from calm_beam.exits.rule import ExitRule
from calm_beam.inputs.demo import embedded
from calm_beam.manifest import EngineRecord
from calm_beam.model import ModelConfig, network_of, parameter_shapes
from calm_beam.model.llama import LlamaConfig

from .machine import describe_machine
from .paper_model import build_paper_model
from .programs.models import LARGE_MODELS

_STEPS = 24
_RULES = (
    (ExitRule(confidence="static"), None),
    (ExitRule(min_exit_layer=4, exit_interval=2), 0.4),
    (ExitRule(min_exit_layer=2, exit_interval=2), 0.55),
)
_SMOLLM = LARGE_MODELS["SmolLM2-135M"]
assert isinstance(_SMOLLM, LlamaConfig)
_SMALL_LLM = dataclasses.replace(_SMOLLM, num_decoder_layers=10)
_MODELS: dict[str, Callable[[], Checkpoint]] = {
    "demo": lambda: load_checkpoint(str(embedded.MODEL)),
    "paper": build_paper_model,
    "llm": lambda: _random(_SMALL_LLM),
}


def main() -> None:
    """Prints a line for every width and number of prompts, and one for every rule."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--models", type=lambda text: text.split(","), default=list(_MODELS))
    parser.add_argument("--widths", type=lambda text: [int(each) for each in text.split(",")], default=[32, 128, 512])
    parser.add_argument("--rounds", type=int, default=5)
    flags = parser.parse_args()
    print(describe_machine())
    for name in flags.models:
        checkpoint = _MODELS[name]()
        for width in flags.widths:
            _prefill(name, checkpoint, width=width, rounds=flags.rounds)
        _single_prompts(name, checkpoint, rounds=flags.rounds)


def _random(config: ModelConfig) -> Checkpoint:
    """Returns a model whose kernels have unit gain."""
    generator = np.random.default_rng(0)
    arrays = {
        name: np.ones(shape, np.float32)
        if name.endswith("/scale")
        else generator.standard_normal(shape, np.float32) * np.float32(shape[0] ** -0.5)
        for name, shape in parameter_shapes(config).items()
    }
    nowhere = pathlib.Path("/nowhere")
    return Checkpoint(config=config, arrays=arrays, directory=nowhere, vocabulary_path=None, layout="native")


def _prefill(name: str, checkpoint: Checkpoint, *, width: int, rounds: int) -> None:
    most = max(1, min(64, 8192 // width))
    (group, *_), model = device_groups(checkpoint.config), network_of(checkpoint.config)
    native = EngineRecord(name="native", head="exact", prefill="native")
    weights = Weights(
        checkpoint, model, group, steps=_STEPS, measures=[ExitRule(confidence="static").measure()], engine=native
    )
    assert weights.native is not None
    slots = Slots(
        SingleBranches(slots=most, steps=_STEPS, capacity=most * _STEPS),
        num_branches=1,
        steps=_STEPS,
        sources={width: most},
        prefixes={},
        widths=np.full(most, width, np.int32),
        places=np.arange(most, dtype=np.int32),
        lengths=np.ones(most, np.int32),
    )
    ours, theirs = NativeSources(checkpoint.config, weights.native, slots), sources_by_width(model, weights, slots)
    for count, length in ((1, width), (1, width * 6 // 10), (most, width), (most, width * 6 // 10)):
        tokens = np.zeros((count, width), np.int32)
        tokens[:, :length] = np.random.default_rng(0).integers(3, 2000, (count, length))
        lengths, places = np.full(count, length, np.int32), np.arange(count, dtype=np.int32)

        def by_xla(tokens: np.ndarray = tokens, lengths: np.ndarray = lengths, places: np.ndarray = places) -> None:
            theirs[width].admit(model, weights, tokens, lengths=lengths, places=places)
            jax.block_until_ready(theirs[width].mask)

        def by_native_code(
            tokens: np.ndarray = tokens, lengths: np.ndarray = lengths, places: np.ndarray = places
        ) -> None:
            ours.prefill(width, source_tokens=tokens, lengths=lengths, places=places)

        xla, native_code = _fastest([by_xla, by_native_code], rounds)
        print(
            f"{name}: prefill of {count} x {length} tokens (width {width}): XLA {xla * 1e3:.1f} ms, native code "
            f"{native_code * 1e3:.1f} ms, {xla / native_code:.2f} times as fast",
            flush=True,
        )


def _single_prompts(name: str, checkpoint: Checkpoint, *, rounds: int) -> None:
    generator = np.random.default_rng(1)
    prompts = [generator.integers(3, 2000, length).tolist() for length in generator.integers(8, 40, 12)]
    for rule, threshold in _RULES:
        branch = Branch.at(rule, threshold, max_decode_length=_STEPS)
        decoders = [
            single_prompt_decoder(checkpoint, branch, engine=engine, exit_head="auto", max_input_length=64)
            for engine in ("xla", "native")
        ]
        times = np.full((2, len(prompts)), np.inf)
        tokens = 0
        for turn in range(rounds + 1):
            for index, prompt in enumerate(prompts):
                for which, decoder in enumerate(decoders):
                    start = time.perf_counter()
                    ((_, result),) = decoder.decode([prompt])
                    seconds = time.perf_counter() - start
                    # The first turn compiles.
                    times[which, index] = min(times[which, index], seconds) if turn else np.inf
                    tokens += result.length if turn == 0 and which == 0 else 0
        xla, native_code = tokens / times.sum(axis=1)
        exits = "the full model" if threshold is None else f"softmax from layer {rule.min_exit_layer} at {threshold}"
        print(
            f"{name}: one prompt at a time, {exits}: tokens a second by XLA {xla:.0f}, by native code "
            f"{native_code:.0f}, {native_code / xla:.2f} times as fast",
            flush=True,
        )


def _fastest(ways: Sequence[Callable[[], None]], rounds: int) -> list[float]:
    """Returns the fastest of some rounds of each way, in seconds, after one that compiles."""
    best = [np.inf] * len(ways)
    for turn in range(rounds + 1):
        for index, way in enumerate(ways):
            start = time.perf_counter()
            way()
            best[index] = min(best[index], time.perf_counter() - start) if turn else np.inf
    return best


if __name__ == "__main__":
    main()
