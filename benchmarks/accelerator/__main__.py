"""What decoding costs on whatever devices JAX finds: programs, decisions, sweeps, single prompts, batches.

    python -m benchmarks.accelerator --json=accelerator.json
    python -m benchmarks.accelerator --quick

The first part compiles and calls every program that `make accelerators` has compiled for devices that were not there.
Each part is a process of its own, so that one that breaks down, or takes too long, leaves the others their figures.
Weights are random (`benchmarks/paper_model.py`), compilation is done before anything is timed, and of several runs the
fastest counts. All parts but the first share what they compile. This process does not use JAX, which would take the
device's memory from the parts. Needs JAX, Flax and NumPy, and this repository.
"""

import argparse
import importlib
import json
import os
import pathlib
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator, Sequence
from typing import Any

from .table import Table

# In this order; with the share of the time that each may take of what is left.
_PARTS = {"programs": 0.4, "rates": 0.1, "decisions": 0.2, "sweeps": 0.5, "singles": 0.5, "batches": 1.0}
_SECONDS, _QUICK_SECONDS = 900.0, 180.0
# Seconds that a part may use beyond its time to finish its current case.
_GRACE = 0.5
_SHOWN_OF_ERRORS = 2000


def main(argv: Sequence[str] | None = None) -> int:
    """Runs every part; returns 1 if one of them failed."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--json", type=pathlib.Path, help="file for all figures")
    parser.add_argument("--quick", action="store_true", help="small sizes, three minutes")
    parser.add_argument("--seconds", type=float, help="for all parts together")
    parser.add_argument("--parts", default=",".join(_PARTS), help="some of them, separated by commas")
    parser.add_argument("--part", choices=_PARTS, help=argparse.SUPPRESS)
    flags = parser.parse_args(argv)
    seconds = flags.seconds or (_QUICK_SECONDS if flags.quick else _SECONDS)
    if flags.part:
        _measure(flags.part, quick=flags.quick, seconds=seconds)
        return 0
    chosen = flags.parts.split(",")
    if unknown := [name for name in chosen if name not in _PARTS]:
        parser.error(f"--parts: {', '.join(unknown)} is none of {', '.join(_PARTS)}")
    end = time.monotonic() + seconds
    table = Table()
    cases: list[dict[str, Any]] = []
    with tempfile.TemporaryDirectory() as compiled:
        for place, name in enumerate(chosen):
            share = 1.0 if place == len(chosen) - 1 else _PARTS[name]
            seconds = share * (end - time.monotonic())
            for case in _run(name, quick=flags.quick, seconds=seconds, compiled=compiled):
                cases.append({"part": name, **table.with_shares(case)})
                table.print(cases[-1])
                if flags.json:
                    # After every case: what is there already survives whatever comes.
                    flags.json.write_text(json.dumps(cases, indent=1) + "\n")
    failed = [case for case in cases if "failed" in case]
    left_out = [case for case in cases if "left_out" in case]
    print(f"{len(cases)} cases; {len(failed)} failed, {len(left_out)} left out for lack of time")
    return int(bool(failed))


def _measure(name: str, *, quick: bool, seconds: float) -> None:
    """Prints each case of a part as a line of JSON."""
    from benchmarks.machine import describe_machine

    from .part import Clock
    from .scales import FULL, QUICK

    print(json.dumps({"machine": describe_machine()}), flush=True)
    measure = importlib.import_module(f"{__package__}.{name}").measure
    for case in measure(QUICK if quick else FULL, Clock(seconds)):
        print(json.dumps(case), flush=True)


def _run(name: str, *, quick: bool, seconds: float, compiled: str) -> Iterator[dict[str, Any]]:
    """Yields the cases of a part that runs in a process of its own, and how that ended if not well.

    Args:
      name: Of the part.
      quick: Whether sizes are small.
      seconds: That it may take.
      compiled: Folder for what parts compile that do not measure that.
    """
    # A part that broke down may hold memory for a while: the next takes what it needs, and not all from the start.
    variables = {**os.environ, "XLA_PYTHON_CLIENT_PREALLOCATE": "false"}
    if name != "programs":
        variables |= {"JAX_COMPILATION_CACHE_DIR": compiled, "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0"}
    command = [sys.executable, "-m", __package__, f"--part={name}", f"--seconds={seconds}", *["--quick"] * quick]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=variables)
    most = seconds * (1 + _GRACE)
    killer = threading.Timer(most, process.kill)
    errors: list[str] = []
    assert process.stdout is not None
    assert process.stderr is not None
    reader = threading.Thread(target=lambda stream: errors.append(stream.read()), args=(process.stderr,))
    killer.start()
    reader.start()
    try:
        for line in process.stdout:
            yield json.loads(line)
        status = process.wait()
    finally:
        killer.cancel()
        process.kill()
        reader.join()
    if status:
        reason = f"killed after {most:.0f} s" if status < 0 and not killer.is_alive() else f"ended with {status}"
        yield {"measured": name, "failed": f"{reason}: {''.join(errors)[-_SHOWN_OF_ERRORS:]}"}


if __name__ == "__main__":
    sys.exit(main())
