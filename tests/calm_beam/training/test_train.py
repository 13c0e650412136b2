"""The training loop, on models of a few thousand weights."""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from calm_beam.checkpoints import fingerprint
from calm_beam.model import EarlyExitT5, T5Config, parameter_shapes
from calm_beam.precision import DTYPES
from calm_beam.training.batches import Pair
from calm_beam.training.config import AdafactorConfig, MuonConfig, OptimizerConfig, TrainingConfig
from calm_beam.training.new_model import initialize_parameters
from calm_beam.training.saved_state import ResumeError, SavedState, TrainedModel
from calm_beam.training.step import variables
from calm_beam.training.train import Progress, train
from calm_beam.training.validation import GenerationScore

# One model for all short runs, so that it is compiled once.
_MODEL = T5Config(
    vocab_size=12,
    emb_dim=16,
    num_heads=2,
    head_dim=8,
    mlp_dim=32,
    num_encoder_layers=1,
    num_decoder_layers=3,
    exit_classifier=2,
)
_CONFIG = TrainingConfig(
    steps=400,
    batch_tokens=160,
    num_shapes=1,
    dropout_rate=0.0,
    sampled_layers=1,
    progress_every=100,
    optimizer=MuonConfig(muon_learning_rate=0.02, adam_learning_rate=0.01, warmup_steps=20),
)
_SHORT = dataclasses.replace(_CONFIG, steps=4, dropout_rate=0.1, progress_every=1)


class _LateScore(GenerationScore):
    """A score with fixed values, whatever the weights."""

    def __init__(self, scores: list[float]) -> None:
        self.name = "a script"
        self._scores = iter(scores)

    def __call__(self, arrays: Any) -> float:
        return next(self._scores)


def _assert_same(one: TrainedModel, two: TrainedModel) -> None:
    """Fails unless both models are equal to the last bit, with equal measurements."""
    assert (one.step, one.validation) == (two.step, two.validation)
    for name, array in one.arrays.items():
        np.testing.assert_array_equal(array, two.arrays[name], err_msg=name)


def _copies(count: int, *, seed: int) -> list[Pair]:
    """Returns pairs whose target is their source, always 4 tokens, and eos in the source."""
    sources = np.random.default_rng(seed).integers(3, 12, size=(count, 4)).tolist()
    return [([*source, 1], source) for source in sources]


@pytest.mark.slow
def test_a_copy_task_is_learned() -> None:
    """With one lower layer sampled a step, the loss falls, every layer's is measured, and unseen sources are copied."""
    model = dataclasses.replace(_MODEL, exit_classifier=0)
    reports: list[Progress] = []
    unseen = _copies(50, seed=1)
    trained = train(_CONFIG, model, pairs=_copies(500, seed=0), validation_pairs=unseen, on_progress=reports.append)
    assert [report.step for report in reports] == [100, 200, 300, 400]
    assert reports[-1].loss < 0.2 * reports[0].loss
    assert reports[0].validation is None
    assert reports[-1].validation is not None
    assert max(reports[-1].validation.losses) < 0.2
    assert (trained.step, trained.validation) == (400, reports[-1].validation)
    assert reports[-1].target_tokens > 0.95 * 400 * 160
    sources = np.array([source for source, _ in unseen], np.int32)
    written = np.zeros_like(sources)
    apply = jax.jit(EarlyExitT5(model).apply)
    tree = variables({name: jnp.asarray(array) for name, array in trained.arrays.items()})
    for position in range(5):
        inputs = np.pad(written[:, :-1], ((0, 0), (1, 0)))
        logits = apply(tree, sources, inputs)
        written[:, position] = np.argmax(logits[-1, :, position], axis=-1)
    assert np.mean(np.all(written == sources, axis=1)) > 0.9


@pytest.mark.parametrize("dtype", DTYPES)
def test_the_result_fits_the_model(dtype: str) -> None:
    """Weights are float32, with the names and shapes of the model, in whatever precision it computes."""
    config = dataclasses.replace(_SHORT, dtype=dtype)
    trained = train(config, _MODEL, pairs=_copies(40, seed=0), validation_pairs=[])
    arrays = trained.arrays
    assert (trained.step, trained.validation) == (4, None)
    assert {name: array.shape for name, array in arrays.items()} == parameter_shapes(_MODEL)
    assert all(array.dtype == np.float32 for array in arrays.values())
    if dtype == "bfloat16":
        # Updates are not rounded, and differ from float32's.
        assert not all(np.array_equal(array, array.astype(jnp.bfloat16)) for array in arrays.values())
        whole = train(_SHORT, _MODEL, pairs=_copies(40, seed=0), validation_pairs=[])
        assert fingerprint(arrays) != fingerprint(whole.arrays)


