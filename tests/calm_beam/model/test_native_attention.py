"""Attention by native code, against sums in float64."""

from typing import Any

import hypothesis
import hypothesis.strategies as st
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from calm_beam.arithmetic import FLOAT32, Arithmetic
from calm_beam.model import native_attention
from calm_beam.model.share import Share
from calm_beam.native import library

pytestmark = pytest.mark.skipif(not library.is_available(), reason="this machine has no native code")

_SIZES = st.sampled_from([1, 3, 8, 15, 16, 20, 32, 33, 64, 100, 128])


def _attended(queries: np.ndarray, keys: np.ndarray, values: np.ndarray, biases: np.ndarray) -> np.ndarray:
    """Returns what queries, (heads, size), attend to of keys and values, (seen, heads, size), with (heads, seen)."""
    logits = np.einsum("hd,thd->ht", queries, keys) + biases
    weights = np.exp(logits - logits.max(axis=-1, keepdims=True))
    return np.einsum("ht,thd->hd", weights / weights.sum(axis=-1, keepdims=True), values)


def _normal(generator: np.random.Generator, *shape: int) -> np.ndarray:
    return generator.standard_normal(shape).astype(np.float32)


def _check(share: Share, row: int, expected: np.ndarray, logits_within: float) -> None:
    found = np.asarray(share.alone())[row]
    np.testing.assert_allclose(found, expected, rtol=0, atol=4e-6 * (1 + logits_within) * (1 + np.abs(expected).max()))


