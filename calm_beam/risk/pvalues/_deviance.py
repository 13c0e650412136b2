"""How far a sum of losses lies below its expectation, in nats: what all our exponential bounds are made of."""

import numpy as np

from calm_beam.risk import elementary

# 2^27 + 1 parts a float64 in two halves whose products are exact.
_SPLITTER = 134217729.0
# Up to here, which is a ratio between 1/3 and 3, the series converges fast; beyond, the direct formula loses no digits.
_NEAR = 0.5
# 1 / (2 j + 1) from j = 1 on; what follows is below 1e-18 of the whole.
_COEFFICIENTS = tuple(1 / (2 * j + 1) for j in range(1, 28))
# By this share the deviance is lowered, so that it is none too large: 16 units of 2^-53, where 12 would do.
_ROUNDING = 2.0**-49


def gap(sums: np.ndarray, *, n: int, delta: float) -> np.ndarray:
    """Returns sums - n delta to a relative error of 2^-52, also where the two nearly cancel."""
    product = n * delta
    return np.asarray((sums - product) - _product_error(float(n), delta, product=product))


def binomial_deviance(
    successes: np.ndarray, gaps: np.ndarray, *, n: int, probability: float, complement: float
) -> np.ndarray:
    """Returns n times the divergence between coins of bias successes / n and p, rounded down.

    The textbook form adds two terms that nearly cancel where the two are close, and n multiplies what is left of their
    rounding errors. With the biases written as p (1 + t) and (1 - p) (1 + s) the linear parts cancel on paper instead,
    and both terms that remain are positive.

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
    return np.asarray((above + below) * (1 - _ROUNDING))


def _xlogx_excess(ratios: np.ndarray, t: np.ndarray) -> np.ndarray:
    """Returns w log(w) - t for ratios w = 1 + t >= 0; near t = 0 that is t^2 / 2, and 1 at w = 0 (0 log 0 = 0)."""
    # With z = t / (2 + t), log(w) is 2 artanh(z) and w is (1 + z) / (1 - z).
    z = t / (2 + t)
    is_near = np.abs(z) <= _NEAR
    z = np.where(is_near, z, 0.0)
    squared = z * z
    series = np.full_like(z, _COEFFICIENTS[-1])
    for coefficient in _COEFFICIENTS[-2::-1]:
        series *= squared
        series += coefficient
    near = 2 * squared * (1 + (1 + z) * z * series) / (1 - z)
    direct = ratios * elementary.log(np.where(ratios > 0, ratios, 1.0)) - t
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
