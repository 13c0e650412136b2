"""The gain of early exits in serving: one prompt at a time, against the full model without exits.

Both decoders are built alike; the full model's has neither conditionals nor confidences. Measured speedups are shown
with the speedup that the counted work allows: layers run, vocabulary projections, the encoder, keys and values of the
source, and keys and values made for skipped layers, each at its own cost on this machine, measured in the same run.
Every round times the pieces and all decoders in turn, prompt by prompt, the full model next to each. Other work on the
machine only adds to a time: of every prompt and piece the fastest round counts. The median over rounds of the ratio of
whole passes is shown too. Compilation is done before. Thresholds are searched that use about a quarter and half of
the layers.

    python -m benchmarks.serving --checkpoint=model/ --data=validation.jsonl.gz
    python -m benchmarks.serving --paper_dimensions

`--paper_dimensions` takes the random weights of `benchmarks/paper_model.py`.
"""

import argparse
import collections
import dataclasses
import functools
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from calm_beam.checkpoints import Checkpoint, load_checkpoint
from calm_beam.decoding.branches import Branch, BranchResult
from calm_beam.decoding.early_exit import EarlyExitDecoder
from calm_beam.decoding.settings import DecodeSettings
from calm_beam.exits.head_forms import EXIT_HEADS
from calm_beam.exits.rule import ExitRule
from calm_beam.model import EarlyExitT5
from calm_beam.model.interface import Numbers, Position, of_layer

from .machine import describe_machine
from .paper_model import build_paper_model, draw_prompts
from .prompts import read_prompts

_MEASURES = ("softmax", "softmax_max", "state", "classifier", "static")
_SHARES = (0.25, 0.5)
# Long enough that starting a loop costs nothing next to it.
_REPEATS = 32
# Halvings of [0, 1] in the search for a threshold.
_TRIES = 12


@dataclasses.dataclass(frozen=True, kw_only=True)
class _Work:
    """What a decoder did over all prompts: counts of each piece of work."""

    prompts: int
    sources: int
    tokens: int
    layers: int
    projections: int
    fills: int

    def cost(self, units: dict[str, float]) -> float:
        """Returns the seconds that this takes at the cost of each piece."""
        return (
            self.prompts * units["encoder"]
            + self.sources * units["source"]
            + self.layers * units["layer"]
            + self.projections * units["projection"]
            + self.fills * units["fill"]
        )


