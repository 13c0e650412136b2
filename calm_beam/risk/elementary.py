"""Exponential, logarithm and binomial distribution with the same bits on every machine.

`numpy.exp`, `numpy.log1p`, `math.log` and scipy's special functions are computed differently from one processor and one
version to the next, and differ in their last digits. Decisions about thresholds must not differ, and sums of such
values would not be byte-identical on two machines. This module uses only operations that IEEE 754 defines to the last
bit: sums, products, quotients, and powers of two. Each is a separate numpy operation, so that no compiler can fuse two
of them.

A logarithm comes in two forms: as a float, and as an integer that is rounded down, from which the growth of a bettor's
capital is computed.

All our exponential bounds use the distance in nats, rounded down, by which a sum of losses or coins lies below
its expectation. The binomial distribution function, the probability of at most so many heads, is accurate far into its
tail, and never too small.
"""

import numpy as np
from numpy.typing import ArrayLike

from calm_beam.risk.losses import LOSS_SCALE

# The largest relative error of `exp` and `log`.
RELATIVE_ERROR = 2.0**-51

_LOG_2_E = 1.4426950408889634
# The upper part ends in 21 zeros, so that its product with an exponent is exact.
_LOG_2_UPPER = float.fromhex("0x1.62e42fee00000p-1")
_LOG_2_LOWER = float.fromhex("0x1.a39ef35793c76p-33")
# Between these the result is a normal number.
_LEAST, _LARGEST = -708.0, 709.0
# 1 / k! for k of 2 to 13. For |r| <= 0.3466 the remainder is below 5e-18.
_EXP_COEFFICIENTS = (
    1 / 2,
    1 / 6,
    1 / 24,
    1 / 120,
    1 / 720,
    1 / 5040,
    1 / 40320,
    1 / 362880,
    1 / 3628800,
    1 / 39916800,
    1 / 479001600,
    1 / 6227020800,
)
# log(m) = 2 artanh(s) with s = (m - 1) / (m + 1): 2 s (1 + s^2 / 3 + s^4 / 5 + ...). For |s| <= 0.1716 the remainder
# after the last term is below 1e-19.
_ARTANH_COEFFICIENTS = tuple(2 / (2 * k + 1) for k in range(1, 13))
_BITS_OF_SQRT_HALF = np.float64(0.7071067811865476).view(np.int64)
_MANTISSA_BITS = 52
# Coefficients of `log_floor`, from the first term on; the remainder is under 2e-14.
_FEWER_COEFFICIENTS = tuple(2 / (2 * k + 1) for k in range(8))
_LOG_2 = 0.6931471805599453
# Subtracted before rounding down, in units of 2^-32: 2^-42 covers the series' remainder and all rounding many times.
_MARGIN = 2.0**-10
# Values per block, so that intermediate results stay in the processor's cache: eight times as fast.
_BLOCK = 8192


def exp(values: ArrayLike) -> np.ndarray:
    """Returns e to the power of every value, to a relative error of 2^-51.

    Args:
      values: Any shape. Values are clipped to [-708, 709], so the result is always a normal number.

    Returns:
      The same shape, float64; NaN for NaN. Exactly 1 at 0.

    Source: the Taylor series, after the reduction of Cody and Waite (1980).

    >>> exp([0.0, 2.0, -2000.0]).tolist()
    [1.0, 7.38905609893065, 3.307553003638408e-308]
    """
    x = np.clip(np.asarray(values, np.float64), _LEAST, _LARGEST)
    exponent = np.rint(x * _LOG_2_E)
    upper = x - exponent * _LOG_2_UPPER
    lower = exponent * _LOG_2_LOWER
    r = upper - lower
    # The rounding error of the subtraction.
    lost = (upper - r) - lower
    series = _polynomial(r, _EXP_COEFFICIENTS)
    with np.errstate(invalid="ignore"):
        power = exponent.astype(np.int64)
    return np.asarray(np.ldexp(1 + (r + (lost + r * r * series)), power))


def log(values: ArrayLike) -> np.ndarray:
    """Returns the natural logarithm of every value, to a relative error of 2^-51.

    Args:
      values: Any shape, positive normal numbers.

    Returns:
      The same shape, float64. Exactly 0 at 1.

    Source: the series of the inverse hyperbolic tangent.

    >>> log([1.0, 10.0]).tolist()
    [0.0, 2.302585092994046]
    """
    x = np.asarray(values, np.float64)
    exponent, s = _reduced(x)
    squared = s * s
    series = _polynomial(squared, _ARTANH_COEFFICIENTS)
    # 2 s is exact, as only the exponent of s moves; the cubic part is small compared with it.
    return np.asarray(exponent * _LOG_2_UPPER + (2 * s + (s * (squared * series) + exponent * _LOG_2_LOWER)))


