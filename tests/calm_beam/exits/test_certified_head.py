"""Claims of a certified head, against float64: never wrong, and open if it cannot decide."""

import functools
from collections.abc import Iterator

import hypothesis
import hypothesis.extra.numpy as hnp
import hypothesis.strategies as st
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from calm_beam.exits import certified_head as quantised_head_module
from calm_beam.exits.certified_head import Certificate, CertifiedHead, certify, quantised_head, screened
from calm_beam.exits.measures import MEASURES
from calm_beam.precision import DTYPES
from tests.instruction_sets import TUNED, forced, needs_native

pytestmark = needs_native
# By each instruction set that certifies.
_INSTRUCTIONS = TUNED
_CERTIFIED = tuple(name for name, measure in MEASURES.items() if measure.bounds is not None)
_WIDTH = 24


@pytest.fixture(autouse=True)
def _strict() -> Iterator[None]:
    with jax.numpy_dtype_promotion("strict"), jax.numpy_rank_promotion("raise"):
        yield


@functools.partial(jax.jit, static_argnums=(2, 3, 4))
def _certified(
    states: jax.Array, head: CertifiedHead, measure: str, is_thorough: bool, instructions: str
) -> Certificate:
    """Returns the certificate, compiled once for each instruction set, which the caller has forced."""
    return certify(states, head, measure=MEASURES[measure], is_thorough=is_thorough)


def _certify(
    states: np.ndarray, weights: np.ndarray, instructions: str, measure: str = "softmax", *, is_thorough: bool = False
) -> Certificate:
    head = quantised_head(jnp.asarray(weights))
    with forced(instructions):
        certified = _certified(jnp.asarray(states), head, measure, is_thorough, instructions)
        found: Certificate = jax.tree.map(np.asarray, certified)
    return found


def _truth(states: np.ndarray, weights: np.ndarray, measure: str) -> tuple[np.ndarray, np.ndarray]:
    """Returns tokens and confidences in float64; a token is -1 where the two largest are equal."""
    # Products of float32 numbers are exact; sums of some dozens nearly.
    logits = states.astype(np.longdouble) @ weights.astype(np.longdouble).T
    largest, second = np.sort(logits, axis=1)[:, [-1, -2]].T
    below = logits - largest[:, None]
    total = np.exp(below).sum(axis=1)
    match measure:
        case "softmax":
            confidence = -np.expm1(second - largest) / total
        case "softmax_max":
            confidence = 1 / total
        case "entropy":
            entropy = np.log(total) - (below * np.exp(below)).sum(axis=1) / total
            confidence = 1 - entropy / np.log(len(weights))
        case _:
            raise ValueError(f"no formula of {measure} in float64")
    return np.where(second == largest, -1, logits.argmax(axis=1)), confidence


def _check(
    states: np.ndarray, weights: np.ndarray, instructions: str, measure: str, *, is_thorough: bool = False
) -> Certificate:
    found = _certify(states, weights, instructions, measure, is_thorough=is_thorough)
    token, confidence = _truth(states, weights, measure)
    known = found.is_certain
    np.testing.assert_array_equal(found.token[known], token[known])
    assert (found.low[known] <= confidence[known]).all()
    assert (confidence[known] <= found.high[known]).all()
    return found


def _trained_like(
    rows: int, vocab_size: int, *, width: int = _WIDTH, scale: float = 6, seed: int = 0, dtype: str = "float32"
) -> tuple[np.ndarray, np.ndarray]:
    """Returns states and a head with differences of logits as in trained models: some tokens are far above the rest."""
    generator = np.random.default_rng(seed)
    weights = generator.standard_normal((vocab_size, width)).astype(np.float32) * np.float32(scale * width**-0.5)
    states = generator.standard_normal((rows, width)).astype(np.float32)
    return states.astype(jnp.dtype(dtype)), weights.astype(jnp.dtype(dtype))


