"""Training the exit classifier: its data, the frozen weights, its report."""

import dataclasses
import itertools
import math
from typing import Any

import jax
import numpy as np
import pytest

from calm_beam.checkpoints import Arrays, FloatArrays
from calm_beam.model import EarlyExitT5, T5Config
from calm_beam.precision import Precision
from calm_beam.training.batches import Pair
from calm_beam.training.config import ClassifierConfig
from calm_beam.training.train_classifier import (
    TrainedClassifier,
    balanced_weights,
    decision_losses,
    geometric_weights,
    independent_weights,
    train_classifier,
)
from tests.builders import build_arrays, build_config

_MODEL = build_config(num_encoder_layers=1, exit_classifier=2)
_ARRAYS = build_arrays(_MODEL, 0)
_CONFIG = ClassifierConfig(batch_tokens=80, num_shapes=1, max_input_length=8, max_target_length=8)
_KERNEL, _BIAS = "decoder/meta_cls/kernel", "decoder/meta_cls/bias"


def _pairs(count: int, *, seed: int) -> list[Pair]:
    generator = np.random.default_rng(seed)
    side = lambda: generator.integers(3, 64, size=generator.integers(1, 8)).tolist()  # noqa: E731
    return [(side(), side()) for _ in range(count)]


_LEARNED, _UNSEEN = _pairs(60, seed=0), _pairs(30, seed=1)


def _train(**changes: Any) -> TrainedClassifier:
    return train_classifier(
        dataclasses.replace(_CONFIG, **changes), _MODEL, arrays=_ARRAYS, pairs=_LEARNED, validation_pairs=_UNSEEN
    )


def _states_and_labels(
    config: T5Config, arrays: FloatArrays, pairs: list[Pair], *, dtype: str = "float32"
) -> list[tuple[np.ndarray, np.ndarray]]:
    """Returns, pair by pair, the layers' states and whether each but the last predicts the last layer's token."""
    model = EarlyExitT5(dataclasses.replace(config, exit_classifier=0), precision=Precision(dtype=dtype))
    tree: dict[str, Any] = {}
    for name, array in arrays.items():
        *parents, leaf = name.split("/")
        node = tree
        for parent in parents:
            node = node.setdefault(parent, {})
        node[leaf] = array
    found = []
    forced = jax.jit(lambda *inputs: model.apply({"params": tree}, *inputs, method="decode_teacher_forced"))
    logits_of = jax.jit(lambda *inputs: model.apply({"params": tree}, *inputs))
    for source, target in pairs:
        target = [*target[:7], 1]
        sources, inputs = (np.pad(row, (0, 8 - len(row)))[None] for row in (source, [0, *target[:-1]]))
        states = np.asarray(forced(sources, inputs), np.float32)[:, 0, : len(target)]
        predicted = np.argmax(np.asarray(logits_of(sources, inputs))[:, 0, : len(target)], axis=-1)
        found.append((states[:-1], predicted[:-1] == predicted[-1]))
    return found


def _margins(arrays: Arrays, states: np.ndarray) -> np.ndarray:
    logits = states.astype(np.float64) @ np.asarray(arrays[_KERNEL]) + np.asarray(arrays[_BIAS])
    return logits[..., 1] - logits[..., 0] if logits.shape[-1] == 2 else logits[..., 0]


@pytest.mark.parametrize("options", [{}, {"objective": "geometric"}, {"balance_classes": True, "num_logits": 1}])
def test_the_backbone_is_frozen(options: dict[str, Any]) -> None:
    """Every array but the classifier's keeps its bits, for any objective; the classifier's are new."""
    before = {name: array.copy() for name, array in _ARRAYS.items()}
    trained = _train(**options)
    assert trained.arrays.keys() == _ARRAYS.keys()
    for name, array in trained.arrays.items():
        if name not in (_KERNEL, _BIAS):
            assert np.asarray(array).tobytes() == before[name].tobytes()
            assert array.dtype == before[name].dtype
    assert not np.array_equal(trained.arrays[_KERNEL], before[_KERNEL][:, : trained.config.exit_classifier])
    assert trained.config == dataclasses.replace(_MODEL, exit_classifier=options.get("num_logits", 2))


