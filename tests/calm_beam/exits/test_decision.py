"""Decisions taken block by block, against the plain measures and numpy's float64."""

import functools
from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import scipy.special
import scipy.stats

from calm_beam.exits import decision
from calm_beam.exits.measures import measure_named
from calm_beam.exits.measures.built_in import entropy_confidence, softmax_gap, softmax_max
from tests.builders import BY_LOGITS
from tests.sampling import sampled

# Divisible by the 128 that are reduced in parallel, by fewer, and by nothing; one block, and several.
_VOCABULARIES = (256, 384, 200, 67, 1, 2048, 2049, 5000, 8192)
_NAMES = ("token", "confidence", "is_finite")


@pytest.fixture(autouse=True)
def _strict() -> Iterator[None]:
    with jax.numpy_dtype_promotion("strict"), jax.numpy_rank_promotion("raise"):
        yield


def _cut(logits: jax.Array, first: Any, entries: int) -> jax.Array:
    return jax.lax.dynamic_slice_in_dim(logits, first, entries, 1)


def _in_blocks(
    logits: jax.Array, measure: str, cut: Callable[[jax.Array, Any, int], jax.Array] = _cut
) -> tuple[jax.Array, ...]:
    named, vocab_size = measure_named(measure), logits.shape[1]
    return decision._decided(decision._in_blocks(cut, logits, measure=named, vocab_size=vocab_size), named, vocab_size)


_decided = functools.partial(jax.jit, static_argnums=1)(_in_blocks)


def _afresh(logits: np.ndarray, measure: str) -> tuple[jax.Array, ...]:
    """Returns `_decided` compiled for the present block sizes."""
    return jax.jit(functools.partial(_in_blocks, measure=measure))(logits)


def _decide(logits: np.ndarray, measure: str = "softmax") -> dict[str, np.ndarray]:
    values = _decided(jnp.asarray(logits, jnp.float32), measure)
    return {name: np.asarray(value) for name, value in zip(_NAMES, values, strict=True)}


def _logits(rows: int, vocab_size: int, scale: float = 3, seed: int = 0) -> np.ndarray:
    return (np.random.default_rng(seed).standard_normal((rows, vocab_size)) * scale).astype(np.float32)


@pytest.mark.parametrize("vocab_size", [size for size in _VOCABULARIES if size > 1])
@pytest.mark.parametrize("scale", sampled([0.05, 3, 40], keep=(1,)))
def test_decisions_are_those_of_a_sorted_softmax(vocab_size: int, scale: float) -> None:
    """Token, gap and maximum are numpy's in float64, and the plain measures', for any size of vocabulary."""
    logits = _logits(64, vocab_size, scale)
    ordered = np.sort(scipy.special.softmax(logits.astype(np.float64), axis=-1))
    gap, largest = _decide(logits), _decide(logits, "softmax_max")
    np.testing.assert_allclose(gap["confidence"], ordered[:, -1] - ordered[:, -2], rtol=1e-4, atol=2e-7)
    np.testing.assert_allclose(largest["confidence"], ordered[:, -1], rtol=3e-6)
    np.testing.assert_allclose(gap["confidence"], softmax_gap(jnp.asarray(logits)), rtol=0, atol=5e-7)
    np.testing.assert_allclose(largest["confidence"], softmax_max(jnp.asarray(logits)), rtol=0, atol=5e-7)
    spread = _decide(logits, "entropy")
    uncertainty = scipy.stats.entropy(ordered, axis=-1) / np.log(vocab_size)
    np.testing.assert_allclose(spread["confidence"], 1 - uncertainty, rtol=0, atol=2e-6)
    np.testing.assert_allclose(spread["confidence"], entropy_confidence(jnp.asarray(logits)), rtol=0, atol=2e-6)
    for decided in (gap, largest, spread, _decide(logits, "state")):
        np.testing.assert_array_equal(decided["token"], np.argmax(logits, axis=-1))
        assert decided["is_finite"].all()
        assert (decided["token"].dtype, decided["confidence"].dtype) == (np.int32, np.float32)


