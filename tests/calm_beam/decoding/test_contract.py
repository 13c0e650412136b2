"""The contract of every decoder: the outputs of plain numpy, in any batch, and clear refusals."""

import dataclasses
import functools
import itertools
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import pytest

from calm_beam.checkpoints import Checkpoint
from calm_beam.decoding.branches import PromptResult
from calm_beam.exits.propagations import PROPAGATIONS
from calm_beam.exits.rule import ExitRule
from calm_beam.model import T5Config, parameter_shapes
from calm_beam.precision import FLOAT32, Precision
from tests.builders import (
    SERVABLE,
    build_arrays,
    build_checkpoint,
    build_config,
    build_prompts,
    build_rule,
    checkpoint_of,
)
from tests.calm_beam.decoding.decoders import DECODERS, STEPS, assert_all_same, assert_same
from tests.instruction_sets import needs_native
from tests.numpy_decoder import Decoded
from tests.numpy_t5 import NumpyT5
from tests.sampling import sampled

pytestmark = pytest.mark.usefixtures("strict_promotion")

# The smallest model with layers to skip, since every rule is compiled for every decoder.
_CONFIG = build_config(num_encoder_layers=1, num_decoder_layers=3, exit_classifier=2)
_DEPTH = _CONFIG.num_decoder_layers
_BFLOAT16 = Precision(dtype="bfloat16")
# As T5X's scalable_t5 trains them, with every option that the first model lacks.
_SCALABLE = dataclasses.replace(_CONFIG, relative_bias_per_layer=True, activation="silu")
_OTHER = dataclasses.replace(
    _CONFIG, exit_classifier=1, tied_head=True, gated_mlp=False, activation="relu", vocab_size=128
)
_THRESHOLDS = (1.0, 0.93, 0.7, 0.5, 0.3, 0.0)
_RULE = ExitRule()
# Each measure, each propagation and each schedule several times, and several sets of exit layers.
_CHOSEN = (
    _RULE,
    ExitRule(state_propagation="from_first_exit", schedule="decay", tau=4.0),
    ExitRule(confidence="softmax_max", state_propagation="projected", schedule="decay_t5x", tau=2.0),
    ExitRule(confidence="softmax_max", state_propagation="from_first_exit", min_exit_layer=2),
    ExitRule(confidence="state", state_propagation="projected", schedule="decay_t5x", tau=2.0),
    ExitRule(confidence="state", state_propagation="from_first_exit", min_exit_layer=2),
    ExitRule(confidence="classifier", schedule="decay", tau=4.0, exit_interval=2),
    ExitRule(confidence="classifier", state_propagation="from_first_exit", schedule="decay_t5x", tau=4.0),
    build_rule("entropy", state_propagation="from_first_exit"),
    build_rule("patience"),
    build_rule("patience", patience=3, state_propagation="projected", schedule="decay", tau=4.0),
    ExitRule(confidence="static", state_propagation="projected"),
)
# A measure that is added is tested although no list here names it.
_RULES = (*_CHOSEN, *(build_rule(name) for name in SERVABLE if name not in {rule.confidence for rule in _CHOSEN}))
_ADDED = range(len(_CHOSEN), len(_RULES))
# Rules that need every layer for every token, which only the sweep decodes.
_FULL_MODEL_RULES = (
    ExitRule(confidence="oracle"),
    ExitRule(state_propagation="full_cache", schedule="decay", tau=4.0),
    ExitRule(token_from="last_layer"),
    ExitRule(confidence="oracle", state_propagation="from_first_exit"),
    ExitRule(confidence="oracle", state_propagation="projected", min_exit_layer=2),
    ExitRule(confidence="oracle", state_propagation="full_cache", exit_interval=2),
)
_PROMPTS = build_prompts(4, 9, 1, 30, 6, 2, 13)

_every_decoder = pytest.mark.parametrize("decoder", DECODERS)
_WAYS_IN = ("sweep", "served", "batched")
_every_way_in = pytest.mark.parametrize("decoder", _WAYS_IN)


def _model(config: T5Config = _CONFIG) -> Checkpoint:
    """Returns weights whose decisions are far from ties, with exits at all layers, and outputs that mostly end."""
    return build_checkpoint(config, seed=1 if config == _OTHER else 0)


