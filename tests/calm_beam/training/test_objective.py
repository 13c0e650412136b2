"""The layer-weighted loss: its weights, its mask, and the estimate from a few layers."""

import functools
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from calm_beam.training.config import LAYER_WEIGHTS
from calm_beam.training.step import (
    all_layers,
    layer_weighted_loss,
    layer_weights,
    rotating_layers,
    sample_layers,
    sampled_weights,
    token_cross_entropy_sums,
)


def _loss(
    logits: np.ndarray, targets: np.ndarray, weights: np.ndarray, *, label_smoothing: float = 0.0, z_loss: float = 0.0
) -> float:
    loss = jax.jit(functools.partial(layer_weighted_loss, label_smoothing=label_smoothing, z_loss=z_loss))
    as_arrays = {"is_target": jnp.asarray(targets != 0), "weights": jnp.asarray(weights, jnp.float32)}
    return float(loss(jnp.asarray(logits), jnp.asarray(targets), **as_arrays))


def _logits_and_targets() -> tuple[np.ndarray, np.ndarray]:
    generator = np.random.default_rng(0)
    targets = np.array([[4, 2, 1, 0, 0], [3, 1, 0, 0, 0]], np.int32)
    return generator.standard_normal((5, 2, 5, 7)).astype(np.float32), targets


def test_weights_are_the_papers() -> None:
    """Layer i of L weighs i / (1 + ... + L)."""
    np.testing.assert_allclose(layer_weights(8), [index / 36 for index in range(1, 9)])


def test_weights_of_the_released_code() -> None:
    """The other weightings are those of T5X: all equal, and each layer twice the one below."""
    np.testing.assert_allclose(layer_weights(8, "uniform"), [1 / 8] * 8)
    np.testing.assert_allclose(layer_weights(8, "exponential"), [2**index / 255 for index in range(8)])


def test_an_unknown_weighting_is_refused() -> None:
    """The error names the weighting and the known ones."""
    with pytest.raises(ValueError, match="layer_weights must be one of linear, uniform, exponential; got 'cubic'"):
        layer_weights(8, "cubic")


def test_no_layers_is_refused() -> None:
    """A decoder has at least one layer."""
    with pytest.raises(ValueError, match="num_layers must be at least 1, got 0"):
        layer_weights(0)


def test_cross_entropy_agrees_with_a_loop() -> None:
    """Each layer's sum is minus the log-probability of its real target tokens."""
    logits, targets = _logits_and_targets()
    expected = np.zeros(5)
    for layer, row, position in itertools.product(range(5), range(2), range(5)):
        scores = logits[layer, row, position].astype(np.float64)
        if targets[row, position]:
            expected[layer] += np.log(np.exp(scores).sum()) - scores[targets[row, position]]
    with jax.numpy_dtype_promotion("strict"), jax.numpy_rank_promotion("raise"):
        found = token_cross_entropy_sums(jnp.asarray(logits), jnp.asarray(targets), is_target=jnp.asarray(targets != 0))
    np.testing.assert_allclose(found, expected, rtol=1e-5)


@pytest.mark.parametrize(("label_smoothing", "z_loss"), [(0.1, 0.0), (0.0, 1e-2), (0.3, 1e-2)])
def test_smoothing_and_z_loss_agree_with_a_loop(label_smoothing: float, z_loss: float) -> None:
    """The loss is the divergence from the smoothed target, plus z_loss times the squared log-normalizer."""
    logits, targets = _logits_and_targets()
    expected = np.zeros(5)
    for layer, row, position in itertools.product(range(5), range(2), range(5)):
        scores = logits[layer, row, position].astype(np.float64)
        if targets[row, position]:
            smoothed = np.full(7, label_smoothing / 6)
            smoothed[targets[row, position]] = 1 - label_smoothing
            log_normalizer = np.log(np.exp(scores).sum())
            entropy = -sum(p * np.log(p) for p in smoothed if p > 0)
            expected[layer] += -smoothed @ (scores - log_normalizer) - entropy + z_loss * log_normalizer**2
    with jax.numpy_dtype_promotion("strict"), jax.numpy_rank_promotion("raise"):
        found = token_cross_entropy_sums(
            jnp.asarray(logits),
            jnp.asarray(targets),
            is_target=jnp.asarray(targets != 0),
            label_smoothing=label_smoothing,
            z_loss=z_loss,
        )
    np.testing.assert_allclose(found, expected, rtol=1e-5)


def test_the_least_smoothed_loss_is_zero() -> None:
    """A prediction equal to the smoothed target has loss 0, and a more certain one has more."""
    targets = np.array([[4, 2]], np.int32)
    smoothed = np.full((1, 1, 2, 7), 0.1 / 6)
    smoothed[0, 0, [0, 1], [4, 2]] = 0.9
    logits = np.log(smoothed).astype(np.float32)
    weights = np.ones(1)
    assert _loss(logits, targets, weights, label_smoothing=0.1) == pytest.approx(0, abs=1e-6)
    assert _loss(2 * logits, targets, weights, label_smoothing=0.1) > 0.05


