"""All decoders behind one call, so that their common contract is stated and tested once."""

import dataclasses
from collections.abc import Callable, Iterator, Sequence
from typing import Any, TypeVar

import jax
import numpy as np

from calm_beam.checkpoints import Checkpoint
from calm_beam.decoding.branches import Branch, BranchResult, PromptResult, Request, sweep_branches
from calm_beam.decoding.cpu import NativeSources
from calm_beam.decoding.decoder import Decoder
from calm_beam.decoding.device_groups import DeviceGroup
from calm_beam.decoding.early_exit import EarlyExitDecoder
from calm_beam.decoding.xla import steps as device_steps
from calm_beam.exits.rule import ExitRule
from calm_beam.model.native import library
from calm_beam.model.sharding import Division
from tests.numpy_decoder import Decoded

Result = TypeVar("Result")

# The functions that end a layer, by native code or by XLA.
LAYER_ENDS = ((library.Stack, "run"), (device_steps, "run_layer"))
# The functions that prefill prompts, by native code or by XLA.
PREFILLS = ((NativeSources, "prefill"), (device_steps, "admit"))

# Longest prompt and output of every test, since each length is compiled separately.
LONGEST_PROMPT = 64
STEPS = 10


def in_order(pairs: Iterator[tuple[int, Result]], count: int) -> list[Result]:
    """Returns the results in the order of the prompts; checks that each prompt has exactly one."""
    found = sorted(pairs, key=lambda pair: pair[0])
    assert [index for index, _ in found] == list(range(count))
    return [result for _, result in found]


@dataclasses.dataclass(frozen=True)
class DecoderUnderTest:
    """One of the decoders.

    Attributes:
      decode: Returns the outputs of every prompt by the full model and at each threshold, whether the decoder takes
        one threshold or many.
      prepare: Returns the decoder for one threshold, given its sizes; it refuses invalid rules, sizes and prompts.
    """

    decode: Callable[..., list[PromptResult]]
    prepare: Callable[..., Any]


def _sweep(
    checkpoint: Checkpoint,
    rule: ExitRule,
    prompts: Sequence[Sequence[int]],
    *,
    thresholds: Sequence[float],
    max_decode_length: int = STEPS,
    **options: Any,
) -> list[PromptResult]:
    decoder = Decoder(
        checkpoint,
        sweep_branches(rule, thresholds, max_decode_length=max_decode_length),
        max_input_length=LONGEST_PROMPT,
        **{"batch_size": 2, **options},
    )
    return in_order(decoder.decode(prompts), len(prompts))


def serve(
    checkpoint: Checkpoint,
    rule: ExitRule,
    prompts: Sequence[Sequence[int]],
    threshold: float | None,
    *,
    max_decode_length: int = STEPS,
    **options: Any,
) -> list[BranchResult]:
    """Returns the served decoder's results at one threshold, in the order of the prompts."""
    decoder = EarlyExitDecoder(
        checkpoint,
        Branch.at(rule, threshold, max_decode_length=max_decode_length),
        max_input_length=LONGEST_PROMPT,
        **options,
    )
    return in_order(decoder.decode(prompts), len(prompts))


def _served(
    checkpoint: Checkpoint,
    rule: ExitRule,
    prompts: Sequence[Sequence[int]],
    *,
    thresholds: Sequence[float],
    **options: Any,
) -> list[PromptResult]:
    branches = [serve(checkpoint, rule, prompts, threshold, **options) for threshold in (None, *thresholds)]
    return [_stacked(outputs) for outputs in zip(*branches, strict=True)]


def _stacked(branches: Sequence[BranchResult]) -> PromptResult:
    return PromptResult(
        tokens=np.stack([branch.tokens for branch in branches]),
        exit_layers=np.stack([branch.exit_layers for branch in branches]),
        confidences=np.stack([branch.confidences for branch in branches]),
        lengths=np.array([branch.length for branch in branches], np.int32),
        is_finite=all(branch.is_finite for branch in branches),
    )


def _batched(
    checkpoint: Checkpoint,
    rule: ExitRule,
    prompts: Sequence[Sequence[int]],
    *,
    thresholds: Sequence[float],
    max_decode_length: int = STEPS,
    **options: Any,
) -> list[PromptResult]:
    """Decodes every prompt at every threshold in one batch, so that it holds different thresholds."""
    branches = sweep_branches(rule, thresholds, max_decode_length=max_decode_length)
    decoder = Decoder(checkpoint, branches[:1], max_input_length=LONGEST_PROMPT, **options)
    requests = [Request(prompt, branches=[branch]) for prompt in prompts for branch in branches]
    results = in_order(decoder.decode(requests), len(requests))
    return [
        PromptResult.joined(results[start : start + len(branches)]) for start in range(0, len(results), len(branches))
    ]


def _prepare_sweep(checkpoint: Checkpoint, rule: ExitRule, *, max_decode_length: int = 5, **sizes: Any) -> Decoder:
    return Decoder(checkpoint, sweep_branches(rule, (0.5,), max_decode_length=max_decode_length), **sizes)


def _prepare_served(
    checkpoint: Checkpoint, rule: ExitRule, *, max_decode_length: int = 5, **sizes: Any
) -> EarlyExitDecoder:
    return EarlyExitDecoder(checkpoint, Branch.at(rule, 0.5, max_decode_length=max_decode_length), **sizes)


def _prepare_batched(checkpoint: Checkpoint, rule: ExitRule, *, max_decode_length: int = 5, **sizes: Any) -> Decoder:
    return Decoder(checkpoint, [Branch.at(rule, 0.5, max_decode_length=max_decode_length)], **sizes)


DECODERS = {
    "sweep": DecoderUnderTest(_sweep, _prepare_sweep),
    "served": DecoderUnderTest(_served, _prepare_served),
    "batched": DecoderUnderTest(_batched, _prepare_batched),
}


def assert_same(one: PromptResult, other: PromptResult, *, confidences_within: float = 1e-5) -> None:
    """Checks that tokens, exit layers and lengths of all branches are equal, and confidences near."""
    for field in ("tokens", "exit_layers", "lengths", "is_finite"):
        np.testing.assert_array_equal(getattr(one, field), getattr(other, field))
    np.testing.assert_allclose(one.confidences, other.confidences, rtol=0, atol=confidences_within)
    for field in ("tokens", "exit_layers", "lengths", "confidences"):
        assert getattr(one, field).dtype == getattr(other, field).dtype


def assert_all_same(ones: Sequence[PromptResult], others: Sequence[PromptResult]) -> None:
    """Checks the same for every prompt."""
    for one, other in zip(ones, others, strict=True):
        assert_same(one, other)


def count_as_numpys(result: PromptResult, expected: Sequence[Decoded]) -> int:
    """Checks branches of bfloat16 against numpy that rounds likewise, and returns how many were compared.

    Branches with a decision nearer a tie than two roundings differ are left out.
    """
    compared = 0
    for branch, decoded in enumerate(expected):
        if decoded.min_gap < 0.05 or decoded.min_margin < 0.01:
            continue
        length = result.lengths[branch]
        assert result.tokens[branch, :length].tolist() == decoded.tokens
        assert result.exit_layers[branch, :length].tolist() == decoded.exit_layers
        np.testing.assert_allclose(result.confidences[branch, :length], decoded.confidences, rtol=0, atol=0.02)
        compared += 1
    return compared


def first_device() -> DeviceGroup:
    """Returns the first device of this process, alone."""
    return DeviceGroup(jax.local_devices()[:1], Division())
