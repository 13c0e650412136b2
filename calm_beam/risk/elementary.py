"""Exponential and logarithm with the same bits on every machine.

`numpy.exp`, `numpy.log1p`, `math.log` and scipy's special functions are computed differently from one processor and one
version to the next, and differ in their last digits. What decides about a threshold must not, and sums of such values
would not be byte-identical on two machines. Here are only operations that IEEE 754 defines to the last bit: sums,
products, quotients, and powers of two. Each is a numpy operation of its own, so that no compiler can fuse two of them.

A logarithm comes in two forms: as a float, and as an integer that is rounded down, of which the growth of a bettor's
capital is made.
"""

import numpy as np
from numpy.typing import ArrayLike

from calm_beam.risk.fixed_point import LOSS_SCALE

# The largest relative error of `exp` and `log`.
RELATIVE_ERROR = 2.0**-51

_LOG_2_E = 1.4426950408889634
# The upper part ends in 21 zeros, so that its product with an exponent is exact.
_LOG_2_UPPER = float.fromhex("0x1.62e42fee00000p-1")
_LOG_2_LOWER = float.fromhex("0x1.a39ef35793c76p-33")
# Between these the result is a normal number.
_LEAST, _LARGEST = -708.0, 709.0
# 1 / k! for k of 2 to 13. For |r| <= 0.3466 what follows is below 5e-18.
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
# log(m) = 2 artanh(s) with s = (m - 1) / (m + 1): 2 s (1 + s^2 / 3 + s^4 / 5 + ...). For |s| <= 0.1716 what follows the
# last is below 1e-19.
_ARTANH_COEFFICIENTS = tuple(2 / (2 * k + 1) for k in range(1, 13))
_BITS_OF_SQRT_HALF = np.float64(0.7071067811865476).view(np.int64)
_MANTISSA_BITS = 52
# Of `log_floor`, from the first term on: what follows the last is under 2e-14.
_FEWER_COEFFICIENTS = tuple(2 / (2 * k + 1) for k in range(8))
_LOG_2 = 0.6931471805599453
# Subtracted before rounding down, in units of 2^-32: 2^-42 covers the series' remainder and all rounding many times.
_MARGIN = 2.0**-10
# Values done at a time, so that intermediate results stay in the processor's cache: eight times as fast.
_BLOCK = 8192


def exp(values: ArrayLike) -> np.ndarray:
    """Returns e to the power of every value, to a relative error of 2^-51.

    Args:
      values: Any shape. Below -708 they count as -708, above 709 as 709: the result is always a normal number.

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
    # What the subtraction lost.
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
    # 2 s is no more than s with its exponent moved; the cubic part is small beside it.
    return np.asarray(exponent * _LOG_2_UPPER + (2 * s + (s * (squared * series) + exponent * _LOG_2_LOWER)))


def log_capital(fixed_losses: np.ndarray, *, delta: float, share: float) -> np.ndarray:
    """Returns by how much the log capital of one bettor grows on each example, rounded down.

    The bettor stakes eta = share / (1 - delta) and multiplies its capital by 1 + eta (delta - D).

    Args:
      fixed_losses: Any shape, int64 in units of 2^-32, each in [-LOSS_SCALE, LOSS_SCALE].
      delta: Risk tolerance, in (0, 1).
      share: Share of the largest bet, in (0, 1); the factor is then at least 1 - share, so no bettor goes bankrupt.

    Returns:
      The same shape, int64 in units of 2^-32: never above the true logarithm, and below it by less than 1.01 units.
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
      The same shape, int64: never above the true logarithm, and below it by less than 1.01 units.

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
    """Returns the polynomial with these coefficients, that of the lowest power first, by Horner's scheme."""
    series = np.full_like(values, coefficients[-1])
    for coefficient in coefficients[-2::-1]:
        series *= values
        series += coefficient
    return series
