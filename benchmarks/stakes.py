"""Which stakes should share the capital of `signed_mixture`: examples until a risk is proved, watched in rounds.

    python -m benchmarks.stakes --calibration=calibration --metric=rouge_l_unicode

Losses are drawn from simulated worlds and, with `--calibration`, from what `calm-beam calibrate` left in its output
directory, so that the risk is known in both. The capitals are the integers of production. Choosing stakes by the data
that they are then used on voids the guarantee: take the generations of another set.
"""

import argparse
import dataclasses
import itertools
import pathlib
import sys
from collections.abc import Iterator, Mapping, Sequence

import numpy as np

from calm_beam.risk.elementary import log_capital
from calm_beam.risk.losses import LOSS_SCALE, to_signed_fixed_point
from calm_beam.risk.pvalues.signed_mixture import BETS

from .machine import describe_machine
from .power import losses_of_calibration

Mixture = Mapping[float, float]


def _evenly(*shares: float) -> Mixture:
    return dict.fromkeys(shares, 1 / len(shares))


# By name: stakes as shares of the largest, and their parts of the capital. Against losses of 0 and 1 with a risk of
# c delta, a share of 1 - c grows fastest (Kelly); where losses vary less, a larger one does.
CANDIDATES: Mapping[str, Mixture] = {
    "five up to 0.6": {0.01: 0.05, 0.03: 0.05, 0.1: 0.3, 0.3: 0.3, 0.6: 0.3},
    "five up to 0.6, evenly": _evenly(0.01, 0.03, 0.1, 0.3, 0.6),
    "five up to 0.9": {0.01: 0.05, 0.03: 0.05, 0.1: 0.3, 0.3: 0.3, 0.9: 0.3},
    "five up to 0.95": {0.01: 0.05, 0.03: 0.05, 0.1: 0.3, 0.3: 0.3, 0.95: 0.3},
    "six up to 0.8": {0.01: 0.05, 0.03: 0.1, 0.1: 0.2, 0.25: 0.2, 0.5: 0.2, 0.8: 0.25},
    "six up to 0.95": {0.01: 0.05, 0.03: 0.05, 0.1: 0.3, 0.3: 0.25, 0.6: 0.1, 0.95: 0.25},
    "six up to 0.95, more on the large": {0.01: 0.05, 0.03: 0.05, 0.1: 0.25, 0.25: 0.2, 0.5: 0.15, 0.95: 0.3},
    "six up to 0.98": {0.01: 0.05, 0.03: 0.1, 0.1: 0.2, 0.3: 0.2, 0.7: 0.15, 0.98: 0.3},
    "seven, each double the last, evenly": _evenly(0.015, 0.03, 0.06, 0.12, 0.24, 0.48, 0.95),
    "seven Kelly stakes, evenly": _evenly(*(1 - c for c in (0.99, 0.97, 0.9, 0.8, 0.5, 0.2, 0.05))),
    "eight up to 0.9, evenly": _evenly(0.01, 0.03, 0.08, 0.16, 0.3, 0.5, 0.7, 0.9),
    "twelve up to 0.95, evenly": _evenly(0.01, 0.02, 0.04, 0.08, 0.12, 0.18, 0.26, 0.36, 0.5, 0.65, 0.8, 0.95),
    "uniform, 5": _evenly(*((2 * place + 1) / 10 for place in range(5))),
    "uniform, 8": _evenly(*((2 * place + 1) / 16 for place in range(8))),
    "uniform, 12": _evenly(*((2 * place + 1) / 24 for place in range(12))),
}
_SHARES = (0.2, 0.5, 0.8, 0.9, 0.95)
_DELTAS = (0.02, 0.05, 0.1)
# On one guarantee, and on twenty that hold together.
_EPSILONS = (0.05, 0.0025)
_POWER = {5_000: (0.6, 0.7, 0.8, 0.9), 100_000: (0.92, 0.94, 0.96, 0.98)}


@dataclasses.dataclass(frozen=True, kw_only=True)
class Case:
    """A loss of a few possible values, whose mean is below delta.

    Attributes:
      kind: Name of the distribution.
      share: Its mean, in multiples of delta.
      delta: Risk tolerance.
      values: shape (values,), int64 in units of 2^-32.
      weights: The same shape: probabilities.
    """

    kind: str
    share: float
    delta: float
    values: np.ndarray
    weights: np.ndarray

    @property
    def name(self) -> str:
        """Its name in the table."""
        return f"{self.kind}, delta {self.delta:g}, risk {self.share:.2f} delta"


def simulated(kind: str, *, delta: float, share: float) -> Case:
    """Returns a case of one of four kinds: coin, zero-inflated, ROUGE-like, signed."""
    risk = delta * share
    if kind == "coin":
        losses, weights = np.array([0.0, 1.0]), np.array([1 - risk, risk])
    elif kind == "signed":
        losses, weights = np.array([-1.0, 0.0, 1.0]), np.array([0.05, 0.9 - risk, 0.05 + risk])
    else:
        fractions = (
            np.arange(1, 33) / 33
            if kind == "zero-inflated"
            else np.array([1 / 9, 1 / 7, 1 / 5, 2 / 9, 1 / 4, 1 / 3, 2 / 5, 1 / 2, 3 / 5, 2 / 3, 1])
        )
        changed = risk / fractions.mean()
        losses = np.append(0.0, fractions)
        weights = np.append(1 - changed, np.full(fractions.size, changed / fractions.size))
    return Case(kind=kind, share=share, delta=delta, values=to_signed_fixed_point(losses), weights=weights)


