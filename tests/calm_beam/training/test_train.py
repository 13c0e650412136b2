"""The training loop, on models of a few thousand weights."""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from calm_beam.checkpoints import fingerprint
from calm_beam.model import EarlyExitT5, T5Config, parameter_shapes
from calm_beam.training.batches import Pair
from calm_beam.training.initialize import initialize_parameters
from calm_beam.training.optimizer import OptimizerConfig
from calm_beam.training.train import Progress, TrainingConfig, _tree, train

# One model for all short runs, so that it is compiled once.
_MODEL = T5Config(
    vocab_size=12,
    emb_dim=16,
    num_heads=2,
    head_dim=8,
    mlp_dim=32,
    num_encoder_layers=1,
    num_decoder_layers=2,
    exit_classifier=2,
)
_CONFIG = TrainingConfig(
    steps=400,
    batch_tokens=160,
    num_shapes=1,
    dropout_rate=0.0,
    sampled_layers=1,
    progress_every=100,
    optimizer=OptimizerConfig(muon_learning_rate=0.02, adam_learning_rate=0.01, warmup_steps=20),
)
_SHORT = dataclasses.replace(_CONFIG, steps=4, dropout_rate=0.1, progress_every=1)


def _copies(count: int, *, seed: int) -> list[Pair]:
    """Returns pairs whose target is their source, always 4 tokens."""
    sources = np.random.default_rng(seed).integers(3, 12, size=(count, 4)).tolist()
    return [(source, source) for source in sources]


def test_a_copy_task_is_learned() -> None:
    """With one lower layer sampled a step, the loss falls, every layer's is measured, and unseen sources are copied."""
    model = dataclasses.replace(_MODEL, num_decoder_layers=3, exit_classifier=0)
    reports: list[Progress] = []
    unseen = _copies(50, seed=1)
    arrays = train(_CONFIG, model, _copies(500, seed=0), unseen, on_progress=reports.append)
    assert [report.step for report in reports] == [100, 200, 300, 400]
    assert reports[-1].loss < 0.2 * reports[0].loss
    assert reports[0].validation_losses is None
    assert reports[-1].validation_losses is not None
    assert max(reports[-1].validation_losses) < 0.2
    assert reports[-1].target_tokens > 0.95 * 400 * 160
    sources = np.array([[*source, 1] for source, _ in unseen], np.int32)
    written = np.zeros_like(sources)
    apply = jax.jit(EarlyExitT5(model).apply)
    tree = _tree({name: jnp.asarray(array) for name, array in arrays.items()})
    for position in range(5):
        inputs = np.pad(written[:, :-1], ((0, 0), (1, 0)))
        logits = apply(tree, sources, inputs)
        written[:, position] = np.argmax(logits[-1, :, position], axis=-1)
    assert np.mean(np.all(written == sources, axis=1)) > 0.9


def test_the_result_fits_the_model() -> None:
    """Weights come back as float32, with the names and shapes of the model."""
    arrays = train(_SHORT, _MODEL, _copies(40, seed=0), [])
    assert {name: array.shape for name, array in arrays.items()} == parameter_shapes(_MODEL)
    assert all(array.dtype == np.float32 for array in arrays.values())


def test_the_seed_decides_everything() -> None:
    """The same seed gives the same weights, with dropout and shuffling on; another seed gives others."""
    pairs = _copies(40, seed=0)
    results = [train(dataclasses.replace(_SHORT, seed=seed), _MODEL, pairs, []) for seed in (3, 3, 4)]
    assert fingerprint(results[0]) == fingerprint(results[1])
    assert fingerprint(results[0]) != fingerprint(results[2])


def test_watching_changes_nothing() -> None:
    """Reports and validations do not change the weights."""
    pairs = _copies(40, seed=0)
    watched = dataclasses.replace(_SHORT, validate_every=2)
    reports: list[Progress] = []
    one = train(watched, _MODEL, pairs, _copies(5, seed=2), on_progress=reports.append)
    assert [report.validation_losses is not None for report in reports] == [False, True, False, True]
    assert fingerprint(one) == fingerprint(train(_SHORT, _MODEL, pairs, []))


