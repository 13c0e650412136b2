"""Merge laws: logits have the same summary however they are divided into parts."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import scipy.special
from hypothesis import given, settings
from hypothesis import strategies as st

from calm_beam.exits import decision
from calm_beam.exits.decision import Summary

pytestmark = pytest.mark.usefixtures("strict_promotion")

# Few values, so that ties are frequent.
_LOGITS = st.lists(st.sampled_from([-np.inf, -3.0, 0.0, 1.5, 1.5, 7.25, np.inf, np.nan]), min_size=1, max_size=6)
# Every length is compiled once.
_slowly = settings(deadline=None)
_merged, _settled, _union = jax.jit(decision.merged), jax.jit(decision.settled), jax.jit(decision.union)


def _parts(logits: list[float]) -> Summary:
    """Returns a summary of each logit by itself, (1, logits)."""
    values = np.array([logits], np.float32)
    is_nan = np.isnan(values)
    index = np.arange(len(logits), dtype=np.int32)[None]
    parts = (
        np.where(is_nan, np.float32(np.inf), values),
        np.where(is_nan, np.int32(-1), index),
        np.full_like(values, -np.inf),
        np.ones_like(values),
        np.zeros_like(values),
    )
    return Summary(*map(jnp.asarray, parts))


def _folded(parts: Summary, order: list[int]) -> Summary:
    arrays = [np.asarray(values) for values in parts]
    columns = [Summary(*(jnp.asarray(values[:, place : place + 1]) for values in arrays)) for place in order]
    return functools.reduce(_merged, columns, decision.nothing((1, 1)))


def _assert_same(one: Summary, other: Summary) -> None:
    found, expected = _settled(one), _settled(other)
    for name in ("largest", "token", "total"):
        np.testing.assert_allclose(getattr(found, name), getattr(expected, name), rtol=1e-6)
    np.testing.assert_allclose(found.weighted, expected.weighted, rtol=1e-5)
    if not np.isnan(expected.largest).any():
        np.testing.assert_array_equal(found.second, expected.second)


@_slowly
@given(logits=_LOGITS, data=st.data())
def test_any_order_and_the_union_at_once_are_the_same(logits: list[float], data: st.DataObject) -> None:
    """Merged one by one in any order, beginning with the empty one, parts have the summary of their union."""
    parts = _parts(logits)
    order = data.draw(st.permutations(range(len(logits))))
    _assert_same(_folded(parts, order), _union(parts))


@_slowly
@given(logits=_LOGITS)
def test_the_summary_is_that_of_the_sorted_logits(logits: list[float]) -> None:
    """Largest, its first index, runner-up and sum are numpy's; NaN counts as the largest and makes the row unusable."""
    largest, token, second, total, weighted = (
        values.item() for values in _settled(_folded(_parts(logits), [*range(len(logits))]))
    )
    if np.isnan(logits).any():
        assert np.isnan(largest)
        assert token == 0
        assert np.isnan(total)
        return
    ordered = np.sort(logits)
    assert largest == ordered[-1]
    assert token == int(np.argmax(logits))
    assert second == (ordered[-2] if len(logits) > 1 else -np.inf)
    if np.isfinite(largest):
        assert total == pytest.approx(np.exp(scipy.special.logsumexp(logits) - largest), rel=1e-6)
        below = np.array(logits)[np.isfinite(logits)] - largest
        assert weighted == pytest.approx((np.exp(below) * below).sum(), rel=1e-5)
    else:
        assert np.isnan(total)