def stored(kind: str, losses: np.ndarray, *, delta: float) -> Iterator[Case]:
    """Yields a case for every threshold at which the mean of stored losses is a tenth to 0.95 of delta.

    Args:
      kind: Name of the loss.
      losses: shape (examples, thresholds).
      delta: Risk tolerance.
    """
    for column in to_signed_fixed_point(losses).T:
        values, counts = np.unique(column, return_counts=True)
        weights = counts / counts.sum()
        share = float(values @ weights) / LOSS_SCALE / delta
        if 0.1 <= share <= 0.95:
            yield Case(kind=kind, share=share, delta=delta, values=values, weights=weights)


def examples_needed(
    case: Case, mixtures: Sequence[Mixture], *, orders: int, size: int, limit: int, seed: int
) -> np.ndarray:
    """Returns the median number of examples until 1 / epsilon is reached, shape (mixtures, epsilons).

    Args:
      case: What losses are drawn from.
      mixtures: Stakes and their parts of the capital.
      orders: Number of orders.
      size: Examples in a round.
      limit: Most examples; an order that gets there counts as having needed as many.
      seed: Of the draws.
    """
    rng = np.random.default_rng(seed)
    stakes = sorted({share for mixture in mixtures for share in mixture})
    growth = _growth(case, stakes)
    capitals = np.zeros((orders, len(stakes)), np.int64)
    needed = np.full((len(mixtures), len(_EPSILONS), orders), limit)
    is_open = np.ones(needed.shape, bool)
    for seen in range(size, limit + 1, size):
        capitals += rng.multinomial(size, case.weights, size=orders) @ growth
        wealth = np.stack([_log_wealth(capitals, stakes, mixture) for mixture in mixtures])
        reached = is_open & (wealth[:, None] >= -np.log(_EPSILONS)[:, None])
        needed[reached] = seen
        is_open &= ~reached
        if not is_open.any():
            break
    return np.asarray(np.median(needed, axis=-1))


def power(case: Case, mixtures: Sequence[Mixture], *, n: int, replications: int, seed: int) -> np.ndarray:
    """Returns in what share of calibrations of n examples, looked at once, the risk is proved; shape (mixtures,)."""
    stakes = sorted({share for mixture in mixtures for share in mixture})
    counts = np.random.default_rng(seed).multinomial(n, case.weights, size=replications)
    capitals = counts @ _growth(case, stakes)
    return np.array([np.mean(_log_wealth(capitals, stakes, mixture) >= -np.log(_EPSILONS[0])) for mixture in mixtures])


def _growth(case: Case, stakes: Sequence[float]) -> np.ndarray:
    """Returns the growth of every bettor's log capital on every value; shape (values, stakes), int64."""
    return np.stack([log_capital(case.values, delta=case.delta, share=share) for share in stakes], axis=-1)


def _log_wealth(capitals: np.ndarray, stakes: Sequence[float], mixture: Mixture) -> np.ndarray:
    places = [stakes.index(share) for share in mixture]
    terms = capitals[..., places] / LOSS_SCALE + np.log(list(mixture.values()))
    return np.asarray(np.logaddexp.reduce(terms, axis=-1))