def _decode(
    decoder: str, checkpoint: Checkpoint, rule: ExitRule = _RULE, prompts: Any = _PROMPTS, **options: Any
) -> Any:
    return DECODERS[decoder].decode(checkpoint, rule, prompts, **{"thresholds": _THRESHOLDS, **options})


@functools.cache
def _outputs(
    decoder: str, rule: ExitRule = _RULE, config: T5Config = _CONFIG, precision: Precision = FLOAT32
) -> tuple[PromptResult, ...]:
    return tuple(_decode(decoder, _model(config), rule, precision=precision))


@functools.cache
def _plain(config: T5Config, dtype: str) -> NumpyT5:
    return NumpyT5(config, _model(config).arrays, dtype)


@functools.cache
def _by_numpy(
    rule: ExitRule, config: T5Config, prompt: tuple[int, ...], threshold: float | None, dtype: str = "float32"
) -> Decoded:
    decoded = _plain(config, dtype).decode(prompt, rule, threshold, max_decode_length=STEPS)
    if dtype == "bfloat16":
        # A float32 sum next to a tie of bfloat16 numbers changes all that follows.
        return decoded
    # So far from every tie that float32 must decide as float64 does.
    assert decoded.min_gap > 1e-4
    assert decoded.min_margin > 1e-5
    return decoded


def _is_beside_a_tie(decoded: Decoded) -> bool:
    """Returns whether bfloat16 may decide otherwise: the distance to a tie is at most that of two roundings."""
    return decoded.min_gap < 0.05 or decoded.min_margin < 0.01


def _assert_branch_equals(result: PromptResult, branch: int, expected: Decoded) -> None:
    length = len(expected.tokens)
    assert result.lengths[branch] == length
    assert result.tokens[branch].tolist() == expected.tokens + [0] * (STEPS - length)
    assert result.exit_layers[branch].tolist() == expected.exit_layers + [0] * (STEPS - length)
    np.testing.assert_allclose(result.confidences[branch, :length], expected.confidences, rtol=0, atol=1e-4)
    assert not result.confidences[branch, length:].any()


def _check_against_numpy(decoder: str, rule: ExitRule, config: T5Config) -> None:
    results = _outputs(decoder, rule, config)
    for prompt, result in zip(_PROMPTS, results, strict=True):
        assert result.is_finite
        for branch, threshold in enumerate((None, *_THRESHOLDS)):
            expected = _by_numpy(rule, config, tuple(prompt), threshold)
            if decoder == "served" and threshold is None and rule.patience is not None:
                # The layers below the last one are not tested: it agrees with itself alone.
                expected = dataclasses.replace(expected, confidences=[1 / rule.patience] * len(expected.tokens))
            _assert_branch_equals(result, branch, expected)
    # Otherwise the comparison would prove little.
    seen_layers = {layer for result in results for layer in result.exit_layers.ravel().tolist()} - {0}
    never_used = {1} if rule.confidence == "state" and rule.schedule == "decay" else set()
    assert seen_layers == set(rule.exit_layers(_DEPTH)) - never_used
    if config != _OTHER:
        assert len({length for result in results for length in result.lengths.tolist()}) > 1


@pytest.mark.parametrize(
    ("decoder", "rule"),
    [
        *(("sweep", rule) for rule in _FULL_MODEL_RULES),
        *sampled([("sweep", rule) for rule in _RULES], keep=(0, 1, 2, 4, 5, 6, 7, 8, 9, 11, *_ADDED)),
        *sampled([("served", rule) for rule in _RULES], keep=(0, 2, 4, 6, 8, 10, *_ADDED)),
        *sampled([("batched", rule) for rule in _RULES], keep=(0, 3, 5, 6, 8, 9, *_ADDED)),
    ],
    ids=str,
)
def test_every_output_is_plain_numpys(decoder: str, rule: ExitRule) -> None:
    """Tokens, exit layers and confidences of every prompt and threshold, and of the full model, are plain numpy's."""
    _check_against_numpy(decoder, rule, _CONFIG)


