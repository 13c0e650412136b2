"""Compiles every device program with the accelerators' own compilers, and checks the results; runs none.

    python -m tools.accelerators
    python -m tools.accelerators --all --output=build/accelerators.json

The compilers are installed into a separate folder (`packages.py`). If they are not available, this prints so and checks
nothing. Processes compile in parallel, each for one target (`targets.py`).
"""

import argparse
import concurrent.futures
import json
import os
import pathlib
import subprocess
import sys
from collections.abc import Iterator, Sequence
from typing import Any

from .packages import ENVIRONMENT, MissingPackagesError, installed

_ROOT = pathlib.Path(__file__).parents[2]
_FOLDER = _ROOT / ".accelerators"
_MEGA = 1e6


def main(argv: Sequence[str] | None = None) -> int:
    """Compiles and checks; returns 1 if a program does not compile, or fails a check.

    With `--all`, tests of `tests/accelerators` also try the checks on broken programs.
    """
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--all", action="store_true", help="every program for every device: an hour of two cores")
    parser.add_argument("--folder", type=pathlib.Path, default=_FOLDER, help="of the compilers")
    parser.add_argument("--processes", type=int, default=os.cpu_count() or 1)
    parser.add_argument("--output", type=pathlib.Path, help="JSON file for all figures")
    parser.add_argument("--target", action="append", help="such as v5e/1/bfloat16/T5/^admit; may be given again")
    parser.add_argument("--compile", metavar="TARGET", help=argparse.SUPPRESS)
    flags = parser.parse_args(argv)
    if flags.compile:
        _compile(flags.compile)
        return 0
    try:
        folder = installed(flags.folder)
    except MissingPackagesError as error:
        print(f"skipped, and nothing checked: {error}")
        return 0
    rows: list[dict[str, Any]] = []
    for row in _rows(flags.target or _targets(folder, every=flags.all), folder, processes=flags.processes):
        rows.append(row)
        print(_line(row), flush=True)
        if flags.output:
            flags.output.parent.mkdir(parents=True, exist_ok=True)
            flags.output.write_text(json.dumps(rows, indent=1) + "\n", encoding="utf-8")
    wrong = [row for row in rows if row["faults"]]
    print(f"{len(rows)} programs compiled for devices that are not here; {len(wrong)} wrong", flush=True)
    status = int(bool(wrong) or not rows)
    if flags.all:
        tests = [sys.executable, "-m", "pytest", "-q", "-m", "compilers", "tests/accelerators"]
        given = {**environment(folder), "CALM_BEAM_ACCELERATORS": "1"}
        status |= int(bool(subprocess.run(tests, env=given, cwd=_ROOT, check=False).returncode))
    return status


def _targets(folder: pathlib.Path, *, every: bool) -> list[str]:
    """Returns the targets as command-line words, from a process with the compilers, since describing needs them."""
    function = "every_target" if every else "of_changes"
    program = f"from tools.accelerators import targets as t; print(*(e.text() for e in t.{function}()), sep=chr(10))"
    return subprocess.run(
        [sys.executable, "-c", program], env=environment(folder), cwd=_ROOT, capture_output=True, text=True, check=True
    ).stdout.splitlines()


def environment(folder: pathlib.Path) -> dict[str, str]:
    """Returns the environment of processes that compile, given the folder of the compilers."""
    path = os.pathsep.join([str(folder), str(_ROOT), *filter(None, [os.environ.get("PYTHONPATH")])])
    return {**os.environ, **ENVIRONMENT, "PYTHONPATH": path}


def _rows(targets: Sequence[str], folder: pathlib.Path, *, processes: int) -> Iterator[dict[str, Any]]:
    with concurrent.futures.ThreadPoolExecutor(max_workers=max(1, processes)) as pool:
        running = [pool.submit(_compiled_apart, target, folder) for target in targets]
        for done in concurrent.futures.as_completed(running):
            yield from done.result()


def _compiled_apart(target: str, folder: pathlib.Path) -> list[dict[str, Any]]:
    """Returns the results for a target from a separate process."""
    command = [sys.executable, "-m", __package__, f"--compile={target}"]
    done = subprocess.run(command, env=environment(folder), cwd=_ROOT, capture_output=True, text=True, check=False)
    rows = [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]
    if done.returncode:
        reason = done.stderr.strip().splitlines()[-1:] or ["no reason given"]
        rows.append({"target": target, "program": "", "faults": [f"ended with {done.returncode}: {reason[0]}"]})
    return rows


def _compile(text: str) -> None:
    """Prints a JSON line for each program of a target."""
    from .checks import faults
    from .compiled import compiled
    from .described import platform_of
    from .targets import Target

    target = Target.of(text)
    for program in target.programs():
        row: dict[str, Any] = {
            "device": target.device,
            "devices": target.count,
            "dtype": target.dtype,
            "model": target.model,
            "program": program.name,
        }
        try:
            platform = platform_of(target.device)
            made = compiled(program, platform=platform, with_assembly=target.dtype == "float32")
            smallest = compiled(program.smallest, platform=platform) if program.smallest else None
        except Exception as error:
            # The other programs are compiled whatever error this compiler raises.
            print(json.dumps({**row, "faults": [f"{type(error).__name__}: {str(error)[:300]}"]}), flush=True)
            continue
        memory = made.memory
        print(
            json.dumps(
                {
                    **row,
                    "seconds": made.seconds,
                    "code_bytes": made.code_bytes,
                    "argument_bytes": memory.argument_size_in_bytes,
                    "output_bytes": memory.output_size_in_bytes,
                    "temporary_bytes": memory.temp_size_in_bytes,
                    "in_place_bytes": memory.alias_size_in_bytes,
                    "bytes_accessed": made.cost.get("bytes accessed"),
                    "conditionals": made.conditionals,
                    "collectives": dict(made.collectives),
                    "faults": faults(made, target.precision, smallest=smallest),
                }
            ),
            flush=True,
        )


def _line(row: dict[str, Any]) -> str:
    if "device" not in row:
        return f"{row['target']}: {'; '.join(row['faults'])}"
    said = f"{row['device']} x {row['devices']}, {row['dtype']}, {row['model']}, {row['program']}"
    if row["faults"]:
        return f"{said}: WRONG: {'; '.join(row['faults'])}"
    return f"{said}: {row['seconds']:.1f} s, {row['code_bytes'] / _MEGA:.2f} MB"


if __name__ == "__main__":
    sys.exit(main())
