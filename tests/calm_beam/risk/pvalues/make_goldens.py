"""Writes `goldens.json`: p-values in 60-digit arithmetic, from their textbook formulas.

    python -m tests.calm_beam.risk.pvalues.make_goldens

The package is not used. Inputs are float64 values, exactly as the p-value functions get them: `total` is the exact
decimal expansion of one (a multiple of 2^-32, as all our loss sums are), `delta` the shortest text that reads back as
it. So any difference from these values comes from the computation, none from the inputs.
"""

import decimal
import json
import math
import pathlib
from fractions import Fraction

import mpmath

OUTPUT = pathlib.Path(__file__).with_name("goldens.json")

_SCALE = 2**32
_DIGITS = 60
_SIZES = (1, 7, 100, 1000, 10570, 1_000_000)
_DELTAS = (0.01, 0.02, 0.05, 0.1, 0.5)


def hoeffding(total: Fraction, n: int, delta: Fraction) -> mpmath.mpf:
    """Returns exp(-2 n max(0, delta - total / n)^2)."""
    slack = max(Fraction(0), delta - total / n)
    return mpmath.exp(-2 * n * _real(slack) ** 2)


def hoeffding_bentkus(total: Fraction, n: int, delta: Fraction) -> mpmath.mpf:
    """Returns the lesser of the Kullback-Leibler and the Bentkus bound, and 1 from delta on."""
    risk = total / n
    if risk >= delta:
        return mpmath.mpf(1)
    divergence = _entropy_term(risk, delta) + _entropy_term(1 - risk, 1 - delta)
    return min(
        mpmath.mpf(1),
        mpmath.exp(-n * divergence),
        mpmath.e * binomial_cdf(-(-total.numerator // total.denominator), n, delta),
    )


def binomial_cdf(successes: int, n: int, probability: Fraction) -> mpmath.mpf:
    """Returns P(Bin(n, probability) <= successes), summed term by term from the largest down."""
    p = _real(probability)
    term = mpmath.binomial(n, successes) * p**successes * (1 - p) ** (n - successes)
    total = mpmath.mpf(0)
    for k in range(successes, -1, -1):
        total += term
        term *= k * (1 - p) / ((n - k + 1) * p)
        # Below n p the terms fall at least geometrically once they fall.
        if term < total * mpmath.mpf(10) ** -50:
            break
    return total


def totals(n: int, delta: float) -> set[Fraction]:
    """Returns loss sums at risk 0, below, at and above delta, next to an integer, and deep in the tail."""
    exact = Fraction(delta)
    wanted = [Fraction(0), n * exact / 4, n * exact * 9 / 10, n * exact * 12 / 10, Fraction(round(n * delta))]
    # The two multiples of 2^-32 around n delta, and two sums that differ by their ceiling alone.
    grid_at_delta = n * exact * _SCALE // 1
    wanted += [Fraction(grid_at_delta, _SCALE), Fraction(grid_at_delta + 1, _SCALE)]
    if n * exact > 2:
        whole = Fraction(int(n * exact) // 2 + 1)
        wanted += [whole, whole + Fraction(1, _SCALE)]
    for exponent in (20, 200):
        # The normal approximation is accurate enough to find such sums.
        risk = exact - Fraction(float(mpmath.sqrt(2 * exponent * mpmath.log(10) * delta * (1 - delta) / n)))
        if risk > 0:
            # The integer is for the binomial test, which takes no other sum.
            wanted += [n * risk, Fraction(math.ceil(n * risk))]
    on_grid = {Fraction(value * _SCALE // 1, _SCALE) for value in wanted}
    return {value for value in on_grid if value <= n and Fraction(float(value)) == value}


def rows() -> list[dict[str, object]]:
    """Returns all rows, in a fixed order."""
    made = []
    for n in _SIZES:
        for delta in _DELTAS:
            for total in sorted(totals(n, delta)):
                exact = Fraction(delta)
                made.append(
                    {
                        "n": n,
                        "total": _decimal(total),
                        "delta": repr(delta),
                        "hoeffding": mpmath.nstr(hoeffding(total, n, exact), 20),
                        "hb": mpmath.nstr(hoeffding_bentkus(total, n, exact), 20),
                        "binomial": mpmath.nstr(binomial_cdf(int(total), n, exact), 20)
                        if total == int(total)
                        else None,
                    }
                )
    return made


def _entropy_term(a: Fraction, b: Fraction) -> mpmath.mpf:
    return mpmath.mpf(0) if a == 0 else _real(a) * mpmath.log(_real(a / b))


def _real(value: Fraction) -> mpmath.mpf:
    return mpmath.mpf(value.numerator) / value.denominator


def _decimal(value: Fraction) -> str:
    with decimal.localcontext(prec=100) as context:
        context.traps[decimal.Inexact] = True
        return format(decimal.Decimal(value.numerator) / value.denominator, "f")


def main() -> None:
    """Writes the file next to this script, one row per line."""
    with mpmath.workdps(_DIGITS):
        lines = ",\n".join(json.dumps(row) for row in rows())
    about = "p-values in 60-digit arithmetic; made by make_goldens.py, which says what the columns are"
    OUTPUT.write_text(f'{{"about": {json.dumps(about)}, "rows": [\n{lines}\n]}}\n', encoding="utf-8")


if __name__ == "__main__":
    main()
