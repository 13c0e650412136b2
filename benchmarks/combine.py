"""What it costs to add up the losses: time per example, size of the state, memory.

    python -m benchmarks.combine --examples=1000000 --thresholds=100 --trials=50

Losses are drawn at random, batch by batch, outside the times. Three things are measured on one process: the sums of one
calibration, those of many random splits at once, and the latter through Beam's in-process runner.
"""

import argparse
import functools
import pickle
import resource
import time
from collections.abc import Iterator
from typing import Any

import apache_beam as beam
import numpy as np
from apache_beam.runners.portability.fn_api_runner import FnApiRunner

from calm_beam.calibration.guarantee import Guarantee
from calm_beam.outputs.totals import Layout
from calm_beam.risk.evidence import RiskTotals
from calm_beam.risk.losses import LOSS_SCALE
from calm_beam.transforms.scoring import SumMerged

from .machine import describe_machine

_SHARE = 0.8
_MERGES = 1000
_CONSISTENCIES = {"hoeffding_bentkus": "textual", "signed_mixture": "risk"}


def main() -> None:
    """Prints one line for every measurement."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--examples", type=int, default=1_000_000)
    parser.add_argument("--thresholds", type=int, default=100)
    parser.add_argument("--trials", type=int, default=50)
    parser.add_argument("--batch", type=int, default=64, help="examples added at once")
    flags = parser.parse_args()
    print(describe_machine())
    before = _largest_resident_mb()
    print(
        f"{flags.examples} examples, {flags.thresholds} thresholds, {flags.trials} trials, batches of {flags.batch}\n"
    )
    print("| p-value | state | size, MB | add, us per example | add all, s | merge, us |")
    print("|---|---|---:|---:|---:|---:|")
    for p_value in _CONSISTENCIES:
        layout = _layout(p_value, flags.thresholds)
        for trials in (None, flags.trials):
            _measure(p_value, layout, examples=flags.examples, batch=flags.batch, trials=trials)
    start = time.perf_counter()
    _through_beam(_layout("signed_mixture", flags.thresholds), flags.examples, batch=flags.batch, trials=flags.trials)
    print(
        f"\nthrough Beam, signed_mixture, {flags.trials} trials, drawing included: {time.perf_counter() - start:.1f} s"
    )
    print(f"largest resident size: {_largest_resident_mb():.0f} MB, {before:.0f} MB of it imports")


def _largest_resident_mb() -> float:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024


def _layout(p_value: str, thresholds: int) -> Layout:
    spec = Guarantee(_CONSISTENCIES[p_value], "rouge_l", delta=0.1, p_value=p_value).planned()
    return Layout.of([spec], thresholds=thresholds)


def _draw(layout: Layout, count: int, *, trials: int, seed: int) -> tuple[np.ndarray, np.ndarray]:
    """Returns random losses, and which of them each trial's part holds."""
    rng = np.random.default_rng(seed)
    lowest = -LOSS_SCALE if layout.objectives[0].is_signed else 0
    losses = rng.integers(lowest, LOSS_SCALE, size=(count, 1, layout.thresholds), endpoint=True)
    return losses, rng.random((count, trials), dtype=np.float32) < _SHARE


def _measure(p_value: str, layout: Layout, *, examples: int, batch: int, trials: int | None) -> None:
    """Prints a line for the sums of one calibration, or of many splits."""
    totals: Any = _zero(layout, trials)
    seconds = 0.0
    for start in range(0, examples, batch):
        losses, is_in_part = _draw(layout, min(batch, examples - start), trials=trials or 1, seed=start)
        begun = time.perf_counter()
        values = layout.values(losses)
        totals = totals.merge(RiskTotals.of(values) if trials is None else RiskTotals.of_parts(values, is_in_part))
        seconds += time.perf_counter() - begun
    begun = time.perf_counter()
    for _ in range(_MERGES):
        totals.merge(_zero(layout, trials))
    merge_seconds = (time.perf_counter() - begun) / _MERGES
    state = "one calibration" if trials is None else f"{trials} trials"
    print(
        f"| {p_value} | {state} | {len(pickle.dumps(totals)) / 2**20:.3f} | {1e6 * seconds / examples:.2f} "
        f"| {seconds:.1f} | {1e6 * merge_seconds:.0f} |"
    )


def _zero(layout: Layout, trials: int | None) -> RiskTotals:
    return RiskTotals.zero(parts=trials, rows=len(layout.rows), thresholds=layout.thresholds)


def _through_beam(layout: Layout, examples: int, *, batch: int, trials: int) -> None:
    def totals_of_shard(start: int) -> Iterator[RiskTotals]:
        for first in range(start, min(start + shard, examples), batch):
            losses, is_in_part = _draw(layout, min(batch, examples - first), trials=trials, seed=first)
            yield RiskTotals.of_parts(layout.values(losses), is_in_part)

    shard = 100 * batch
    with beam.Pipeline(runner=FnApiRunner()) as pipeline:
        _ = (
            pipeline
            | beam.Create(range(0, examples, shard))
            | beam.FlatMap(totals_of_shard)
            | beam.CombineGlobally(SumMerged(functools.partial(_zero, layout, trials)))
            | beam.Map(_check_count, examples=examples)
        )


def _check_count(totals: RiskTotals, *, examples: int) -> None:
    """Checks that no example was lost."""
    assert totals.n == examples


if __name__ == "__main__":
    main()
