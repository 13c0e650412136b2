"""Decoder-only models learn from the outputs of their prompts only."""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from calm_beam.checkpoints import fingerprint
from calm_beam.errors import UsageError
from calm_beam.evaluation.suitability import layer_predictions
from calm_beam.exits.rule import ExitRule
from calm_beam.model import network_of, parameter_shapes
from calm_beam.model.interface import Taught
from calm_beam.model.llama import LlamaConfig
from calm_beam.precision import DTYPES
from calm_beam.training.batches import BatchShape, Pair, choose_shapes, end_pairs, pad_batch
from calm_beam.training.config import ClassifierConfig, MuonConfig, TrainingConfig
from calm_beam.training.new_model import initialize_parameters
from calm_beam.training.saved_state import ResumeError, SavedState
from calm_beam.training.step import loss_and_gradients, variables
from calm_beam.training.train import Progress, train
from calm_beam.training.train_classifier import train_classifier
from calm_beam.training.validation import validation_losses
from tests.builders import checkpoint_of
from tests.calm_beam.model.llama.builders import build_llama_arrays, build_llama_config
from tests.numpy_llama import NumpyLlama

# Id 0 is an ordinary token, and one of the end ids.
_MODEL = build_llama_config(end_ids=(0, 2), exit_classifier=2)
_ARRAYS = build_llama_arrays(_MODEL, 0)
# Prompts and outputs, each shorter and longer than the other, that begin and end with 0.
_PAIRS: list[Pair] = [([0, 5, 0], [7, 0, 9]), ([4, 4, 0, 4, 8, 6], [3]), ([9], [0, 0, 11, 3, 0]), ([17, 0], [])]
_CONFIG = TrainingConfig(
    steps=4,
    batch_tokens=60,
    num_shapes=1,
    max_input_length=8,
    max_target_length=8,
    dropout_rate=0.0,
    sampled_layers=1,
    progress_every=1,
    optimizer=MuonConfig(muon_learning_rate=0.02, adam_learning_rate=0.01, warmup_steps=20),
)


def _ended(end_id: int | None = None, config: LlamaConfig = _MODEL) -> list[Pair]:
    return end_pairs(_PAIRS, config, max_input_length=8, max_target_length=8, end_id=end_id)


def _batch() -> Taught:
    """Returns one batch of all pairs, with an empty row."""
    return pad_batch(_ended(), BatchShape(rows=5, source=9, target=7))


def _by_name(arrays: Any) -> dict[str, jax.Array]:
    return {name: jnp.asarray(array) for name, array in arrays.items()}


def _gradients(batch: Taught) -> tuple[float, dict[str, jax.Array]]:
    loss, gradients = loss_and_gradients(
        network_of(_MODEL),
        _by_name(_ARRAYS),
        batch=batch,
        layers=jnp.array([1, 2, 3], jnp.int32),
        weights=jnp.array([0.2, 0.3, 0.5], jnp.float32),
        key=jax.random.key(0),
        label_smoothing=0.0,
        z_loss=0.0,
    )
    return float(loss), gradients


@pytest.mark.usefixtures("strict_promotion")
@pytest.mark.parametrize(
    "changes",
    [{}, {"sliding_window": 3, "windowed_layers": (0, 2)}, {"attention_bias": True, "query_key_norms": True}],
    ids=["plain", "windows", "biases and norms"],
)
def test_states_that_predict_targets_are_those_of_step_by_step_decoding(changes: dict[str, Any]) -> None:
    """From the prompt's last position on, states are numpy's, token by token, whatever padding follows."""
    config = dataclasses.replace(_MODEL, **changes)
    arrays = build_llama_arrays(config, 1)
    states = network_of(config).apply(variables(_by_name(arrays)), _batch(), method="teacher_forced")
    plain = NumpyLlama(config, arrays)
    assert states.shape == (3, 5, 7, 12)
    for row, ((prompt, _), (_, output)) in enumerate(zip(_PAIRS, _ended(), strict=True)):
        expected = plain.states([*prompt, *output[:-1]])[:, len(prompt) - 1 :]
        assert expected.shape[1] == len(output)
        np.testing.assert_allclose(states[:, row, : len(output)], expected, rtol=0, atol=1e-4)


def test_given_the_full_models_outputs_the_last_layer_predicts_them() -> None:
    """Given its own outputs, which end by either id or not at all, the last layer predicts each of their tokens."""
    plain, generator = NumpyLlama(_MODEL, _ARRAYS), np.random.default_rng(1)
    prompts = [generator.integers(0, 50, size=length).tolist() for length in (1, 2, 3, 5, 8) for _ in range(5)]
    outputs = [plain.decode(prompt, ExitRule(), 1.0, max_decode_length=9).tokens for prompt in prompts]
    assert {0, 2} <= {output[-1] for output in outputs}
    assert any(len(output) == 9 for output in outputs)
    found = layer_predictions(checkpoint_of(_MODEL, _ARRAYS), list(zip(prompts, outputs, strict=True)))
    assert sorted(found.tokens[-1].tolist()) == sorted(token for output in outputs for token in output)


