"""Floating point operations of the decoder per generated token, by the formula that the paper cites.

CALM, "FLOPs and speedup computations", adopts the count of Elbayad et al. (2020), "Depth-Adaptive Transformer",
Appendix B. With model width d, attention width a (heads times their width), feed-forward width d_f, encoder width d_e,
vocabulary V, source length |x|, position t from 1 and a multiply-add as 2 operations, one token costs

    a layer that it uses       12 d a + 4 d_f d + 4 t a + 4 |x| a, and 4 |x| a d_e at the sequence's first use of it
    a layer that it skips      4 d a, the keys and values of the propagated state
    an exit test               2 V d for softmax measures, 2 d for the classifier, nothing for the others
    the output                 2 V d

Two counts differ in the tests they charge. `flops_appendix_b` follows the text: the tests that the token took.
`flops_calm_table` charges every token of a sequence with the tests of its deepest token.

Not all of this is proven. Taken literally, the formula cannot give the paper's Table 2: at 1.73 softmax layers
the table says x0.50, the formula at least x0.66 whatever the lengths (a test shows it). The second count is compatible
with every row of CNN/DM and WMT, and with those of SQuAD but one (1.03 layers, x5.68, needs outputs a little shorter
than the others), at |x| = 1024, mean |y| = 82, 39 and 5.6 and d_f without the gate. It was inferred from these numbers
alone; the authors do not mention it, and another count may agree as well.

The paper has no decoder-only models. They are counted alike, without the parts they do not have: with keys of width k,
a layer used costs 4 d a + 4 d k + 4 d_f d + 4 (|x| + t - 1) a, and a skipped one 4 d k; the first step reads the
prompt's last token, whose keys and values are already stored in skipped layers. The prompt is not counted, nor is the
encoder.

The feed-forward layer is counted as in the formula, ungated: two matrices. T5 1.1's gated one has a third, 2 d_f d
more for every layer used, which neither the formula nor, as far as it shows, the table has. A mixture of experts is
counted with all experts, since our decoders compute each for every token; its router is left out.
"""

import dataclasses
from collections.abc import Sequence
from typing import Self

import numpy as np

from calm_beam.decoding.settings import recorded_rule
from calm_beam.exits.measures import MEASURES
from calm_beam.exits.rule import ExitRule
from calm_beam.exits.token_cost import TokenCost
from calm_beam.manifest import Calibration, Manifest
from calm_beam.model import ModelConfig, architecture_of


@dataclasses.dataclass(frozen=True, kw_only=True)
class DecoderSizes:
    """Sizes that the operations of a decoder depend on.

    Attributes:
      num_layers: Depth L.
      width: Model width d.
      attention_width: Heads times the width of one, a; in the cited formula it is d.
      mlp_width: Width of the feed-forward layer d_f.
      encoder_width: Width of the encoder's output d_e; in T5 it is d. 0 in decoder-only models.
      vocab_size: Width of the output head V.
      keys_width: Heads of keys times the width of one, k; None if it is a.
    """

    num_layers: int
    width: int
    attention_width: int
    mlp_width: int
    encoder_width: int
    vocab_size: int
    keys_width: int | None = None

    def __post_init__(self) -> None:
        for field in dataclasses.fields(self):
            value = getattr(self, field.name)
            if value is not None and value < (0 if field.name == "encoder_width" else 1):
                raise ValueError(f"{field.name} must be at least 1, got {value}.")

    @classmethod
    def of(cls, config: ModelConfig) -> Self:
        """Returns the sizes of a model's decoder."""
        return cls(
            num_layers=config.num_decoder_layers,
            width=config.emb_dim,
            attention_width=config.num_heads * config.head_dim,
            mlp_width=config.mlp_dim,
            encoder_width=architecture_of(config).encoder_width(config),
            vocab_size=config.vocab_size,
            keys_width=config.num_kv_heads * config.head_dim,
        )


