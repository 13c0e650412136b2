"""Costs and decisions of the certified exit head, compared with the exact one.

For vocabularies, widths and numbers of rows: milliseconds of the exact head by XLA and of the certified one by native
code, and the share of rows that a certificate decides at each of some thresholds. States are random, and so are heads,
of which the gap between the two largest probabilities is spread over (0, 1); then heads that are made to be hard; and,
with a checkpoint and data, trained weights with the states that the full model has at three of its layers.

    python -m benchmarks.exit_head --json
    python -m benchmarks.exit_head --checkpoint=model/ --data=validation.jsonl.gz
"""

import argparse
import functools
import json
import time
from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from calm_beam.checkpoints import load_checkpoint
from calm_beam.decoding.branches import sweep_branches
from calm_beam.decoding.decoder import Decoder
from calm_beam.decoding.settings import DecodeSettings
from calm_beam.exits.certified_head import Certificate, CertifiedHead, candidates_of, certify, quantised_head
from calm_beam.exits.decision import decide
from calm_beam.exits.measures import measure_named
from calm_beam.exits.rule import ExitRule
from calm_beam.exits.thresholds import uniform_grid
from calm_beam.model import EarlyExitT5
from calm_beam.model.native import library
from calm_beam.precision import FLOAT32

from .machine import describe_machine
from .prompts import read_prompts

_THRESHOLDS = (0.5, 0.9, 0.99)
_GRID = uniform_grid(0.05)
_REPETITIONS = 7
# Logits of a random head have about this standard deviation, with which gaps are anywhere in (0, 1).
_LOGIT_SCALE = 9.0
_HARD = ("near-equal rows", "huge norms", "one repeated row")


