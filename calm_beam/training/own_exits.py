"""Norms and heads of exits that a model did not have: they begin as what all layers shared until then."""

import dataclasses
from typing import Any, cast

import numpy as np

from calm_beam.checkpoints import Array, Arrays, StoredArrays
from calm_beam.model import ModelConfig, architecture_of
from calm_beam.model.exit_parameters import exit_shapes


def with_own_exits(
    config: ModelConfig, arrays: Arrays, *, exit_norms: bool, exit_heads: bool
) -> tuple[ModelConfig, Arrays]:
    """Returns a model whose layers below the last have norms, or heads, of their own, and which predicts what it did.

    Args:
      config: Of the model.
      arrays: Its weights by name.
      exit_norms: Whether each of these layers is to have a norm; what a model has, it keeps.
      exit_heads: Whether each is to have the kernel of a head.

    Returns:
      The new config, and its weights: those that were given, and copies of the final norm and the output head.

    Raises:
      ValueError: If there is one layer only.

    Source: EE-Tuning (Pan et al., 2024), where added exits begin as copies of the final one.
    """
    changes = {"exit_norms": config.exit_norms or exit_norms, "exit_heads": config.exit_heads or exit_heads}
    changed: ModelConfig = dataclasses.replace(cast(Any, config), **changes)
    names = [name for name in exit_shapes(changed) if name not in arrays]
    if not names:
        return changed, arrays
    kernel = _head(config, arrays) if changed.exit_heads and not config.exit_heads else None
    added: dict[str, Any] = {}
    for name in names:
        added[name] = kernel if name.endswith("/kernel") else arrays["decoder/decoder_norm/scale"]
    # Stored arrays stay on disk, and are read again for each copy.
    all_arrays: dict[str, Array] = {**arrays, **added}
    return changed, arrays.of(all_arrays) if isinstance(arrays, StoredArrays) else all_arrays


def _head(config: ModelConfig, arrays: Arrays) -> Array:
    """Returns the output head as a kernel, [width, vocabulary], of states that are not scaled."""
    if not config.tied_head:
        return arrays["decoder/logits_dense/kernel"]
    kernel = arrays["token_embedder/embedding"].T
    if not architecture_of(config).scales_tied_head:
        return kernel
    return np.asarray(kernel) / np.float32(np.sqrt(config.emb_dim))
