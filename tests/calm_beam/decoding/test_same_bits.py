"""Each engine is batch-invariant: a prompt's numbers depend neither on the batch nor on the kind of call."""

import functools
from typing import Any

import numpy as np
import pytest

from calm_beam.checkpoints import Checkpoint
from calm_beam.decoding.branches import Branch, PromptResult, Request, sweep_branches
from calm_beam.decoding.decoder import Decoder
from calm_beam.exits.rule import ExitRule
from calm_beam.precision import Precision
from tests.builders import build_checkpoint, build_config, build_prompts, build_rule, checkpoint_of
from tests.calm_beam.decoding.decoders import STEPS, in_order
from tests.calm_beam.model.llama.builders import build_llama_arrays, build_llama_config
from tests.instruction_sets import AVAILABLE, forced
from tests.sampling import sampled

# Instruction sets of native code, and XLA.
_ENGINES = (*AVAILABLE, "none")
_THRESHOLDS = (0.93, 0.7, 0.5, 0.3, 0.05)
# Prompts of several padded widths, without a prefix common to enough of them to be prefilled once.
_PROMPTS = build_prompts(4, 9, 1, 30, 6, 2, 13, 40, 17)
_RULES = (
    ExitRule(),
    ExitRule(schedule="decay", tau=4.0),
    build_rule("softmax_max", state_propagation="projected"),
    build_rule("entropy"),
    build_rule("state", state_propagation="from_first_exit"),
    build_rule("classifier", exit_interval=2),
    build_rule("patience", min_exit_layer=2),
    build_rule("static"),
)


@functools.cache
def _model(kind: str) -> Checkpoint:
    if kind == "llama":
        config = build_llama_config(vocab_size=64, num_decoder_layers=4, max_positions=128, end_ids=(1, 7))
        return checkpoint_of(config, build_llama_arrays(config, 1))
    if kind == "experts":
        config = build_llama_config(
            **{"vocab_size": 64, "num_decoder_layers": 4, "max_positions": 128, "end_ids": (1, 7), "mlp_dim": 56},
            **{"num_experts": 8, "experts_per_token": 2, "normed_expert_weights": True},
        )
        return checkpoint_of(config, build_llama_arrays(config, 1))
    if kind == "another t5":
        return build_checkpoint(build_config(exit_classifier=2, tied_head=True, gated_mlp=False, vocab_size=128))
    return build_checkpoint(build_config(exit_classifier=2))


def _decoder(kind: str, branches: tuple[Branch, ...], slots: int, *, by: str, **options: Any) -> Decoder:
    engine = "xla" if by == "none" else "native"
    return Decoder(_model(kind), branches, max_input_length=64, batch_size=slots, engine=engine, **options)


def _assert_equal(found: PromptResult, expected: PromptResult, branch: int) -> None:
    one, other = found.branch(0), expected.branch(branch)
    # Other branches may have tested the full model's.
    for name in ("tokens", "exit_layers", "confidences", *(["max_rejected_confidence"] if branch else [])):
        np.testing.assert_array_equal(getattr(one, name), getattr(other, name), err_msg=name)


# Each measure in each model that has what it needs; each of three measures in a model of its own is always run.
_RULES_IN_MODELS = [
    (rule, kind)
    for rule in _RULES
    for kind in ("t5", "another t5", "llama")
    if (rule.confidence, kind) != ("classifier", "llama")
]


@pytest.mark.parametrize(
    ("rule", "kind"),
    sampled(_RULES_IN_MODELS, keep=(0, 14, 16)),
    ids=[f"{rule.confidence}-{rule.schedule}-{kind}" for rule, kind in _RULES_IN_MODELS],
)
def test_a_sweep_and_batches_of_any_size_give_the_same_bits(rule: ExitRule, kind: str) -> None:
    """Sweep and batches have equal tokens, exits, confidences and runner-ups, by XLA and every instruction set here."""
    branches = sweep_branches(rule, _THRESHOLDS, max_decode_length=STEPS)
    requests = [Request(prompt, branches=[branch]) for prompt in _PROMPTS for branch in branches]
    for name in _ENGINES:
        with forced(name):
            swept = in_order(_decoder(kind, branches, 5, by=name).decode(_PROMPTS), len(_PROMPTS))
            for slots in (1, 3, 16, 64):
                served = in_order(_decoder(kind, branches[:1], slots, by=name).decode(requests), len(requests))
                for index, found in enumerate(served):
                    prompt, branch = divmod(index, len(branches))
                    _assert_equal(found, swept[prompt], branch)
            exits = {layer for result in swept for layer in result.exit_layers.ravel().tolist()}
            assert len(exits - {0}) > 1


@pytest.mark.parametrize("name", _ENGINES)
def test_rules_that_share_a_sweep_give_the_bits_of_their_own(name: str) -> None:
    """Rules in one sweep have the bits of single sweeps, and prompts decoded alone those of a batch."""
    rules = (ExitRule(), build_rule("state"), build_rule("classifier"))
    together = sweep_branches(rules, _THRESHOLDS, max_decode_length=STEPS)
    with forced(name):
        alone = _decoder("t5", together, 1, by=name)
        joined = in_order(_decoder("t5", together, 4, by=name).decode(_PROMPTS), len(_PROMPTS))
        for place, rule in enumerate(rules):
            own = _decoder("t5", sweep_branches(rule, _THRESHOLDS, max_decode_length=STEPS), 7, by=name)
            results = in_order(own.decode(_PROMPTS), len(_PROMPTS))
            for prompt, result, of_all in zip(_PROMPTS, results, joined, strict=True):
                ((_, by_itself),) = alone.decode([prompt])
                for found in (of_all, by_itself):
                    of_rule = found.by_rule(len(rules))[place]
                    for field in ("tokens", "exit_layers", "confidences", "max_rejected_confidence"):
                        np.testing.assert_array_equal(getattr(of_rule, field), getattr(result, field), err_msg=field)


@pytest.mark.parametrize(
    ("kind", "dtype"),
    sampled([("t5", "bfloat16"), ("llama", "bfloat16"), ("experts", "bfloat16"), ("experts", "float32")], keep=(0, 2)),
)
def test_precision_experts_and_tight_budgets_move_no_bit(kind: str, dtype: str) -> None:
    """With XLA, sweeps and batches whose prompts wait, are preempted and begin again give the same bits."""
    branches = sweep_branches(ExitRule(), _THRESHOLDS, max_decode_length=STEPS)
    requests = [Request(prompt, branches=[branch]) for prompt in _PROMPTS for branch in branches]
    options: dict[str, Any] = {"by": "none", "precision": Precision(dtype=dtype)}
    swept = in_order(_decoder(kind, branches, 9, **options).decode(_PROMPTS), len(_PROMPTS))
    tight = _decoder(kind, branches[:1], 9, max_cache_tokens=128, **options)
    for index, found in enumerate(in_order(tight.decode(requests), len(requests))):
        prompt, branch = divmod(index, len(branches))
        _assert_equal(found, swept[prompt], branch)