def test_options_reach_the_weighted_loss() -> None:
    """The weighted loss is the weighted mean of the layers' sums, with the same smoothing and z-loss."""
    logits, targets = _logits_and_targets()
    options = {"label_smoothing": 0.2, "z_loss": 1e-2}
    sums = token_cross_entropy_sums(
        jnp.asarray(logits), jnp.asarray(targets), is_target=jnp.asarray(targets != 0), **options
    )
    assert _loss(logits, targets, layer_weights(5), **options) == pytest.approx(
        float(layer_weights(5) @ np.asarray(sums) / 5), rel=1e-5
    )


def test_padding_does_not_count() -> None:
    """Neither the logits at padding nor its amount change the loss."""
    logits, targets = _logits_and_targets()
    weights = all_layers(5)[1]
    loss = _loss(logits, targets, weights)
    changed = np.where((targets == 0)[None, :, :, None], logits + np.arange(7, dtype=np.float32), logits)
    wider = np.pad(changed, ((0, 0), (0, 1), (0, 2), (0, 0)))
    np.testing.assert_allclose(_loss(wider, np.pad(targets, ((0, 1), (0, 2))), weights), loss, rtol=1e-6)


def test_nothing_but_padding_has_no_loss() -> None:
    """A batch without target tokens has loss 0, not NaN."""
    logits, targets = _logits_and_targets()
    assert _loss(logits, np.zeros_like(targets), np.ones(5)) == 0


@pytest.mark.parametrize("weighting", LAYER_WEIGHTS)
@pytest.mark.parametrize("sampled", [1, 2, 3])
def test_estimate_is_unbiased(sampled: int, weighting: str) -> None:
    """Averaged over all equally likely sets of lower layers, the estimate is the exact loss, for every weighting."""
    logits, targets = _logits_and_targets()
    options = {"label_smoothing": 0.1, "z_loss": 1e-3}
    exact = _loss(logits, targets, all_layers(5, weighting)[1], **options)
    estimates = []
    for chosen in itertools.combinations(range(1, 5), sampled):
        layers, weights = sampled_weights(5, np.array(chosen), weighting=weighting)
        estimates.append(_loss(logits[layers - 1], targets, weights, **options))
    assert np.ptp(estimates) > 0.01
    np.testing.assert_allclose(np.mean(estimates), exact, rtol=1e-5)


def test_unscaled_weights_would_be_biased() -> None:
    """The check above fails for weights that are not scaled up."""
    logits, targets = _logits_and_targets()
    exact = _loss(logits, targets, all_layers(5)[1])
    layers = [np.array([*chosen, 5]) for chosen in itertools.combinations(range(1, 5), 2)]
    weights = layer_weights(5)
    unscaled = [_loss(logits[i - 1], targets, weights[i - 1]) for i in layers]
    assert abs(np.mean(unscaled) - exact) > 0.1


def test_every_set_of_layers_is_equally_likely() -> None:
    """Sampling draws each pair of distinct lower layers with the same probability, and always the last layer."""
    generator = np.random.default_rng(1)
    counts: dict[tuple[int, ...], int] = {}
    for _ in range(3000):
        layers, _weights = sample_layers(5, sampled_layers=2, generator=generator)
        assert layers[-1] == 5
        key = tuple(sorted(layers[:-1].tolist()))
        counts[key] = counts.get(key, 0) + 1
    assert set(counts) == set(itertools.combinations(range(1, 5), 2))
    # 500 each expected; 5 standard deviations are 102.
    assert all(abs(count - 500) < 102 for count in counts.values())


@pytest.mark.parametrize("weighting", LAYER_WEIGHTS)
@pytest.mark.parametrize("sampled", [0, 4, 9])
def test_zero_or_enough_layers_is_exact(sampled: int, weighting: str) -> None:
    """With 0, or as many layers as there are, all layers are computed with their exact weights."""
    generator = np.random.default_rng(0)
    layers, weights = sample_layers(5, sampled_layers=sampled, generator=generator, weighting=weighting)
    np.testing.assert_array_equal(layers, [1, 2, 3, 4, 5])
    np.testing.assert_array_equal(weights, layer_weights(5, weighting))


@pytest.mark.parametrize("weighting", LAYER_WEIGHTS)
@pytest.mark.parametrize("every", [1, 2, 3, 7])
def test_layers_that_take_turns_add_up(every: int, weighting: str) -> None:
    """In each cycle of turns, every layer has its exact weight; at every step the last one has."""
    summed = np.zeros(5)
    for step in range(11, 11 + every):
        layers, weights = rotating_layers(5, every=every, step=step, weighting=weighting)
        assert layers[-1] == 5
        assert set(np.diff(layers[:-1]).tolist()) <= {every}
        summed[layers - 1] += weights
    np.testing.assert_allclose(summed / every, layer_weights(5, weighting))


def test_sampled_layers_keep_the_weighting() -> None:
    """A sample has the requested weighting, scaled for the layers left out."""
    layers, weights = sample_layers(5, sampled_layers=2, generator=np.random.default_rng(0), weighting="exponential")
    exact = layer_weights(5, "exponential")[layers - 1]
    np.testing.assert_allclose(weights, exact * [2, 2, 1])