def log_capital(fixed_losses: np.ndarray, *, delta: float, share: float) -> np.ndarray:
    """Returns the growth of one bettor's log capital on each example, rounded down.

    The bettor stakes eta = share / (1 - delta) and multiplies its capital by 1 + eta (delta - D).

    Args:
      fixed_losses: Any shape, int64 in units of 2^-32, each in [-LOSS_SCALE, LOSS_SCALE].
      delta: Risk tolerance, in (0, 1).
      share: Share of the largest bet, in (0, 1); the factor is then at least 1 - share, so no bettor goes bankrupt.

    Returns:
      The same shape, int64 in units of 2^-32: at most the true logarithm, and less than 1.01 units below it.
      Rounding down makes p-values larger.

    Source: ours; the series is the textbook's for the inverse hyperbolic tangent.
    """
    eta = share / (1 - delta)
    flat = fixed_losses.reshape(-1)
    grown = np.empty(flat.shape, np.int64)
    for start in range(0, flat.size, _BLOCK):
        block = slice(start, start + _BLOCK)
        grown[block] = log_floor(1 + eta * (delta - flat[block] / LOSS_SCALE))
    return grown.reshape(fixed_losses.shape)


def log_floor(values: np.ndarray) -> np.ndarray:
    """Returns the logarithms of positive normal numbers in units of 2^-32, rounded down.

    Args:
      values: Any shape, float64.

    Returns:
      The same shape, int64: at most the true logarithm, and less than 1.01 units below it.

    Source: the series of the inverse hyperbolic tangent.
    """
    exponent, s = _reduced(values)
    series = _polynomial(s * s, _FEWER_COEFFICIENTS)
    logarithm = exponent * _LOG_2 + s * series
    return np.asarray(np.floor(logarithm * LOSS_SCALE - _MARGIN).astype(np.int64))