def main() -> None:
    """Prints the table."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--checkpoint")
    parser.add_argument("--data")
    parser.add_argument("--paper_dimensions", action="store_true")
    parser.add_argument("--prompts", type=int, default=10)
    parser.add_argument("--max_decode_length", type=int, default=48)
    parser.add_argument("--rounds", type=int, default=10)
    parser.add_argument("--measures", default=",".join(_MEASURES))
    parser.add_argument(
        "--exit_heads", nargs="+", choices=EXIT_HEADS, default=["exact"], help="of the decoders that exit early"
    )
    flags = parser.parse_args()
    if flags.paper_dimensions == bool(flags.checkpoint and flags.data):
        parser.error("pass --checkpoint and --data, or --paper_dimensions")
    steps = flags.max_decode_length
    if flags.paper_dimensions:
        checkpoint, prompts = build_paper_model(), draw_prompts(flags.prompts)
    else:
        checkpoint = load_checkpoint(flags.checkpoint)
        settings = DecodeSettings(rule=ExitRule(), thresholds=(0.5,), max_input_length=512, max_decode_length=steps)
        # One width for all, as for the encoder whose cost is taken.
        prompts = [
            prompt
            for prompt in read_prompts(flags.data, checkpoint, settings=settings, count=2 * flags.prompts)
            if len(prompt) <= 32
        ][: flags.prompts]
    print(describe_machine())
    print(f"{len(prompts)} prompts, at most {steps} tokens, {flags.rounds} rounds")
    _print_table(checkpoint, prompts, steps=steps, flags=flags)


def _print_table(
    checkpoint: Checkpoint, prompts: Sequence[Sequence[int]], *, steps: int, flags: argparse.Namespace
) -> None:
    depth = checkpoint.config.num_decoder_layers
    # Static confidence is known without computing anything.
    full = EarlyExitDecoder(checkpoint, Branch.at(ExitRule(confidence="static"), None, max_decode_length=steps))
    decoders, works = {}, {}
    full_work = _counted(ExitRule(confidence="static"), depth, results=dict(full.decode(prompts)))
    for measure in flags.measures.split(","):
        rule = ExitRule(confidence=measure)
        for share in _SHARES:
            threshold, results = _searched(checkpoint, rule, prompts=prompts, steps=steps, layers=share * depth)
            for exit_head in flags.exit_heads:
                decoder = EarlyExitDecoder(
                    checkpoint, Branch.at(rule, threshold, max_decode_length=steps), exit_head=exit_head
                )
                _check_same(dict(decoder.decode(prompts)), results)
                decoders[measure, exit_head, threshold] = decoder
                works[measure, exit_head, threshold] = _counted(rule, depth, results=results)
    pieces = dict(_pieces(checkpoint, width=32 if len(prompts[0]) <= 32 else 64, steps=steps))
    # By piece or by decoder: [rounds] or [rounds, prompts].
    seconds: dict[Any, list[Any]] = collections.defaultdict(list)
    for _ in range(flags.rounds):
        for name, (piece, times) in pieces.items():
            seconds[name].append(_timed(piece) / times)
        for key, decoder in decoders.items():
            passes = [(_timed_decode(full, prompt), _timed_decode(decoder, prompt)) for prompt in prompts]
            seconds["full", key].append([ours for ours, _ in passes])
            seconds[key].append([theirs for _, theirs in passes])
    units = {name: min(seconds[name]) for name in pieces}
    full_seconds = np.min([value for key in decoders for value in seconds["full", key]], axis=0).sum()
    print("; ".join(f"{name} {value * 1e6:.1f} us" for name, value in units.items()))
    print(
        f"full model: {full_work.tokens} tokens, {full_seconds / full_work.tokens * 1e6:.0f} us a token, encoder "
        f"included; its pieces add up to {full_work.cost(units) / full_seconds:.0%} of that"
    )
    columns = (
        "measure",
        "exit head",
        "threshold",
        f"layers of {depth}",
        "projections",
        "fills",
        "us",
        "allowed",
        "measured",
    )
    print(f"| {' | '.join((*columns, 'measured / allowed', 'median round'))} |")
    print(f"|---|---{'|---:' * len(columns)}|")
    for key, work in works.items():
        measure, exit_head, threshold = key
        # Outputs differ in length: cost per token is compared.
        per_token = full_work.tokens / work.tokens
        ours, theirs = np.array(seconds[key]), np.array(seconds["full", key])
        allowed = full_work.cost(units) / per_token / work.cost(units)
        measured = theirs.min(axis=0).sum() / per_token / ours.min(axis=0).sum()
        median = statistics.median((theirs.sum(axis=1) / per_token / ours.sum(axis=1)).tolist())
        counts = [f"{count / work.tokens:.2f}" for count in (work.layers, work.projections, work.fills)]
        speeds = (f"{ours.min(axis=0).sum() / work.tokens * 1e6:.0f}", f"{allowed:.2f}", f"{measured:.2f}")
        cells = (measure, exit_head, f"{threshold:.4f}", *counts, *speeds, f"{measured / allowed:.0%}", f"{median:.2f}")
        print(f"| {' | '.join(cells)} |", flush=True)


def _searched(
    checkpoint: Checkpoint, rule: ExitRule, *, prompts: Sequence[Sequence[int]], steps: int, layers: float
) -> tuple[float, dict[int, BranchResult]]:
    """Returns a threshold that uses about so many layers per token, and the outputs at it."""
    depth = checkpoint.config.num_decoder_layers
    lower, upper = 0.0, 1.0
    found: list[tuple[float, float, dict[int, BranchResult]]] = []
    for _ in range(1 if rule.confidence == "static" else _TRIES):
        threshold = layers / depth if rule.confidence == "static" else (lower + upper) / 2
        decoder = EarlyExitDecoder(checkpoint, Branch.at(rule, threshold, max_decode_length=steps))
        results = dict(decoder.decode(prompts))
        work = _counted(rule, depth, results=results)
        used = work.layers / work.tokens
        found.append((abs(used - layers), threshold, results))
        lower, upper = (threshold, upper) if used < layers else (lower, threshold)
    _, threshold, results = min(found, key=lambda entry: entry[0])
    return threshold, results


def _check_same(results: dict[int, BranchResult], expected: dict[int, BranchResult]) -> None:
    """Says if a decoder gives other tokens or exits than the exact head's."""
    for index, result in results.items():
        for name in ("tokens", "exit_layers"):
            if (getattr(result, name) != getattr(expected[index], name)).any():
                print(f"prompt {index}: other {name} than with the exact head")


def _counted(rule: ExitRule, depth: int, *, results: dict[int, BranchResult]) -> _Work:
    exits = np.concatenate([result.exit_layers[: result.length] for result in results.values()])
    of_logits = rule.confidence in ("softmax", "softmax_max")
    # With static exits, layers above the exit are no part of the model that is served.
    is_static = rule.confidence == "static"
    return _Work(
        prompts=len(results),
        sources=len(results) * (int(exits[0]) if is_static else depth),
        tokens=len(exits),
        layers=int(exits.sum()),
        projections=int(exits.sum()) if of_logits else len(exits),
        fills=0 if is_static else int((depth - exits).sum()),
    )


