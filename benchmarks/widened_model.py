"""A trained model in the paper's dimensions: it computes what it did, at the cost of the larger sizes.

Random weights have exits, but their layers do not agree with each other as those of trained models do, and a model of
the paper's size takes days to train here. So a small trained model is put into the first entries of larger arrays, with
zeros in all others. Its outputs, exits and confidences stay what they are (but for rounding, and for the epsilon of
the norms), while products of matrices take as long as with any other numbers.

Two things need care. A norm divides by the root mean square over all entries, the zeros too: its scale makes up for
that. And the tokens that are added must never be chosen: one entry of the state is a constant that nothing changes, and
from which the head gives them a very low logit.
"""

import dataclasses
import re

import numpy as np

from calm_beam.checkpoints import Checkpoint
from calm_beam.model import T5Config, parameter_shapes

from .paper_model import PAPER_DIMENSIONS

# The constant, as a share of the embeddings' root mean square: too small to be seen in a norm or a similarity.
_CONSTANT = 1e-3
# The factor of states. States grow by less than a thousand from the first layer to the last.
_REFUSAL = -1e9


def widen_to_paper(checkpoint: Checkpoint) -> Checkpoint:
    """Returns a model of the paper's dimensions that generates what a smaller one does.

    Raises:
      ValueError: If the model has another number of decoder layers or another architecture than the paper's, or is
        larger in any dimension.
    """
    small = checkpoint.config
    large = dataclasses.replace(
        PAPER_DIMENSIONS,
        relative_max_distance=small.relative_max_distance,
        exit_classifier=small.exit_classifier,
    )
    kept = ("num_decoder_layers", "relative_buckets", "gated_mlp", "activation", "relative_bias_per_layer", "tied_head")
    for field in dataclasses.fields(T5Config):
        has, becomes = getattr(small, field.name), getattr(large, field.name)
        if has != becomes if field.name in kept else has > becomes:
            raise ValueError(
                f"this model cannot be widened to the paper's dimensions: its {field.name} is {has}, the paper's "
                f"{becomes}. Expected {', '.join(f'{name} {getattr(large, name)}' for name in kept)}, and nothing "
                "larger than in the paper."
            )
    if small.emb_dim == large.emb_dim:
        raise ValueError(f"this model cannot be widened: its emb_dim is the paper's already, {large.emb_dim}.")
    arrays = {}
    for name, shape in parameter_shapes(large).items():
        arrays[name] = np.zeros(shape, np.float32)
        if name in checkpoint.arrays:
            _put(name, np.asarray(checkpoint.arrays[name], np.float32), wider=arrays[name], small=small, large=large)
        # Layers that the small encoder has not are all 0: they add nothing.
    embedding = arrays["token_embedder/embedding"]
    embedding[:, -1] = _CONSTANT * np.sqrt(np.mean(np.square(embedding[: small.vocab_size, : small.emb_dim])))
    arrays["decoder/decoder_norm/scale"][-1] = 1
    arrays["decoder/logits_dense/kernel"][-1, small.vocab_size :] = _REFUSAL
    return dataclasses.replace(checkpoint, config=large, arrays=arrays)


def _put(name: str, values: np.ndarray, *, wider: np.ndarray, small: T5Config, large: T5Config) -> None:
    """Writes the values of a small array to where the wider one has them."""
    if name.endswith("/scale"):
        values = values * np.float32(np.sqrt(small.emb_dim / large.emb_dim))
    elif match := re.search(r"attention/(query|key|value|out)/kernel$", name):
        # [width, heads * head_dim], or transposed: heads and their entries are widened apart.
        heads = int(match[1] != "out")
        values = _by_head(values, heads, config=small)
        # A view: what is written there is written to the array.
        wider = _by_head(wider, heads, config=large)
    wider[tuple(slice(size) for size in values.shape)] = values


def _by_head(kernel: np.ndarray, axis: int, *, config: T5Config) -> np.ndarray:
    shape = list(kernel.shape)
    shape[axis : axis + 1] = [config.num_heads, config.head_dim]
    return kernel.reshape(shape)