@pytest.mark.parametrize(
    ("options", "weigh"),
    [
        ({}, independent_weights),
        ({"objective": "geometric"}, geometric_weights),
        ({"balance_classes": True, "batch_tokens": 10_000}, balanced_weights),
    ],
)
def test_losses_are_those_of_the_oracle(options: dict[str, Any], weigh: Any) -> None:
    """Losses and quality agree with labels made pair by pair, from the logits of every layer, without padding."""
    trained = _train(**options)
    for pairs, loss in ((_LEARNED, trained.training_loss), (_UNSEEN, trained.validation_loss)):
        found = _states_and_labels(_MODEL, _ARRAYS, pairs)
        states = np.concatenate([states for states, _ in found], axis=1)
        agrees = np.concatenate([agrees for _, agrees in found], axis=1)
        losses = decision_losses(_margins(trained.arrays, states), agrees)
        assert loss == pytest.approx(np.sum(weigh(agrees) * losses) / agrees.shape[1], rel=1e-4)
    assert trained.tokens == sum(min(len(target), 7) + 1 for _, target in _LEARNED)
    for quality, labels, margins in zip(trained.quality, agrees, _margins(trained.arrays, states), strict=True):
        assert quality.agreeing == pytest.approx(labels.mean())
        # Counted by hand: true "don't exit", predicted, wanted.
        right, said, wanted = np.sum(~labels & (margins < 0)), np.sum(margins < 0), np.sum(~labels)
        assert quality.f1 == pytest.approx(2 * right / (said + wanted))


def test_the_fit_is_the_minimum() -> None:
    """Moving the kernel or the bias in several directions increases the training loss."""
    trained = _train()
    found = _states_and_labels(_MODEL, _ARRAYS, _LEARNED)
    states = np.concatenate([states for states, _ in found], axis=1)
    agrees = np.concatenate([agrees for _, agrees in found], axis=1)
    loss = lambda margins: np.mean(decision_losses(margins, agrees))  # noqa: E731
    margins = _margins(trained.arrays, states)
    assert loss(margins) < loss(np.full_like(margins, np.log(agrees.mean() / (1 - agrees.mean())))) - 0.02
    generator = np.random.default_rng(0)
    for scale in (0.05, -0.05):
        assert loss(margins + scale) > loss(margins)
        direction = generator.standard_normal(_MODEL.emb_dim) / states.std(axis=(0, 1))
        assert loss(margins + states @ (scale * direction)) > loss(margins)


def test_a_classifier_learns_from_the_type_that_decodes() -> None:
    """In bfloat16, labels and loss are those of bfloat16 states, which differ from float32's."""
    trained = _train(dtype="bfloat16")
    losses = {}
    for dtype in ("float32", "bfloat16"):
        found = _states_and_labels(_MODEL, _ARRAYS, _UNSEEN, dtype=dtype)
        states = np.concatenate([states for states, _ in found], axis=1)
        agrees = np.concatenate([agrees for _, agrees in found], axis=1)
        losses[dtype] = np.mean(decision_losses(_margins(trained.arrays, states), agrees))
    assert trained.validation_loss == pytest.approx(losses["bfloat16"], rel=1e-4)
    assert trained.validation_loss != pytest.approx(losses["float32"], rel=1e-4)
    assert all(np.asarray(array).dtype == np.float32 for array in trained.arrays.values())


def test_one_logit_and_two_score_alike() -> None:
    """The paper's d + 1 weights and T5X's two logits give the same probabilities and the same quality."""
    one, two = _train(num_logits=1), _train(num_logits=2)
    assert (one.arrays[_KERNEL].shape, one.arrays[_BIAS].shape) == ((16, 1), (1,))
    assert (two.arrays[_KERNEL].shape, two.arrays[_BIAS].shape) == ((16, 2), (2,))
    states = np.random.default_rng(0).standard_normal((50, 16)).astype(np.float32)
    np.testing.assert_allclose(_margins(one.arrays, states), _margins(two.arrays, states), atol=1e-5)
    assert [quality.f1 for quality in one.quality] == [quality.f1 for quality in two.quality]