@pytest.mark.parametrize(
    ("decoder", "rule"),
    sampled(
        [(decoder, rule) for rule in (_RULES[0], _RULES[2], _RULES[4], _RULES[6], _RULES[10]) for decoder in DECODERS],
        keep=(0, 1, 2, 3, 9, 14),
    ),
    ids=str,
)
def test_in_bfloat16_outputs_are_those_of_numpy_that_rounds_likewise(decoder: str, rule: ExitRule) -> None:
    """But for the few branches with a decision nearer a tie than two roundings are apart; those are counted."""
    compared = 0
    for prompt, result in zip(_PROMPTS, _outputs(decoder, rule, precision=_BFLOAT16), strict=True):
        for branch, threshold in enumerate((None, *_THRESHOLDS)):
            expected = _by_numpy(rule, _CONFIG, tuple(prompt), threshold, "bfloat16")
            if _is_beside_a_tie(expected):
                continue
            length = result.lengths[branch]
            assert result.tokens[branch, :length].tolist() == expected.tokens
            assert result.exit_layers[branch, :length].tolist() == expected.exit_layers
            is_asked = not (decoder == "served" and threshold is None and rule.patience is not None)
            if is_asked:
                np.testing.assert_allclose(result.confidences[branch, :length], expected.confidences, rtol=0, atol=0.02)
            compared += 1
    assert compared > len(_PROMPTS) * len(_THRESHOLDS) / 3


def test_bfloat16_is_another_promise() -> None:
    """Rounding to bfloat16 changes confidences, and so outputs, which differ from float32's."""
    pairs = list(zip(_outputs("sweep"), _outputs("sweep", precision=_BFLOAT16), strict=True))
    changes = [np.abs(one.confidences[:, 0] - other.confidences[:, 0]).max() for one, other in pairs]
    assert 1e-4 < max(changes) < 0.1


def test_the_variants_differ() -> None:
    """The model, prompts and thresholds used here distinguish all state propagations."""
    rules = [*(dataclasses.replace(_RULE, state_propagation=name) for name in PROPAGATIONS), _FULL_MODEL_RULES[2]]
    outputs = [
        [_by_numpy(rule, _CONFIG, tuple(prompt), threshold).tokens for prompt in _PROMPTS for threshold in _THRESHOLDS]
        for rule in rules
    ]
    for one, other in itertools.combinations(outputs, 2):
        assert one != other


def _ends_output(tokens: Sequence[int]) -> bool:
    """Ends outputs by their last two tokens, which no end token could say."""
    return sum(tokens[-2:]) % 5 == 0


@_every_decoder
def test_what_ends_an_output_besides_end_tokens(decoder: str) -> None:
    """An output ends with the first token that a function of its tokens names, and is otherwise plain numpy's."""
    results = _decode(decoder, _model(), ends_output=_ends_output, batch_size=2)
    cut = 0
    for prompt, result in zip(_PROMPTS, results, strict=True):
        for branch, threshold in enumerate((None, *_THRESHOLDS)):
            decoded = _by_numpy(_RULE, _CONFIG, tuple(prompt), threshold)
            whole = range(1, len(decoded.tokens) + 1)
            length = next((count for count in whole if _ends_output(decoded.tokens[:count])), len(whole))
            kept = {name: getattr(decoded, name)[:length] for name in ("tokens", "exit_layers", "confidences")}
            _assert_branch_equals(result, branch, dataclasses.replace(decoded, **kept))
            cut += length < len(whole)
    assert cut > len(_PROMPTS)


@_every_decoder
@pytest.mark.parametrize(
    ("config", "rule"), [(_SCALABLE, _RULE), (_OTHER, ExitRule(confidence="classifier"))], ids=["scalable", "other"]
)
def test_every_output_of_other_models_is_plain_numpys(decoder: str, config: T5Config, rule: ExitRule) -> None:
    """Models with per-layer positions and SiLU, or a tied head, ReLU and a classifier of one logit, match numpy."""
    _check_against_numpy(decoder, rule, config)


