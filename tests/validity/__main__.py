"""Runs the validity suite in full and writes its table: `python -m tests.validity --output=build/validity.md`.

Exit status: 0 if chance explains every share, 1 if it does not.
"""

import argparse
import pathlib
import sys
import time
from collections.abc import Sequence

from .suite import most_misses, run_world, summary, table
from .worlds import WORLDS


def main(argv: Sequence[str] | None = None) -> int:
    """Runs every world and returns the exit status."""
    parser = argparse.ArgumentParser(prog="python -m tests.validity", description=(__doc__ or "").split(":")[0])
    parser.add_argument("--replications", type=int, default=10_000, help="calibrations per world")
    parser.add_argument("--output", type=pathlib.Path, required=True, help="Markdown file to write")
    flags = parser.parse_args(argv)
    outcomes = []
    start = time.monotonic()
    for number, world in enumerate(WORLDS, start=1):
        outcomes += run_world(world, replications=flags.replications)
        print(f"{number} of {len(WORLDS)} worlds, {time.monotonic() - start:.0f} s: {world.name}", file=sys.stderr)
    flags.output.parent.mkdir(parents=True, exist_ok=True)
    text = f"{_heading(flags.replications)}The largest over the procedures:\n\n{summary(outcomes)}\n"
    flags.output.write_text(f"{text}Each procedure:\n\n{table(outcomes)}", encoding="utf-8")
    broken = [outcome for outcome in outcomes if not outcome.is_valid]
    for outcome in broken:
        print(
            f"broken: {outcome.world}, {outcome.p_value}, {outcome.procedure}: "
            f"{outcome.false_rejections} of {outcome.replications} with epsilon {outcome.epsilon}",
            file=sys.stderr,
        )
    largest = max(outcome.false_rejections / outcome.replications / outcome.epsilon for outcome in outcomes)
    print(f"{len(outcomes)} combinations, {len(broken)} broken; largest share of errors: {largest:.3f} epsilon")
    return 1 if broken else 0


def _heading(replications: int) -> str:
    return (
        f"Share of {replications:,} simulated calibrations, in per cent, in which a threshold was accepted whose risk "
        f"is not below delta. At epsilon 5 %, chance explains up to "
        f"{most_misses(replications, 0.05) / replications:.2%} (99.9 % interval).\n\n"
    )


if __name__ == "__main__":
    sys.exit(main())
