"""Operation counts against the paper's numbers, against a loop over the formula, and at their limits."""

import dataclasses
import math
from collections.abc import Callable, Sequence

import hypothesis
import hypothesis.strategies as st
import numpy as np
import pytest

from calm_beam.evaluation.flops import (
    DecoderSizes,
    flops_appendix_b,
    flops_calm_table,
    full_model_flops,
    share_at_mean,
    share_of_work,
)
from calm_beam.exits.rule import ExitRule
from calm_beam.model import T5Config
from tests.builders import build_config
from tests.calm_beam.model.llama.builders import build_llama_config

# CALM, "Implementation Details": 8 layers, 6 heads of 64, embeddings 512, MLP 1024, vocabulary 32,128.
_PAPER = DecoderSizes(
    num_layers=8, width=512, attention_width=384, mlp_width=1024, encoder_width=512, vocab_size=32_128
)
_SOURCE = 1024
_Count = Callable[..., np.ndarray]
_COUNTS: list[_Count] = [flops_appendix_b, flops_calm_table]
_EXITS = st.lists(st.integers(1, 8), min_size=1, max_size=30)
_MEASURES = st.sampled_from(["softmax", "softmax_max", "state", "classifier", "static", "oracle"])


def _reduction(outputs: Sequence[Sequence[int]], count: _Count, confidence: str) -> float:
    """Returns the factor by which the outputs cost less than at full depth."""
    rule = ExitRule(confidence=confidence)
    early = sum(int(count(exits, _PAPER, source_length=_SOURCE, rule=rule).sum()) for exits in outputs)
    full = sum(int(full_model_flops(len(exits), _PAPER, source_length=_SOURCE).sum()) for exits in outputs)
    return full / early


@pytest.mark.parametrize("count", _COUNTS)
def test_the_papers_check_point(count: _Count) -> None:
    """SQuAD, state: 2.00 layers, 5.6 tokens on average, give the x3.65 of Table 2."""
    outputs = [[2] * 5, [2] * 5, [2] * 6, [2] * 6, [2] * 6]
    assert sum(map(len, outputs)) / len(outputs) == 5.6
    assert round(_reduction(outputs, count, "state"), 2) == 3.65


@pytest.mark.parametrize("count", _COUNTS)
def test_full_depth_saves_nothing(count: _Count) -> None:
    """All layers for every token and no costly test are exactly x1.00, as `state` at 8.00 layers shows."""
    assert _reduction([[8] * 20, [8] * 3], count, "state") == 1.0


@pytest.mark.parametrize("count", _COUNTS)
def test_softmax_tests_cost_more_than_they_save_at_full_depth(count: _Count) -> None:
    """Seven tests of the whole vocabulary, with nothing saved, are well below x1, as in the paper's CNN/DM rows."""
    assert 0.3 < _reduction([[8] * 82], count, "softmax") < 0.5


@hypothesis.settings(deadline=None, derandomize=True, max_examples=200)
@hypothesis.given(st.lists(st.integers(1, 8), min_size=1, max_size=60), st.integers(1, 4096))
def test_appendix_b_cannot_give_the_papers_summarisation_row(exits: list[int], source_length: int) -> None:
    """At 1.73 layers or fewer per token the literal count never falls to x0.66, for any length; Table 2 has x0.50."""
    # Tokens that exit at layer 1, as many as bring the mean down.
    shallow = max(1, math.ceil(sum(layer - 1.73 for layer in exits) / 0.73))
    mixed = exits + [1] * shallow
    assert np.mean(mixed) <= 1.73
    early = flops_appendix_b(mixed, _PAPER, source_length=source_length, rule=ExitRule()).sum()
    assert full_model_flops(len(mixed), _PAPER, source_length=source_length).sum() / early > 0.66


# CALM Table 2, CNN/DM and WMT: measure, tokens of an output, layers, FLOPs reduction.
_TABLE: list[tuple[str, int, float, float]] = [
    *[("softmax", 82, *row) for row in [(5.73, 0.44), (2.62, 0.49), (3.75, 0.47), (1.73, 0.50)]],
    *[("softmax", 39, *row) for row in [(3.35, 0.66), (1.76, 0.91), (3.19, 0.67), (1.96, 0.85)]],
    *[("state", 82, *row) for row in [(7.97, 1.00), (5.22, 1.11)]],
    *[("state", 39, *row) for row in [(7.68, 1.01), (2.84, 1.93), (2.72, 2.01)]],
    *[("classifier", 82, *row) for row in [(7.16, 1.03), (4.51, 1.15), (6.49, 1.06), (2.30, 1.25)]],
    *[("classifier", 39, *row) for row in [(5.50, 1.06), (2.97, 1.22), (5.05, 1.08), (3.08, 1.21)]],
]