def _certified_cases() -> Iterator[Any]:
    """Yields decoders, rules and precisions: all of them, most of them marked exhaustive.

    A head depends on the measure of a rule only, so one rule of each measure is enough. In float32 every decoder is
    paired with every measure, of which `make test` takes all in a sweep and two elsewhere. Bfloat16 changes only the
    numbers in a head, so every second pair is enough.
    """
    of_measures = [_RULES[place] for place in (0, 2, 5, 7, 8, 9, 11, *_ADDED)]
    for precision, rule in itertools.product((FLOAT32, _BFLOAT16), _RULES):
        for column, decoder in enumerate(_WAYS_IN):
            marks: Any = pytest.mark.exhaustive
            if rule in of_measures:
                if precision == FLOAT32:
                    is_quick = decoder == "sweep" or rule.confidence in ("softmax", "classifier")
                    marks = () if is_quick and rule.confidence != "static" else pytest.mark.slow
                elif (of_measures.index(rule) + column) % 2 == 0:
                    marks = pytest.mark.slow
            yield pytest.param(decoder, rule, precision, marks=marks)


@needs_native
@pytest.mark.parametrize(("decoder", "rule", "precision"), list(_certified_cases()), ids=str)
def test_a_certified_head_changes_nothing(decoder: str, rule: ExitRule, precision: Precision) -> None:
    """With a certified head, tokens and exit layers are the exact head's, and confidences are near."""
    certified = _decode(decoder, _model(), rule, exit_head="int8", precision=precision)
    for one, other in zip(certified, _outputs(decoder, rule, precision=precision), strict=True):
        assert_same(one, other, confidences_within=0.2)


@_every_decoder
def test_of_two_thresholds_the_lower_never_exits_later_in_equal_states(decoder: str) -> None:
    """As long as two branches have had the same tokens and exits."""
    compared = 0
    for result in _outputs(decoder):
        for upper, lower in itertools.combinations(range(len(_THRESHOLDS) + 1), 2):
            for step in range(min(result.lengths[[upper, lower]])):
                assert result.exit_layers[lower, step] <= result.exit_layers[upper, step]
                compared += 1
                if result.exit_layers[lower, step] != result.exit_layers[upper, step]:
                    break
                assert result.tokens[lower, step] == result.tokens[upper, step]
    assert compared > len(_PROMPTS) * 21


@pytest.mark.parametrize(
    ("decoder", "state_propagation"),
    [
        *(("sweep", name) for name in PROPAGATIONS),
        ("served", "from_exit"),
        ("batched", "from_exit"),
    ],
)
def test_static_layers_are_those_of_a_shallower_model(decoder: str, state_propagation: str) -> None:
    """Threshold m / L uses m layers for every token, and gives the outputs of a decoder with its first m layers."""
    rule = ExitRule(confidence="static", state_propagation=state_propagation)
    thresholds = [layers / _DEPTH for layers in range(1, _DEPTH + 1)]
    results = _decode(decoder, _model(), rule, thresholds=thresholds)
    for prompt, result in zip(_PROMPTS, results, strict=True):
        for layers in range(1, _DEPTH + 1):
            length = result.lengths[layers]
            assert set(result.exit_layers[layers, :length].tolist()) == {layers}
            assert set(result.confidences[layers, :length].tolist()) == {np.float32(layers / _DEPTH)}
            assert result.tokens[layers, :length].tolist() == _cut_output(layers, tuple(prompt)).tokens


@functools.cache
def _cut_output(layers: int, prompt: tuple[int, ...]) -> Decoded:
    """Returns the full output, by plain numpy, of a decoder with only its first layers."""
    config = dataclasses.replace(_CONFIG, num_decoder_layers=layers)
    arrays = _model().arrays
    cut = NumpyT5(config, {name: arrays[name] for name in parameter_shapes(config)})
    decoded = cut.decode(prompt, _RULE, None, max_decode_length=STEPS)
    assert decoded.min_gap > 1e-4
    return decoded