def main() -> None:
    """Prints a line for every head and number of rows."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--vocabularies", type=int, nargs="+", default=[2048, 32128, 128256])
    parser.add_argument("--widths", type=int, nargs="+", default=[128, 512, 2048])
    parser.add_argument("--rows", type=int, nargs="+", default=[1, 2, 4, 8, 32, 128, 512])
    parser.add_argument("--confidence", default="softmax")
    parser.add_argument("--checkpoint")
    parser.add_argument("--data")
    parser.add_argument("--prompts", type=int, default=100)
    parser.add_argument("--json", action="store_true")
    flags = parser.parse_args()
    if not library.is_available():
        parser.error(f"certified heads are native code's: {library.why_not_loaded()}")
    if not flags.json:
        print(describe_machine())
    heads = _trained(flags) if flags.checkpoint else _made(flags)
    for name, states, weights in heads:
        head = quantised_head(jnp.asarray(weights))
        for rows in flags.rows:
            line = {
                "head": name,
                "vocabulary": weights.shape[0],
                "width": weights.shape[1],
                "rows": rows,
                **_compared(np.resize(states, (rows, states.shape[1])), weights, head, flags.confidence),
            }
            print(json.dumps({**line, "machine": describe_machine()}) if flags.json else _in_words(line), flush=True)


def _made(flags: argparse.Namespace) -> Iterator[tuple[str, np.ndarray, np.ndarray]]:
    generator = np.random.default_rng(0)
    for vocab_size in flags.vocabularies:
        for width in flags.widths:
            states = generator.standard_normal((512, width), np.float32)
            weights = generator.standard_normal((vocab_size, width), np.float32)
            weights *= np.float32(_LOGIT_SCALE * width**-0.5)
            yield "random", states, weights
    # The last of them, made hard.
    for name in _HARD:
        hard = weights.copy()
        match name:
            case "near-equal rows":
                hard[1::2] = np.nextafter(hard[::2][: len(hard[1::2])], np.float32(np.inf))
            case "huge norms":
                hard *= np.exp(generator.uniform(-6, 6, (len(hard), 1))).astype(np.float32)
            case _:
                hard[:] = hard[0]
        yield name, states, hard


def _trained(flags: argparse.Namespace) -> Iterator[tuple[str, np.ndarray, np.ndarray]]:
    checkpoint = load_checkpoint(flags.checkpoint)
    depth, rule = checkpoint.config.num_decoder_layers, ExitRule(confidence="static")
    settings = DecodeSettings(rule=rule, thresholds=(1.0,), max_input_length=128, max_decode_length=32)
    prompts = read_prompts(flags.data, checkpoint, settings=settings, count=flags.prompts)
    outputs = dict(
        Decoder(
            checkpoint,
            sweep_branches(rule, (1.0,), max_decode_length=32),
        ).decode(prompts)
    )
    source = np.zeros((len(prompts), 128), np.int32)
    target = np.zeros((len(prompts), 32), np.int32)
    for index, prompt in enumerate(prompts):
        source[index, : len(prompt)] = prompt
        target[index] = outputs[index].tokens[0]
    model, parameters = EarlyExitT5(checkpoint.config), {"params": checkpoint.parameters()}
    shifted = np.pad(target[:, :-1], ((0, 0), (1, 0)))
    states = model.apply(parameters, source, shifted, method="decode_teacher_forced")
    is_token = target > 0
    for layer in (1, (depth + 1) // 2, depth - 1):
        inputs = np.asarray(model.apply(parameters, states[layer - 1], layer, method="head_inputs"))
        weights, vocab_axis = model.apply(parameters, layer, method="head_weights")
        yield f"trained, layer {layer}", inputs[is_token], np.moveaxis(np.asarray(weights), vocab_axis, 0)


def _compared(states: np.ndarray, weights: np.ndarray, quantised: CertifiedHead, confidence: str) -> dict[str, Any]:
    measure = measure_named(confidence)
    rows, head = jnp.asarray(states), jnp.asarray(weights)
    exact = jax.jit(functools.partial(decide, vocab_axis=0, measure=measure, precision=FLOAT32))
    token, value, is_finite = map(np.asarray, exact(rows, head))
    certified = jax.jit(functools.partial(certify, measure=measure))
    found: Certificate = jax.tree.map(np.asarray, certified(rows, quantised))
    known = found.is_certain & is_finite
    return {
        "exact_msec": _msec(exact, rows, head),
        "int8": {
            "msec": _msec(certified, rows, quantised),
            "certain": float(known.mean()),
            "candidates": candidates_of(len(weights)),
            "decided": {f"{each:g}": float((known & ~_is_open(found, [each])).mean()) for each in _THRESHOLDS},
            "decided_on_grid": float((known & ~_is_open(found, _GRID)).mean()),
            "interval": float(np.median((found.high - found.low)[known])) if known.any() else None,
            "wrong_tokens": int((found.token != token)[known].sum()),
            "outside": int(((value < found.low - 1e-5) | (value > found.high + 1e-5))[known].sum()),
        },
    }


def _is_open(found: Certificate, thresholds: Any) -> np.ndarray:
    compared = np.asarray(thresholds, np.float32)[:, None]
    return np.any((np.asarray(found.low) < compared) & (compared <= np.asarray(found.high)), axis=0)


def _msec(computed: Callable[..., Any], *args: Any) -> float:
    jax.block_until_ready(computed(*args))
    times = []
    for _ in range(_REPETITIONS):
        started = time.perf_counter()
        jax.block_until_ready(computed(*args))
        times.append(time.perf_counter() - started)
    return 1e3 * min(times)


def _in_words(line: dict[str, Any]) -> str:
    certified = line["int8"]
    decided = " / ".join(f"{share:.1%}" for share in certified["decided"].values())
    return (
        f"{line['head']}, V {line['vocabulary']:,}, d {line['width']}, {line['rows']} rows: exact "
        f"{line['exact_msec']:.2f} ms; int8 {certified['msec']:.2f} ms, decides {decided} (grid of {len(_GRID)}: "
        f"{certified['decided_on_grid']:.1%}), {certified['wrong_tokens']} wrong"
    )


if __name__ == "__main__":
    main()