def _reduced(values: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Returns the exponent of every number, and s = (m - 1) / (m + 1) of its mantissa m."""
    # A number is 2^exponent times a mantissa in [sqrt(1/2), sqrt(2)), where the series is short.
    bits = values.view(np.int64)
    exponent = (bits - _BITS_OF_SQRT_HALF) >> _MANTISSA_BITS
    mantissa = (bits - (exponent << _MANTISSA_BITS)).view(np.float64)
    return exponent, (mantissa - 1) / (mantissa + 1)


def _polynomial(values: np.ndarray, coefficients: tuple[float, ...]) -> np.ndarray:
    """Returns the polynomial with these coefficients, lowest power first, by Horner's scheme."""
    series = np.full_like(values, coefficients[-1])
    for coefficient in coefficients[-2::-1]:
        series *= values
        series += coefficient
    return series


# 2^27 + 1 splits a float64 into two halves whose products are exact.
_SPLITTER = 134217729.0
# Up to 0.5, a ratio between 1/3 and 3, the series converges fast; beyond, the direct formula loses no digits.
_NEAR = 0.5
# 1 / (2 j + 1) from j = 1 on; the remainder is below 1e-18 of the sum.
_DEVIANCE_COEFFICIENTS = tuple(1 / (2 * j + 1) for j in range(1, 28))
# The deviance is lowered by this share, so that it is never too large: 16 units of 2^-53, where 12 are enough.
_DEVIANCE_ROUNDING = 2.0**-49
# The logarithm of k! less Stirling's (k + 1/2) log k - k + log(2 pi) / 2, from k = 1 on; 0 has no entry.
_STIRLING_ERRORS = np.array(
    [
        0.0,
        0.08106146679532726,
        0.0413406959554093,
        0.02767792568499834,
        0.020790672103765093,
        0.016644691189821193,
        0.013876128823070748,
        0.01189670994589177,
        0.010411265261972096,
        0.009255462182712733,
        0.00833056343336287,
        0.007573675487951841,
        0.00694284010720953,
        0.006408994188004207,
        0.0059513701127588475,
        0.005554733551962801,
    ]
)
# Coefficients of odd powers of 1 / k; the remainder is below 2e-18 from k = 16 on.
_STIRLING_COEFFICIENTS = (1 / 12, -1 / 360, 1 / 1260, -1 / 1680, 1 / 1188, -691 / 360360)
_ONE_OVER_ROOT_2_PI = 0.3989422804014327
# Terms taken at a time, growing up to a bound. Their number does not depend on other values in the same call.
_FIRST_TERMS, _MOST_TERMS = 64, 4096
_ROWS_AT_A_TIME = 128
# The sum ends where the remainder is a smaller share of it.
_NEGLIGIBLE = 2.0**-60
# Numbers of roundings: in a term's factor; in the sum and the factor before it.
_ROUNDINGS_PER_TERM, _ROUNDINGS = 6, 16
_UNIT = 2.0**-53
# Rounding the deviance d down raises exp(-d) by less than this share.
_RISE_BY_ROUNDING = 2.0**-49


def gap(sums: np.ndarray, *, n: int, delta: float) -> np.ndarray:
    """Returns sums - n delta to a relative error of 2^-52, also where the two nearly cancel."""
    product = n * delta
    return np.asarray((sums - product) - _product_error(float(n), delta, product=product))


def binomial_deviance(
    successes: np.ndarray, gaps: np.ndarray, *, n: int, probability: float, complement: float
) -> np.ndarray:
    """Returns n times the divergence between coins of bias successes / n and p, rounded down.

    The textbook form adds two terms that nearly cancel where the two are close, and n multiplies what is left of their
    rounding errors. With the biases written as p (1 + t) and (1 - p) (1 + s) the linear parts cancel symbolically,
    and both remaining terms are positive.

    Args:
      successes: Any shape, in [0, n], not necessarily whole.
      gaps: The same shape: successes - n p.
      n: Number of tosses.
      probability: p, in (0, 1).
      complement: 1 - p.
    """
    heads, tails = n * probability, n * complement
    above = heads * _xlogx_excess(successes / heads, gaps / heads)
    below = tails * _xlogx_excess((n - successes) / tails, -gaps / tails)
    return np.asarray((above + below) * (1 - _DEVIANCE_ROUNDING))


def _xlogx_excess(ratios: np.ndarray, t: np.ndarray) -> np.ndarray:
    """Returns w log(w) - t for ratios w = 1 + t >= 0; near t = 0 that is t^2 / 2, and 1 at w = 0 (0 log 0 = 0)."""
    # With z = t / (2 + t), log(w) is 2 artanh(z) and w is (1 + z) / (1 - z).
    z = t / (2 + t)
    is_near = np.abs(z) <= _NEAR
    z = np.where(is_near, z, 0.0)
    squared = z * z
    series = np.full_like(z, _DEVIANCE_COEFFICIENTS[-1])
    for coefficient in _DEVIANCE_COEFFICIENTS[-2::-1]:
        series *= squared
        series += coefficient
    near = 2 * squared * (1 + (1 + z) * z * series) / (1 - z)
    direct = ratios * log(np.where(ratios > 0, ratios, 1.0)) - t
    return np.asarray(np.where(is_near, near, direct))


def _product_error(a: float, b: float, *, product: float) -> float:
    """Returns a b - product exactly, where product is a b as rounded (Dekker 1971)."""
    a_upper, a_lower = _halves(a)
    b_upper, b_lower = _halves(b)
    return a_lower * b_lower - (((product - a_upper * b_upper) - a_lower * b_upper) - a_upper * b_lower)


def _halves(value: float) -> tuple[float, float]:
    moved = _SPLITTER * value
    upper = moved - (moved - value)
    return upper, value - upper


def binomial_cdf(successes: np.ndarray, n: int, *, probability: float) -> np.ndarray:
    """Returns P(Bin(n, probability) <= successes), rounded up: an upper bound, close in relative terms.

    It exceeds the exact value by a share of about 1e-13 in ordinary cases, and by less than 1e-9 at any n up to 2^31.
    Its bits are the same on every machine.

    Args:
      successes: Any shape, whole numbers in [0, n].
      n: Number of trials.
      probability: Probability of success, in (0, 1).

    Returns:
      The same shape, in (0, 1].

    Source: Loader (2000), "Fast and accurate computation of binomial probabilities", for a single number of successes;
    the others are added as multiples of it.
    """
    distinct, places = np.unique(successes, return_inverse=True)
    result = np.ones(distinct.size)
    gaps = gap(distinct, n=n, delta=probability)
    is_low = gaps <= 0
    if is_low.any():
        low, share = _lower_tail(distinct[is_low], -gaps[is_low], n=n, p=probability, q=1 - probability)
        result[is_low] = low * (1 + share)
    # Above the mean the upper tail is the small one: at most n - successes - 1 failures.
    is_high = (gaps > 0) & (distinct < n)
    if is_high.any():
        failures = n - distinct[is_high] - 1
        high, share = _lower_tail(failures, gaps[is_high] + 1, n=n, p=1 - probability, q=probability)
        result[is_high] = 1 - high * (1 - share) + _RISE_BY_ROUNDING
    return np.asarray(np.minimum(result, 1.0)[places].reshape(successes.shape))


def _lower_tail(
    successes: np.ndarray, below: np.ndarray, *, n: int, p: float, q: float
) -> tuple[np.ndarray, np.ndarray]:
    """Returns P(Bin(n, p) <= successes) for numbers below the mean, and its largest relative error.

    Args:
      successes: shape (numbers,), whole numbers in [0, n).
      below: The same shape: n p - successes, at least 0.
      n: Number of trials.
      p: Probability of success.
      q: Probability of failure.
    """
    sums, terms = np.empty(successes.size), np.empty(successes.size)
    for start in range(0, successes.size, _ROWS_AT_A_TIME):
        part = slice(start, start + _ROWS_AT_A_TIME)
        sums[part], terms[part] = _relative_sum(successes[part], n=n, p=p, q=q)
    failures = n - successes
    inner = np.maximum(successes, 1.0)
    density = np.where(successes > 0, _ONE_OVER_ROOT_2_PI * np.sqrt(n / (inner * failures)), 1.0)
    errors = np.where(
        successes > 0,
        (_stirling_error(np.array(float(n))) - _stirling_error(inner)) - _stirling_error(failures),
        0.0,
    )
    # The deviance is rounded down, so the exponent is never too small.
    exponent = errors - binomial_deviance(successes, -below, n=n, probability=p, complement=q)
    return sums * density * exp(exponent), (_ROUNDINGS + _ROUNDINGS_PER_TERM * terms) * _UNIT


def _relative_sum(successes: np.ndarray, *, n: int, p: float, q: float) -> tuple[np.ndarray, np.ndarray]:
    """Returns P(X <= k) / P(X = k) and the number of terms added, for k below the mean.

    Each P(X = j - 1) is P(X = j) times a ratio below 1 that falls with j, so a geometric series bounds the terms left
    out; it is added.
    """
    total, last, added = np.ones(successes.size), np.ones(successes.size), np.zeros(successes.size)
    is_open = successes > 0
    size = _FIRST_TERMS
    while is_open.any():
        begun = added[is_open][:, None]
        steps = begun + np.arange(size + 1)
        k = successes[is_open][:, None]
        ratios = np.maximum(0.0, k - steps) * q / ((n - k + 1 + steps) * p)
        factors = ratios[:, :-1].copy()
        factors[:, 0] *= last[is_open]
        # Both accumulations go from left to right, by definition.
        terms = np.multiply.accumulate(factors, axis=1)
        factors[:] = terms
        factors[:, 0] += total[is_open]
        grown = np.add.accumulate(factors, axis=1)[:, -1]
        following = ratios[:, -1]
        left_out = np.where(following < 1, terms[:, -1] * following / np.maximum(1 - following, _UNIT), np.inf)
        is_done = left_out <= _NEGLIGIBLE * grown
        total[is_open] = np.where(is_done, grown + left_out, grown)
        last[is_open] = terms[:, -1]
        added[is_open] += size
        is_open[is_open] = ~is_done
        size = min(2 * size, _MOST_TERMS)
    return total, np.minimum(added, successes)


def _stirling_error(numbers: np.ndarray) -> np.ndarray:
    """Returns the log of a factorial minus Stirling's formula, for whole numbers from 1 on."""
    inverse = 1 / numbers
    squared = inverse * inverse
    series = np.full_like(inverse, _STIRLING_COEFFICIENTS[-1])
    for coefficient in _STIRLING_COEFFICIENTS[-2::-1]:
        series = series * squared + coefficient
    series = series * inverse
    small = np.minimum(numbers, _STIRLING_ERRORS.size - 1).astype(np.int64)
    return np.asarray(np.where(numbers < _STIRLING_ERRORS.size, _STIRLING_ERRORS[small], series))