def _spread(length: int, layers: float, deepest: int) -> list[int]:
    """Returns an output with this mean of layers, whose first token goes deepest and whose others are about equal."""
    others = max(length - 1, round(layers * length) - deepest)
    low, more = divmod(others, length - 1)
    return [deepest] + [low + 1] * more + [low] * (length - 1 - more)


@pytest.mark.parametrize(("confidence", "length", "layers", "printed"), _TABLE)
def test_the_papers_table_is_within_reach_of_the_second_count(
    confidence: str, length: int, layers: float, printed: float
) -> None:
    """For every row some depth of the deepest token gives the printed number, the only support for the count."""
    reached = [
        _reduction([_spread(length, layers, deepest)], flops_calm_table, confidence)
        for deepest in range(math.ceil(layers), 9)
    ]
    assert min(reached) - 0.01 <= printed <= max(reached) * 1.01 + 0.01


@pytest.mark.parametrize(("confidence", "length", "layers", "printed"), _TABLE[:4])
def test_the_papers_softmax_rows_of_summarisation_are_out_of_reach_of_appendix_b(
    confidence: str, length: int, layers: float, printed: float
) -> None:
    """For any deepest token, tests charged to the tokens that took them cost less than the table says."""
    reached = [
        _reduction([_spread(length, layers, deepest)], flops_appendix_b, confidence)
        for deepest in range(math.ceil(layers), 9)
    ]
    assert min(reached) > printed + 0.01


@hypothesis.settings(deadline=None, derandomize=True)
@hypothesis.given(_EXITS, st.integers(1, 300), _MEASURES, st.integers(1, 8), st.integers(1, 4))
def test_both_counts_equal_a_loop_over_the_formula(
    exits: list[int], source: int, confidence: str, first: int, interval: int
) -> None:
    """Layer by layer and token by token, both counts equal the module's formula."""
    sizes = DecoderSizes(num_layers=8, width=7, attention_width=5, mlp_width=11, encoder_width=3, vocab_size=13)
    rule = ExitRule(confidence=confidence, min_exit_layer=first, exit_interval=interval)
    per_test = {"softmax": 2 * 13 * 7, "softmax_max": 2 * 13 * 7, "classifier": 2 * 7}.get(confidence, 0)
    may_exit = rule.exit_layers(8)
    used: set[int] = set()
    literal, table = [], []
    for position, exit_layer in enumerate(exits, start=1):
        cost = 2 * 13 * 7
        for layer in range(1, 9):
            if layer > exit_layer:
                cost += 4 * 7 * 5
                continue
            cost += 12 * 7 * 5 + 4 * 11 * 7 + 4 * position * 5 + 4 * source * 5
            if layer not in used:
                cost += 4 * source * 5 * 3
                used.add(layer)
        literal.append(cost + per_test * sum(layer <= exit_layer for layer in may_exit if layer < 8))
        table.append(cost + per_test * sum(layer <= max(exits) for layer in may_exit if layer < 8))
    assert flops_appendix_b(exits, sizes, source_length=source, rule=rule).tolist() == literal
    assert flops_calm_table(exits, sizes, source_length=source, rule=rule).tolist() == table


@hypothesis.settings(deadline=None, derandomize=True)
@hypothesis.given(_EXITS, _MEASURES, st.integers(1, 8), st.integers(1, 8), st.booleans())
def test_the_share_of_work_is_that_of_a_decoder_that_projects_once_a_layer(
    exits: list[int], confidence: str, first: int, interval: int, has_encoder: bool
) -> None:
    """A test of logits gives the token that exits there; all others are projected at their exit."""
    sizes = DecoderSizes(
        num_layers=8,
        width=7,
        attention_width=6,
        mlp_width=11,
        encoder_width=3 if has_encoder else 0,
        vocab_size=13,
        keys_width=None if has_encoder else 2,
    )
    rule = ExitRule(confidence=confidence, min_exit_layer=first, exit_interval=interval)
    may_exit = rule.exit_layers(8)
    exits = [next(layer for layer in may_exit if layer >= exit_layer) for exit_layer in exits]
    through, skipped = (
        (12 * 7 * 6 + 4 * 11 * 7, 4 * 7 * 6) if has_encoder else (4 * 7 * (6 + 2) + 4 * 11 * 7, 4 * 7 * 2)
    )
    cost = 0
    for exit_layer in exits:
        cost += exit_layer * through + (8 - exit_layer) * skipped
        tested = sum(layer <= exit_layer for layer in may_exit)
        if confidence in ("softmax", "softmax_max"):
            cost += tested * 2 * 13 * 7
        else:
            tests = tested - (exit_layer == 8)
            cost += 2 * 13 * 7 + (tests * 2 * 7 if confidence == "classifier" else 0)
    expected = pytest.approx(cost / len(exits) / (8 * through + 2 * 13 * 7))
    assert share_of_work(exits, sizes, rule=rule) == expected
    if (8 - first) % interval == 0 and confidence in ("softmax", "softmax_max"):
        assert share_at_mean(sum(exits) / len(exits), sizes, rule=rule) == expected