def test_the_seed_decides_everything() -> None:
    """The same seed gives the same weights, with dropout and shuffling on; another seed gives others."""
    pairs = _copies(40, seed=0)
    results = [
        train(dataclasses.replace(_SHORT, seed=seed), _MODEL, pairs=pairs, validation_pairs=[]).arrays
        for seed in (3, 3, 4)
    ]
    assert fingerprint(results[0]) == fingerprint(results[1])
    assert fingerprint(results[0]) != fingerprint(results[2])


def test_watching_changes_nothing() -> None:
    """Reports, validations and saved states do not change the weights."""
    pairs = _copies(40, seed=0)
    watched = dataclasses.replace(_SHORT, validate_every=2, save_every=1)
    reports: list[Progress] = []
    states: list[SavedState] = []
    first_steps: list[int] = []
    score = _LateScore([0.1, 0.2])
    watched_model = train(
        watched,
        _MODEL,
        pairs=pairs,
        validation_pairs=_copies(5, seed=2),
        score=score,
        on_first_steps=first_steps.append,
        on_progress=reports.append,
        on_save=states.append,
    )
    assert first_steps == [0, 1, 2]
    assert [report.validation is not None for report in reports] == [False, True, False, True]
    assert [state.step for state in states] == [1, 2, 3]
    assert watched_model.step == 4
    assert fingerprint(watched_model.arrays) == fingerprint(
        train(_SHORT, _MODEL, pairs=pairs, validation_pairs=[]).arrays
    )


def test_fine_tuning_starts_from_the_given_weights() -> None:
    """A tiny step from given weights stays near them, leaves them untouched, and keeps the exit classifier."""
    initial = initialize_parameters(_MODEL, generator=np.random.default_rng(9))
    initial["decoder/meta_cls/kernel"] += 0.25
    before = fingerprint(initial)
    small = MuonConfig(muon_learning_rate=1e-5, adam_learning_rate=1e-5)
    config = dataclasses.replace(_SHORT, optimizer=small)
    arrays = train(config, _MODEL, pairs=_copies(40, seed=0), validation_pairs=[], initial=initial).arrays
    assert fingerprint(initial) == before
    np.testing.assert_array_equal(arrays["decoder/meta_cls/kernel"], initial["decoder/meta_cls/kernel"])
    for name, array in arrays.items():
        np.testing.assert_allclose(array, initial[name], atol=1e-4)
    assert not np.array_equal(arrays["token_embedder/embedding"], initial["token_embedder/embedding"])


@pytest.mark.parametrize(
    ("killed_after", "optimizer", "dtype"),
    [
        *((step, _CONFIG.optimizer, "float32") for step in (1, 2, 3)),
        *((step, AdafactorConfig(learning_rate=0.01), "float32") for step in (1, 2, 3)),
        (2, _CONFIG.optimizer, "bfloat16"),
    ],
)
def test_a_resumed_run_ends_with_the_same_bits(optimizer: OptimizerConfig, killed_after: int, dtype: str) -> None:
    """A run that dies after a step and is resumed from its last state has the bits of one that did not."""
    # 40 pairs are two batches, so an epoch ends during the run; dropout and sampled layers are drawn at each step.
    config = dataclasses.replace(_SHORT, optimizer=optimizer, progress_every=3, validate_every=2, save_every=1)
    config = dataclasses.replace(config, dtype=dtype)
    pairs, unseen = _copies(40, seed=0), _copies(5, seed=2)
    reports: list[Progress] = []
    whole = train(config, _MODEL, pairs=pairs, validation_pairs=unseen, on_progress=reports.append)
    states: list[SavedState] = []

    def save(state: SavedState) -> None:
        states.append(state)
        if state.step == killed_after:
            raise KeyboardInterrupt

    before: list[Progress] = []
    with pytest.raises(KeyboardInterrupt):
        train(config, _MODEL, pairs=pairs, validation_pairs=unseen, on_progress=before.append, on_save=save)
    after: list[Progress] = []
    resumed = train(
        config, _MODEL, pairs=pairs, validation_pairs=unseen, on_progress=after.append, resume_from=states[-1]
    )
    assert before + after == reports
    _assert_same(resumed, whole)


