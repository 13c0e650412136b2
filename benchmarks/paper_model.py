"""A model with random weights, of the paper's dimensions or of others, and prompts for it.

The cost of a sweep depends on where tokens exit. Two things are set so that this differs between thresholds:

- Decoder layer i adds so much to the state that its output and its input have a cosine similarity of about
  (L + i) / (2 L + 1): lower layers change the state more than upper ones, as in trained models. With weights drawn
  in the same way in all layers, nearly all similarities would be the same.
- The output head is so steep that the gap between the two largest of 32,128 probabilities is anywhere in (0, 1), and
  so is the exit classifier's score.

Measured on 128 tokens, the 5th and 95th percentiles of the gap are 0.02 to 0.06 and 0.96 to 1 at every layer; those of
the similarity rise from 0.50 and 0.59 at layer 2 to 0.93 and 0.94 at layer 8. `benchmarks.sweep` prints the mean exit
layers that come out. What trained models have and this one has not is agreement: below the last two layers, a layer
hardly ever predicts the token that the last one does. Outputs of different thresholds part early and share little,
which is a hard case for a sweep.
"""

import dataclasses
import pathlib
import re

import numpy as np

from calm_beam.checkpoints import Checkpoint
from calm_beam.model import T5Config, parameter_shapes

PAPER_DIMENSIONS = T5Config(
    vocab_size=32128,
    emb_dim=512,
    num_heads=6,
    head_dim=64,
    mlp_dim=1024,
    num_encoder_layers=8,
    num_decoder_layers=8,
    exit_classifier=1,
)
# Those of T5 1.1 large.
LARGE_DIMENSIONS = dataclasses.replace(
    PAPER_DIMENSIONS, emb_dim=1024, num_heads=16, mlp_dim=2816, num_encoder_layers=24, num_decoder_layers=24
)
# Logits have about this standard deviation. Below sqrt(2 ln 32128) = 4.5 all probabilities would be small.
_LOGIT_SCALE = 9.0
# About what a layer whose kernels have unit gain adds to the state, as a root mean square.
_ADDED = 0.8


def build_paper_model(seed: int = 0, *, config: T5Config = PAPER_DIMENSIONS) -> Checkpoint:
    """Returns random float32 weights whose confidences are spread over (0, 1).

    Args:
      seed: Of the weights.
      config: Sizes; with an exit classifier of one logit and a head of its own, as the paper's.
    """
    generator = np.random.default_rng(seed)
    arrays = {}
    for name, shape in parameter_shapes(config).items():
        if name.endswith("/scale"):
            arrays[name] = np.ones(shape, np.float32)
            continue
        arrays[name] = generator.standard_normal(shape, np.float32)
        arrays[name] *= np.float32(_standard_deviation(name, shape, config))
    return Checkpoint(config=config, arrays=arrays, directory=pathlib.Path(), vocabulary_path=None, layout="native")


def draw_prompts(
    count: int, *, length: int = 64, seed: int = 1, vocab_size: int = PAPER_DIMENSIONS.vocab_size
) -> list[tuple[int, ...]]:
    """Returns prompts of random token ids, eos last."""
    ids = np.random.default_rng(seed).integers(3, vocab_size, size=(count, length - 1))
    return [(*row, *PAPER_DIMENSIONS.end_ids) for row in ids.tolist()]


def _standard_deviation(name: str, shape: tuple[int, ...], config: T5Config) -> float:
    if name == "token_embedder/embedding":
        return 1.0
    if name.endswith("/rel_embedding"):
        return 0.5
    if name == "decoder/logits_dense/kernel":
        return _LOGIT_SCALE * shape[0] ** -0.5
    if name == "decoder/meta_cls/kernel":
        # The score's logit then has a standard deviation of about 2 in the middle layer.
        norms = _norms(config.num_decoder_layers)
        return 2.0 * shape[0] ** -0.5 / norms[len(norms) // 2]
    if name == "decoder/meta_cls/bias":
        return 0.1
    deviation = shape[0] ** -0.5
    if name.endswith("/query/kernel"):
        # T5 does not divide attention logits by sqrt(head_dim).
        return deviation * config.head_dim**-0.5
    layer = re.match(r"decoder/layers_(\d+)/.*(?:/out|/wo)/kernel", name)
    if layer:
        below, above = _norms(config.num_decoder_layers)[int(layer[1]) :][:2]
        return deviation * (above**2 - below**2) ** 0.5 / _ADDED
    return deviation


def _norms(num_layers: int) -> list[float]:
    """Returns the state's root mean square before and after every layer: one more than there are layers."""
    norms = [1.0]
    for layer in range(1, num_layers + 1):
        # What is added is as good as orthogonal to the state: the similarity is the ratio of the norms.
        norms.append(norms[-1] * (2 * num_layers + 1) / (layer + num_layers))
    return norms
