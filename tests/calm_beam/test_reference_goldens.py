"""Decodes and activations of the published implementation, if they are available.

The environment variable CALM_BEAM_GOLDENS names a folder with a small T5X checkpoint and the reference's outputs;
without it, these tests are skipped.
"""

import functools
import os
import pathlib
from typing import Any

import jax
import numpy as np
import pytest

from calm_beam.checkpoints import Checkpoint, load_checkpoint
from calm_beam.decoding.branches import Branch, PromptResult, sweep_branches
from calm_beam.decoding.decoder import Decoder
from calm_beam.decoding.early_exit import EarlyExitDecoder
from calm_beam.exits.measures.built_in import softmax_gap
from calm_beam.exits.rule import ExitRule
from calm_beam.model import EarlyExitT5
from calm_beam.precision import DTYPES, Precision
from tests.numpy_t5 import NumpyT5
from tests.sampling import sampled

_FOLDER = os.environ.get("CALM_BEAM_GOLDENS", "")
pytestmark = pytest.mark.skipif(
    not _FOLDER, reason="CALM_BEAM_GOLDENS does not name a folder with outputs of the reference"
)

_CONFIDENCES = {"softmax_diff": "softmax", "softmax_max": "softmax_max", "state": "state", "meta": "classifier"}
_DECODES = [
    *(("reference", method) for method in _CONFIDENCES),
    *(("paper", method) for method in _CONFIDENCES),
    ("paper_decay", "softmax_diff"),
    ("paper_decay", "meta"),
]
# Both variants and a schedule; differences of one logit, scores of the classifier, states.
_SAMPLE = sampled(_DECODES, keep=(0, 5, 7, 8))
_STEPS = 24


def _rule(name: str, method: str) -> ExitRule:
    decay: dict[str, Any] = {"schedule": "decay", "tau": 4.0} if name == "paper_decay" else {}
    propagation = "from_first_exit" if name == "reference" else "from_exit"
    return ExitRule(confidence=_CONFIDENCES[method], state_propagation=propagation, **decay)


@functools.cache
def _checkpoint() -> Checkpoint:
    return load_checkpoint(pathlib.Path(_FOLDER) / "t5x_checkpoint")


@functools.cache
def _load(name: str) -> dict[str, np.ndarray]:
    with np.load(pathlib.Path(_FOLDER) / f"tiny_{name}.npz") as file:
        return dict(file)


def _prompts() -> list[list[int]]:
    inputs = _load("inputs")
    rows = zip(inputs["encoder_input_tokens"], inputs["lengths"], strict=True)
    return [tokens[:length].tolist() for tokens, length in rows]


@functools.cache
def _sweep(name: str, method: str) -> list[PromptResult]:
    thresholds = _load(f"decode_{name}")[f"{method}/thresholds"].tolist()
    decoder = Decoder(
        _checkpoint(), sweep_branches(_rule(name, method), thresholds, max_decode_length=_STEPS), batch_size=4
    )
    return [result for _, result in sorted(decoder.decode(_prompts()), key=lambda pair: pair[0])]


def test_the_checkpoint_has_the_references_arrays() -> None:
    """The T5X folder has the arrays that were saved directly, bit by bit."""
    arrays = _load("params")
    assert _checkpoint().arrays.keys() == arrays.keys()
    for name, array in arrays.items():
        np.testing.assert_array_equal(_checkpoint().arrays[name], array)


@pytest.mark.parametrize(("name", "method"), _SAMPLE)
def test_every_decode_is_the_references(name: str, method: str) -> None:
    """Tokens and exit layers are identical at every threshold, and confidences agree within 1e-4."""
    golden = {key.removeprefix(f"{method}/"): value for key, value in _load(f"decode_{name}").items()}
    for prompt, result in enumerate(_sweep(name, method)):
        assert result.is_finite
        was_generated = golden["exits"][:, prompt] > 0
        np.testing.assert_array_equal(result.lengths[1:], was_generated.sum(axis=1))
        np.testing.assert_array_equal(result.tokens[1:], golden["tokens"][:, prompt])
        np.testing.assert_array_equal(result.exit_layers[1:], np.where(was_generated, golden["exits"][:, prompt], 0))
        confidences = np.where(was_generated, golden["confidences"][:, prompt], 0)
        np.testing.assert_allclose(result.confidences[1:], confidences, rtol=0, atol=1e-4)


@pytest.mark.parametrize(("name", "method"), _SAMPLE)
def test_every_output_as_it_is_served_is_the_references(name: str, method: str) -> None:
    """With layers skipped, one prompt at a time, tokens and exit layers are identical, confidences within 1e-4."""
    golden = {key.removeprefix(f"{method}/"): value for key, value in _load(f"decode_{name}").items()}
    for lane, threshold in enumerate(golden["thresholds"].tolist()):
        decoder = EarlyExitDecoder(_checkpoint(), Branch.at(_rule(name, method), threshold, max_decode_length=_STEPS))
        for prompt, result in decoder.decode(_prompts()):
            was_generated = golden["exits"][lane, prompt] > 0
            assert result.is_finite
            assert result.length == was_generated.sum()
            np.testing.assert_array_equal(result.tokens, golden["tokens"][lane, prompt])
            np.testing.assert_array_equal(result.exit_layers, np.where(was_generated, golden["exits"][lane, prompt], 0))
            confidences = np.where(was_generated, golden["confidences"][lane, prompt], 0)
            np.testing.assert_allclose(result.confidences, confidences, rtol=0, atol=1e-4)