def test_a_state_without_the_optimiser_would_differ() -> None:
    """The check above fails if the optimiser starts again: its state matters."""
    config = dataclasses.replace(_SHORT, save_every=2)
    pairs = _copies(40, seed=0)
    states: list[SavedState] = []
    whole = train(config, _MODEL, pairs=pairs, validation_pairs=[], on_save=states.append)
    blank = {name: np.zeros_like(array) for name, array in states[0].optimizer.items()}
    forgetful = train(
        config, _MODEL, pairs=pairs, validation_pairs=[], resume_from=dataclasses.replace(states[0], optimizer=blank)
    )
    assert fingerprint(forgetful.arrays) != fingerprint(whole.arrays)


def test_another_run_is_not_resumed() -> None:
    """A state is refused by a run with other settings, data or first weights, each named; reporting may change."""
    config = dataclasses.replace(_SHORT, save_every=2)
    pairs = _copies(40, seed=0)
    states: list[SavedState] = []
    train(config, _MODEL, pairs=pairs, validation_pairs=[], on_save=states.append)
    state = states[0]
    train(
        dataclasses.replace(config, progress_every=3, save_every=1),
        _MODEL,
        pairs=pairs,
        validation_pairs=[],
        resume_from=state,
    )
    for changed, message in (
        ({"steps": 9}, r"another one \(steps: 4, now 9\)"),
        ({"dtype": "bfloat16"}, r"another one \(dtype: float32, now bfloat16\)"),
        ({"dropout_rate": 0.2, "z_loss": 0.1}, r"\(dropout_rate: 0.1, now 0.2; z_loss: 0.0, now 0.1\)"),
        ({"optimizer": AdafactorConfig()}, "optimizer: MuonConfig, now AdafactorConfig"),
        ({"optimizer": MuonConfig(warmup_steps=3)}, r"muon_learning_rate: 0.02, now 0.008; warmup_steps: 20, now 3\)"),
    ):
        with pytest.raises(ResumeError, match=message):
            train(dataclasses.replace(config, **changed), _MODEL, pairs=pairs, validation_pairs=[], resume_from=state)
    with pytest.raises(ResumeError, match=r"training data: 40 pairs, \w{16}, now 40 pairs, \w{16}\)"):
        train(config, _MODEL, pairs=_copies(40, seed=1), validation_pairs=[], resume_from=state)
    with pytest.raises(ResumeError, match=r"validation data: 0 pairs, .*, now 3 pairs"):
        train(config, _MODEL, pairs=pairs, validation_pairs=_copies(3, seed=0), resume_from=state)
    initial = initialize_parameters(_MODEL, generator=np.random.default_rng(0))
    with pytest.raises(ResumeError, match="initial weights: new, now sha256:"):
        train(config, _MODEL, pairs=pairs, validation_pairs=[], initial=initial, resume_from=state)
    with pytest.raises(ResumeError, match="best by: loss, now a script"):
        train(config, _MODEL, pairs=pairs, validation_pairs=[], score=_LateScore([]), resume_from=state)


def test_a_state_of_another_optimiser_version_is_refused() -> None:
    """An optimiser state with unexpected arrays is refused with a clear message."""
    config = dataclasses.replace(_SHORT, save_every=2)
    states: list[SavedState] = []
    train(config, _MODEL, pairs=_copies(40, seed=0), validation_pairs=[], on_save=states.append)
    odd = dataclasses.replace(states[0], optimizer={"momentum": np.zeros(3, np.float32)})
    with pytest.raises(ResumeError, match="another version of calm-beam or of optax"):
        train(config, _MODEL, pairs=_copies(40, seed=0), validation_pairs=[], resume_from=odd)


