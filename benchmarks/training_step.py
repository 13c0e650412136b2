"""Times a step of training a decoder-only model: its gradient, its update, and how well both use the machine.

Prompts and targets are random ids. Losses are those of every eighth layer, as with `train --rotating_layers=8`.

    python -m benchmarks.training_step --checkpoint=smollm2 --rows=8 --source=250 --target=12
"""

import argparse
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import numpy as np

from calm_beam.checkpoints import load_checkpoint
from calm_beam.model import network_of
from calm_beam.model.llama import LlamaConfig
from calm_beam.training.batches import BatchShape, pad_batch
from calm_beam.training.config import MuonConfig
from calm_beam.training.step import (
    initial_optimizer_state,
    loss_and_gradients,
    parameter_group,
    rotating_layers,
    update,
)

from .machine import describe_machine
from .multiply_adds import square_rate

_EVERY = 8
_STEPS = 1000
_TIMES = 3


def main(argv: Sequence[str] | None = None) -> None:
    """Prints seconds, and the share of the rate of a square matrix product."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--checkpoint", required=True)
    parser.add_argument("--rows", type=int, default=8)
    parser.add_argument("--source", type=int, default=250, help="tokens of a row, prompt and output")
    parser.add_argument("--target", type=int, default=12, help="tokens of its output")
    flags = parser.parse_args(argv)
    checkpoint = load_checkpoint(flags.checkpoint)
    config = checkpoint.config
    if not isinstance(config, LlamaConfig):
        parser.error(f"{flags.checkpoint}: not a decoder-only model")
    ids = np.random.default_rng(0).integers(5, config.vocab_size, (flags.rows, flags.source)).tolist()
    shape = BatchShape(rows=flags.rows, source=flags.source, target=flags.target)
    batch = pad_batch([(row, row[-flags.target :]) for row in ids], shape)
    parameters = {name: jax.numpy.asarray(np.asarray(array, np.float32)) for name, array in checkpoint.arrays.items()}
    layers, weights = rotating_layers(config.num_decoder_layers, every=_EVERY, step=1)
    model = network_of(config, layer_dropout=0.2)

    def gradient() -> Any:
        return loss_and_gradients(
            model,
            parameters,
            batch=batch,
            layers=layers,
            weights=weights.astype(np.float32),
            key=jax.random.key(0),
            label_smoothing=0.0,
            z_loss=0.0,
        )

    optimizer = MuonConfig()
    kernels = {name: array.shape for name, array in parameters.items()}
    state = initial_optimizer_state(optimizer, _STEPS, parameters=parameters)
    (_, gradients), compiled, of_gradient = _timed(gradient)

    def updated() -> Any:
        nonlocal parameters, state
        parameters, state = update(optimizer, _STEPS, parameters=parameters, state=state, gradients=gradients)
        return parameters

    _, compiled_update, of_update = _timed(updated)
    tokens, targets = flags.rows * flags.source, flags.rows * flags.target * len(layers)
    of_head = config.vocab_size * config.emb_dim
    for_gradient = 3 * (tokens * sum(map(np.prod, _layer_kernels(kernels))) + targets * of_head)
    for_update = sum(_newton_schulz(*shape, steps=optimizer.newton_schulz_steps) for shape in _layer_kernels(kernels))
    rate = square_rate()
    print(describe_machine())
    print(f"{tokens:,} tokens, losses of {len(layers)} of {config.num_decoder_layers} layers")
    for name, first, seconds, operations in (
        ("gradient", compiled, of_gradient, for_gradient),
        ("update", compiled_update, of_update, for_update),
    ):
        share = operations / seconds / rate
        print(f"{name}: {seconds:.1f} s, {share:.0%} of the rate of a square product; compiled in {first:.0f} s")


def _timed(call: Callable[[], Any]) -> tuple[Any, float, float]:
    """Returns a call's last result, the seconds by which its first time was longer, and the least of the others."""
    seconds = []
    for _ in range(1 + _TIMES):
        began = time.perf_counter()
        result = jax.block_until_ready(call())
        seconds.append(time.perf_counter() - began)
    return result, seconds[0] - min(seconds[1:]), min(seconds[1:])


def _layer_kernels(shapes: Mapping[str, tuple[int, ...]]) -> list[tuple[int, ...]]:
    """Returns the shapes of the kernels of layers, which Muon trains."""
    return [shape for name, shape in shapes.items() if parameter_group(name) == "muon"]


def _newton_schulz(inputs: int, outputs: int, *, steps: int) -> int:
    """Returns the multiply-adds by which Muon makes a kernel's update orthogonal.

    Source: Jordan et al. (2024), "Muon": each step has the products X X', A A and B X, of the shorter side.
    """
    short, long = sorted((inputs, outputs))
    return steps * (2 * short * short * long + short**3)


if __name__ == "__main__":
    main()
