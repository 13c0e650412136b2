"""In models with exit norms or exit heads, each state goes to its own layer's head."""

import dataclasses
import functools
from typing import Any

import jax
import numpy as np
import pytest

from calm_beam.checkpoints import Checkpoint
from calm_beam.decoding.branches import Branch, PromptResult
from calm_beam.decoding.decoder import Decoder
from calm_beam.decoding.xla import steps as device_steps
from calm_beam.exits.rule import ExitRule
from calm_beam.model import T5Config
from calm_beam.model.llama import LlamaConfig
from calm_beam.model.native import library
from calm_beam.precision import FLOAT32, Precision
from tests.builders import build_arrays, build_config, build_prompts, build_rule, checkpoint_of
from tests.calm_beam.decoding.decoders import DECODERS, STEPS, assert_same, count_as_numpys
from tests.calm_beam.model.llama.builders import build_llama_arrays, build_llama_config
from tests.instruction_sets import needs_native
from tests.numpy_decoder import Decoded
from tests.numpy_llama import NumpyLlama
from tests.numpy_t5 import NumpyT5
from tests.sampling import sampled

pytestmark = pytest.mark.usefixtures("strict_promotion")

_DEPTH = 3
_T5 = build_config(num_encoder_layers=1, num_decoder_layers=_DEPTH, exit_classifier=2)
_LLAMA = build_llama_config(
    vocab_size=64, emb_dim=16, head_dim=8, mlp_dim=32, max_positions=128, end_ids=(1,), exit_classifier=2
)
# Seed of the weights, by kind; each has outputs whose decisions are far from ties.
_KINDS: dict[str, tuple[int, T5Config | LlamaConfig]] = {
    "t5": (0, dataclasses.replace(_T5, exit_norms=True, exit_heads=True)),
    "t5 norms": (0, dataclasses.replace(_T5, tied_head=True, exit_norms=True)),
    "t5 heads": (0, dataclasses.replace(_T5, tied_head=True, exit_heads=True)),
    "llama": (1, dataclasses.replace(_LLAMA, exit_norms=True, exit_heads=True)),
    "llama norms": (0, dataclasses.replace(_LLAMA, exit_norms=True, unit_offset_norms=True)),
    "llama heads": (0, dataclasses.replace(_LLAMA, tied_head=True, exit_heads=True)),
}
_THRESHOLDS = (0.93, 0.7, 0.5, 0.3, 0.0)
_BFLOAT16 = Precision(dtype="bfloat16")
_SOFTMAX = ExitRule()
_STATE = ExitRule(confidence="state", state_propagation="from_first_exit")
_CLASSIFIER = ExitRule(confidence="classifier", state_propagation="projected")
_STATIC = ExitRule(confidence="static")
_PATIENCE = build_rule("patience", state_propagation="projected")
_RULES = (_SOFTMAX, _STATE, _CLASSIFIER, _STATIC, _PATIENCE, build_rule("entropy"))
# Rules that need every layer for every token, which only the sweep decodes.
_FULL_MODEL_RULES = (
    ExitRule(confidence="oracle"),
    ExitRule(token_from="last_layer"),
    ExitRule(confidence="state", state_propagation="full_cache"),
)
_PROMPTS = build_prompts(4, 9, 1, 30, 6)


@functools.cache
def _model(kind: str) -> Checkpoint:
    seed, config = _KINDS[kind]
    if isinstance(config, T5Config):
        return checkpoint_of(config, build_arrays(config, seed))
    return checkpoint_of(config, build_llama_arrays(config, seed))


@functools.cache
def _by_numpy(
    rule: ExitRule, kind: str, prompt: tuple[int, ...], threshold: float | None, dtype: str = "float32"
) -> Decoded:
    checkpoint = _model(kind)
    decoder = NumpyT5 if isinstance(checkpoint.config, T5Config) else NumpyLlama
    decoded = decoder(checkpoint.config, checkpoint.arrays, dtype).decode(
        prompt, rule, threshold, max_decode_length=STEPS
    )
    # So far from every tie that float32 must decide as float64 does.
    assert dtype != "float32" or (decoded.min_gap > 1e-4 and decoded.min_margin > 1e-5)
    return decoded


@functools.cache
def _outputs(
    decoder: str, rule: ExitRule, kind: str, precision: Precision = FLOAT32, **options: Any
) -> tuple[PromptResult, ...]:
    # Several rows of one call exit at different layers.
    return tuple(
        DECODERS[decoder].decode(
            _model(kind), rule, _PROMPTS, thresholds=_THRESHOLDS, precision=precision, batch_size=3, **options
        )
    )