def test_other_measures_have_no_confidence_here() -> None:
    """A confidence that does not come from logits is 0 here."""
    assert not _decide(_logits(8, 256), "static")["confidence"].any()


@pytest.mark.parametrize("vocab_size", [256, 200, 4200])
@pytest.mark.parametrize(
    "places", [(0, 1), (3, 131), (131, 3), (127, 128), (5, 133), (198, 199), (4, 68, 132, 199), (-1, 2), (-1, 150)]
)
def test_ties_go_to_the_first(vocab_size: int, places: tuple[int, ...]) -> None:
    """Of equal largest logits, in one block or in several, the first is the token, and there is no gap."""
    logits = _logits(3, vocab_size)
    logits[:, list(places)] = 50
    decided = _decide(logits)
    assert decided["token"].tolist() == [min(place % vocab_size for place in places)] * 3
    assert (decided["confidence"] == 0).all()
    np.testing.assert_allclose(_decide(logits, "softmax_max")["confidence"], 1 / len(places), rtol=1e-6)


def test_a_row_of_equal_logits_is_token_0() -> None:
    """A flat distribution has its first token, gap 0 and a maximum of one over the vocabulary."""
    logits = np.full((2, 384), -3.5, np.float32)
    assert _decide(logits)["token"].tolist() == [0, 0]
    assert (_decide(logits)["confidence"] == 0).all()
    np.testing.assert_allclose(_decide(logits, "softmax_max")["confidence"], 1 / 384, rtol=1e-6)


def test_a_vocabulary_of_one() -> None:
    """The only token is certain."""
    decided = _decide(np.array([[3.0], [-2.0]]))
    assert decided["token"].tolist() == [0, 0]
    assert decided["confidence"].tolist() == [1, 1]


@pytest.mark.parametrize("measure", [*BY_LOGITS, "state"])
@pytest.mark.parametrize("vocab_size", [256, 200, 2100])
@pytest.mark.parametrize("value", [np.nan, np.inf])
def test_a_row_that_is_not_finite_says_so(measure: str, vocab_size: int, value: float) -> None:
    """One NaN or infinity anywhere in a row marks it, gives a token that exists, and leaves the other rows alone."""
    logits = _logits(vocab_size, vocab_size)
    clean = _decide(logits, measure)
    broken = logits.copy()
    # In every second row, at every second place.
    marked = np.arange(0, vocab_size, 2)
    broken[marked, marked] = value
    decided = _decide(broken, measure)
    assert not decided["is_finite"][marked].any()
    expected = 0 if np.isnan(value) else marked
    np.testing.assert_array_equal(decided["token"][marked], expected)
    for name in _NAMES:
        np.testing.assert_array_equal(decided[name][1::2], clean[name][1::2])
    if measure != "state":
        # No threshold accepts it.
        assert not (decided["confidence"][marked] >= 0).any()


def test_a_row_of_nan_or_of_nothing_is_not_finite() -> None:
    """Rows of NaN only, and of minus infinity only, are not finite."""
    logits = np.array([[np.nan] * 256, [-np.inf] * 256], np.float32)
    for measure in (*BY_LOGITS, "state"):
        assert not _decide(logits, measure)["is_finite"].any()


@pytest.mark.parametrize("vocab_size", [256, 5000])
@pytest.mark.parametrize("allowed", [slice(0, 7), slice(-7, None)])
def test_minus_infinity_forbids_a_token_only(vocab_size: int, allowed: slice) -> None:
    """A logit of minus infinity, or a whole block of them, has probability 0; the row is finite if its largest is."""
    logits = np.full((4, vocab_size), -np.inf, np.float32)
    logits[:, allowed] = _logits(4, 7)
    expected = np.sort(scipy.special.softmax(logits[:, allowed].astype(np.float64), axis=-1))
    decided = _decide(logits)
    assert decided["is_finite"].all()
    np.testing.assert_array_equal(decided["token"], np.argmax(logits, axis=-1))
    np.testing.assert_allclose(decided["confidence"], expected[:, -1] - expected[:, -2], rtol=1e-5)