@hypothesis.settings(deadline=None, derandomize=True)
@hypothesis.given(_EXITS, st.integers(1, 300))
def test_decoder_only_models_equal_a_loop_over_their_formula(exits: list[int], source: int) -> None:
    """There is no cross-attention, keys have their own width, and a first token leaves nothing to skipped layers."""
    sizes = DecoderSizes(
        num_layers=8, width=7, attention_width=6, mlp_width=11, encoder_width=0, vocab_size=13, keys_width=3
    )
    costs = []
    for place, exit_layer in enumerate(exits):
        cost = 2 * 13 * 7
        for layer in range(1, 9):
            if layer <= exit_layer:
                cost += 2 * (2 * 7 * 6 + 2 * 7 * 3 + 2 * 11 * 7) + 4 * (source + place) * 6
            elif place:
                cost += 2 * 2 * 7 * 3
        costs.append(cost)
    assert flops_appendix_b(exits, sizes, source_length=source, rule=None).tolist() == costs


def test_sizes_of_models() -> None:
    """A decoder-only model's key heads differ from its query heads, it has no encoder, and all experts count."""
    sizes = DecoderSizes.of(build_llama_config())
    assert (sizes.attention_width, sizes.keys_width, sizes.encoder_width) == (24, 12, 0)
    assert DecoderSizes.of(build_llama_config(mlp_dim=28, num_experts=4)).mlp_width == 28
    sizes = DecoderSizes.of(build_config())
    assert (sizes.attention_width, sizes.keys_width, sizes.encoder_width) == (16, 16, 16)


@hypothesis.settings(deadline=None, derandomize=True)
@hypothesis.given(_EXITS, _MEASURES, st.data())
def test_a_deeper_token_never_costs_less(exits: list[int], confidence: str, data: st.DataObject) -> None:
    """One more layer for one token raises what the output costs, in both counts."""
    place = data.draw(st.integers(0, len(exits) - 1))
    deeper = [min(8, layer + (index == place)) for index, layer in enumerate(exits)]
    for count in _COUNTS:
        before, after = (
            count(each, _PAPER, source_length=_SOURCE, rule=ExitRule(confidence=confidence)).sum()
            for each in (exits, deeper)
        )
        assert after > before or exits == deeper


@pytest.mark.parametrize("count", _COUNTS)
def test_an_output_without_tokens_costs_nothing(count: _Count) -> None:
    """An output without tokens costs nothing."""
    assert count([], _PAPER, source_length=_SOURCE, rule=ExitRule()).shape == (0,)


def test_sizes_come_from_the_model() -> None:
    """Attention is as wide as all heads together, and the encoder as wide as the decoder."""
    config = T5Config(
        vocab_size=32_128,
        emb_dim=512,
        num_heads=6,
        head_dim=64,
        mlp_dim=1024,
        num_encoder_layers=8,
        num_decoder_layers=8,
    )
    assert DecoderSizes.of(config) == dataclasses.replace(_PAPER, keys_width=384)


@pytest.mark.parametrize(
    ("exits", "source_length", "message"),
    [
        ([1, 9], 4, r"exit_layers must be in 1\.\.8, the decoder's layers; got 9\."),
        ([0, 3], 4, r"exit_layers must be in 1\.\.8, the decoder's layers; got 0\."),
        ([3], 0, "source_length must be at least 1, got 0"),
    ],
)
@pytest.mark.parametrize("count", _COUNTS)
def test_values_out_of_range_are_refused(count: _Count, exits: list[int], source_length: int, message: str) -> None:
    """Layers count from 1, and a prompt has at least its eos."""
    with pytest.raises(ValueError, match=message):
        count(exits, _PAPER, source_length=source_length, rule=None)


def test_a_size_of_zero_is_refused() -> None:
    """The message names the size."""
    with pytest.raises(ValueError, match="vocab_size must be at least 1, got 0"):
        dataclasses.replace(_PAPER, vocab_size=0)
