"""Counts of outputs with known content."""

import numpy as np
import pytest

from calm_beam.evaluation.flops import DecoderSizes, flops_appendix_b, flops_calm_table
from calm_beam.evaluation.splits import BLEU_ROWS, OutputCounter
from calm_beam.exits.rule import ExitRule
from calm_beam.metrics.corpus_bleu import bleu_counts
from calm_beam.outputs import Generation, Output
from tests.calm_beam.calibration.builders import build_generation

_SIZES = DecoderSizes(num_layers=4, width=8, attention_width=6, mlp_width=16, encoder_width=8, vocab_size=32)
_RULE = ExitRule(confidence="softmax")


def _output(text: str, tokens: tuple[int, ...], exit_layers: tuple[int, ...]) -> Output:
    return Output(text=text, tokens=tokens, exit_layers=exit_layers, confidences=(0.5,) * len(tokens))


def _generation() -> Generation:
    return build_generation(
        outputs=(
            _output("cat", (5, 6, 1), (4, 4, 4)),
            _output("cat", (5, 6, 1), (2, 4, 1)),
            # At the greatest length, without and with eos.
            _output("dog dog", (7, 7, 7, 7), (1, 1, 1, 3)),
            _output("dog", (7, 7, 7, 1), (1, 1, 1, 3)),
        )
    )


def _no_length() -> int:
    raise AssertionError("the source length is asked for where nothing needs it")


def test_tokens_layers_and_cut_outputs() -> None:
    """An output is cut if it has the greatest length and does not end with eos."""
    counter = OutputCounter(max_decode_length=4, end_ids=(1,), rule=_RULE)
    assert counter.rows == ("tokens", "layers", "cut")
    counts = counter.counts(_generation(), lanes=4, source_length=_no_length)
    assert counts.tolist() == [[3, 3, 4, 4], [12, 7, 6, 6], [0, 0, 1, 0]]


def test_every_end_id_ends_an_output() -> None:
    """Each end id ends an output, also as the last token that fits; T5's eos is an ordinary token in another model."""
    counter = OutputCounter(max_decode_length=4, end_ids=(6, 7), rule=_RULE)
    assert counter.counts(_generation(), lanes=4, source_length=_no_length)[2].tolist() == [0, 0, 0, 1]


def test_operations() -> None:
    """The full model's output has no tests; others are charged by the rule, next to their cost at full depth."""
    counter = OutputCounter(max_decode_length=4, end_ids=(1,), rule=_RULE, sizes=_SIZES)
    found = dict(zip(counter.rows, counter.counts(_generation(), lanes=4, source_length=lambda: 9), strict=True))
    for name, count in (("flops_appendix_b", flops_appendix_b), ("flops_calm_table", flops_calm_table)):
        early = [
            count(output.exit_layers, _SIZES, source_length=9, rule=_RULE).sum() for output in _generation().outputs
        ]
        full = count((4, 4, 4), _SIZES, source_length=9, rule=None).sum()
        assert found[name].tolist() == [full, *early[1:]]
    assert found["flops_full"][0] == found["flops_full"][1] == found["flops_appendix_b"][0]
    assert found["flops_full"][2] == flops_appendix_b((4,) * 4, _SIZES, source_length=9, rule=None).sum()


def test_bleu_counts_stand_beside() -> None:
    """Every output has its own BLEU counts against the references."""
    pytest.importorskip("sacrebleu")
    counter = OutputCounter(max_decode_length=4, end_ids=(1,), rule=_RULE, with_bleu=True)
    counts = counter.counts(_generation(), lanes=4, source_length=_no_length)
    assert counter.rows[3:] == BLEU_ROWS
    expected = [bleu_counts(output.text, ("cat",)) for output in _generation().outputs]
    np.testing.assert_array_equal(counts[3:], np.stack(expected, axis=1))


def test_a_failed_example_counts_nothing() -> None:
    """A failed example has no outputs and counts nothing; its losses are counted elsewhere."""
    failed = build_generation(outputs=(), failure="broken")
    counter = OutputCounter(max_decode_length=4, end_ids=(1,), rule=_RULE, sizes=_SIZES, with_bleu=True)
    assert not counter.counts(failed, lanes=4, source_length=_no_length).any()