def test_losses_are_means_over_outputs_and_their_ends() -> None:
    """Every layer's loss is numpy's mean over the tokens of outputs alone; zeros among them count."""
    shapes = choose_shapes(_ended(), batch_tokens=20, num_shapes=2)
    found = validation_losses(network_of(_MODEL), _by_name(_ARRAYS), pairs=_ended(), shapes=shapes)
    plain, sums, tokens = NumpyLlama(_MODEL, _ARRAYS), np.zeros(3), 0
    for (prompt, _), (source, output) in zip(_PAIRS, _ended(), strict=True):
        logits = plain.logits(plain.states(source)[:, len(prompt) - 1 :])
        for place, token in enumerate(output):
            sums += np.log(np.exp(logits[:, place]).sum(axis=-1)) - logits[:, place, token]
        tokens += len(output)
    assert tokens == 3 + 1 + 5 + 0 + 4
    np.testing.assert_allclose(found, sums / tokens, rtol=1e-5)


def test_nothing_is_learned_from_what_is_no_output() -> None:
    """A head column of an id that outputs lack has only the gradient of the positions that predict them.

    Values in padding change neither the loss nor any gradient.
    """
    batch = _batch()
    loss, gradients = _gradients(batch)
    sources, targets = np.array(batch.source_tokens), np.array(batch.targets)
    sources[np.arange(9)[None] >= np.asarray(batch.source_lengths)[:, None]] = 23
    targets[~batch.is_target] = 29
    other_loss, other = _gradients(batch._replace(source_tokens=sources, targets=targets))
    assert other_loss == pytest.approx(loss, rel=1e-6)
    for name, gradient in gradients.items():
        np.testing.assert_allclose(other[name], gradient, atol=1e-6, err_msg=name)
    # By plain numpy: the head's gradient is that of the softmax, at the positions of outputs only.
    plain, expected, tokens = NumpyLlama(_MODEL, _ARRAYS), np.zeros((12, 50)), 0
    for (prompt, _), (source, output) in zip(_PAIRS, _ended(), strict=True):
        states = plain.states(source)[:, len(prompt) - 1 :]
        logits = plain.logits(states)
        shares = np.exp(logits) / np.exp(logits).sum(axis=-1, keepdims=True)
        shares[:, np.arange(len(output)), list(output)] -= 1
        scale = plain.arrays["decoder/decoder_norm/scale"]
        normed = states / np.sqrt(np.mean(states**2, axis=-1, keepdims=True) + _MODEL.norm_epsilon) * scale
        expected += np.einsum("l,ltd,ltv->dv", [0.2, 0.3, 0.5], normed, shares)
        tokens += len(output)
    np.testing.assert_allclose(gradients["decoder/logits_dense/kernel"], expected / tokens, atol=1e-5)


@pytest.mark.parametrize(("end_id", "ends"), [(None, 0), (2, 2)])
def test_outputs_end_with_an_id_of_the_model(end_id: int | None, ends: int) -> None:
    """Outputs end with the requested id, or else the model's first; prompts get none, and are not cut."""
    assert _ended(end_id)[0] == ([0, 5, 0, 7, 0, 9], [7, 0, 9, ends])
    assert _ended(end_id)[3] == ([17, 0], [ends])
    assert end_pairs([([4], [5, 6, 7])], _MODEL, max_input_length=1, max_target_length=3, end_id=end_id) == [
        ([4, 5, 6], [5, 6, ends])
    ]


def test_batches_are_chosen_by_prompt_and_output_together() -> None:
    """A row is as wide as the longer of prompt and output: 6 positions fit a short prompt with a long output, too."""
    pairs: list[Pair] = [([4] * 5, [5]), ([4], [5] * 5)]
    ended = end_pairs(pairs, _MODEL, max_input_length=8, max_target_length=8)
    assert choose_shapes(ended, batch_tokens=24, num_shapes=1) == (BatchShape(rows=4, source=6, target=6),)


@pytest.mark.parametrize("dtype", DTYPES)
def test_training_lowers_the_loss_of_every_layer(dtype: str) -> None:
    """An output that repeats its prompt is learned, zeros included; the classifier is unchanged."""
    sources = np.random.default_rng(0).integers(0, 12, size=(60, 4)).tolist()
    pairs: list[Pair] = [(source, source[:1] * 2) for source in sources]
    config = dataclasses.replace(_CONFIG, steps=60, batch_tokens=240, sampled_layers=0, dtype=dtype)
    reports: list[Progress] = []
    initial = initialize_parameters(_MODEL, generator=np.random.default_rng(0))
    trained = train(
        dataclasses.replace(config, validate_every=1),
        _MODEL,
        pairs=pairs,
        validation_pairs=pairs[:20],
        initial=initial,
        on_progress=reports.append,
    )
    first, last = (report.validation for report in (reports[0], reports[-1]))
    assert first is not None
    assert last is not None
    assert all(after < 0.6 * before for before, after in zip(first.losses, last.losses, strict=True))
    assert {name: array.shape for name, array in trained.arrays.items()} == parameter_shapes(_MODEL)
    np.testing.assert_array_equal(trained.arrays["decoder/meta_cls/kernel"], initial["decoder/meta_cls/kernel"])


