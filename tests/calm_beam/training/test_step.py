"""The update rule of each parameter."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import optax.contrib
import pytest

from calm_beam.model import T5Config, parameter_shapes
from calm_beam.training.config import AdafactorConfig, MuonConfig
from calm_beam.training.step import linear_schedule, make_optimizer, parameter_group

_MODEL = T5Config(
    vocab_size=11,
    emb_dim=8,
    num_heads=2,
    head_dim=4,
    mlp_dim=12,
    num_encoder_layers=1,
    num_decoder_layers=2,
    exit_classifier=2,
)


def _random(seed: int) -> dict[str, jax.Array]:
    generator = np.random.default_rng(seed)
    return {
        name: jnp.asarray(generator.standard_normal(shape), jnp.float32)
        for name, shape in parameter_shapes(_MODEL).items()
    }


def test_muon_gets_the_layer_kernels_only() -> None:
    """Muon trains the 2-D kernels of the layers, Adam everything else, and the exit classifier stays as it is."""
    groups: dict[str, set[str]] = {"muon": set(), "adam": set(), "frozen": set()}
    for name in parameter_shapes(_MODEL):
        groups[parameter_group(name)].add(name)
    assert len(groups["muon"]) == 7 + 2 * 11
    assert all("/layers_" in name and name.endswith("/kernel") for name in groups["muon"])
    assert groups["frozen"] == {"decoder/meta_cls/kernel", "decoder/meta_cls/bias"}
    assert {"token_embedder/embedding", "decoder/logits_dense/kernel", "encoder/relpos_bias/rel_embedding"} <= groups[
        "adam"
    ]
    assert all(name.endswith("/scale") for name in groups["adam"] if "/layers_" in name)


def test_updates_are_those_of_each_rule_alone() -> None:
    """Stacking kernels by shape changes nothing: each gets optax's Muon update of itself, others get Adam's."""
    config = MuonConfig(clip_norm=1e9, warmup_steps=0)
    parameters = _random(0)
    optimizer = make_optimizer(config, steps=10)
    state = jax.jit(optimizer.init)(parameters)
    muon = optax.contrib.muon(linear_schedule(8e-3, config, steps=10), ns_steps=5, beta=0.95)
    adam = optax.adam(linear_schedule(3e-3, config, steps=10), b1=0.9, b2=0.98)
    update = jax.jit(optimizer.update)
    names = (
        "decoder/layers_1/mlp/wi_0/kernel",
        "decoder/layers_0/mlp/wo/kernel",
        "decoder/logits_dense/kernel",
    )
    rules = {name: muon if parameter_group(name) == "muon" else adam for name in names}
    alone = {name: rule.init({name: parameters[name]}) for name, rule in rules.items()}
    for seed in (1, 2):
        gradients = _random(seed)
        updates, state = update(gradients, state, parameters)
        for name, rule in rules.items():
            expected, alone[name] = jax.jit(rule.update)({name: gradients[name]}, alone[name], {name: parameters[name]})
            np.testing.assert_allclose(updates[name], expected[name], rtol=2e-4, atol=1e-7)
        assert not np.any(updates["decoder/meta_cls/kernel"])


def test_muon_updates_are_nearly_orthogonal() -> None:
    """All singular values of a kernel's first update are about the learning rate; those of Adam's are not."""
    parameters = _random(0)
    config = MuonConfig(warmup_steps=0)
    optimizer = make_optimizer(config, steps=10)
    updates, _ = jax.jit(optimizer.update)(_random(1), jax.jit(optimizer.init)(parameters), parameters)
    values = np.linalg.svd(updates["decoder/layers_0/self_attention/query/kernel"], compute_uv=False) / 8e-3
    assert values.min() > 0.5
    assert values.max() < 1.5
    head = np.linalg.svd(updates["decoder/logits_dense/kernel"], compute_uv=False) / 3e-3
    assert head.max() > 2


def test_rates_rise_then_fall_to_zero() -> None:
    """The rate peaks after the warm-up and is 0 after the last step."""
    schedule = linear_schedule(1.0, MuonConfig(warmup_steps=10), steps=110)
    assert schedule(0) == pytest.approx(1 / 11)
    assert schedule(10) == 1.0
    assert schedule(60) == pytest.approx(0.5)
    assert schedule(110) == 0.0


def test_short_runs_warm_up_for_a_fifth() -> None:
    """A run shorter than its warm-up still reaches the peak."""
    schedule = linear_schedule(1.0, MuonConfig(warmup_steps=100), steps=20)
    assert schedule(4) == 1.0
    assert schedule(20) == 0.0


@pytest.mark.parametrize(
    ("field", "value", "message"),
    [
        ("muon_learning_rate", 0.0, "muon_learning_rate must be positive and finite, got 0.0"),
        ("adam_learning_rate", float("nan"), "adam_learning_rate must be positive and finite, got nan"),
        ("clip_norm", float("inf"), "clip_norm must be positive and finite, got inf"),
        ("momentum", 1.0, r"momentum must be in \[0, 1\), got 1.0"),
        ("warmup_steps", -1, "warmup_steps must be at least 0, got -1"),
        ("newton_schulz_steps", 0, "newton_schulz_steps must be at least 1, got 0"),
    ],
)
def test_bad_settings_are_named(field: str, value: float, message: str) -> None:
    """Each setting out of range is refused with its value."""
    with pytest.raises(ValueError, match=message):
        MuonConfig(**{field: value})  # type: ignore[arg-type]


def _adafactor(
    parameters: dict[str, np.ndarray], gradients: list[dict[str, np.ndarray]], rate: float
) -> list[dict[str, np.ndarray]]:
    """Returns Adafactor's updates of each step, by Shazeer & Stern (2018), algorithms 4 and 5, in float64."""
    rows: dict[str, np.ndarray] = {}
    columns: dict[str, np.ndarray] = {}
    full: dict[str, np.ndarray] = {}
    all_updates = []
    for step, gradient in enumerate(gradients, start=1):
        decay, updates = 1 - step**-0.8, {}
        for name, values in gradient.items():
            square = values.astype(np.float64) ** 2 + 1e-30
            if values.ndim == 2 and min(values.shape) >= 128:
                rows[name] = decay * rows.get(name, 0) + (1 - decay) * square.mean(axis=1)
                columns[name] = decay * columns.get(name, 0) + (1 - decay) * square.mean(axis=0)
                moment = np.outer(rows[name], columns[name]) / rows[name].mean()
            else:
                full[name] = moment = decay * full.get(name, 0) + (1 - decay) * square
            update = values / np.sqrt(moment)
            update /= max(1, np.sqrt(np.mean(update**2)))
            scale = max(1e-3, float(np.sqrt(np.mean(parameters[name].astype(np.float64) ** 2))))
            updates[name] = -rate * scale * update
            parameters[name] = parameters[name] + updates[name]
        all_updates.append(updates)
    return all_updates


