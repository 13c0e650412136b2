"""How much `calibrate --sequential` saves: examples, layers and time by each rule to stop, against all of them.

    python -m benchmarks.sequential --checkpoint=MODEL --data='calibration/*.jsonl.gz'

Each row is a whole `calm-beam calibrate` with its own process, compiled code taken from the cache that JAX keeps.
"""

import argparse
import pathlib
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence

from rich import box
from rich.console import Console
from rich.table import Table

from calm_beam.manifest import Calibration, Manifest, read_manifest

from .machine import describe_machine

_ENTRY = "from calm_beam.launch.cli import entry_point; entry_point()"


def main(argv: Sequence[str] | None = None) -> None:
    """Runs every rule and prints a table."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n\n")[0])
    parser.add_argument("--checkpoint", required=True)
    parser.add_argument("--data", required=True)
    parser.add_argument("--metric", default="rouge_l_unicode")
    parser.add_argument("--deltas", default="0.02,0.05,0.1")
    parser.add_argument("--consistencies", default="textual,risk")
    parser.add_argument("--round_examples", type=int, default=250)
    parser.add_argument("--num_shards", type=int, default=20, help="of runs that stop")
    parser.add_argument("--stop_gain", default="2%")
    parser.add_argument("--also", default="", help="further flags of calibrate, separated by spaces")
    flags = parser.parse_args(argv)
    print(describe_machine())
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    for name in ("consistency", "delta", "stopped by", "examples", "threshold", "layers", "seconds"):
        table.add_column(name, justify="left" if name in ("consistency", "stopped by") else "right", no_wrap=True)
    with tempfile.TemporaryDirectory(prefix="calm-beam-bench-") as folder:
        asked = (f"--consistency={flags.consistencies}", f"--delta={flags.deltas}")
        whole, seconds = _run(pathlib.Path(folder) / "whole", asked, flags)
        for entry in whole.calibrations:
            _add(table, whole, entry, rule=f"all, {entry.p_value}", seconds=seconds)
            own = (f"--consistency={entry.consistency}", f"--delta={entry.delta}", "--sequential")
            rules = [f"--stop_gain={flags.stop_gain}"]
            if entry.threshold is not None:
                rules.insert(0, f"--stop_at_threshold={entry.threshold:g}")
            for number, rule in enumerate(rules):
                output = pathlib.Path(folder) / f"{entry.consistency}-{entry.delta}-{number}"
                rounds = (f"--round_examples={flags.round_examples}", f"--num_shards={flags.num_shards}")
                manifest, took = _run(output, (*own, *rounds, rule), flags)
                (found,) = manifest.calibrations
                assert manifest.sequential is not None
                by = rule if manifest.sequential.ended_by.startswith("stop") else manifest.sequential.ended_by
                _add(table, manifest, found, rule=by.removeprefix("--"), seconds=took)
    Console(width=100, highlight=False).print(table)


def _run(output: pathlib.Path, asked: Sequence[str], flags: argparse.Namespace) -> tuple[Manifest, float]:
    """Returns what a calibration has found, and how many seconds it took, its start and its report included."""
    command = [sys.executable, "-c", _ENTRY, "calibrate", f"--output={output}", *asked, *flags.also.split()]
    task = (f"--checkpoint={flags.checkpoint}", f"--data={flags.data}", f"--metric={flags.metric}")
    start = time.monotonic()
    subprocess.run([*command, *task], check=True, capture_output=True)
    return read_manifest(output / "manifest.json"), time.monotonic() - start


def _add(table: Table, manifest: Manifest, entry: Calibration, *, rule: str, seconds: float) -> None:
    table.add_row(
        entry.consistency,
        f"{entry.delta:g}",
        rule,
        f"{manifest.data.examples:,}",
        "never" if entry.threshold is None else f"{entry.threshold:g}",
        f"{entry.layers:.2f}",
        f"{seconds:.0f}",
    )


if __name__ == "__main__":
    main()