def test_the_best_model_is_returned_by_score() -> None:
    """With scores .2, .5, .5, .3 at steps 1 to 4, the model is that of step 2: the first of the best."""
    pairs, unseen = _copies(40, seed=0), _copies(5, seed=2)
    config = dataclasses.replace(_SHORT, validate_every=1, save_every=1)
    states: list[SavedState] = []
    best = train(
        config,
        _MODEL,
        pairs=pairs,
        validation_pairs=unseen,
        score=_LateScore([0.2, 0.5, 0.5, 0.3]),
        on_save=states.append,
    )
    assert best.step == 2
    assert best.validation is not None
    assert best.validation.score == 0.5
    for name, array in states[1].parameters.items():
        np.testing.assert_array_equal(best.arrays[name], array)
    assert fingerprint(best.arrays) != fingerprint(train(config, _MODEL, pairs=pairs, validation_pairs=unseen).arrays)


def test_the_best_model_is_returned_by_loss() -> None:
    """If training increases the last layer's loss, the weights of the step with the least are returned."""
    # Learning one pairing and validating on another: the loss falls at first, and rises with overfitting.
    pairs = [([source], [3 + (source - 2) % 9]) for source in range(3, 12)]
    unseen = [([source], [3 + (source + 1) % 9]) for source in range(3, 12)]
    config = dataclasses.replace(
        _SHORT, steps=40, dropout_rate=0.0, validate_every=4, optimizer=AdafactorConfig(learning_rate=0.1)
    )
    reports: list[Progress] = []
    best = train(config, _MODEL, pairs=pairs, validation_pairs=unseen, on_progress=reports.append)
    losses = {report.step: report.validation.losses[-1] for report in reports if report.validation is not None}
    assert best.step == min(losses, key=lambda step: losses[step])
    assert best.step < 40
    assert best.validation is not None
    assert best.validation.losses[-1] == losses[best.step]
    assert losses[40] > best.validation.losses[-1] + 0.1


def test_initial_scales() -> None:
    """Kernels preserve variance, query kernels compensate unscaled attention, norms start at 1."""
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
        ("rotating_layers", -1, "rotating_layers must be at least 0, got -1"),
        ("layer_dropout", 1.0, r"layer_dropout must be in \[0, 1\), got 1.0"),
        ("dropout_rate", 1.0, r"dropout_rate must be in \[0, 1\), got 1.0"),
        ("label_smoothing", -0.1, r"label_smoothing must be in \[0, 1\), got -0.1"),
        ("z_loss", float("nan"), "z_loss must be at least 0 and finite, got nan"),
        ("save_every", -1, "save_every must be at least 0, got -1"),
        ("dtype", "float16", "dtype must be one of float32, bfloat16; got 'float16'"),
        ("layer_weights", "cubic", "layer_weights must be one of linear, uniform, exponential; got 'cubic'"),
    ],
)
def test_bad_settings_are_named(field: str, value: Any, message: str) -> None:
    """Each setting out of range is refused with its value."""
    with pytest.raises(ValueError, match=message):
        dataclasses.replace(_CONFIG, **{field: value})


def test_bad_data_is_named() -> None:
    """No pairs, ids outside the vocabulary, and weights of another model are refused with clear messages."""
    with pytest.raises(ValueError, match="at least one pair, got none"):
        train(_SHORT, _MODEL, pairs=[], validation_pairs=[])
    with pytest.raises(ValueError, match=r"validation_pairs\[0\] has id 12; ids must be in \[1, 12\)"):
        train(_SHORT, _MODEL, pairs=[([3], [3])], validation_pairs=[([3], [12])])
    initial = initialize_parameters(_MODEL, generator=np.random.default_rng(0))
    del initial["decoder/decoder_norm/scale"]
    with pytest.raises(ValueError, match="decoder/decoder_norm/scale is missing, unknown or of another shape"):
        train(_SHORT, _MODEL, pairs=[([3], [3])], validation_pairs=[], initial=initial)


def test_diverging_is_an_error() -> None:
    """A loss that is not finite stops the run with the step."""
    initial = initialize_parameters(_MODEL, generator=np.random.default_rng(0))
    initial["decoder/logits_dense/kernel"][0, 0] = np.nan
    with pytest.raises(FloatingPointError, match="the training loss is nan at step 1"):
        train(_SHORT, _MODEL, pairs=_copies(40, seed=0), validation_pairs=[], initial=initial)
