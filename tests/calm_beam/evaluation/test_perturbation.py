"""Outputs with one token replaced, against plain numpy and against the sweep."""

import dataclasses
import functools
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import jax
import numpy as np
import pytest

from calm_beam.checkpoints import Checkpoint
from calm_beam.decoding.branches import sweep_branches
from calm_beam.decoding.decoder import Decoder
from calm_beam.evaluation.sensitivity import KINDS, PerturbationDecoder, Perturbed
from calm_beam.exits.rule import ExitRule
from tests.builders import build_arrays, build_checkpoint, build_config, checkpoint_of
from tests.numpy_t5 import NumpyT5

# Small and of few shapes, since most of the time here is XLA's.
_CONFIG = build_config(num_encoder_layers=1, num_decoder_layers=3)
# A model whose outputs sometimes end early.
_SEED = 3
_STEPS = 8
_POSITIONS = tuple(range(_STEPS))
_RANK = 4


@pytest.fixture(autouse=True)
def _strict() -> Iterator[None]:
    with jax.numpy_dtype_promotion("strict"), jax.numpy_rank_promotion("raise"):
        yield


def _prompts(*lengths: int, seed: int = 0) -> list[list[int]]:
    """Returns random prompts that end in eos, without pad and without id 63."""
    generator = np.random.default_rng(seed)
    return [[*generator.integers(2, 63, size=length - 1).tolist(), 1] for length in lengths]


_PROMPTS = _prompts(4, 9, 1, 30, 6, 32, 13)


def _decode(
    prompts: Sequence[Sequence[int]],
    checkpoint: Checkpoint | None = None,
    *,
    positions: Sequence[int] = _POSITIONS,
    rank: int = _RANK,
    batch_size: int = 3,
) -> list[Perturbed]:
    """Returns the results in the order of the prompts; checks that there is exactly one for each."""
    decoder = PerturbationDecoder(
        checkpoint or build_checkpoint(_CONFIG, seed=_SEED),
        positions=positions,
        rank=rank,
        max_decode_length=_STEPS,
        max_input_length=64,
        batch_size=batch_size,
    )
    results = list(decoder.decode(prompts))
    assert sorted(index for index, _ in results) == list(range(len(prompts)))
    return [result for _, result in sorted(results, key=lambda pair: pair[0])]


@functools.cache
def _default() -> tuple[Perturbed, ...]:
    return tuple(_decode(_PROMPTS))


@dataclasses.dataclass
class _Plain:
    """The definition, recomputed from scratch at every step; keeps the least distance between ranked logits."""

    model: NumpyT5
    source: Sequence[int]
    min_gap: float = np.inf

    def output(self, kind: str | None = None, position: int = -1, rank: int = 1) -> tuple[int, ...]:
        """Returns the greedy output with the token at a position replaced; None replaces nothing."""
        tokens: list[int] = []
        while len(tokens) < _STEPS and tokens[-1:] != [1]:
            states = self.model.teacher_forced(self.source, [0, *tokens])[:, -1]
            here = len(tokens) == position
            layer = 0 if here and kind == "layer" else -1
            place = rank - 1 if here and kind == "sampling" else 0
            logits = self.model.logits(states[layer])
            ordered = np.argsort(-logits)
            nearest = np.abs(logits - logits[ordered[place]])
            self.min_gap = min(self.min_gap, float(np.sort(nearest)[1]))
            tokens.append(int(ordered[place]))
        return tuple(tokens)


def test_every_output_equals_plain_numpy() -> None:
    """Unperturbed and perturbed outputs are those of a model that recomputes all states at every step."""
    found_lengths: set[int] = set()
    longer = shorter = same = 0
    for seed in (2, _SEED):
        checkpoint = build_checkpoint(_CONFIG, seed=seed)
        prompts = _prompts(5, 2, 11, 35 if seed == 2 else 20, seed=seed)
        for prompt, result in zip(prompts, _decode(prompts, checkpoint), strict=True):
            plain = _Plain(NumpyT5(_CONFIG, checkpoint.arrays), prompt)
            assert result.is_finite
            assert result.unperturbed == plain.output()
            positions = [position for position in _POSITIONS if position < len(result.unperturbed)]
            assert set(result.outputs) == {(kind, position) for kind in KINDS for position in positions}
            for (kind, position), output in result.outputs.items():
                assert output == plain.output(kind, position, _RANK)
                longer += len(output) > len(result.unperturbed)
                shorter += len(output) < len(result.unperturbed)
                same += output == result.unperturbed
            # So far from every tie that float32 must choose as float64 does.
            assert plain.min_gap > 1e-4
            found_lengths.add(len(result.unperturbed))
    # Otherwise the comparison would prove little.
    assert min(longer, shorter, same) > 0
    assert len(found_lengths) > 1