def main(argv: Sequence[str] | None = None) -> int:
    """Prints the tables; returns 0."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--calibration", type=pathlib.Path, help="output directory of calibrate")
    parser.add_argument("--metric", default="rouge_l_unicode")
    parser.add_argument("--orders", type=int, default=100, help="orders of every case")
    parser.add_argument("--round", type=int, default=100, help="examples in a round")
    parser.add_argument("--limit", type=int, default=400_000, help="most examples of an order")
    parser.add_argument("--replications", type=int, default=2000, help="calibrations for the power at a fixed n")
    parser.add_argument("--seed", type=int, default=20220714)
    parser.add_argument("--details", action="store_true", help="print the medians of every case too")
    flags = parser.parse_args(argv)
    cases = {
        "simulated": [
            simulated(kind, delta=delta, share=share)
            for kind in ("coin", "zero-inflated", "ROUGE-like", "signed")
            for delta in _DELTAS
            for share in _SHARES
        ]
    }
    if flags.calibration:
        cases["stored"] = [
            case
            for kind, losses in losses_of_calibration(flags.calibration, metric=flags.metric).items()
            for delta in _DELTAS
            for case in stored(kind, losses, delta=delta)
        ]
    print(describe_machine())
    print(f"{flags.orders} orders, rounds of {flags.round}, epsilon {' and '.join(map(str, _EPSILONS))}\n")
    mixtures = list(CANDIDATES.values())
    medians = {
        source: np.stack(
            [
                examples_needed(
                    case, mixtures, orders=flags.orders, size=flags.round, limit=flags.limit, seed=flags.seed + place
                )
                for place, case in enumerate(_counted(found, source))
            ]
        )
        for source, found in cases.items()
    }
    _print_ratios(cases, medians)
    _print_by_share(cases, medians)
    if flags.details:
        _print_details(cases, medians)
    _print_power(replications=flags.replications, seed=flags.seed)
    return 0


def _counted(cases: Sequence[Case], source: str) -> Iterator[Case]:
    for place, case in enumerate(cases, start=1):
        print(f"\r{source}: {place} of {len(cases)}", end="", file=sys.stderr, flush=True)
        yield case
    print(file=sys.stderr)


def _names() -> list[str]:
    return [f"{name} (in use)" if mixture == dict(BETS) else name for name, mixture in CANDIDATES.items()]


def _ratios(medians: np.ndarray) -> np.ndarray:
    """Returns what was needed over the least of any candidate; shape (cases, mixtures, epsilons)."""
    return medians / medians.min(axis=1, keepdims=True)


def _geometric_mean(ratios: np.ndarray) -> np.ndarray:
    """Returns the means over cases and epsilons, shape (mixtures,)."""
    return np.asarray(np.exp(np.log(ratios).mean(axis=(0, 2))))


def _print_ratios(cases: Mapping[str, Sequence[Case]], medians: Mapping[str, np.ndarray]) -> None:
    """Prints examples needed over those of the best candidate."""
    ratios = {source: _ratios(found) for source, found in medians.items()}
    everything = np.concatenate(list(ratios.values()))
    all_cases = [case for found in cases.values() for case in found]
    columns = [*(f"{source}, {len(found)} cases" for source, found in cases.items()), "all", "worst case"]
    print("Median examples until proved, over those of the best candidate: geometric means, and the worst case\n")
    print(f"| candidate | stakes | {' | '.join(columns)} | |")
    print(f"|---|---:|{'---:|' * len(columns)}---|")
    for place, (name, mixture) in enumerate(zip(_names(), CANDIDATES.values(), strict=True)):
        means = [_geometric_mean(found)[place] for found in (*ratios.values(), everything)]
        worst = everything[:, place].max(axis=-1)
        print(
            f"| {name} | {len(mixture)} | {' | '.join(f'{mean:.3f}' for mean in means)} "
            f"| {worst.max():.2f} | {all_cases[int(worst.argmax())].name} |"
        )


def _print_by_share(cases: Mapping[str, Sequence[Case]], medians: Mapping[str, np.ndarray]) -> None:
    """Prints the geometric means by how far the risk is from delta."""
    edges = (0.0, 0.35, 0.65, 0.85, 0.925, 1.0)
    ratios = np.concatenate([_ratios(found) for found in medians.values()])
    shares = np.array([case.share for found in cases.values() for case in found])
    print("\nThe same geometric means by risk, in multiples of delta\n")
    print(f"| candidate | {' | '.join(f'up to {edge:g}' for edge in edges[1:])} |")
    print(f"|---|{'---:|' * (len(edges) - 1)}")
    bands = [(shares > low) & (shares <= high) for low, high in itertools.pairwise(edges)]
    for place, name in enumerate(_names()):
        means = [f"{_geometric_mean(ratios[band])[place]:.3f}" if band.any() else "" for band in bands]
        print(f"| {name} | {' | '.join(means)} |")


def _print_details(cases: Mapping[str, Sequence[Case]], medians: Mapping[str, np.ndarray]) -> None:
    """Prints the medians of every case."""
    print(f"\n| case | epsilon | {' | '.join(_names())} |")
    print(f"|---|---:|{'---:|' * len(CANDIDATES)}")
    for source, found in cases.items():
        for case, needed in zip(found, medians[source], strict=True):
            for place, epsilon in enumerate(_EPSILONS):
                print(f"| {case.name} | {epsilon:g} | {' | '.join(f'{median:.0f}' for median in needed[:, place])} |")


def _print_power(*, replications: int, seed: int) -> None:
    """Prints in how many per cent of calibrations a risk is proved at the end of n examples."""
    header = [f"n {n:,}, risk {share:g} delta" for n, shares in _POWER.items() for share in shares]
    print(f"\nPer cent of calibrations in which the risk is proved at epsilon {_EPSILONS[0]}, looking once at the end;")
    print(f"means over coin, ROUGE-like and signed losses and delta {', '.join(map(str, _DELTAS))}\n")
    print(f"| candidate | {' | '.join(header)} |")
    print(f"|---|{'---:|' * len(header)}")
    mixtures = list(CANDIDATES.values())
    columns = [
        np.mean(
            [
                power(simulated(kind, delta=delta, share=share), mixtures, n=n, replications=replications, seed=seed)
                for kind in ("coin", "ROUGE-like", "signed")
                for delta in _DELTAS
            ],
            axis=0,
        )
        for n, shares in _POWER.items()
        for share in shares
    ]
    for name, row in zip(_names(), np.array(columns).T, strict=True):
        print(f"| {name} | {' | '.join(f'{100 * share:.1f}' for share in row)} |")


if __name__ == "__main__":
    sys.exit(main())