def test_fine_tuning_starts_from_the_given_weights() -> None:
    """A tiny step from given weights stays near them, leaves them untouched, and keeps the exit classifier."""
    initial = initialize_parameters(_MODEL, generator=np.random.default_rng(9))
    initial["decoder/meta_cls/kernel"] += 0.25
    before = fingerprint(initial)
    small = OptimizerConfig(muon_learning_rate=1e-5, adam_learning_rate=1e-5)
    arrays = train(dataclasses.replace(_SHORT, optimizer=small), _MODEL, _copies(40, seed=0), [], initial=initial)
    assert fingerprint(initial) == before
    np.testing.assert_array_equal(arrays["decoder/meta_cls/kernel"], initial["decoder/meta_cls/kernel"])
    for name, array in arrays.items():
        np.testing.assert_allclose(array, initial[name], atol=1e-4)
    assert not np.array_equal(arrays["token_embedder/embedding"], initial["token_embedder/embedding"])


def test_initial_scales() -> None:
    """Kernels preserve variance, query kernels make up for unscaled attention, norms start at 1."""
    model = dataclasses.replace(_MODEL, emb_dim=64, num_heads=4, head_dim=16, mlp_dim=128)
    arrays = initialize_parameters(model, generator=np.random.default_rng(0))
    layer = "decoder/layers_0"
    assert arrays[f"{layer}/self_attention/query/kernel"].std() == pytest.approx((64 * 16) ** -0.5, rel=0.1)
    assert arrays[f"{layer}/self_attention/key/kernel"].std() == pytest.approx(64**-0.5, rel=0.1)
    assert arrays[f"{layer}/mlp/wo/kernel"].std() == pytest.approx(128**-0.5, rel=0.1)
    assert np.all(arrays["decoder/decoder_norm/scale"] == 1)


@pytest.mark.parametrize(
    ("field", "value", "message"),
    [
        ("steps", 0, "steps must be at least 1, got 0"),
        ("batch_tokens", 0, "batch_tokens must be at least 1, got 0"),
        ("max_target_length", 1, "max_target_length must be at least 2"),
        ("sampled_layers", -1, "sampled_layers must be at least 0, got -1"),
        ("dropout_rate", 1.0, r"dropout_rate must be in \[0, 1\), got 1.0"),
    ],
)
def test_bad_settings_are_named(field: str, value: Any, message: str) -> None:
    """Each setting out of range is refused with its value."""
    with pytest.raises(ValueError, match=message):
        dataclasses.replace(_CONFIG, **{field: value})


def test_bad_data_is_named() -> None:
    """No pairs, ids outside the vocabulary, and weights of another model are refused in words."""
    with pytest.raises(ValueError, match="at least one pair, got none"):
        train(_SHORT, _MODEL, [], [])
    with pytest.raises(ValueError, match=r"validation_pairs\[0\] has id 12; ids must be in \[1, 12\)"):
        train(_SHORT, _MODEL, [([3], [3])], [([3], [12])])
    initial = initialize_parameters(_MODEL, generator=np.random.default_rng(0))
    del initial["decoder/decoder_norm/scale"]
    with pytest.raises(ValueError, match="decoder/decoder_norm/scale is missing, unknown or of another shape"):
        train(_SHORT, _MODEL, [([3], [3])], [], initial=initial)


def test_diverging_is_an_error() -> None:
    """A loss that is no longer finite stops the run and names the step."""
    initial = initialize_parameters(_MODEL, generator=np.random.default_rng(0))
    initial["decoder/logits_dense/kernel"][0, 0] = np.nan
    with pytest.raises(FloatingPointError, match="the training loss is nan at step 1"):
        train(_SHORT, _MODEL, _copies(40, seed=0), [], initial=initial)
