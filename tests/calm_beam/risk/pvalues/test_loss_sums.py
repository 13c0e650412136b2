"""p-values of loss sums: goldens in 60 digits, brute force, and common properties."""

import json
import math
import os
import pathlib
import re
from collections.abc import Callable
from fractions import Fraction

import mpmath
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from calm_beam.risk.pvalues import exact_binomial_p_value, hoeffding_bentkus_p_value, hoeffding_p_value
from tests.calm_beam.risk.pvalues import make_goldens

_GOLDENS = pathlib.Path(__file__).with_name("goldens.json")
_EXTERNAL = os.environ.get("CALM_BEAM_GOLDENS")
_COLUMNS = {
    "hoeffding": hoeffding_p_value,
    "hb": hoeffding_bentkus_p_value,
    "binomial": exact_binomial_p_value,
}
_DELTA = st.floats(min_value=0.001, max_value=0.999)
_N = st.integers(min_value=1, max_value=10**6)
_SHARE = st.floats(min_value=0.0, max_value=1.0)

PValue = Callable[..., np.ndarray]

all_p_values = pytest.mark.parametrize("p_value", [hoeffding_p_value, hoeffding_bentkus_p_value])


def _assert_agrees(path: pathlib.Path, column: str, *, relative: float) -> tuple[list[float], list[mpmath.mpf]]:
    """Asserts that every row of the file is met to the relative tolerance, or to 1e-300; returns both values."""
    rows = [row for row in json.loads(path.read_text(encoding="utf-8"))["rows"] if row[column] is not None]
    assert len(rows) > 100
    computed = [
        _COLUMNS[column](np.array([float(row["total"])]), n=row["n"], delta=float(row["delta"]))[0] for row in rows
    ]
    # Our p-value for all smaller ones is 1e-300, which the absolute tolerance covers.
    exact = [mpmath.mpf(row[column]) for row in rows]
    np.testing.assert_allclose(computed, [float(value) for value in exact], rtol=relative, atol=1e-300)
    return computed, exact


@pytest.mark.parametrize("column", _COLUMNS)
def test_agrees_with_60_digit_arithmetic(column: str) -> None:
    """60-digit goldens are met to 1e-11, and from above, down to tails of 1e-200 and up to a million examples."""
    computed, exact = _assert_agrees(_GOLDENS, column, relative=1e-11)
    # They are rounded to 20 digits.
    assert all(ours >= theirs * (1 - mpmath.mpf(10) ** -18) for ours, theirs in zip(computed, exact, strict=True))


@pytest.mark.skipif(_EXTERNAL is None, reason="CALM_BEAM_GOLDENS is unset: no folder with another pvalues.json")
@pytest.mark.parametrize("column", _COLUMNS)
def test_agrees_with_external_goldens(column: str) -> None:
    """Goldens made elsewhere, in CALM_BEAM_GOLDENS/pvalues.json, are met to 1e-9."""
    assert _EXTERNAL is not None
    _assert_agrees(pathlib.Path(_EXTERNAL) / "pvalues.json", column, relative=1e-9)


@pytest.mark.parametrize("n", [1, 2, 5, 13, 40])
@pytest.mark.parametrize("delta", [0.02, 0.1, 0.5, 0.9])
def test_agrees_with_brute_force(n: int, delta: float) -> None:
    """HB equals its textbook formula, with the binomial tail in exact fractions."""
    p = Fraction(delta)
    for numerator in range(4 * n + 1):
        total = Fraction(numerator, 4)
        mean = total / n
        if mean >= p:
            expected = 1.0
        else:
            pairs = ((mean, p), (1 - mean, 1 - p))
            divergence = sum(float(a) * math.log(a / b) for a, b in pairs if a > 0)
            tail = sum(math.comb(n, k) * p**k * (1 - p) ** (n - k) for k in range(math.ceil(total) + 1))
            expected = min(1.0, math.exp(-n * divergence), math.e * float(tail))
        computed = hoeffding_bentkus_p_value([float(total)], n=n, delta=delta)
        assert computed[0] == pytest.approx(expected, rel=1e-12, abs=0)