def test_the_unperturbed_output_is_the_full_models() -> None:
    """Branch 0 gives the tokens of the sweep's full model."""
    decoder = Decoder(
        build_checkpoint(_CONFIG, seed=_SEED),
        sweep_branches(ExitRule(), (0.5,), max_decode_length=_STEPS),
        max_input_length=64,
    )
    for index, swept in decoder.decode(_PROMPTS):
        assert list(_default()[index].unperturbed) == swept.tokens[0, : swept.lengths[0]].tolist()


def test_the_first_rank_changes_nothing() -> None:
    """Replacing a token by the last layer's own choice gives the unperturbed output at every position."""
    for result in _decode(_PROMPTS, rank=1):
        for position in range(len(result.unperturbed)):
            assert result.outputs["sampling", position] == result.unperturbed


def test_one_layer_changes_nothing() -> None:
    """If the first layer is the last, its prediction is the model's."""
    config = build_config(num_decoder_layers=1)
    for result in _decode(_PROMPTS, build_checkpoint(config)):
        assert {output for (kind, _), output in result.outputs.items() if kind == "layer"} == {result.unperturbed}


def test_outputs_part_at_the_position_only() -> None:
    """Before the position an output is the unperturbed one; there a lower rank is another token, so it differs."""
    for result in _default():
        for (kind, position), output in result.outputs.items():
            assert output[:position] == result.unperturbed[:position]
            if kind == "sampling":
                assert output[position] != result.unperturbed[position]
            elif output[position] == result.unperturbed[position]:
                assert output == result.unperturbed


def test_only_positions_that_the_output_has() -> None:
    """A position beyond the end of the unperturbed output has no outputs; its last one, the eos, has."""
    assert min(len(result.unperturbed) for result in _default()) < _STEPS
    for result in _default():
        assert {position for _, position in result.outputs} == set(range(len(result.unperturbed)))


def test_ranks_differ() -> None:
    """Two ranks put different tokens at a position, and neither puts the model's own there."""
    for result, last in zip(_default(), _decode(_PROMPTS, rank=64), strict=True):
        for position, own in enumerate(result.unperturbed):
            chosen = {outputs.outputs["sampling", position][position] for outputs in (result, last)}
            assert len(chosen | {own}) == 3


@pytest.mark.parametrize("batch_size", [1, 3])
def test_the_batch_does_not_matter(batch_size: int) -> None:
    """The order and number of prompts in the batch do not change a prompt's outputs."""
    order = [6, 2, 0, 5, 1]
    results = _decode([_PROMPTS[index] for index in order], batch_size=batch_size)
    assert results == [_default()[index] for index in order]


def test_positions_do_not_matter_to_each_other() -> None:
    """A position alone has the outputs that it has together with others."""
    for alone, among in zip(_decode(_PROMPTS, positions=[3]), _default(), strict=True):
        assert alone.outputs == {lane: output for lane, output in among.outputs.items() if lane[1] == 3}


def test_broken_logits_are_told() -> None:
    """A prompt whose logits are not finite is marked, and the others are as without it."""
    arrays = build_arrays(_CONFIG, 0)
    arrays["token_embedder/embedding"][63] = np.nan
    # Never generated: its logit is 0, and some other one of 63 is always above.
    arrays["decoder/logits_dense/kernel"][:, 63] = 0
    broken = checkpoint_of(_CONFIG, arrays)
    results = _decode([_PROMPTS[0], [8, 63, 1], _PROMPTS[1]], broken)
    assert [result.is_finite for result in results] == [True, False, True]
    assert results[0] == _decode([_PROMPTS[0]], broken)[0]


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"positions": ()}, r"positions must list one or more different values, got \[\]"),
        ({"positions": (2, 2)}, r"positions must list one or more different values, got \[2, 2\]"),
        ({"positions": (0, 8)}, r"positions must be in \[0, 8\), the output's room; got 8"),
        ({"positions": (-1,)}, r"positions must be in \[0, 8\), the output's room; got -1"),
        ({"rank": 0}, r"rank must be in \[1, 64\], the model's token ids; got 0"),
        ({"rank": 65}, r"rank must be in \[1, 64\], the model's token ids; got 65"),
    ],
    ids=str,
)
def test_what_cannot_be_replaced_is_refused(changes: Mapping[str, Any], message: str) -> None:
    """Positions beyond the output or given twice, and ranks that no token has, are refused."""
    with pytest.raises(ValueError, match=message):
        PerturbationDecoder(build_checkpoint(_CONFIG), max_decode_length=8, **{"positions": (0,), "rank": 2, **changes})
