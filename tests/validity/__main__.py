"""Runs the validity suite in full and writes its table: `python -m tests.validity --output=build/validity.md`.

Exit status: 0 if chance explains every share, 1 if it does not. P-values that are monitored although they are not valid
for it do not count.
"""

import argparse
import pathlib
import sys
import time
from collections.abc import Callable, Sequence
from typing import TypeVar

from .confirmed import CONFIRMED_WORLDS, ConfirmedOutcome, confirmed_table, run_confirmed_world
from .sequential import END, WATCHED_WORLDS, WatchedOutcome, run_watched_world, watched_table
from .suite import most_misses, run_world, summary, table
from .worlds import WORLDS, World

_Outcome = TypeVar("_Outcome")
_WATCHED = (
    "The same where calibrations are tested after every round, and an error at any look counts; the largest over the "
    "procedures. Only p-values that may be watched promise anything here, and all of them at the end alone:\n\n"
)
_CONFIRMED = (
    "Where half of the units choose a threshold, by a sweep that does not show all losses, and the others confirm it "
    "as it is served; next to it what became of it if those who chose confirmed it too. The largest over p-values and "
    "procedures:\n\n"
)


def main(argv: Sequence[str] | None = None) -> int:
    """Runs every world and returns the exit status."""
    parser = argparse.ArgumentParser(prog="python -m tests.validity", description=(__doc__ or "").split(":")[0])
    parser.add_argument("--replications", type=int, default=10_000, help="calibrations per world")
    parser.add_argument("--output", type=pathlib.Path, required=True, help="Markdown file to write")
    flags = parser.parse_args(argv)
    outcomes = _run(run_world, WORLDS, replications=flags.replications)
    watched = _run(run_watched_world, WATCHED_WORLDS, replications=flags.replications)
    confirmed = _run(run_confirmed_world, CONFIRMED_WORLDS, replications=flags.replications)
    flags.output.parent.mkdir(parents=True, exist_ok=True)
    text = (
        f"{_heading(flags.replications)}The largest over the procedures:\n\n{summary(outcomes)}\n"
        f"{_WATCHED}{watched_table(watched)}\n{_CONFIRMED}{confirmed_table(confirmed)}\n"
        f"Each procedure, looking once:\n\n{table(outcomes)}"
    )
    flags.output.write_text(text, encoding="utf-8")
    broken = [outcome for outcome in outcomes if not outcome.is_valid]
    for outcome in broken:
        print(
            f"broken: {outcome.world}, {outcome.p_value}, {outcome.procedure}: "
            f"{outcome.false_rejections} of {outcome.replications} with epsilon {outcome.epsilon}",
            file=sys.stderr,
        )
    largest = max(outcome.false_rejections / outcome.replications / outcome.epsilon for outcome in outcomes)
    print(f"{len(outcomes)} combinations, {len(broken)} broken; largest share of errors: {largest:.3f} epsilon")
    is_broken = [bool(broken), _report_watched(watched), _report_confirmed(confirmed)]
    return 1 if any(is_broken) else 0


def _run(run: Callable[..., list[_Outcome]], worlds: Sequence[World], *, replications: int) -> list[_Outcome]:
    """Returns the outcomes in every world, and prints progress."""
    outcomes = []
    start = time.monotonic()
    for number, world in enumerate(worlds, start=1):
        outcomes += run(world, replications=replications)
        print(f"{number} of {len(worlds)} worlds, {time.monotonic() - start:.0f} s: {world.name}", file=sys.stderr)
    return outcomes


def _report_watched(outcomes: Sequence[WatchedOutcome]) -> bool:
    """Prints the outcomes of monitored calibrations; returns whether a promise is broken."""
    broken = [outcome for outcome in outcomes if outcome.is_promised and not outcome.is_valid]
    for outcome in broken:
        print(
            f"broken when watched: {outcome.world}, {outcome.p_value}, {outcome.rounds}, {outcome.procedure}: "
            f"{outcome.errors} of {outcome.replications} with epsilon {outcome.epsilon}",
            file=sys.stderr,
        )
    for kind, found in (
        ("watched", [outcome for outcome in outcomes if outcome.is_promised and outcome.rounds != END]),
        ("the same worlds, looked at once", [outcome for outcome in outcomes if outcome.rounds == END]),
    ):
        count = sum(outcome in broken for outcome in found)
        most = max(outcome.share / outcome.epsilon for outcome in found)
        print(f"{kind}: {len(found)} combinations, {count} broken; largest share of errors: {most:.3f} epsilon")
    for name in dict.fromkeys(outcome.p_value for outcome in outcomes if not outcome.is_promised):
        peeked = [outcome for outcome in outcomes if outcome.p_value == name and not outcome.is_promised]
        worst = max(peeked, key=lambda outcome: outcome.share / outcome.epsilon)
        print(
            f"not made to be watched, {name}: up to {worst.share / worst.epsilon:.2f} epsilon "
            f"({worst.world}, {worst.rounds})"
        )
    return bool(broken)


def _report_confirmed(outcomes: Sequence[ConfirmedOutcome]) -> bool:
    """Prints the outcomes of confirmed choices; returns whether a promise is broken."""
    broken = [outcome for outcome in outcomes if not outcome.is_valid]
    for outcome in broken:
        print(
            f"broken when confirmed: {outcome.world}, {outcome.p_value}, {outcome.procedure}: {outcome.errors} of "
            f"{outcome.replications} with epsilon {outcome.epsilon}",
            file=sys.stderr,
        )
    errors, repeated = (
        max(getattr(outcome, count) / outcome.replications / outcome.epsilon for outcome in outcomes)
        for count in ("errors", "repeated")
    )
    print(
        f"confirmed: {len(outcomes)} combinations, {len(broken)} broken; largest share of errors: {errors:.3f} "
        f"epsilon, and {repeated:.2f} epsilon where those who chose confirm"
    )
    return bool(broken)


def _heading(replications: int) -> str:
    return (
        f"Share of {replications:,} simulated calibrations, in per cent, in which a threshold was accepted whose risk "
        f"is not below delta. At epsilon 5 %, chance explains up to "
        f"{most_misses(replications, 0.05) / replications:.2%} (99.9 % interval).\n\n"
    )


if __name__ == "__main__":
    sys.exit(main())
