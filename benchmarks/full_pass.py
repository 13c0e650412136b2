"""Compares the full model decoded in three ways, token by token.

1. Without cache and without exits: the whole prefix goes through all layers at every step.
2. The sweep's full-model branch, which never exits.
3. The sweep's early-exit path with exits disabled (the last layer is the only one that may exit).

    python -m benchmarks.full_pass --checkpoint=model/ --data=validation.jsonl.gz --prompts=1000
"""

import argparse
import functools

import jax
import jax.numpy as jnp
import numpy as np

from calm_beam.checkpoints import load_checkpoint
from calm_beam.decoding.branches import sweep_branches
from calm_beam.decoding.compilation import bucket_width
from calm_beam.decoding.decoder import Decoder
from calm_beam.decoding.settings import DecodeSettings
from calm_beam.exits.rule import ExitRule
from calm_beam.inputs.vocabularies.vocabulary import EOS_ID
from calm_beam.model import EarlyExitT5

from .machine import describe_machine
from .prompts import read_prompts

_ROWS = 50


def main() -> None:
    """Prints how many outputs and tokens differ."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--checkpoint", required=True)
    parser.add_argument("--data", required=True)
    parser.add_argument("--prompts", type=int, default=1000)
    parser.add_argument("--max_decode_length", type=int, default=64)
    flags = parser.parse_args()
    checkpoint = load_checkpoint(flags.checkpoint)
    rule = ExitRule(min_exit_layer=checkpoint.config.num_decoder_layers)
    settings = DecodeSettings(
        rule=rule, thresholds=(0.5,), max_input_length=512, max_decode_length=flags.max_decode_length
    )
    prompts = read_prompts(flags.data, checkpoint, settings=settings, count=flags.prompts)
    decoder = Decoder(
        checkpoint,
        sweep_branches(rule, (0.5,), max_decode_length=flags.max_decode_length),
    )
    swept = dict(decoder.decode(prompts))
    model, parameters = EarlyExitT5(checkpoint.config), {"params": checkpoint.parameters()}
    plain = _decode_without_cache(model, parameters, prompts=prompts, steps=flags.max_decode_length)
    print(describe_machine())
    total = sum(int(swept[index].lengths[0]) for index in range(len(prompts)))
    for name, place in (("full-model branch", 0), ("exits disabled", 1)):
        differing = [index for index in range(len(prompts)) if (swept[index].tokens[place] != plain[index]).any()]
        print(f"{name}: {len(differing)} of {len(prompts)} outputs ({total} tokens) differ from the plain full pass")


def _decode_without_cache(
    model: EarlyExitT5, parameters: object, *, prompts: list[tuple[int, ...]], steps: int
) -> np.ndarray:
    """Returns the greedy outputs, shape (prompts, steps), padded with 0."""
    outputs = np.zeros((len(prompts), steps), np.int32)
    by_width: dict[int, list[int]] = {}
    for index, prompt in enumerate(prompts):
        by_width.setdefault(bucket_width(len(prompt), 512), []).append(index)
    for width, members in by_width.items():
        for start in range(0, len(members), _ROWS):
            rows = members[start : start + _ROWS]
            source = np.zeros((_ROWS, width), np.int32)
            for row, index in enumerate(rows):
                source[row, : len(prompts[index])] = prompts[index]
            outputs[rows] = np.asarray(_greedy(model, steps, parameters, source))[: len(rows)]
    return outputs


@functools.partial(jax.jit, static_argnums=(0, 1))
def _greedy(model: EarlyExitT5, steps: int, parameters: object, source: jax.Array) -> jax.Array:
    """Returns greedy outputs, shape (rows, steps); every step decodes the whole prefix again."""

    def one_step(step: jax.Array, tokens: jax.Array) -> jax.Array:
        inputs = jnp.pad(tokens[:, :-1], ((0, 0), (1, 0)))
        states = model.apply(parameters, source, inputs, method="decode_teacher_forced")
        chosen = jnp.argmax(model.apply(parameters, states[-1], len(states), method="head"), axis=-1).astype(jnp.int32)
        ended = jnp.any(tokens == EOS_ID, axis=1)
        return tokens.at[:, step].set(jnp.where(ended, 0, chosen[:, step]))

    return jax.lax.fori_loop(0, steps, one_step, jnp.zeros((source.shape[0], steps), jnp.int32))


if __name__ == "__main__":
    main()