def _pieces(checkpoint: Checkpoint, *, width: int, steps: int) -> Iterator[tuple[str, tuple[Callable[[], Any], int]]]:
    """Yields the pieces of work: name, a call that does it, and how often the call does it."""
    config = checkpoint.config
    depth = config.num_decoder_layers
    model, parameters = EarlyExitT5(config), jax.device_put({"params": checkpoint.parameters()})
    apply = functools.partial(model.apply, parameters)
    source = jax.device_put(np.full((1, width), 5, np.int32))

    def encode(parameters: Any, source: jax.Array) -> Any:
        return model.apply(parameters, source, method="encode")

    def cross_keys_values(parameters: Any, encoded: jax.Array) -> Any:
        return model.apply(parameters, encoded, method="cross_keys_values")

    def empty_cache() -> list[Any]:
        empty = jnp.zeros((1, 1, config.num_heads, steps, config.head_dim))
        return [(empty, empty)] * depth

    def put(cached: Any, new: Any, step: Numbers) -> Any:
        return tuple(
            jax.lax.dynamic_update_slice(old, values[:, :, :, None], (0, 0, 0, step, 0))
            for old, values in zip(cached, new, strict=True)
        )

    def layers(parameters: Any, cross: Any, hidden: jax.Array) -> Any:
        apply = functools.partial(model.apply, parameters)
        biases = apply(steps, method="decoder_position_biases")

        def all_layers(repeat: jax.Array, state: Any) -> Any:
            hidden, cache = state
            step = repeat % steps
            position = Position(step, jnp.full(1, width))
            (source_bias,) = apply(source > 0, position, method="source_biases")
            self_biases = [
                jax.lax.dynamic_index_in_dim(bias, step, 1, keepdims=False)[None, None, :, None] for bias in biases
            ]
            kept = []
            for layer in range(1, depth + 1):
                own = put(cache[layer - 1], apply(hidden, layer, position=position, method="self_keys_values"), step)
                self_bias = of_layer(self_biases, layer)
                hidden = apply(
                    hidden,
                    layer,
                    self_keys_values=own,
                    self_bias=self_bias,
                    source_keys_values=cross[layer - 1],
                    source_bias=source_bias,
                    position=position,
                    method="decoder_layer",
                )
                kept.append(own)
            return hidden, kept

        return jax.lax.fori_loop(0, _REPEATS, all_layers, (hidden, empty_cache()))

    def projections(parameters: Any, hidden: jax.Array) -> Any:
        def project(_: jax.Array, hidden: jax.Array) -> jax.Array:
            logits = model.apply(parameters, hidden, depth, method="head")
            largest = jnp.max(logits, axis=-1, keepdims=True)
            indices = jnp.arange(config.vocab_size, dtype=jnp.int32)
            token = jnp.min(jnp.where(logits == largest, indices, config.vocab_size - 1), axis=-1)
            return hidden + token[..., None].astype(jnp.float32) * np.float32(1e-9)

        return jax.lax.fori_loop(0, _REPEATS, project, hidden)

    def fills(parameters: Any, hidden: jax.Array) -> Any:
        def fill(repeat: jax.Array, cache: Any) -> Any:
            states = hidden + repeat.astype(jnp.float32)
            project = functools.partial(model.apply, parameters, method="self_keys_values")
            position = Position(repeat % steps, jnp.full(1, width))
            return [
                put(pair, project(states, layer, position=position), position.steps)
                for layer, pair in enumerate(cache, start=1)
            ]

        return jax.lax.fori_loop(0, _REPEATS, fill, empty_cache())

    hidden = apply(jnp.full((1, 1), 5, jnp.int32), method="embed")
    encoded = jax.jit(encode)(parameters, source)
    cross = jax.jit(cross_keys_values)(parameters, encoded)
    calls = {
        "encoder": (jax.jit(encode), (source,), 1),
        "source": (jax.jit(cross_keys_values), (encoded,), depth),
        "layer": (jax.jit(layers), (cross, hidden), _REPEATS * depth),
        "projection": (jax.jit(projections), (hidden,), _REPEATS),
        "fill": (jax.jit(fills), (hidden,), _REPEATS * depth),
    }
    for name, (function, arguments, times) in calls.items():
        piece = functools.partial(_ready, function, parameters, *arguments)
        piece()
        yield name, (piece, times)


def _ready(function: Callable[..., Any], *arguments: Any) -> Any:
    return jax.block_until_ready(function(*arguments))


def _timed_decode(decoder: EarlyExitDecoder, prompt: Sequence[int]) -> float:
    return _timed(lambda: list(decoder.decode([prompt])))


def _timed(work: Callable[[], Any]) -> float:
    start = time.perf_counter()
    work()
    return time.perf_counter() - start


if __name__ == "__main__":
    main()
