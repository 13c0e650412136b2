"""Random weights for new models."""

from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest

from calm_beam.model import ModelConfig, network_of, parameter_shapes
from calm_beam.training.batches import choose_shapes, end_pairs
from calm_beam.training.new_model import initialize_parameters
from calm_beam.training.validation import validation_losses
from tests.builders import build_config
from tests.calm_beam.model.llama.builders import build_llama_config

_LARGER: dict[str, Any] = {"vocab_size": 64, "emb_dim": 64, "num_heads": 4, "head_dim": 16, "mlp_dim": 96}


@pytest.mark.parametrize(
    "config",
    [
        build_config(**_LARGER),
        build_llama_config(**_LARGER),
        build_llama_config(**_LARGER, tied_head=True, attention_bias=True, query_key_norms=True),
        build_llama_config(**_LARGER, unit_offset_norms=True, exit_classifier=1),
    ],
    ids=["t5", "llama", "tied, with biases", "norms by 1 + scale"],
)
def test_a_new_model_knows_next_to_nothing(config: ModelConfig) -> None:
    """Every layer's loss is about that of a uniform distribution over ids, and not far more."""
    arrays = initialize_parameters(config, generator=np.random.default_rng(0))
    assert {name: array.shape for name, array in arrays.items()} == parameter_shapes(config)
    generator = np.random.default_rng(1)
    sides = [generator.integers(2, 64, size=(2, 6)).tolist() for _ in range(30)]
    pairs = end_pairs([(one, two) for one, two in sides], config, max_input_length=8, max_target_length=8)
    shapes = choose_shapes(pairs, batch_tokens=400, num_shapes=1)
    parameters = {name: jnp.asarray(array) for name, array in arrays.items()}
    losses = np.array(validation_losses(network_of(config), parameters, pairs=pairs, shapes=shapes))
    assert np.all(np.abs(losses - np.log(64)) < 1)


def test_an_exit_classifier_begins_undecided() -> None:
    """A new exit classifier scores every state 1/2."""
    for config in (build_config(exit_classifier=2), build_llama_config(exit_classifier=2)):
        arrays = initialize_parameters(config, generator=np.random.default_rng(0))
        assert not arrays["decoder/meta_cls/kernel"].any()
        assert not arrays["decoder/meta_cls/bias"].any()