@pytest.mark.parametrize("instructions", _INSTRUCTIONS)
@pytest.mark.parametrize("measure", _CERTIFIED)
@pytest.mark.parametrize(("rows", "vocab_size"), [(2, 2048), (9, 1999), (48, 2048), (384, 513), (3, 9001), (20, 9001)])
@pytest.mark.parametrize("dtype", DTYPES)
def test_intervals_contain_the_truth(instructions: str, measure: str, rows: int, vocab_size: int, dtype: str) -> None:
    """Intervals contain the truth for few rows and many, partial blocks, and either type; most rows are certain."""
    found = _check(*_trained_like(rows, vocab_size, dtype=dtype), instructions, measure)
    assert found.is_certain.mean() > 0.9
    width = (found.high - found.low)[found.is_certain]
    assert (width > 0).all()
    assert np.median(width) < 0.3


@pytest.mark.parametrize("instructions", _INSTRUCTIONS)
@pytest.mark.parametrize("measure", _CERTIFIED)
@pytest.mark.parametrize("vocab_size", [700, 9001, 40_000])
def test_thorough_answers_are_narrower_and_contain_the_truth(instructions: str, measure: str, vocab_size: int) -> None:
    """With candidates from all blocks, or from some; with AVX-512, a call of few rows is narrower still.

    AVX2 quantises states to 14 bits for any number of rows: a call of few rows gives the same intervals.
    """
    states, weights = _trained_like(24, vocab_size, scale=2)
    once = _check(states, weights, instructions, measure)
    thorough = _check(states, weights, instructions, measure, is_thorough=True)
    few = _check(states[:8], weights, instructions, measure, is_thorough=True)
    for found in (once, thorough, few):
        assert found.is_certain.mean() > 0.9
    by_row = [(found.high - found.low)[:8] for found in (once, thorough, few)]
    widths = [np.median(of_rows) for of_rows in by_row]
    assert widths[0] > widths[1] > 0
    if instructions == "avx2":
        np.testing.assert_array_equal(by_row[1], by_row[2])
    else:
        assert widths[1] > widths[2] > 0


@pytest.mark.parametrize("instructions", _INSTRUCTIONS)
@pytest.mark.parametrize("width", [3, 22, 70, 200])
@pytest.mark.parametrize("rows", [3, 20])
def test_widths_of_any_size(instructions: str, width: int, rows: int) -> None:
    """Widths that do not fill a vector are certified correctly."""
    for dtype in DTYPES:
        found = _check(*_trained_like(rows, 700, width=width, dtype=dtype), instructions, "softmax")
        assert found.is_certain.mean() > 0.8


@pytest.mark.parametrize("instructions", _INSTRUCTIONS)
@pytest.mark.parametrize("width", [4, 512, 4096])
@pytest.mark.parametrize("rows", [2, 20])
def test_the_largest_sums_have_room(instructions: str, width: int, rows: int) -> None:
    """All numbers of a state and of an entry are as large as can be, with one sign."""
    rates = np.linspace(-20, 20, 600, dtype=np.float32)
    weights = np.repeat(rates[:, None] / width, width, axis=1)
    states = np.repeat(np.where(np.arange(rows) % 2, 1, -1).astype(np.float32)[:, None], width, axis=1)
    found = _check(states, weights, instructions, "softmax")
    assert found.is_certain.all()
    np.testing.assert_array_equal(found.token, np.where(np.arange(rows) % 2, 599, 0))


@pytest.mark.parametrize("instructions", _INSTRUCTIONS)
def test_other_measures_get_the_token_alone(instructions: str) -> None:
    """Without bounds of a confidence, an argmax is certified; the interval is 0."""
    states, weights = _trained_like(40, 2048)
    found = _certify(states, weights, instructions, "patience")
    assert found.is_certain.mean() > 0.9
    np.testing.assert_array_equal(
        found.token[found.is_certain], _truth(states, weights, "softmax")[0][found.is_certain]
    )
    assert not found.low.any()
    assert not found.high.any()


