"""Computations of a checkpoint: logits, and outputs of the decoder."""

import pathlib

import jax
import numpy as np

from calm_beam.checkpoints import Checkpoint
from calm_beam.decoding.branches import PromptResult, sweep_branches
from calm_beam.decoding.decoder import Decoder
from calm_beam.exits.rule import ExitRule
from calm_beam.model import EarlyExitT5

GOLDENS = pathlib.Path(__file__).with_name("hugging_face_goldens")
"""Models that transformers saved, with what it computes; `make_hugging_face_goldens.py` made them."""


def assert_gives(checkpoint: Checkpoint, source: np.ndarray, target: np.ndarray, expected: np.ndarray) -> None:
    """Asserts that every layer's logits are within 1e-5 of the largest logit, the accuracy of float32."""
    apply = jax.jit(EarlyExitT5(checkpoint.config).apply)
    found = apply({"params": checkpoint.parameters()}, source.astype(np.int32), target.astype(np.int32))
    np.testing.assert_allclose(found, expected, rtol=0, atol=1e-5 * np.abs(expected).max())


def assert_generates(checkpoint: Checkpoint, source: np.ndarray, expected: np.ndarray) -> None:
    """Asserts that the full model generates the expected tokens, (batch, steps), 0 after eos."""
    found = generate(checkpoint, source, max_decode_length=expected.shape[1])
    assert [result.tokens[0].tolist() for result in found] == expected.tolist()


def generate(checkpoint: Checkpoint, source: np.ndarray, *, max_decode_length: int = 12) -> list[PromptResult]:
    """Returns the outputs of prompts, (batch, source) and 0-padded, of the full model and at two thresholds."""
    prompts = [[int(token) for token in row if token] for row in source]
    decoder = Decoder(
        checkpoint,
        sweep_branches(ExitRule(), (0.6, 0.2), max_decode_length=max_decode_length),
    )
    found = dict(decoder.decode(prompts))
    return [found[index] for index in range(len(prompts))]
