"""The contract of every architecture with the decoders."""

import dataclasses

import numpy as np
import pytest

from calm_beam.model import ARCHITECTURES, ModelConfig, architecture_of, network_of, parameter_shapes
from tests.builders import build_config
from tests.calm_beam.model.llama.builders import build_llama_config

_CONFIGS: tuple[ModelConfig, ...] = (
    build_config(exit_classifier=2),
    build_config(tied_head=True),
    build_config(tied_head=True, exit_heads=True),
    build_llama_config(),
    build_llama_config(tied_head=True, exit_classifier=1, attention_bias=True, query_key_norms=True),
    build_llama_config(exit_norms=True, exit_heads=True),
)


def test_every_architecture_is_tested() -> None:
    """The configs of this module cover every architecture."""
    assert {type(config) for config in _CONFIGS} == set(ARCHITECTURES)


@pytest.mark.parametrize("config", _CONFIGS, ids=lambda config: type(config).__name__)
def test_weights_of_the_named_shapes_are_all_that_a_network_takes(config: ModelConfig) -> None:
    """Embedding, prefill, keys and values, head and its weights have the shapes that decoders rely on."""
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
    for layer in range(1, config.num_decoder_layers + 1):
        weights, vocab_axis = model.apply(parameters, layer, method="head_weights")
        assert weights.shape[vocab_axis] == config.vocab_size
        assert weights.size == config.vocab_size * config.emb_dim


def test_first_inputs() -> None:
    """T5 begins with its start token for any prompt; a decoder-only model continues from the last token."""
    config, llama = build_config(), build_llama_config()
    assert architecture_of(config).first_input(config, [9, 8, 1]) == 0
    other = dataclasses.replace(config, start_id=7)
    assert architecture_of(other).first_input(other, [9, 8, 1]) == 7
    assert architecture_of(llama).first_input(llama, [9, 8, 3]) == 3


def test_positions_that_a_model_does_not_have_are_refused() -> None:
    """A prompt and output beyond the model's positions are refused with what to lower."""
    config = build_llama_config(max_positions=64)
    architecture_of(config).check_positions(config, source=54, steps=10)
    with pytest.raises(ValueError, match=r"has 64 positions, but .* 55 tokens and outputs of up to 10 need 65\. Lower"):
        architecture_of(config).check_positions(config, source=55, steps=10)
    architecture_of(build_config()).check_positions(build_config(), source=10_000, steps=10_000)