@pytest.mark.parametrize(
    ("decoder", "batch_size", "precision"),
    sampled(
        [
            (decoder, batch_size, precision)
            for batch_size, precision in ((1, FLOAT32), (3, FLOAT32), (8, FLOAT32), (3, _BFLOAT16))
            for decoder in DECODERS
        ],
        keep=range(10),
    ),
    ids=str,
)
def test_the_batch_does_not_matter(decoder: str, batch_size: int, precision: Precision) -> None:
    """With any number of slots, any order, a prompt alone or twice, every prompt has the same outputs.

    In bfloat16 that is no promise, since a sum can end on either side of a tie, and on which depends on the processor:
    few branches next to one are left out.
    """
    checkpoint, alone = _model(), _outputs(decoder, precision=precision)
    # Rows that exit at one layer would not affect each other.
    assert len({int(result.exit_layers[4, 0]) for result in alone}) > 1
    near = 1e-5 if precision == FLOAT32 else 0.02
    compared = []
    for order in (range(7), [6, 2, 0, 5, 1, 4, 3], [1, 4, 1], [3]):
        prompts = [_PROMPTS[index] for index in order]
        results = _decode(decoder, checkpoint, prompts=prompts, batch_size=batch_size, precision=precision)
        for result, index in zip(results, order, strict=True):
            branches = _branches_without_ties(_PROMPTS[index], precision)
            assert_same(_of_branches(result, branches), _of_branches(alone[index], branches), confidences_within=near)
            compared += branches
    assert len(compared) >= 0.75 * 18 * (1 + len(_THRESHOLDS))


def _branches_without_ties(prompt: Sequence[int], precision: Precision) -> list[int]:
    thresholds = (None, *_THRESHOLDS)
    decoded = [_by_numpy(_RULE, _CONFIG, tuple(prompt), threshold, precision.dtype) for threshold in thresholds]
    return [branch for branch, each in enumerate(decoded) if precision == FLOAT32 or not _is_beside_a_tie(each)]


def _of_branches(result: PromptResult, branches: list[int]) -> PromptResult:
    parts = {name: getattr(result, name)[branches] for name in ("tokens", "exit_layers", "lengths", "confidences")}
    return dataclasses.replace(result, **parts)


@_every_decoder
def test_prompts_of_different_widths(decoder: str) -> None:
    """Short and long prompts are padded to different widths and each comes back under its own index."""
    prompts = build_prompts(33, 4, 50, 9)
    for prompt, result in zip(prompts, _decode(decoder, _model(), prompts=prompts), strict=True):
        for branch, threshold in enumerate((None, *_THRESHOLDS)):
            _assert_branch_equals(result, branch, _by_numpy(_RULE, _CONFIG, tuple(prompt), threshold))


def _with_broken_token() -> tuple[Checkpoint, Checkpoint]:
    """Returns two models that differ in token 63 only, which neither generates: NaN in the first, 0 in the second."""
    arrays = build_arrays(_CONFIG, 0)
    arrays["decoder/logits_dense/kernel"][:, 63] = 0
    whole, broken = arrays["token_embedder/embedding"].copy(), arrays["token_embedder/embedding"].copy()
    whole[63], broken[63] = 0, np.nan
    return (
        checkpoint_of(_CONFIG, {**arrays, "token_embedder/embedding": broken}),
        checkpoint_of(_CONFIG, {**arrays, "token_embedder/embedding": whole}),
    )


@_every_decoder
@pytest.mark.parametrize("batch_size", [1, 3])
def test_a_broken_prompt_disturbs_nobody(decoder: str, batch_size: int) -> None:
    """A prompt that gives NaN is marked, with valid ids; the other outputs do not change."""
    broken, whole = _with_broken_token()
    prompts = [*_PROMPTS[:2], [8, 63, 1], *_PROMPTS[2:]]
    results = _decode(decoder, broken, prompts=prompts, batch_size=batch_size)
    assert [result.is_finite for result in results] == [index != 2 for index in range(8)]
    expected = _decode(decoder, whole, batch_size=batch_size)
    assert not any((result.tokens == 63).any() for result in expected)
    assert_all_same([*results[:2], *results[3:]], expected)
    assert 0 <= results[2].tokens.min() <= results[2].tokens.max() < _CONFIG.vocab_size


@_every_decoder
def test_the_full_model_never_exits(decoder: str) -> None:
    """With confidence exactly 1, threshold 1 exits, and the full model does not."""
    saturated_exits = 0
    for result in _decode(decoder, build_checkpoint(_CONFIG, logit_scale=400)):
        full, one = (result.exit_layers[branch, : result.lengths[branch]] for branch in (0, 1))
        assert (full == _DEPTH).all()
        early = one < _DEPTH
        assert (result.confidences[1, : result.lengths[1]][early] == 1).all()
        saturated_exits += int(early.sum())
    assert saturated_exits > 10