@pytest.mark.parametrize("instructions", _INSTRUCTIONS)
@pytest.mark.parametrize("measure", _CERTIFIED)
@hypothesis.settings(max_examples=25, deadline=None)
# An entropy near 0, rounded to a confidence below the truth.
@hypothesis.example(seed=521, scale=10.0, spread=0.0, row=np.zeros(_WIDTH, np.float32), dtype="float32")
@hypothesis.given(
    seed=st.integers(0, 2**32 - 1),
    scale=st.floats(1e-3, 1e4),
    spread=st.floats(0, 12),
    row=hnp.arrays(np.float32, _WIDTH, elements=st.floats(-1e5, 1e5, width=32)),
    dtype=st.sampled_from(DTYPES),
)
def test_nothing_wrong_is_ever_certain(
    instructions: str, measure: str, seed: int, scale: float, spread: float, row: np.ndarray, dtype: str
) -> None:
    """With tiny and huge states, norms of very different sizes, and one large row, the truth is in the interval."""
    generator = np.random.default_rng(seed)
    states, weights = _trained_like(3, 520, seed=seed)
    weights *= np.exp(generator.uniform(-spread, spread, (520, 1))).astype(np.float32)
    weights[generator.integers(520)] = row
    states *= np.float32(scale)
    _check(states.astype(jnp.dtype(dtype)), weights.astype(jnp.dtype(dtype)), instructions, measure)