@pytest.mark.parametrize("delta", [0.01, 0.1, 0.5])
@pytest.mark.parametrize("n", [1, 100, 1600])
def test_at_risk_zero(n: int, delta: float) -> None:
    """Without any loss HB is (1 - delta)^n and Hoeffding exp(-2 n delta^2); neither is NaN, nor 0 where they vanish."""
    bentkus, hoeffding = (
        p_value([0.0], n=n, delta=delta)[0] for p_value in (hoeffding_bentkus_p_value, hoeffding_p_value)
    )
    assert bentkus == pytest.approx((1 - delta) ** n, rel=1e-12, abs=1e-300)
    assert hoeffding == pytest.approx(math.exp(-2 * n * delta**2), rel=1e-12, abs=1e-300)
    assert min(bentkus, hoeffding) > 0


def test_each_half_can_decide() -> None:
    """Far below delta the Bentkus half is the smaller, near delta the divergence is."""
    n, delta = 1000, 0.1
    tail = sum(math.comb(n, k) * delta**k * (1 - delta) ** (n - k) for k in range(61))
    divergence = {
        mean: mean * math.log(mean / delta) + (1 - mean) * math.log((1 - mean) / 0.9) for mean in (0.06, 0.098)
    }
    assert math.e * tail < math.exp(-n * divergence[0.06])
    far, near = hoeffding_bentkus_p_value([60.0, 98.0], n=n, delta=delta)
    assert far == pytest.approx(math.e * tail, rel=1e-12, abs=0)
    assert near == pytest.approx(math.exp(-n * divergence[0.098]), rel=1e-12, abs=0)


def test_any_excess_over_an_integer_raises_the_ceiling() -> None:
    """One unit of 2^-32 above an integer costs a whole loss in the Bentkus half."""
    n, delta = 1000, 0.1
    at, above, next_one = hoeffding_bentkus_p_value([60.0, 60.0 + 2.0**-32, 61.0], n=n, delta=delta)
    assert at < above
    assert above == pytest.approx(next_one, rel=1e-12, abs=0)


