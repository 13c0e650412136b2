"""Heads in native code: tokens, and the numbers behind confidences, against float64 logits."""

import functools
from typing import Any

import hypothesis
import hypothesis.strategies as st
import jax.numpy as jnp
import numpy as np
import pytest

from calm_beam.exits.decision import Summary
from calm_beam.exits.measures import MEASURES
from calm_beam.model.native import build, library
from calm_beam.model.native_decoder import NativeDecoder, Packing

pytestmark = pytest.mark.usefixtures("instruction_set")


def _head(kernel: np.ndarray, *, factor: float = 1.0) -> tuple[NativeDecoder, library.Head]:
    width = len(kernel)
    decoder = NativeDecoder(
        [],
        prompt_layers=[],
        source_layers=[],
        rows_of_prompts="of prompt",
        embedding=np.zeros((1, width), np.float32),
        norms=[np.linspace(0.5, 2, width, dtype=np.float32)],
        factors=[factor],
        epsilon=1e-6,
        packing=Packing(),
    )
    return decoder, decoder.head(1, (kernel.T, 0))


@hypothesis.settings(max_examples=60, deadline=None)
@hypothesis.given(
    seed=st.integers(0, 10_000),
    rows=st.integers(1, 40),
    width=st.sampled_from([1, 7, 16, 48]),
    vocab_size=st.sampled_from([2, 3, 63, 64, 65, 255, 256, 257, 1000]),
    scale=st.sampled_from([0.01, 1.0, 30.0]),
    has_equal=st.booleans(),
    measure=st.sampled_from([name for name in library.MEASURES if MEASURES[name].of_summary]),
)
def test_a_head_sums_up_its_logits(
    seed: int, rows: int, width: int, vocab_size: int, scale: float, has_equal: bool, measure: str
) -> None:
    """The best token and the numbers behind confidences are those of float64 logits."""
    generator = np.random.default_rng(seed)
    states = generator.standard_normal((50, width)).astype(np.float32)
    kernel = (scale * generator.standard_normal((width, vocab_size))).astype(np.float32)
    if has_equal:
        kernel[:, generator.integers(0, vocab_size, 3)] = kernel[:, generator.integers(0, vocab_size, 1)]
    entries = generator.integers(0, 50, rows)
    decoder, head = _head(kernel, factor=0.25)
    made_by = library.measure_of(measure, vocab_size=vocab_size)
    summarise = functools.partial(library.summarise, head, states=states, measure=made_by)
    tokens: Any
    facts: Any
    tokens, facts = summarise(entries=entries)
    chosen = states[entries].astype(np.float64)
    normed = chosen / np.sqrt((chosen**2).mean(axis=1, keepdims=True) + 1e-6) * decoder.norms[0] * 0.25
    logits = normed @ kernel.astype(np.float64)
    largest = logits.max(axis=1, keepdims=True)
    close = 1e-5 * (1 + scale * width**0.5)
    assert (largest[:, 0] - logits[np.arange(rows), tokens] <= close).all()
    if has_equal:
        # Of equal ones, the first.
        for row, token in enumerate(tokens):
            same = np.flatnonzero((kernel == kernel[:, [token]]).all(axis=0))
            assert token == same[0], row
    below = logits - largest
    expected = [
        largest[:, 0],
        np.sort(logits, axis=1)[:, -2],
        np.exp(below).sum(axis=1),
        (np.exp(below) * below).sum(axis=1),
    ]
    for found, truth in zip(facts, expected, strict=False):
        np.testing.assert_allclose(found, truth, rtol=50 * close, atol=close)
    largest, second, total, weighted, confidence = facts
    of_summary = MEASURES[measure].of_summary
    assert of_summary is not None
    by_python = of_summary(Summary(largest, tokens, second, total, weighted), vocab_size)
    np.testing.assert_allclose(confidence, by_python, rtol=1e-6, atol=1e-6)
    one_by_one = [summarise(entries=entries[[row]]) for row in range(rows)]
    np.testing.assert_array_equal(np.concatenate([each for each, _ in one_by_one]), tokens)
    np.testing.assert_array_equal(np.concatenate([each for _, each in one_by_one], axis=1), facts)


@pytest.mark.parametrize("dtype", [jnp.bfloat16, np.float16])
@pytest.mark.parametrize("rows", [1, 2, 3, 4, 5, 6, 7, 40])
def test_weights_of_two_bytes_give_the_same_bits(dtype: Any, rows: int, instruction_set: str) -> None:
    """Weights that are numbers of a smaller type are stored in that type, and results do not change."""
    generator = np.random.default_rng(rows)
    kernel = generator.standard_normal((48, 300))
    kernel[:, 7], kernel[3, 8], kernel[5, 9] = 0, -0.0, np.finfo(np.float16).smallest_subnormal
    kernel = kernel.astype(dtype).astype(np.float32)
    states = generator.standard_normal((rows, 48)).astype(np.float32)
    decoder, small = _head(kernel)
    panels = library.packed(kernel)
    is_halved = dtype == jnp.bfloat16 or instruction_set in build.TUNED
    assert panels.dtype == (dtype if is_halved else np.float32)
    wide = np.ascontiguousarray(panels.astype(np.float32))
    large = library.Head(library.matrix(wide, 300), decoder.packing.address(decoder.norms[0]), 1e-6, 1.0)
    found, expected = (
        library.summarise(head, states=states, entries=np.arange(rows), measure=None) for head in (small, large)
    )
    for one, other in zip(found, expected, strict=True):
        np.testing.assert_array_equal(one, other)


def test_weights_that_no_smaller_type_has() -> None:
    """One number is enough for float32."""
    kernel = np.ones((70, 130), np.float32)
    kernel[69, 129] = 1 + 2**-20
    assert library.packed(kernel).dtype == np.float32
    kernel[69, 129] = np.nan
    assert library.packed(kernel).dtype == np.float32


def test_a_head_of_logits_that_are_no_numbers() -> None:
    """NaN counts as the largest, as with XLA, and with infinite logits only the token is known."""
    kernel = np.zeros((4, 300), np.float32)
    kernel[:, 280], kernel[:, 17] = 2, 1
    states = np.ones((4, 4), np.float32)
    states[1, 2], states[2] = np.nan, -1
    _, head = _head(kernel)
    tokens, facts = library.summarise(head, states=states, entries=np.arange(4))
    assert tokens.tolist() == [280, 0, 0, 280]
    assert np.isnan(facts[0]).tolist() == [False, True, False, False]
    kernel[0, 5] = np.inf
    _, head = _head(kernel)
    tokens, facts = library.summarise(head, states=np.ones((1, 4), np.float32), entries=np.arange(1))
    assert (tokens.tolist(), facts[0].tolist()) == ([5], [np.inf])
    assert np.isnan(facts[2:4]).all()
    kernel[:] = -np.inf
    _, head = _head(kernel)
    tokens, facts = library.summarise(head, states=np.ones((1, 4), np.float32), entries=np.arange(1))
    assert (tokens.tolist(), facts[0].tolist()) == ([0], [-np.inf])
