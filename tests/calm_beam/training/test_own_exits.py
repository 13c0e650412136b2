"""Training models with exit norms or exit heads."""

import dataclasses
import itertools
import pathlib
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from calm_beam.checkpoints import StoredArrays, fingerprint, load_checkpoint, write_native
from calm_beam.model import ModelConfig, network_of, parameter_shapes
from calm_beam.model.interface import Taught
from calm_beam.training.config import MuonConfig, TrainingConfig
from calm_beam.training.new_model import with_own_exits
from calm_beam.training.step import layer_weighted_loss, loss_and_gradients, variables
from calm_beam.training.train import train
from tests.builders import build_arrays, build_config
from tests.calm_beam.model.llama.builders import build_llama_arrays, build_llama_config
from tests.sampling import sampled

_T5 = build_config(num_encoder_layers=1, num_decoder_layers=4)
_LLAMA = build_llama_config(num_decoder_layers=4)


def _arrays(config: Any) -> dict[str, np.ndarray]:
    return build_arrays(config, 0) if config.__class__ is _T5.__class__ else build_llama_arrays(config, 0)


def _logits(config: ModelConfig, arrays: Any) -> np.ndarray:
    tokens = np.array([[5, 9, 4, 1]], np.int32)
    inputs = (tokens,) if isinstance(config, type(_LLAMA)) else (tokens, np.array([[0, 7, 3]], np.int32))
    return np.asarray(jax.jit(network_of(config).apply)(variables(arrays), *inputs))


@pytest.mark.parametrize(
    "config",
    [
        _T5,
        dataclasses.replace(_T5, tied_head=True),
        _LLAMA,
        dataclasses.replace(_LLAMA, tied_head=True, unit_offset_norms=True),
    ],
    ids=["t5", "tied t5", "llama", "gemma"],
)
def test_new_exits_change_no_logits(config: Any) -> None:
    """New norms are copies of the final one, and kernels of the head; a tied T5's include its scale for states."""
    arrays = _arrays(config)
    before = _logits(config, arrays)
    for exit_norms, exit_heads in ((True, False), (False, True), (True, True)):
        changed, added = with_own_exits(config, arrays, exit_norms=exit_norms, exit_heads=exit_heads)
        assert changed == dataclasses.replace(config, exit_norms=exit_norms, exit_heads=exit_heads)
        assert {name: np.asarray(array).shape for name, array in added.items()} == parameter_shapes(changed)
        assert all(array is arrays[name] for name, array in added.items() if name in arrays)
        after = _logits(changed, added)
        np.testing.assert_allclose(after, before, rtol=0, atol=1e-5 * np.abs(before).max())
        if not (exit_heads and config.tied_head):
            np.testing.assert_array_equal(after, before)


@pytest.mark.parametrize("base", [_T5, _LLAMA], ids=["t5", "llama"])
def test_exits_of_a_stored_model_are_those_of_its_arrays(base: Any, tmp_path: pathlib.Path) -> None:
    """A tied head is read from the files transposed, and changes of the files are still detected."""
    config = dataclasses.replace(base, tied_head=True)
    arrays = _arrays(config)
    write_native(tmp_path, config, arrays=arrays, vocabulary_path=None)
    stored = load_checkpoint(tmp_path)
    _, expected = with_own_exits(config, arrays, exit_norms=True, exit_heads=True)
    _, found = with_own_exits(stored.config, stored.arrays, exit_norms=True, exit_heads=True)
    assert isinstance(found, StoredArrays)
    assert fingerprint(found) == fingerprint(expected)


def test_what_a_model_has_it_keeps() -> None:
    """Existing norms are kept when heads are added."""
    config = dataclasses.replace(_T5, exit_norms=True)
    arrays = _arrays(config)
    changed, added = with_own_exits(config, arrays, exit_norms=False, exit_heads=True)
    assert (changed.exit_norms, changed.exit_heads) == (True, True)
    np.testing.assert_array_equal(_logits(changed, added), _logits(config, arrays))
    assert with_own_exits(config, arrays, exit_norms=True, exit_heads=False) == (config, arrays)