@pytest.mark.parametrize("n", [1, 1000, 2**31])
@pytest.mark.parametrize("delta", [5e-324, 1e-300, 1e-17, 1 - 2.0**-30, 1 - 2.0**-53])
def test_extreme_tolerances(n: int, delta: float) -> None:
    """Next to 0 and 1 nothing overflows, and p-values still grow with the losses from above 0 up to 1."""
    sums = np.unique([0.0, 1.0, n // 2, n - 1, n])
    for p_value in (hoeffding_p_value, hoeffding_bentkus_p_value, exact_binomial_p_value):
        with np.errstate(all="raise", under="ignore"):
            computed = p_value(sums, n=n, delta=delta)
        assert np.all(computed > 0)
        assert np.all(computed[1:] >= computed[:-1] * (1 - 1e-11))
        assert computed[-1] == 1


@settings(max_examples=150)
@given(
    n=st.one_of(st.integers(1, 200), st.integers(1, 10**5), st.sampled_from([10**6, 3 * 10**6])),
    delta=st.one_of(_DELTA, st.sampled_from([1e-9, 1e-5, 1 - 1e-9])),
    deviations=st.floats(-3, 37),
    is_whole=st.booleans(),
)
def test_is_never_below_the_exact_value(n: int, delta: float, deviations: float, is_whole: bool) -> None:
    """p-values are upper bounds of those in 60-digit arithmetic, and above them by a share of 1e-10 at most."""
    total = min(max(n * delta - deviations * math.sqrt(n * delta * (1 - delta)), 0.0), float(n))
    total = float(math.floor(total)) if is_whole else total
    exact, p = Fraction(total), Fraction(delta)
    with mpmath.workdps(60):
        pairs = [
            (hoeffding_p_value, make_goldens.hoeffding(exact, n, p)),
            (hoeffding_bentkus_p_value, make_goldens.hoeffding_bentkus(exact, n, p)),
        ]
        if is_whole:
            pairs.append((exact_binomial_p_value, make_goldens.binomial_cdf(int(total), n, p)))
        for p_value, expected in pairs:
            computed = mpmath.mpf(float(p_value([total], n=n, delta=delta)[0]))
            assert min(expected, 1) <= computed <= max(expected * (1 + mpmath.mpf(10) ** -10), mpmath.mpf(1e-300))


@all_p_values
@given(n=_N, delta=_DELTA, shares=st.lists(_SHARE, min_size=2, max_size=8))
def test_is_monotone_and_in_range(p_value: PValue, n: int, delta: float, shares: list[float]) -> None:
    """p-values lie in [0, 1], never fall as the losses grow, and are 1 once the mean reaches delta."""
    sums = np.sort(np.concatenate([np.array(shares), np.array(shares) * delta])) * n
    p_values = p_value(sums, n=n, delta=delta)
    assert np.all((p_values >= 0) & (p_values <= 1))
    # Two sums may be so close that only rounding distinguishes their p-values.
    assert np.all(p_values[1:] >= p_values[:-1] * (1 - 1e-11))
    assert np.all(p_values[sums / n >= delta] == 1.0)


@all_p_values
@given(n=_N, deltas=st.tuples(_DELTA, _DELTA), share=_SHARE)
def test_falls_as_delta_grows(p_value: PValue, n: int, deltas: tuple[float, float], share: float) -> None:
    """A larger tolerance never has a larger p-value."""
    strict, generous = sorted(deltas)
    sums = [share * strict * n]
    assert p_value(sums, n=n, delta=generous)[0] <= p_value(sums, n=n, delta=strict)[0] * (1 + 1e-11)


@given(n=_N, delta=_DELTA, share=_SHARE)
def test_bentkus_improves_on_hoeffding(n: int, delta: float, share: float) -> None:
    """HB is never above Hoeffding, by Pinsker's inequality."""
    sums = [share * n]
    ours = hoeffding_bentkus_p_value(sums, n=n, delta=delta)[0]
    assert ours <= hoeffding_p_value(sums, n=n, delta=delta)[0] * (1 + 1e-11)


@all_p_values
def test_shape_is_kept(p_value: PValue) -> None:
    """There is one p-value per threshold, none for none; a grid of size 1 is no scalar."""
    for shape in ((0,), (1,), (20,)):
        assert p_value(np.zeros(shape), n=10, delta=0.1).shape == shape


@all_p_values
def test_delta_outside_is_refused(p_value: PValue) -> None:
    """Delta must be strictly inside (0, 1)."""
    for delta in (5, 0, 1, -0.1, math.nan):
        message = f"delta must be in (0, 1), got {delta}. Tolerances are fractions: for 5 % pass delta=0.05."
        with pytest.raises(ValueError, match=re.escape(message)):
            p_value([0.0], n=10, delta=delta)


@all_p_values
def test_n_is_checked(p_value: PValue) -> None:
    """N must be an integer of at least 1."""
    with pytest.raises(ValueError, match=re.escape("n must be at least 1, got 0. Is the calibration set empty?")):
        p_value([0.0], n=0, delta=0.1)
    with pytest.raises(TypeError, match=re.escape("n must be an integer, got 10.0.")):
        p_value([0.0], n=10.0, delta=0.1)


@all_p_values
def test_sums_outside_are_refused(p_value: PValue) -> None:
    """A sum that n losses cannot have is refused by value and place, NaN included."""
    for value in (-0.5, 10.5, math.nan, math.inf):
        message = f"loss_sum[1] must be in [0, 10] for n = 10, got {value}. It is the sum of n losses"
        with pytest.raises(ValueError, match=re.escape(message)):
            p_value([0.0, value], n=10, delta=0.1)