@pytest.mark.parametrize("measure", [*BY_LOGITS, "classifier"])
@pytest.mark.parametrize("rows", [192, 2048])
@pytest.mark.parametrize("held", [1, 64])
def test_few_rows_at_a_time_change_nothing(measure: str, rows: int, held: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Deciding some rows at a time gives the bits of all at once; one or three rows differ by rounding."""
    logits = _logits(rows, 384)
    monkeypatch.setattr(decision, "_ROWS", rows)
    whole = _afresh(logits, measure)
    sizes: list[int] = []

    def cut(part: jax.Array, first: Any, entries: int) -> jax.Array:
        sizes.append(part.shape[0])
        return _cut(part, first, entries)

    monkeypatch.setattr(decision, "_ROWS", held)
    parts = jax.jit(functools.partial(_in_blocks, measure=measure, cut=cut))(logits)
    for one, other in zip(whole, parts, strict=True):
        np.testing.assert_allclose(one, other, rtol=0, atol=1e-6 if held == 1 else 0)
    # 192 is 3 times a power of 2.
    assert sizes[0] == {(1, 192): 3, (1, 2048): 1, (64, 192): 48, (64, 2048): 64}[held, rows]


@pytest.mark.parametrize("measure", [*BY_LOGITS, "classifier"])
@pytest.mark.parametrize("entries", sampled([64, 100, 128, 383], keep=(0, 1)))
def test_blocks_of_the_vocabulary_change_nothing(measure: str, entries: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Blocks that fit the vocabulary or not change only the rounding of the sum."""
    logits = _logits(96, 384)
    whole = _afresh(logits, measure)
    monkeypatch.setattr(decision, "_ENTRIES", entries)
    for one, other in zip(whole, _afresh(logits, measure), strict=True):
        np.testing.assert_allclose(one, other, rtol=0, atol=1e-6)
    np.testing.assert_array_equal(whole[0], np.argmax(logits, axis=-1))


def test_many_rows_are_decided_as_few_are() -> None:
    """Thousands of rows give what sixty-four at a time give, and what numpy gives."""
    logits = _logits(4096, 512)
    ordered = np.sort(scipy.special.softmax(logits.astype(np.float64), axis=-1))
    decided = _decide(logits)
    np.testing.assert_array_equal(decided["token"], np.argmax(logits, axis=-1))
    np.testing.assert_allclose(decided["confidence"], ordered[:, -1] - ordered[:, -2], rtol=0, atol=1e-6)
    for start in range(0, 4096, 1024):
        part = _decide(logits[start : start + 64])
        for name in _NAMES:
            np.testing.assert_allclose(part[name], decided[name][start : start + 64], rtol=0, atol=1e-6)


@pytest.mark.parametrize("measure", [*BY_LOGITS, "classifier"])
@pytest.mark.parametrize("entries", [100, 128, 5000])
def test_a_gpus_blocks_change_nothing(measure: str, entries: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """On a GPU blocks run one after the other, as many entries as fit; ties and non-finite rows are as on a CPU."""
    logits = _logits(70, 384)
    logits[1, 250], logits[2, 7] = np.nan, np.inf
    logits[3, [130, 300]] = 50
    expected = _afresh(logits, measure)
    sizes: list[int] = []

    def cut(part: jax.Array, first: Any, entries: int) -> jax.Array:
        sizes.append(entries)
        return _cut(part, first, entries)

    monkeypatch.setattr(jax, "default_backend", lambda: "gpu")
    monkeypatch.setattr(decision, "_GPU_LOGITS", 70 * entries + 69)
    made = jax.jit(functools.partial(_in_blocks, measure=measure, cut=cut))(logits)
    assert (sum(sizes), max(sizes)) == (384, min(entries, 384))
    for one, other in zip(expected, made, strict=True):
        np.testing.assert_allclose(one, other, rtol=0, atol=1e-6)
    assert np.asarray(made[0])[[1, 3]].tolist() == [0, 130]