def flops_appendix_b(
    exit_layers: Sequence[int], sizes: DecoderSizes, *, source_length: int, rule: ExitRule | None
) -> np.ndarray:
    """Returns the decoder's operations for each token of one output, each token charged with its own tests.

    A layer is tested if the token may exit there or go on: the last one never is. A test's projection onto the
    vocabulary is counted in addition to that of the output, as in the formula, though a decoder may use one for both.

    Args:
      exit_layers: Layers used for each token, from 1, in the order of the output.
      sizes: Sizes of the model.
      source_length: Tokens of the prompt as the encoder saw it, eos included, at least 1.
      rule: The exit rule, which decides what is tested and where. None for the full model, which tests nothing.

    Returns:
      shape (tokens,), int64: their sum is the cost of the whole output.

    Raises:
      ValueError: If an exit layer is not in 1..L, or the source length is below 1.

    Source: Elbayad et al. (2020), Appendix B (FLOPS approximation); CALM, "FLOPs and speedup computations".
    """
    exits = _checked(exit_layers, sizes, source_length=source_length)
    flops: np.ndarray = _without_tests(exits, sizes, source_length=source_length) + _tests(exits, sizes, rule=rule)
    return flops


def flops_calm_table(
    exit_layers: Sequence[int], sizes: DecoderSizes, *, source_length: int, rule: ExitRule | None
) -> np.ndarray:
    """Returns the decoder's operations for each token of one output, in the count that fits the paper's Table 2.

    Every token is charged with the tests of the deepest token of its output. See the module docstring for the evidence.

    Args:
      exit_layers: Layers used for each token, from 1, in the order of the output.
      sizes: Sizes of the model.
      source_length: Tokens of the prompt as the encoder saw it, eos included, at least 1.
      rule: The exit rule; None for the full model.

    Returns:
      shape (tokens,), int64.

    Raises:
      ValueError: If an exit layer is not in 1..L, or the source length is below 1.

    Source: inferred from CALM Table 2 (test efficiency gains); Elbayad et al. (2020), Appendix B, except for the tests.
    """
    exits = _checked(exit_layers, sizes, source_length=source_length)
    deepest = np.full_like(exits, exits.max(initial=1))
    flops: np.ndarray = _without_tests(exits, sizes, source_length=source_length) + _tests(deepest, sizes, rule=rule)
    return flops


def full_model_flops(num_tokens: int, sizes: DecoderSizes, *, source_length: int) -> np.ndarray:
    """Returns the operations for tokens that use all layers without tests; both counts agree on them.

    A reduction factor, such as the paper's x3.65, is the sum of these over many outputs, divided by the sum of one of
    the counts above over the same outputs.

    Args:
      num_tokens: Number of tokens of the output.
      sizes: Sizes of the model.
      source_length: Tokens of the prompt as the encoder saw it, eos included, at least 1.

    Returns:
      shape (tokens,), int64.

    Raises:
      ValueError: If the source length is below 1.

    Source: Elbayad et al. (2020), Appendix B (FLOPS approximation).
    """
    return flops_appendix_b([sizes.num_layers] * num_tokens, sizes, source_length=source_length, rule=None)


def share_of_work(exit_layers: Sequence[int] | np.ndarray, sizes: DecoderSizes, *, rule: ExitRule) -> float:
    """Returns the operations of decoding tokens as a share of the full model's; attention is left out.

    Without attention, the share does not depend on lengths. The counts above follow the paper; this one follows our
    decoders, where the projection of the test at which a token exits also gives the token.

    Args:
      exit_layers: Layers used for each token, from 1; at least one.
      sizes: Sizes of the model.
      rule: The exit rule.

    Raises:
      ValueError: If an exit layer is not in 1..L.
    """
    cost = operations_cost(sizes)
    by_layer = np.array([cost.at(layer, rule) for layer in range(1, sizes.num_layers + 1)])
    exits = _checked(exit_layers, sizes, source_length=1)
    return float(by_layer[exits - 1].mean()) / cost.full()


def operations_cost(sizes: DecoderSizes) -> TokenCost:
    """Returns the cost of a token in operations, without attention."""
    through, skipped = _layer_operations(sizes)
    tests = {
        measure.needs: measure.test_operations(width=sizes.width, vocab_size=sizes.vocab_size)
        for measure in MEASURES.values()
    }
    return TokenCost(
        layers=sizes.num_layers,
        layer=through,
        skipped=skipped,
        output=2 * sizes.vocab_size * sizes.width,
        tests=tests,
    )


def share_at_mean(layers: float, sizes: DecoderSizes, *, rule: ExitRule) -> float:
    """Returns `share_of_work` of tokens that use `layers` layers on average.

    Args:
      layers: From the rule's lowest exit layer to L.
      sizes: Sizes of the model.
      rule: With exits at equal distances up to the last layer: each exit layer further is a test more, so the share
        depends on the mean alone.
    """
    assert _has_equal_distances(rule, sizes), "the mean does not tell how many tests there are"
    cost = operations_cost(sizes)
    return cost.at_mean(layers, rule) / cost.full()