def test_a_resumed_run_ends_as_one_that_was_not_interrupted() -> None:
    """A resumed run has the bits of an uninterrupted one; another end id is another run."""
    states: list[SavedState] = []
    config = dataclasses.replace(_CONFIG, save_every=2)
    arguments: dict[str, Any] = {"pairs": _PAIRS * 5, "validation_pairs": _PAIRS}
    whole = train(config, _MODEL, **arguments, on_save=states.append)
    resumed = train(config, _MODEL, **arguments, resume_from=states[0])
    assert states[0].step == 2
    assert fingerprint(resumed.arrays) == fingerprint(whole.arrays)
    assert resumed.validation == whole.validation
    with pytest.raises(ResumeError, match="end of targets: 0, now 2"):
        train(config, _MODEL, **arguments, resume_from=states[0], end_id=2)


def test_layer_skips_recipe_is_resumed_to_the_same_bits() -> None:
    """Layer dropout and alternating layer losses resume where they stopped; each alone gives other weights."""
    states: list[SavedState] = []
    arguments: dict[str, Any] = {"pairs": _PAIRS * 5, "validation_pairs": []}
    recipe = dataclasses.replace(_CONFIG, layer_dropout=0.4, rotating_layers=2, save_every=3)
    whole = train(recipe, _MODEL, **arguments, on_save=states.append)
    resumed = train(recipe, _MODEL, **arguments, resume_from=states[0])
    assert fingerprint(resumed.arrays) == fingerprint(whole.arrays)
    others = [dataclasses.replace(recipe, layer_dropout=0.0), dataclasses.replace(recipe, rotating_layers=0), _CONFIG]
    found = {fingerprint(train(other, _MODEL, **arguments).arrays) for other in others}
    assert len(found | {fingerprint(whole.arrays)}) == 4
    with pytest.raises(ResumeError, match="rotating_layers: 2, now "):
        train(dataclasses.replace(recipe, rotating_layers=0), _MODEL, **arguments, resume_from=states[0])


def test_the_classifier_learns_from_states_of_outputs() -> None:
    """Shares of agreement are those of plain numpy; all other weights keep their bits."""
    config = ClassifierConfig(batch_tokens=40, num_shapes=1, max_input_length=8, max_target_length=8)
    pairs = _PAIRS * 4
    trained = train_classifier(config, _MODEL, arrays=_ARRAYS, pairs=pairs, validation_pairs=_PAIRS)
    plain, agrees = NumpyLlama(_MODEL, _ARRAYS), []
    for (prompt, _), (source, _) in zip(_PAIRS, _ended(), strict=True):
        predicted = plain.logits(plain.states(source)[:, len(prompt) - 1 :]).argmax(axis=-1)
        agrees.append(predicted[:-1] == predicted[-1])
    expected = np.concatenate(agrees, axis=1)
    assert trained.tokens == 4 * expected.shape[1]
    np.testing.assert_allclose([quality.agreeing for quality in trained.quality], expected.mean(axis=1))
    for name, array in trained.arrays.items():
        if not name.startswith("decoder/meta_cls/"):
            np.testing.assert_array_equal(array, _ARRAYS[name], err_msg=name)


def test_what_cannot_be_learned_is_refused() -> None:
    """Dropout, long prompts, ids beyond the vocabulary, and lengths beyond the positions are refused."""
    with pytest.raises(UsageError, match=r"dropout is 0\.1, but decoder-only models have none"):
        train(dataclasses.replace(_CONFIG, dropout_rate=0.1), _MODEL, pairs=_PAIRS, validation_pairs=[])
    with pytest.raises(ValueError, match=r"pairs\[1\]: its prompt has 9 ids, expected 1 to max_input_length=8"):
        train(_CONFIG, _MODEL, pairs=[([5], [6]), ([5] * 9, [6])], validation_pairs=[])
    with pytest.raises(ValueError, match=r"pairs\[0\] has id 50; ids must be in \[0, 50\), the model's vocabulary\."):
        train(_CONFIG, _MODEL, pairs=[([5], [50])], validation_pairs=[])
    short = dataclasses.replace(_MODEL, max_positions=9)
    with pytest.raises(ValueError, match=r"the model has 9 positions, but prompts of up to 6 .* of up to 6 need 12"):
        train(_CONFIG, short, pairs=_PAIRS, validation_pairs=[])