def test_objectives_differ() -> None:
    """The three ways of weighting decisions give three classifiers."""
    kernels = [np.asarray(_train(**options).arrays[_KERNEL]) for options in ({}, {"objective": "geometric"})]
    kernels.append(np.asarray(_train(balance_classes=True).arrays[_KERNEL]))
    assert all(np.abs(one - two).max() > 0.01 for one, two in itertools.combinations(kernels, 2))


def test_what_is_stored_is_what_is_measured() -> None:
    """A classifier for float16 has values that float16 holds, and its loss is that of the rounded values."""
    trained = _train(stored_dtype="float16")
    for name in (_KERNEL, _BIAS):
        np.testing.assert_array_equal(trained.arrays[name], np.asarray(trained.arrays[name], np.float16))
    assert trained.training_loss != _train().training_loss


def test_steps_bound_what_is_learned_from() -> None:
    """One step learns from one batch; more steps than an epoch has are an epoch; progress counts both sets."""
    reports: list[tuple[int, int]] = []
    one = train_classifier(
        dataclasses.replace(_CONFIG, steps=1),
        _MODEL,
        arrays=_ARRAYS,
        pairs=_LEARNED,
        validation_pairs=_UNSEEN,
        on_progress=lambda *report: reports.append(report),
    )
    assert reports == [(1, 4), (2, 4), (3, 4), (4, 4)]
    assert one.tokens < _train(steps=3).tokens < _train(steps=6).tokens == _train(steps=99).tokens


def test_the_seed_decides_the_batches() -> None:
    """The same seed learns from the same batches; another one does not."""
    kernels = [_train(steps=1, seed=seed).arrays[_KERNEL] for seed in (0, 0, 1)]
    np.testing.assert_array_equal(kernels[0], kernels[1])
    assert not np.array_equal(kernels[0], kernels[2])


def test_a_model_whose_layers_always_agree_exits() -> None:
    """If all layers always predict one token, all is "exit", F1 and AUC have no value, nothing overflows."""
    arrays = {**_ARRAYS, "decoder/logits_dense/kernel": np.zeros_like(_ARRAYS["decoder/logits_dense/kernel"])}
    trained = train_classifier(_CONFIG, _MODEL, arrays=arrays, pairs=_LEARNED, validation_pairs=_UNSEEN)
    assert trained.validation_loss < 1e-3
    assert all(
        quality.agreeing == 1 and math.isnan(quality.f1) and math.isnan(quality.auc) for quality in trained.quality
    )
    with pytest.raises(ValueError, match="there is nothing to balance"):
        train_classifier(
            dataclasses.replace(_CONFIG, balance_classes=True),
            _MODEL,
            arrays=arrays,
            pairs=_LEARNED,
            validation_pairs=_UNSEEN,
        )


def test_a_single_layer_is_refused() -> None:
    """A decoder of one layer, which has no exit to decide about, is refused."""
    model = build_config(num_decoder_layers=1)
    with pytest.raises(ValueError, match="needs a decoder of at least 2 layers, this one has 1"):
        train_classifier(_CONFIG, model, arrays=build_arrays(model, 0), pairs=_LEARNED, validation_pairs=_UNSEEN)


def test_broken_weights_are_refused() -> None:
    """States that are not finite are an error."""
    arrays = {name: array.copy() for name, array in _ARRAYS.items()}
    arrays["decoder/layers_0/mlp/wo/kernel"][0, 0] = np.nan
    with pytest.raises(ValueError, match="the model gives states that are not finite"):
        train_classifier(_CONFIG, _MODEL, arrays=arrays, pairs=_LEARNED, validation_pairs=_UNSEEN)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"steps": 0}, "steps must be at least 1, got 0"),
        ({"max_target_length": 1}, "max_target_length must be at least 2"),
        ({"seed": -1}, "seed must be at least 0, got -1"),
        ({"objective": "joint"}, "objective must be one of independent, geometric; got 'joint'"),
        (
            {"objective": "geometric", "balance_classes": True},
            "balance_classes needs objective independent, got geometric",
        ),
        ({"num_logits": 3}, "num_logits must be 1 or 2, got 3"),
    ],
)
def test_bad_settings_are_named(changes: dict[str, Any], message: str) -> None:
    """Each setting out of range is refused with its value."""
    with pytest.raises(ValueError, match=message):
        dataclasses.replace(_CONFIG, **changes)