@_every_decoder
def test_outputs_begin_and_end_as_the_config_says(decoder: str) -> None:
    """A T5 with another start token and several end tokens gives plain numpy's outputs, and ends with each of them."""
    config = dataclasses.replace(_CONFIG, start_id=7, end_ids=(1, 14, 18, 52))
    ends: set[int] = set()
    for prompt, result in zip(_PROMPTS, _outputs(decoder, _RULE, config), strict=True):
        for branch, threshold in enumerate((None, *_THRESHOLDS)):
            expected = _by_numpy(_RULE, config, tuple(prompt), threshold)
            _assert_branch_equals(result, branch, expected)
            ends |= {expected.tokens[-1]} if len(expected.tokens) < STEPS else set()
    assert len(ends) > 1
    usual = _outputs(decoder, _RULE, _CONFIG)
    assert any(a.tokens[0, 0] != b.tokens[0, 0] for a, b in zip(_outputs(decoder, _RULE, config), usual, strict=True))


@_every_decoder
def test_outputs_end_with_eos_or_at_the_limit(decoder: str) -> None:
    """Eos is the last token wherever it occurs; a lower limit gives the beginning of the longer output."""
    checkpoint = build_checkpoint(_CONFIG, seed=8)
    whole = _decode(decoder, checkpoint)
    ends: set[int] = set()
    for result, branch in itertools.product(whole, range(len(_THRESHOLDS) + 1)):
        tokens = result.tokens[branch, : result.lengths[branch]].tolist()
        assert 1 not in tokens[:-1]
        assert len(tokens) == STEPS or tokens[-1] == 1
        assert not result.tokens[branch, len(tokens) :].any()
        assert (result.exit_layers[branch] > 0).tolist() == [step < len(tokens) for step in range(STEPS)]
        ends.add(len(tokens))
    assert ends >= {1, STEPS}
    for limit in (1, 4):
        for cut, longer in zip(_decode(decoder, checkpoint, max_decode_length=limit), whole, strict=True):
            np.testing.assert_array_equal(cut.lengths, np.minimum(limit, longer.lengths))
            np.testing.assert_array_equal(cut.tokens, longer.tokens[:, :limit])


@_every_way_in
@pytest.mark.parametrize("sizes", [{"max_decode_length": 0}, {"max_input_length": 0}, {"batch_size": -1}], ids=str)
def test_sizes_below_one_are_refused(decoder: str, sizes: Mapping[str, int]) -> None:
    """Lengths and batch size must be at least 1; the message names the one that is not."""
    ((name, value),) = sizes.items()
    with pytest.raises(ValueError, match=f"{name} must be at least 1, got {value}"):
        DECODERS[decoder].prepare(build_checkpoint(_CONFIG), _RULE, **sizes)


@_every_way_in
def test_a_rule_that_does_not_fit_the_model_is_refused(decoder: str) -> None:
    """A missing classifier, or an exit layer above the decoder, is refused before anything is decoded."""
    checkpoint = build_checkpoint(build_config())
    with pytest.raises(ValueError, match="confidence 'classifier' needs decoder/meta_cls in the checkpoint"):
        DECODERS[decoder].prepare(checkpoint, ExitRule(confidence="classifier"))
    with pytest.raises(ValueError, match="min_exit_layer must be at most 4, the decoder's depth; got 5"):
        DECODERS[decoder].prepare(checkpoint, ExitRule(min_exit_layer=5))


@_every_way_in
@pytest.mark.parametrize("length", [0, 7])
def test_empty_and_long_prompts_are_refused(decoder: str, length: int) -> None:
    """A prompt without tokens, or with too many, is refused by its index before anything is decoded."""
    prepared = DECODERS[decoder].prepare(build_checkpoint(_CONFIG), _RULE, max_input_length=6)
    with pytest.raises(ValueError, match=f"prompts must have 1 to 6 tokens, prompt 1 has {length}"):
        next(prepared.decode([[5, 1], [5] * length]))


@_every_decoder
def test_no_prompts_no_results(decoder: str) -> None:
    """Without prompts there are no results."""
    assert _decode(decoder, _model(), prompts=[]) == []