def test_one_layer_has_none_below() -> None:
    """A model of one layer has no layers below the last; the message names the field."""
    config = build_config(num_decoder_layers=1)
    with pytest.raises(ValueError, match="exit_heads is true, but needs at least 2 decoder layers"):
        with_own_exits(config, _arrays(config), exit_norms=False, exit_heads=True)


def _batch(config: ModelConfig) -> Taught:
    generator = np.random.default_rng(1)
    source, targets = (generator.integers(3, 50, (3, 5)).astype(np.int32) for _ in range(2))
    return Taught(source, np.full(3, 5, np.int32), targets, np.array([5, 2, 4], np.int32))


@pytest.mark.parametrize(
    ("config", "layers"),
    sampled(
        itertools.product(
            (
                dataclasses.replace(_T5, exit_heads=True, tied_head=True),
                dataclasses.replace(_LLAMA, exit_norms=True, exit_heads=True),
            ),
            ((1, 3, 4), (2, 4), (4,)),
        ),
        keep=(0, 4, 5),
    ),
)
def test_loss_and_gradients_are_those_of_each_layers_head(config: Any, layers: tuple[int, ...]) -> None:
    """Loss and gradients are those written out layer by layer; exits of layers left out get no gradient."""
    model, batch = network_of(config), _batch(config)
    parameters = {name: jnp.asarray(array) for name, array in _arrays(config).items()}
    weights = jnp.linspace(0.2, 0.5, len(layers), dtype=jnp.float32)

    def written_out(parameters: dict[str, jax.Array]) -> jax.Array:
        apply = lambda *values, **named: model.apply(variables(parameters), *values, **named)  # noqa: E731
        states = apply(batch, method="teacher_forced")
        logits = jnp.stack([apply(states[layer - 1], layer, method="head") for layer in layers])
        targets = jnp.asarray(batch.targets)
        return layer_weighted_loss(logits, targets, is_target=jnp.asarray(batch.is_target), weights=weights)

    expected, by_name = jax.jit(jax.value_and_grad(written_out))(parameters)
    loss, gradients = loss_and_gradients(
        model,
        parameters,
        batch=batch,
        layers=np.array(layers, np.int32),
        weights=weights,
        key=jax.random.key(0),
        label_smoothing=0.0,
        z_loss=0.0,
    )
    np.testing.assert_allclose(loss, expected, rtol=1e-5)
    for name, gradient in gradients.items():
        np.testing.assert_allclose(gradient, by_name[name], rtol=0, atol=1e-5, err_msg=name)
    own = {name: gradient for name, gradient in gradients.items() if "decoder/exit_" in name}
    moved = {name for name, gradient in own.items() if np.asarray(gradient).any()}
    assert moved == {name for name in own if any(f"s_{layer - 1}/" in name for layer in layers)}


@pytest.mark.parametrize("rotating_layers", [0, 2])
def test_every_exit_is_trained(rotating_layers: int) -> None:
    """Norms and heads of all layers change, each by its own gradient, whichever layers a step takes."""
    config = dataclasses.replace(_T5, exit_norms=True, exit_heads=True)
    settings = TrainingConfig(
        steps=4,
        batch_tokens=40,
        num_shapes=1,
        dropout_rate=0.1,
        sampled_layers=0,
        rotating_layers=rotating_layers,
        optimizer=MuonConfig(warmup_steps=0),
    )
    generator = np.random.default_rng(0)
    pairs = [tuple(generator.integers(2, 60, (2, 6)).tolist()) for _ in range(20)]
    start, before = with_own_exits(_T5, _arrays(_T5), exit_norms=True, exit_heads=True)
    assert start == config
    trained = train(settings, config, pairs=pairs, validation_pairs=pairs[:4], initial=before)
    assert trained.validation is not None
    assert len(trained.validation.losses) == 4
    own = [name for name in trained.arrays if "decoder/exit_" in name]
    assert len(own) == 6
    for name in own:
        assert not np.array_equal(trained.arrays[name], np.asarray(before[name])), name
    for kind in ("norms", "heads"):
        values = [trained.arrays[name] for name in own if kind in name]
        assert not np.array_equal(values[0], values[1])