@pytest.mark.parametrize(("name", "method"), _SAMPLE)
def test_the_full_model_is_the_references(name: str, method: str) -> None:
    """Under any rule, the full model's branch has the reference's tokens at full depth."""
    inputs = _load("inputs")
    for prompt, result in enumerate(_sweep(name, method)):
        length = inputs["full/length"][prompt]
        assert result.lengths[0] == length
        np.testing.assert_array_equal(result.tokens[0], inputs["full/tokens"][prompt])
        np.testing.assert_array_equal(result.exit_layers[0], [8] * length + [0] * (_STEPS - length))


@pytest.mark.parametrize("example", [0, 1])
def test_activations_are_the_references(example: int) -> None:
    """Encoder output, states, logits and classifier scores of every layer agree under teacher forcing."""
    prefix = f"example_{example}/"
    golden = {key.removeprefix(prefix): value for key, value in _load("teacher_forcing").items() if prefix in key}
    model, parameters = EarlyExitT5(_checkpoint().config), {"params": _checkpoint().parameters()}
    source, inputs = golden["encoder_input_tokens"][None], golden["decoder_input_tokens"][None]

    def compiled(method: str, *arrays: Any, **settings: int) -> jax.Array:
        return jax.jit(functools.partial(model.apply, method=method, **settings))(parameters, *arrays)

    is_real = golden["encoder_input_tokens"] != 0
    encoded = compiled("encode", source)[0]
    np.testing.assert_allclose(encoded[is_real], golden["encoder_output"][is_real], rtol=0, atol=1e-4)
    states = compiled("decode_teacher_forced", source, inputs)
    np.testing.assert_allclose(states[:, 0], golden["layer_hidden"], rtol=1e-4, atol=1e-3)
    np.testing.assert_allclose(compiled("head", states, layer=1)[:, 0], golden["layer_logits"], rtol=0, atol=1e-3)
    np.testing.assert_allclose(compiled("exit_score", states)[:, 0], golden["layer_meta_score"], rtol=0, atol=1e-4)


def test_in_bfloat16_t5x_is_as_far_from_us_as_from_itself() -> None:
    """In bfloat16, teacher-forced predictions agree to no bit; ours are nearer to float32 than T5X's own are.

    Where predictions differ, the two best are nearly equally likely. In float32 there is no difference at all.
    """
    inputs, t5x = _load("inputs"), dict(np.load(pathlib.Path(__file__).with_name("t5x_bfloat16.npz")))
    is_token = np.arange(_STEPS) < inputs["full/length"][:, None]
    decoder_inputs = np.pad(inputs["full/tokens"][:, :-1], ((0, 0), (1, 0))).astype(np.int32)
    found: dict[str, np.ndarray] = {name: values[:, is_token] for name, values in t5x.items()}
    for dtype in DTYPES:
        precision = Precision(dtype=dtype)
        model = EarlyExitT5(_checkpoint().config, precision=precision)
        apply = functools.partial(model.apply, {"params": _checkpoint().parameters(precision)})
        states = apply(inputs["encoder_input_tokens"], decoder_inputs, method="decode_teacher_forced")
        logits = apply(states, 1, method="head")[:, is_token]
        found |= {
            f"our {dtype}/tokens": np.argmax(logits, axis=-1),
            f"our {dtype}/gaps": np.asarray(softmax_gap(logits)),
        }

    def compared(one: str, other: str) -> tuple[int, float, float]:
        """Returns how many tokens differ, the mean change of the gap, and the widest gap where tokens differ."""
        differ = found[f"{one}/tokens"] != found[f"{other}/tokens"]
        changes = np.abs(found[f"{one}/gaps"] - found[f"{other}/gaps"])
        return int(differ.sum()), float(changes.mean()), float(found[f"{other}/gaps"][differ].max(initial=0))

    flips, change, _ = compared("our float32", "float32")
    assert (flips, change < 1e-5) == (0, True)
    own_flips, own_change, _ = compared("bfloat16", "float32")
    our_flips, our_change, _ = compared("our bfloat16", "float32")
    flips, change, widest = compared("our bfloat16", "bfloat16")
    assert our_flips < own_flips
    assert our_change < own_change < 0.02
    assert change < 0.03
    assert flips < 2 * own_flips
    assert widest < 0.1


@pytest.mark.parametrize(("name", "method"), _DECODES)
def test_plain_numpy_agrees_with_the_reference(name: str, method: str) -> None:
    """The naive model of other tests has the reference's tokens and exits, for a prompt each way."""
    plain = NumpyT5(_checkpoint().config, _checkpoint().arrays)
    golden = _load(f"decode_{name}")
    for prompt, lane in ((0, 2), (3, 5)):
        threshold = float(golden[f"{method}/thresholds"][lane])
        decoded = plain.decode(_prompts()[prompt], _rule(name, method), threshold, max_decode_length=_STEPS)
        length = len(decoded.tokens)
        assert decoded.tokens == golden[f"{method}/tokens"][lane, prompt, :length].tolist()
        assert decoded.exit_layers == golden[f"{method}/exits"][lane, prompt, :length].tolist()
        assert not golden[f"{method}/tokens"][lane, prompt, length:].any()
