"""Measuring a model: losses by layer, the better of two models, and scores of its outputs."""

import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from calm_beam.metrics.registry import MetricError
from calm_beam.metrics.squad import token_f1
from calm_beam.model import EarlyExitT5
from calm_beam.training.batches import choose_shapes, end_pairs
from calm_beam.training.config import TrainingConfig
from calm_beam.training.step import variables
from calm_beam.training.validation import GenerationScore, Validation, validation_losses
from tests.builders import build_arrays, build_checkpoint, build_config

_LENGTH = 6
_CONFIG = TrainingConfig(steps=1, max_target_length=_LENGTH)


@pytest.mark.parametrize("exit_heads", [False, True])
def test_losses_are_means_over_all_target_tokens(*, exit_heads: bool) -> None:
    """Over pairs of many lengths, each layer's loss is the mean over tokens of a pair-by-pair computation."""
    config = build_config(num_encoder_layers=1, num_decoder_layers=2, exit_heads=exit_heads)
    generator = np.random.default_rng(0)
    side = lambda: generator.integers(3, 64, size=generator.integers(1, 6)).tolist()  # noqa: E731
    pairs = end_pairs([(side(), side()) for _ in range(7)], config, max_input_length=8, max_target_length=8)
    parameters = {name: jnp.asarray(array) for name, array in build_arrays(config, 0).items()}
    model = EarlyExitT5(config)
    shapes = choose_shapes(pairs, batch_tokens=24, num_shapes=2)
    found = validation_losses(model, parameters, pairs=pairs, shapes=shapes)
    sums, tokens = np.zeros(2), 0
    apply = jax.jit(model.apply)
    for source, target in pairs:
        # Padded to one width, for a single compilation; padding comes after all real tokens.
        sources, inputs = (np.pad(row, (0, 8 - len(row)))[None] for row in (source, [0, *target[:-1]]))
        logits = np.asarray(apply(variables(parameters), sources, inputs), np.float64)
        for layer, (position, token) in itertools.product(range(2), enumerate(target)):
            scores = logits[layer, 0, position]
            sums[layer] += np.log(np.exp(scores).sum()) - scores[token]
        tokens += len(target)
    np.testing.assert_allclose(found, sums / tokens, rtol=1e-5)


def test_better_means_a_lower_last_loss() -> None:
    """Without scores the last layer's loss decides, whatever the others' are; equal is not better."""
    one, two = Validation(losses=(9.0, 1.0)), Validation(losses=(2.0, 1.5))
    assert one.is_better_than(two)
    assert not two.is_better_than(one)
    assert not one.is_better_than(one)


def test_better_means_a_higher_score() -> None:
    """With scores, losses do not matter; equal is not better."""
    one, two = Validation(losses=(1.0,), score=0.2), Validation(losses=(2.0,), score=0.3)
    assert two.is_better_than(one)
    assert not one.is_better_than(two)
    assert not two.is_better_than(Validation(losses=(3.0,), score=0.3))


def _as_text(ids: object) -> str:
    return " ".join(str(index) for index in ids if index != 1)  # type: ignore[attr-defined]


def too_much(candidate: str, references: object) -> float:
    """An invalid metric."""
    return 2.0


def test_the_score_is_that_of_the_full_models_greedy_outputs() -> None:
    """The score is the mean metric of outputs made by a plain loop over the last layer's logits."""
    checkpoint = build_checkpoint(build_config(), seed=1)
    generator = np.random.default_rng(0)
    prompts = [[*generator.integers(3, 64, size=size).tolist(), 1] for size in (2, 5, 3, 1)]
    apply = jax.jit(EarlyExitT5(checkpoint.config).apply)
    outputs = []
    for prompt in prompts:
        source = np.pad(prompt, (0, 6 - len(prompt)))[None]
        written: list[int] = []
        while len(written) < _LENGTH and 1 not in written:
            inputs = np.array([[0, *written, *[0] * (_LENGTH - 1 - len(written))]])
            logits = apply({"params": checkpoint.parameters()}, source, inputs)
            written.append(int(np.argmax(logits[-1, 0, len(written)])))
        outputs.append(_as_text(written))
    # Some words of each output are right.
    references = [(output, "7 8") if row % 2 else (output.split(" ")[0] + " 9",) for row, output in enumerate(outputs)]
    expected = [token_f1(output, right) for output, right in zip(outputs, references, strict=True)]
    assert 0 < min(expected) < 1
    score = GenerationScore(
        "token_f1",
        checkpoint.config,
        prompts=prompts,
        references=references,
        decode=_as_text,
        config=_CONFIG,
    )
    assert score(checkpoint.arrays) == pytest.approx(np.mean(expected), abs=1e-12)
    assert score.name == "token_f1 of 4 outputs"


def test_an_unknown_metric_is_refused_at_once() -> None:
    """An unknown metric is refused before any model is made."""
    with pytest.raises(ValueError, match=r'metric "rouge_x" is not known\. Did you mean "rouge_l"'):
        GenerationScore(
            "rouge_x", build_config(), prompts=[[3, 1]], references=[("a",)], decode=_as_text, config=_CONFIG
        )


def test_a_bad_score_names_the_row() -> None:
    """A metric outside [0, 1] fails with the place of the row."""
    checkpoint = build_checkpoint(build_config(), seed=1)
    metric = f"{__name__}:too_much"
    score = GenerationScore(
        metric, checkpoint.config, prompts=[[3, 1]], references=[("a",)], decode=_as_text, config=_CONFIG
    )
    with pytest.raises(
        MetricError, match=r'on example "validation row 1": returned 2.0, expected a number in \[0, 1\]'
    ):
        score(checkpoint.arrays)
