"""Where the time of a sweep goes: each step of rows, and the bookkeeping of the host between them.

    python benchmarks/sweep_profile.py --json --prompts=1000
    python benchmarks/sweep_profile.py --checkpoint=model/ --data=validation.jsonl.gz --paper_dimensions --prompts=64

Models, data and other flags are those of `benchmarks/sweep.py`. The sweep runs once to compile, then `--runs` times as
it is, and `--runs` times with every step waited for and timed separately; the fastest of each
counts. The rest is the host's: packing of rows, groups and paths, and the dispatch of steps. Where host and device
overlap, the parts are more than the whole.
"""

import json
import pathlib
import sys
from collections.abc import Sequence
from typing import Any

if not __package__:
    # Run as a file, Python looks for modules next to it, and not in the folder of the packages.
    sys.path[0] = str(pathlib.Path(__file__).resolve().parents[1])

from benchmarks.machine import describe_machine
from benchmarks.sweep import Task, branches_of, decode, fastest, started
from benchmarks.timed_steps import timed_steps


def main(argv: Sequence[str] | None = None) -> int:
    """Prints a table, and with `--json` a last line with the same figures."""
    task, flags = started(__doc__, argv)
    figures = {"machine": describe_machine(), **_measure(task)}
    if flags.json:
        print(json.dumps(figures))
    return 0


def _measure(task: Task) -> dict[str, Any]:
    everything = branches_of(task, [None, *task.grid])
    decode(task, everything)
    as_it_is = fastest(task, everything)
    profiles = []
    for _ in range(task.runs):
        with timed_steps() as (seconds, calls):
            profiles.append((decode(task, everything).seconds, dict(seconds), dict(calls)))
    waited, by_step, calls = min(profiles, key=lambda profile: profile[0])
    parts = {"host": waited - sum(by_step.values()), **by_step}
    print(f"{as_it_is.seconds:.2f} s as it is, {waited:.2f} s where every step is waited for")
    for name, part in sorted(parts.items(), key=lambda item: -item[1]):
        print(f"{name:12}{part:8.2f} s{part / waited:8.1%}{calls.get(name, 0):8d} calls")
    padded = as_it_is.work.padded_rows / as_it_is.work.layer_rows
    print(f"rows of padding over rows of layers: {padded:.1%}")
    return {
        "confidence": task.rule.confidence,
        "thresholds": len(task.grid),
        "prompts": len(task.prompts),
        "sweep_seconds": as_it_is.seconds,
        "seconds_where_steps_are_waited_for": waited,
        "seconds": parts,
        "calls": calls,
        "padded_rows_over_layer_rows": padded,
    }


if __name__ == "__main__":
    sys.exit(main())