@pytest.mark.parametrize(
    ("decoder", "rule", "kind"),
    [
        *sampled(
            [("sweep", rule, kind) for rule in _FULL_MODEL_RULES for kind in ("t5", "llama")],
            keep=(0, 1, 3, 4),
        ),
        *sampled([("sweep", rule, kind) for rule in _RULES for kind in ("t5", "llama")], keep=(0, 1, 2, 5, 8)),
        *sampled([("served", rule, kind) for rule in _RULES for kind in ("t5", "llama")], keep=(1, 2, 5, 6, 8)),
        *sampled([("batched", rule, kind) for rule in _RULES for kind in ("t5", "llama")], keep=(3,)),
        *sampled(
            [
                (decoder, rule, kind)
                for kind in _KINDS
                for decoder in ("sweep", "served")
                for rule in (_SOFTMAX, _STATE)
            ],
            keep=(5, 10, 17, 22),
        ),
    ],
    ids=str,
)
def test_every_output_is_plain_numpys(decoder: str, rule: ExitRule, kind: str) -> None:
    """Tokens, exit layers and confidences of every prompt and threshold, and of the full model, are plain numpy's."""
    for prompt, result in zip(_PROMPTS, _outputs(decoder, rule, kind), strict=True):
        assert result.is_finite
        for branch, threshold in enumerate((None, *_THRESHOLDS)):
            expected = _by_numpy(rule, kind, tuple(prompt), threshold)
            confidences = expected.confidences
            if decoder == "served" and threshold is None and rule.patience is not None:
                # The layers below the last one are not tested: it agrees with itself alone.
                confidences = [1 / rule.patience] * len(confidences)
            length = len(expected.tokens)
            assert result.tokens[branch].tolist() == expected.tokens + [0] * (STEPS - length)
            assert result.exit_layers[branch].tolist() == expected.exit_layers + [0] * (STEPS - length)
            np.testing.assert_allclose(result.confidences[branch, :length], confidences, rtol=0, atol=1e-4)
    seen = {layer for result in _outputs(decoder, rule, kind) for layer in result.exit_layers.ravel().tolist()} - {0}
    assert seen == set(rule.exit_layers(_DEPTH))


@pytest.mark.parametrize("kind", ["t5", "t5 norms", "llama", "llama norms"])
def test_a_wrong_layers_head_would_be_seen(kind: str) -> None:
    """If norms or heads of two layers are exchanged, numpy's outputs differ."""
    checkpoint = _model(kind)
    for field in ("exit_norms", "exit_heads"):
        if not getattr(checkpoint.config, field):
            continue
        arrays = dict(checkpoint.arrays)
        first, second = (next(name for name in arrays if f"{field}_{index}/" in name) for index in (0, 1))
        arrays[first], arrays[second] = arrays[second], arrays[first]
        decoder = NumpyT5 if isinstance(checkpoint.config, T5Config) else NumpyLlama
        exchanged = decoder(checkpoint.config, arrays)
        differing = [
            exchanged.decode(prompt, _STATE, threshold, max_decode_length=STEPS).tokens
            != _by_numpy(_STATE, kind, tuple(prompt), threshold).tokens
            for prompt in _PROMPTS
            for threshold in _THRESHOLDS
        ]
        assert any(differing)


@pytest.mark.parametrize(
    ("decoder", "rule", "kind"),
    sampled(
        [
            (decoder, rule, kind)
            for decoder in DECODERS
            for rule in (_SOFTMAX, _STATE)
            for kind in ("t5 heads", "llama")
        ],
        keep=(5, 10),
    ),
    ids=str,
)
def test_in_bfloat16_outputs_are_those_of_numpy_that_rounds_likewise(decoder: str, rule: ExitRule, kind: str) -> None:
    """But for the branches with a decision nearer a tie than two roundings are apart; those are counted."""
    compared = sum(
        count_as_numpys(
            result, [_by_numpy(rule, kind, tuple(prompt), threshold, "bfloat16") for threshold in (None, *_THRESHOLDS)]
        )
        for prompt, result in zip(_PROMPTS, _outputs(decoder, rule, kind, _BFLOAT16), strict=True)
    )
    assert compared > len(_PROMPTS) * len(_THRESHOLDS) / 4


@needs_native
@pytest.mark.parametrize(
    ("decoder", "rule", "kind"),
    sampled(
        [
            (decoder, rule, kind)
            for decoder in ("sweep", "served", "batched")
            for rule in (_SOFTMAX, _STATE)
            for kind in ("t5 heads", "llama")
        ],
        keep=(0, 3, 5, 10),
    ),
    ids=str,
)
def test_a_certified_head_changes_nothing(decoder: str, rule: ExitRule, kind: str) -> None:
    """Every kernel has its own certified head: tokens and exit layers are the exact heads'."""
    certified = _outputs(decoder, rule, kind, exit_head="int8")
    for one, other in zip(certified, _outputs(decoder, rule, kind), strict=True):
        assert_same(one, other, confidences_within=0.2)


def _compiled_heads(config: T5Config) -> int:
    """Returns how many programs of heads a batch compiles in advance."""
    jax.clear_caches()
    checkpoint = checkpoint_of(config, build_arrays(config, 0))
    branch = Branch.at(_STATE, 0.5, max_decode_length=STEPS)
    decoder = Decoder(checkpoint, [branch], max_input_length=32, batch_size=2)
    decoder.open_batch().warm_up()
    programs: Any = device_steps.decide_rows
    count: int = programs._cache_size()
    return count


def test_lower_layers_share_a_program(monkeypatch: pytest.MonkeyPatch) -> None:
    """With XLA, any number of exit heads takes two programs of each size, and shared ones take one."""
    monkeypatch.setenv(library.VARIABLE, "none")
    shared = _compiled_heads(_T5)
    assert shared > 0
    assert _compiled_heads(dataclasses.replace(_T5, exit_heads=True, num_decoder_layers=5)) == 2 * shared
    jax.clear_caches()
