"""Bytes of all functions that decide about thresholds, on many random inputs, for test_bits.py.

    python -m tests.calm_beam.risk.bits            # prints what this machine computes
    python -m tests.calm_beam.risk.bits --write    # and writes bits.json, which is committed

One digest per function is the SHA-256 of the bytes of its values. The inputs are integers of numpy's frozen generator
and their quotients, which are equal on every machine. The last printed digest is of numpy's and libm's own
exponentials, which may differ.
"""

import functools
import hashlib
import json
import math
import pathlib
import sys
from collections.abc import Callable, Iterator

import numpy as np

from calm_beam.exits.rule import ExitRule
from calm_beam.exits.thresholds import scheduled_thresholds
from calm_beam.risk.counts import binomial_interval
from calm_beam.risk.evidence import Evidence
from calm_beam.risk.losses import LOSS_SCALE
from calm_beam.risk.monitor import RiskMonitor
from calm_beam.risk.pvalues import P_VALUES, excess_p_values, hoeffding_bentkus_p_value, p_values_of
from calm_beam.risk.sample_size import exact_power

OUTPUT = pathlib.Path(__file__).with_name("bits.json")

_DELTAS = (0.003, 0.02, 0.1, 0.3, 0.5, 0.8)


def p_values(name: str) -> Iterator[np.ndarray]:
    """Yields p-values of losses of many kinds, in sets of many sizes."""
    generator = np.random.RandomState(16)
    for n in (1, 9, 250, 4001):
        for delta in _DELTAS:
            # Losses that are at most delta on average, a third of them 0, and coins for the test that wants them.
            losses = generator.randint(0, LOSS_SCALE + 1, size=(n, 8))
            is_kept = generator.randint(0, 1000, size=(n, 8)) < np.arange(8) * 250 * min(delta, 1 - delta)
            fixed = np.where(is_kept, LOSS_SCALE if name == "exact_binomial" else losses, 0)
            yield p_values_of(fixed / LOSS_SCALE, p_value=name, delta=delta)


def large_sets(name: str) -> Iterator[np.ndarray]:
    """Yields p-values of many examples, of which only sums are known."""
    generator = np.random.RandomState(17)
    if P_VALUES[name].needs_table:
        return
    for n in (100_000, 10_000_000, 2_000_000_000):
        for delta in _DELTAS:
            # Up to some 30 standard deviations below the mean, where p-values are still normal numbers.
            shares = 1 - generator.randint(0, 1000, size=12) / 1000 * min(1.0, 30 / math.sqrt(n * delta))
            whole = np.floor(np.floor(n * delta) * shares).astype(np.int64)
            loss = np.minimum(whole, n) * LOSS_SCALE
            if name in ("hoeffding", "hoeffding_bentkus"):
                loss = loss + generator.randint(0, 2, size=12) * 12345
            sums = dict.fromkeys(P_VALUES[name].statistics(delta), loss)
            if name == "signed_mixture":
                sums = {bet: loss // (7 + place) for place, bet in enumerate(sums)}
            if name == "exact_binomial":
                sums[P_VALUES[name].statistics(delta)[1]] = np.zeros(12, np.int64)
            yield P_VALUES[name].p_values(Evidence(n=n, sums=sums), delta, 0.05)


def _other_numbers() -> Iterator[tuple[str, Callable[[], np.ndarray]]]:
    """Yields other numbers that are in manifests or that decide: names, and functions that compute them."""
    losses = np.random.RandomState(18).randint(0, LOSS_SCALE + 1, size=400) / LOSS_SCALE
    yield "excess", lambda: excess_p_values(losses[:, None], p_value="hoeffding_bentkus", delta=0.4)
    monitor = RiskMonitor.start(delta=0.4, alpha=0.01)
    yield "monitor", lambda: np.array([*monitor.observe(losses.tolist()).stakes, monitor.observe(losses).capital])
    yield "interval", lambda: np.array([binomial_interval(count, 53) for count in range(0, 54, 6)])
    yield "power", lambda: np.array([exact_power("hoeffding_bentkus", n=500, risk=0.05, delta=0.1, epsilon=0.05)])
    grid = tuple(place / 20 for place in range(21))
    for schedule in ("decay", "decay_t5x"):
        rule = ExitRule(schedule=schedule, tau=4.0)
        yield schedule, functools.partial(scheduled_thresholds, rule, grid, max_decode_length=512)


def digests() -> dict[str, str]:
    """Returns the digest of every function's values."""
    found = {}
    for name in P_VALUES:
        parts = [*p_values(name), *large_sets(name)]
        found[name] = _digest(np.concatenate(parts))
    for name, computed in _other_numbers():
        found[name] = _digest(computed())
    return found


def golden_rows() -> list[tuple[str, float]]:
    """Returns some single p-values with their expressions: few enough to read."""
    rows = []
    for name in P_VALUES:
        for n, delta in ((60, 0.1), (1000, 0.02), (1000, 0.5)):
            losses = (np.arange(n)[:, None] * [3, 5, 7] % 97 < [2, 4, 8]) * (1.0 if name == "exact_binomial" else 0.7)
            computed = p_values_of(losses, p_value=name, delta=delta)
            rows += [(f"{name} n={n} delta={delta} column={column}", float(p)) for column, p in enumerate(computed)]
    for n, total in ((10**6, 98_765.4321), (2 * 10**9, 199_950_000.5)):
        p_value = float(hoeffding_bentkus_p_value(total, n=n, delta=0.1))
        rows.append((f"hoeffding_bentkus n={n} delta=0.1 loss_sum={total}", p_value))
    return rows


def _digest(values: np.ndarray) -> str:
    assert np.isfinite(values).all()
    return hashlib.sha256(np.ascontiguousarray(values).tobytes()).hexdigest()


def computed_here() -> dict[str, dict[str, str]]:
    """Returns the content of bits.json."""
    return {"digests": digests(), "rows": {name: value.hex() for name, value in golden_rows()}}


def digest_of_theirs() -> str:
    """Returns the digest of exponentials and logarithms of numpy and of the system's library."""
    arguments = np.random.RandomState(19).randint(-(2**40) + 1, 2**40, size=20_000) / 2**40
    libm = [math.exp(value) for value in arguments.tolist()]
    return _digest(np.concatenate([np.exp(arguments), np.log1p(arguments), libm]))


def main() -> None:
    """Prints everything as JSON."""
    here = computed_here()
    if "--write" in sys.argv[1:]:
        OUTPUT.write_text(json.dumps(here, indent=1) + "\n", encoding="utf-8")
    print(json.dumps({**here, "theirs": digest_of_theirs()}))


if __name__ == "__main__":
    main()