@hypothesis.settings(max_examples=40)
@hypothesis.given(
    seed=st.integers(0, 1000),
    rows=st.integers(1, 21),
    length=st.integers(1, 70),
    heads=st.sampled_from([(1, 1), (4, 4), (4, 2), (6, 1)]),
    size=_SIZES,
    scale=st.sampled_from([0.1, 1.0, 10.0]),
    has_biases=st.booleans(),
    data=st.data(),
)
def test_paths(
    seed: int,
    rows: int,
    length: int,
    heads: tuple[int, int],
    size: int,
    scale: float,
    has_biases: bool,
    data: st.DataObject,
) -> None:
    """A row attends to what its path names up to its own step, from the first on, and no further back than it may."""
    generator = np.random.default_rng(seed)
    (num_heads, key_heads), nodes = heads, 50
    first = data.draw(st.integers(0, 1)) if length > 1 else 0
    window = data.draw(st.integers(1, length))
    queries = _normal(generator, rows, num_heads, size) * np.float32(scale / np.sqrt(size))
    keys, values = (_normal(generator, nodes, key_heads * size) for _ in range(2))
    keys[0] = values[0] = np.nan
    steps = generator.integers(first, length, rows).astype(np.int32)
    paths = generator.integers(1, nodes, (rows, length)).astype(np.int32)
    places = np.arange(length)
    age = steps[:, None] - places
    is_seen = (places >= first) & (age >= 0) & (age < window)
    # What is not seen may be anything.
    paths[~is_seen] = 0
    biases = _normal(generator, num_heads, length) if has_biases else np.zeros((0, 0), np.float32)
    share = native_attention.share_of_path(
        jnp.array(queries),
        (jnp.array(keys), jnp.array(values)),
        paths=paths,
        steps=steps,
        biases=jnp.array(biases),
        first=first,
        window=window,
    )
    for row in range(rows):
        seen = paths[row, is_seen[row]]
        of_keys, of_values = (
            np.repeat(store[seen].reshape(-1, key_heads, size), num_heads // key_heads, axis=1).astype(np.float64)
            for store in (keys, values)
        )
        added = biases[:, age[row, is_seen[row]]] if has_biases else np.zeros((num_heads, len(seen)))
        _check(share, row, _attended(queries[row].astype(np.float64), of_keys, of_values, added), scale)


@hypothesis.settings(max_examples=40)
@hypothesis.given(
    seed=st.integers(0, 1000),
    rows=st.integers(1, 21),
    source=st.integers(1, 40),
    heads=st.sampled_from([(1, 1), (4, 4), (4, 2)]),
    size=_SIZES,
)
def test_sources(seed: int, rows: int, source: int, heads: tuple[int, int], size: int) -> None:
    """A row attends to what its source has that is no padding, from the first position that it sees."""
    generator = np.random.default_rng(seed)
    (num_heads, key_heads), places = heads, 5
    queries = _normal(generator, rows, num_heads, size)
    keys, values = (_normal(generator, places, key_heads, source, size) for _ in range(2))
    lengths = generator.integers(1, source + 1, places)
    mask = np.arange(source) < lengths[:, None]
    for values_of in (keys, values):
        np.swapaxes(values_of, 1, 2)[~mask] = np.nan
    of_row = generator.integers(0, places, rows).astype(np.int32)
    seen_from = generator.integers(0, lengths[of_row]).astype(np.int32)
    share = native_attention.share_of_source(
        jnp.array(queries),
        (jnp.array(keys), jnp.array(values)),
        places=of_row,
        mask=jnp.array(mask),
        seen_from=jnp.array(seen_from),
    )
    for row, place in enumerate(of_row):
        of_keys, of_values = (
            np.repeat(
                np.swapaxes(part[place, :, seen_from[row] : lengths[place]], 0, 1), num_heads // key_heads, axis=1
            ).astype(np.float64)
            for part in (keys, values)
        )
        expected = _attended(queries[row].astype(np.float64), of_keys, of_values, np.zeros((num_heads, len(of_keys))))
        _check(share, row, expected, np.sqrt(size))


def _of_one_path(queries: Any, keys: Any, values: Any, **options: Any) -> Share:
    """Returns the share of rows that all attend to every key, of one head."""
    count = len(keys)
    rows = len(queries)
    return native_attention.share_of_path(
        jnp.asarray(queries, jnp.float32)[:, None],
        (jnp.asarray(keys, jnp.float32), jnp.asarray(values, jnp.float32)),
        paths=np.tile(np.arange(count, dtype=np.int32), (rows, 1)),
        steps=np.full(rows, count - 1, np.int32),
        biases=jnp.zeros((0, 0)),
        **{"first": 0, "window": count, **options},
    )


@pytest.mark.parametrize("broken", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("where", ["queries", "keys", "values"])
def test_what_is_no_number_is_not_hidden(broken: float, where: str) -> None:
    """A number that is not finite, and is seen, leaves none that is; other rows keep theirs."""
    arrays = {name: np.full((3, 16), 0.1, np.float32) for name in ("queries", "keys", "values")}
    arrays[where][1, 2] = broken
    share = _of_one_path(**arrays)
    is_finite = np.isfinite(np.asarray(share.alone())).all(axis=(1, 2))
    if where == "keys" and broken == -np.inf:
        # Its logit is below all others: nothing is had of it, as XLA has it.
        assert is_finite.all()
    else:
        assert is_finite.tolist() == ([True, False, True] if where == "queries" else [False] * 3)


@pytest.mark.parametrize("size", [30.0, 80.0, 1e4, 1e20, -1e20])
def test_large_logits(size: float) -> None:
    """Logits of any size, with others far below them."""
    queries = np.full((2, 4), 1.0)
    keys = np.array([[size / 4] * 4, [size / 4 - 1] * 4, [-abs(size)] * 4])
    share = _of_one_path(queries, keys, np.eye(3, 4))
    logits = keys.astype(np.float32).astype(np.float64).sum(axis=1)
    weights = np.exp(logits - logits.max())
    np.testing.assert_allclose(share.alone()[0, 0, :3], weights / weights.sum(), rtol=2e-5, atol=1e-30)


def test_who_sees_nothing() -> None:
    """There is nothing, which counts for nothing beside what is seen."""
    nothing = _of_one_path(np.ones((2, 8)), np.ones((1, 8)), np.ones((1, 8)), first=1)
    assert (np.asarray(nothing.mixed) == 0).all()
    assert (np.asarray(nothing.total) == 0).all()
    other = _of_one_path(np.ones((2, 8)), np.full((2, 8), -200.0), np.full((2, 8), 3.0))
    np.testing.assert_allclose(nothing.merged(other), 3.0, rtol=1e-6)
    beyond = native_attention.share_of_source(
        jnp.ones((1, 1, 8)),
        (jnp.full((2, 1, 4, 8), np.nan), jnp.full((2, 1, 4, 8), np.nan)),
        places=np.array([2], np.int32),
        mask=jnp.ones((2, 4), bool),
        seen_from=jnp.zeros(1, jnp.int32),
    )
    assert (np.asarray(beyond.mixed) == 0).all()


def test_a_row_has_its_bits_in_any_company() -> None:
    """What a row gets does not depend on the others of its call, nor on the threads."""
    generator = np.random.default_rng(0)
    queries, keys, values = (_normal(generator, count, 32) for count in (300, 40, 40))
    many = _of_one_path(queries, keys, values)
    for rows in (slice(0, 1), slice(5, 9), slice(100, 229)):
        few = _of_one_path(queries[rows], keys, values)
        for one, other in zip(few, many, strict=True):
            np.testing.assert_array_equal(one, np.asarray(other)[rows])


def test_parts_merge() -> None:
    """Two parts of the keys come to what all of them are."""
    generator = np.random.default_rng(1)
    queries, keys, values = (_normal(generator, count, 32) for count in (9, 40, 40))
    parts = [_of_one_path(queries, keys[part], values[part]) for part in (slice(0, 13), slice(13, 40))]
    whole = _of_one_path(queries, keys, values)
    np.testing.assert_allclose(parts[0].merged(parts[1]), whole.alone(), rtol=0, atol=2e-6)


def test_what_it_is_for(monkeypatch: pytest.MonkeyPatch) -> None:
    """float32 on one device, where there is native code."""
    assert native_attention.is_for(FLOAT32, devices=1)
    assert not native_attention.is_for(Arithmetic(dtype="bfloat16"), devices=1)
    assert not native_attention.is_for(FLOAT32, devices=2)
    monkeypatch.setattr(native_attention, "is_available", lambda: False)
    assert not native_attention.is_for(FLOAT32, devices=1)


def test_it_is_compiled_into_programs() -> None:
    """It may be called while JAX compiles."""
    queries, keys, values = (np.full((count, 8), 0.5, np.float32) for count in (3, 4, 4))
    np.testing.assert_array_equal(jax.jit(_of_one_path)(queries, keys, values).alone(), np.full((3, 1, 8), 0.5))