def test_adafactor_is_that_of_the_paper() -> None:
    """Three steps agree with the published algorithm, for a factored array and for ones too small to factor."""
    shapes = {"decoder/layers_0/mlp/wo/kernel": (128, 130), "decoder/logits_dense/kernel": (8, 11), "a/scale": (8,)}
    draw = lambda seed: {  # noqa: E731
        name: np.random.default_rng((seed, index)).standard_normal(shape).astype(np.float32)
        for index, (name, shape) in enumerate(shapes.items())
    }
    parameters, gradients = draw(0), [draw(seed) for seed in (1, 2, 3)]
    optimizer = make_optimizer(AdafactorConfig(learning_rate=0.01), steps=3)
    moved, state = dict(parameters), optimizer.init(parameters)
    for gradient, expected in zip(gradients, _adafactor(dict(parameters), gradients, 0.01), strict=True):
        updates, state = optimizer.update(gradient, state, moved)
        moved = optax.apply_updates(moved, updates)
        for name in shapes:
            np.testing.assert_allclose(updates[name], expected[name], rtol=2e-3, atol=1e-7)


def test_adafactor_leaves_the_exit_classifier() -> None:
    """Adafactor changes every parameter except those of the exit classifier, whatever its gradient."""
    optimizer = make_optimizer(AdafactorConfig(), steps=10)
    parameters = _random(0)
    updates, _ = optimizer.update(_random(1), optimizer.init(parameters), parameters)
    still = {name for name, update in updates.items() if not np.any(update)}
    assert still == {"decoder/meta_cls/kernel", "decoder/meta_cls/bias"}


def test_a_bad_rate_of_adafactor_is_named() -> None:
    """A learning rate out of range is refused with its value."""
    with pytest.raises(ValueError, match="learning_rate must be positive and finite, got -1"):
        AdafactorConfig(learning_rate=-1)
