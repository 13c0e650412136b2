"""The models that are decoded, their prompts, and thresholds for them."""

import functools

import numpy as np

from benchmarks.paper_model import build_paper_model, draw_prompts
from calm_beam.checkpoints import Checkpoint
from calm_beam.decoding.branches import sweep_branches
from calm_beam.decoding.decoder import Decoder
from calm_beam.exits.rule import ExitRule

from .part import Scale

# Thresholds among which one is looked for that uses so many layers, and prompts on which layers are counted.
_TRIED, _TRIED_PROMPTS = 40, 8


@functools.lru_cache(maxsize=1)
def model_of(scale: Scale, name: str) -> Checkpoint:
    """Returns the model of so much a scale, kept until another is asked for."""
    return build_paper_model(config=dict(scale.models)[name])


def prompts_for(scale: Scale, name: str, count: int) -> list[tuple[int, ...]]:
    """Returns prompts of a model, of as many tokens as the scale says."""
    return draw_prompts(count, length=scale.prompt_tokens, vocab_size=dict(scale.models)[name].vocab_size)


@functools.cache
def thresholds_for(scale: Scale, name: str, measure: str, shares: tuple[float, ...]) -> list[float]:
    """Returns thresholds at which a token takes about such shares of the layers.

    Args:
      scale: Has the model.
      name: Of the model.
      measure: Name of the confidence measure.
      shares: In (0, 1].
    """
    checkpoint = model_of(scale, name)
    depth = checkpoint.config.num_decoder_layers
    if measure == "static":
        return [layers / depth for layers in sorted({round(share * depth) for share in shares})]
    # Measures crowd at either end of [0, 1].
    grid = tuple(float(value) for value in 1 / (1 + np.exp(-np.linspace(-6, 6, _TRIED))))
    decoder = Decoder(
        checkpoint,
        sweep_branches(ExitRule(confidence=measure), grid, max_decode_length=scale.steps, with_full_model=False),
        max_input_length=scale.prompt_tokens,
    )
    exits = np.stack([result.exit_layers for _, result in decoder.decode(prompts_for(scale, name, _TRIED_PROMPTS))])
    used = np.array([of_branch[of_branch > 0].mean() for of_branch in np.moveaxis(exits, 1, 0)])
    return [grid[place] for place in sorted({int(np.argmin(np.abs(used - share * depth))) for share in shares})]