@pytest.mark.parametrize("instructions", _INSTRUCTIONS)
@pytest.mark.parametrize("rows", [2, 40])
def test_equal_rows_are_left_open(instructions: str, rows: int) -> None:
    """A head of one repeated row, or with its best token twice, has no largest logit and is left open."""
    for vocab_size in (2048, 9000):
        states, weights = _trained_like(rows, vocab_size)
        repeated = np.repeat(weights[:1], vocab_size, axis=0)
        assert not _certify(states, repeated, instructions).is_certain.any()
        twice = np.concatenate([weights[: vocab_size // 2], weights[: vocab_size // 2]])
        assert not _certify(states, twice, instructions).is_certain.any()


@pytest.mark.parametrize("instructions", _INSTRUCTIONS)
def test_nearly_equal_rows_are_told_apart_or_left_open(instructions: str) -> None:
    """With rows that differ in the last bits of one weight, certain results are right, and some are open."""
    states, weights = _trained_like(64, 2048)
    weights[1::2] = weights[::2]
    weights[1::2, 0] = np.nextafter(weights[::2, 0], np.float32(np.inf))
    found = _check(states, weights, instructions, "softmax")
    assert not found.is_certain.all()


@pytest.mark.parametrize("instructions", _INSTRUCTIONS)
@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
def test_what_is_not_finite_is_left_open(instructions: str, value: float) -> None:
    """Non-finite values leave a row open if in its state, and all rows if in the weights."""
    states, weights = _trained_like(20, 520)
    states[3, 5] = value
    found = _certify(states, weights, instructions)
    assert not found.is_certain[3]
    assert np.delete(found.is_certain, 3).mean() > 0.9
    states[3, 5] = 0
    weights[100, 7] = value
    for measure in ("softmax", "patience"):
        assert not _certify(states, weights, instructions, measure).is_certain.any()


@pytest.mark.parametrize("instructions", _INSTRUCTIONS)
@pytest.mark.parametrize("exponent", [-140, -126, -120, -118, -115, -103, -90, -60, 60, 100, 127])
def test_sizes_at_the_ends_of_float32(instructions: str, exponent: int) -> None:
    """Squares that vanish, and sums that overflow, make nothing wrong certain."""
    states, weights = _trained_like(20, 520)
    with np.errstate(over="ignore", invalid="ignore"):
        _check(np.ldexp(states, exponent), np.ldexp(weights, -exponent), instructions, "softmax")
        _check(states, np.ldexp(weights, exponent), instructions, "softmax")
        _check(np.ldexp(states, exponent), weights, instructions, "softmax")


@pytest.mark.parametrize("instructions", _INSTRUCTIONS)
def test_numbers_that_vanish(instructions: str) -> None:
    """Subnormal weights or states together with larger ones, and vanishing products, give no wrong certainty."""
    generator = np.random.default_rng(0)
    signs = np.sign(generator.standard_normal((20, 256))).astype(np.float32)
    tiny = np.ldexp(np.float32(0.99), -126)
    weights = generator.choice([-tiny, tiny], (128, 256))
    weights[:64, 0] = (350 + 2 * np.arange(64)) * tiny
    for exponent in (110, 116, 120):
        _check(np.ldexp(signs, exponent), weights, instructions, "softmax")
    weights = generator.integers(-126, 127, (128, 256)).astype(np.float32)
    weights[:, 0] = np.arange(128)
    states = signs * tiny
    states[:, 0] = 2.0**-118
    _check(states, np.ldexp(weights, 113), instructions, "softmax")
    states, weights = _trained_like(6, 520)
    weights[1::2] = weights[::2]
    weights[1::2, 0] = np.nextafter(weights[::2, 0], np.float32(np.inf))
    _check(np.ldexp(states, -58), np.ldexp(weights, -58), instructions, "softmax")


@pytest.mark.parametrize("instructions", _INSTRUCTIONS)
def test_zeros_are_left_open(instructions: str) -> None:
    """A state of zeros makes all logits equal, and is left open."""
    states, weights = _trained_like(20, 520)
    states[4] = 0
    found = _check(states, weights, instructions, "softmax")
    assert not found.is_certain[4]


@pytest.mark.parametrize("instructions", _INSTRUCTIONS)
@pytest.mark.parametrize("rows", [0, 1, 11, 24])
def test_padding_is_left_open(instructions: str, rows: int) -> None:
    """Rows of zeros after the last state, which native code skips, are left open."""
    states, weights = _trained_like(40, 2048)
    states[rows:] = 0
    found = _check(states, weights, instructions, "softmax")
    assert not found.is_certain[rows:].any()


@pytest.mark.parametrize("instructions", _INSTRUCTIONS)
@pytest.mark.parametrize("rows", [9, 11, 24])
def test_a_row_is_the_same_in_any_company(instructions: str, rows: int) -> None:
    """A row gives the same bits in any batch, except in calls of up to eight rows, which are quantised differently."""
    states, weights = _trained_like(40, 2048)
    head = quantised_head(jnp.asarray(weights))
    padded = np.where(np.arange(40)[:, None] < rows, states, 0)
    with forced(instructions):
        alone = _of_native_code(states[:rows], head)
        for company in (states, padded):
            np.testing.assert_array_equal(_of_native_code(company, head)[:, :rows], alone)


def _of_native_code(states: np.ndarray, head: CertifiedHead) -> np.ndarray:
    """Returns native code's result for each state: [facts, rows]."""
    known = screened(jnp.asarray(states), head)
    return np.stack([*known[:6], *known.rest])


@pytest.mark.parametrize("instructions", _INSTRUCTIONS)
def test_columns_that_stand_out_are_kept(instructions: str) -> None:
    """A column of huge weights that meets almost none of the states leaves the others as precise as before."""
    states, weights = _trained_like(40, 2048)
    weights[1000:, 9] = -1e6
    states[:, 9] = 1e-3
    head = quantised_head(jnp.asarray(weights))
    assert head.kept.tolist() == [9]
    found = _check(states, weights, instructions, "softmax")
    assert found.is_certain.mean() > 0.9
    assert np.median((found.high - found.low)[found.is_certain]) < 0.3


@pytest.mark.parametrize("instructions", _INSTRUCTIONS)
def test_a_bound_that_is_too_tight_is_found_out(instructions: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The checks above fail if the quantisation error is not counted."""
    states, weights = _trained_like(384, 2048, scale=12)
    monkeypatch.setattr(quantised_head_module, "_rounded_up", lambda values: (1e-3 * values).astype(np.float32))
    with pytest.raises(AssertionError):
        _check(states, weights, instructions, "softmax")