def _has_equal_distances(rule: ExitRule, sizes: DecoderSizes) -> bool:
    """Returns whether a rule's exit layers are at equal distances up to the last layer."""
    return (sizes.num_layers - rule.min_exit_layer) % rule.exit_interval == 0


def shares_of_operations(manifest: Manifest, sizes: DecoderSizes | None) -> tuple[float | None, ...]:
    """Returns for each entry the share of the full model's operations that decoding takes, exit tests included.

    Args:
      manifest: The result.
      sizes: Sizes of the model; None if it was not loaded, so that nothing can be counted.

    Returns:
      Shares, above 1 if tests cost more than exits save. None for an entry that never exits, and for one whose number
      of tests does not follow from the mean layers.
    """
    if sizes is None:
        return (None,) * len(manifest.calibrations)
    return tuple(_share_of_entry(manifest, entry, sizes) for entry in manifest.calibrations)


def _share_of_entry(manifest: Manifest, entry: Calibration, sizes: DecoderSizes) -> float | None:
    if entry.threshold is None:
        return None
    rule = recorded_rule(manifest.decode_of(entry))
    return share_at_mean(entry.layers, sizes, rule=rule) if _has_equal_distances(rule, sizes) else None


def _checked(exit_layers: Sequence[int] | np.ndarray, sizes: DecoderSizes, *, source_length: int) -> np.ndarray:
    if source_length < 1:
        raise ValueError(f"source_length must be at least 1, got {source_length}: the eos of a prompt counts.")
    exits = np.asarray(exit_layers, dtype=np.int64)
    if exits.size and not (exits.min() >= 1 and exits.max() <= sizes.num_layers):
        wrong = exits.min() if exits.min() < 1 else exits.max()
        raise ValueError(f"exit_layers must be in 1..{sizes.num_layers}, the decoder's layers; got {wrong}.")
    return exits


def _without_tests(exits: np.ndarray, sizes: DecoderSizes, *, source_length: int) -> np.ndarray:
    if not sizes.encoder_width:
        return _of_decoder_only(exits, sizes, source_length=source_length)
    width, inner = sizes.width, sizes.attention_width
    positions = np.arange(1, len(exits) + 1)
    of_weights, skipped = _layer_operations(sizes)
    through = of_weights + 4 * positions * inner + 4 * source_length * inner
    # Keys and values over the source are computed once per layer, by the first token that uses it.
    reached = np.maximum.accumulate(exits)
    first_uses = np.diff(reached, prepend=0)
    cross_attention = first_uses * 4 * source_length * inner * sizes.encoder_width
    output = 2 * sizes.vocab_size * width
    flops: np.ndarray = exits * through + (sizes.num_layers - exits) * skipped + cross_attention + output
    return flops


def _of_decoder_only(exits: np.ndarray, sizes: DecoderSizes, *, source_length: int) -> np.ndarray:
    before = np.arange(len(exits))
    of_weights, keys = _layer_operations(sizes)
    through = of_weights + 4 * (source_length + before) * sizes.attention_width
    skipped = np.where(before > 0, keys, 0)
    output = 2 * sizes.vocab_size * sizes.width
    flops: np.ndarray = exits * through + (sizes.num_layers - exits) * skipped + output
    return flops


def _layer_operations(sizes: DecoderSizes) -> tuple[int, int]:
    """Returns the operations of a token with the weights of a layer that it uses, and of one that it skips."""
    width, inner = sizes.width, sizes.attention_width
    if sizes.encoder_width:
        return 12 * width * inner + 4 * sizes.mlp_width * width, 4 * width * inner
    keys = 4 * width * (sizes.keys_width or inner)
    return 4 * width * inner + keys + 4 * sizes.mlp_width * width, keys


def _tests(depths: np.ndarray, sizes: DecoderSizes, *, rule: ExitRule | None) -> np.ndarray:
    """Returns the operations of the exit tests of tokens with these depths."""
    if rule is None:
        return np.zeros_like(depths)
    per_test = rule.measure().test_operations(width=sizes.width, vocab_size=sizes.vocab_size)
    *tested, _ = rule.exit_layers(sizes.num_layers)
    return per_test * np.searchsorted(tested, depths, side="right")
