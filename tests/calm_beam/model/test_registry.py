"""What every architecture owes the decoders."""

import numpy as np
import pytest

from calm_beam.model import ARCHITECTURES, ModelConfig, architecture_of, network_of, parameter_shapes
from tests.builders import build_config

_CONFIGS: tuple[ModelConfig, ...] = (build_config(exit_classifier=2), build_config(tied_head=True))


def test_every_architecture_is_tested() -> None:
    """The configs of this module are of all kinds."""
    assert {type(config) for config in _CONFIGS} == set(ARCHITECTURES)


@pytest.mark.parametrize("config", _CONFIGS, ids=lambda config: type(config).__name__)
def test_weights_of_the_named_shapes_are_all_that_a_network_takes(config: ModelConfig) -> None:
    """Embedding, prefill, keys and values, head and its weights have the shapes that decoders count on."""
    import flax.traverse_util

    tree = flax.traverse_util.unflatten_dict(
        {name: np.ones(shape, np.float32) for name, shape in parameter_shapes(config).items()}, sep="/"
    )
    model, parameters = network_of(config), {"params": tree}
    keys_values, mask = model.apply(parameters, np.array([[5, 1, 0]]), np.array([2]), method="prefill")
    assert len(keys_values) == config.num_decoder_layers
    for values in (array for pair in keys_values for array in pair):
        assert values.shape == (1, config.num_kv_heads, 3, config.head_dim)
    assert mask.tolist() == [[True, True, False]]
    weights, vocab_axis = model.apply(parameters, method="head_weights")
    assert weights.shape[vocab_axis] == config.vocab_size
    pending = architecture_of(config).pending_shapes(config)
    assert all(isinstance(size, int) for shape in pending.values() for size in shape)


def test_the_first_input_of_t5_is_its_start_token() -> None:
    """Whatever the prompt."""
    assert architecture_of(build_config()).first_input([9, 8, 1]) == 0
