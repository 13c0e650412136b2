"""The cost of commands before they do any work: programs compiled, seconds of compiling, and imports.

    python -m benchmarks.cold_start --json
    python -m benchmarks.cold_start --repository=../another-checkout

Runs, each in a process of its own: `calibrate` on the demo model and data, and 40 steps of `train` from the demo model,
first without compiled code and then with the code that the first run left; and `--help` of every command. Another
checkout of the repository is run with the packages that are installed here.
"""

import argparse
import dataclasses
import json
import os
import pathlib
import resource
import subprocess
import sys
import tempfile
import time

from calm_beam.launch.commands import COMMANDS

from .machine import describe_machine

_HERE = pathlib.Path(__file__).parent.parent
_STEPS = 40

# Runs the arguments from the second on as a command; writes what was compiled into the file that the first names.
_COUNTED = """
import collections, json, sys
import jax
spans, hits = [], []
def add(event, start, end, **about):
    spans.append((event, start, end, about.get("fun_name", "?")))
jax.monitoring.register_event_time_span_listener(add)
jax.monitoring.register_event_listener(lambda event, **about: hits.append(event))
from calm_beam.launch import cli
status = cli.main(sys.argv[2:])
compiled = [span for span in spans if "backend_compile" in span[0]]
def seconds(spans):
    total = reached = 0.0
    for start, end in sorted(spans):
        total += max(0.0, end - max(start, reached))
        reached = max(reached, end)
    return total
with open(sys.argv[1], "w") as file:
    json.dump({
        "programs": len(compiled),
        "from_cache": sum("cache_hits" in event for event in hits),
        "compiling": seconds(span[1:3] for span in compiled),
        "with_tracing": seconds(span[1:3] for span in spans if "/jax/core/compile/" in span[0]),
        "by_function": collections.Counter(span[3] for span in compiled),
    }, file)
sys.exit(status)
"""


@dataclasses.dataclass(frozen=True, kw_only=True)
class _Run:
    """Measurements of one command.

    Attributes:
      seconds: By the clock, of the whole process.
      cpu_seconds: Of all its threads.
      programs: That were compiled, or read from the cache.
      from_cache: Of these, those that were read.
      compiling: Seconds in which XLA compiled or a program was read.
      with_tracing: Seconds in which functions were traced and lowered, too.
      by_function: Programs by the name of the function.
    """

    seconds: float
    cpu_seconds: float
    programs: int = 0
    from_cache: int = 0
    compiling: float = 0.0
    with_tracing: float = 0.0
    by_function: dict[str, int] = dataclasses.field(default_factory=dict)


def main() -> None:
    """Prints all of it."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--repository", type=pathlib.Path, default=_HERE, help="checkout to measure")
    parser.add_argument("--json", action="store_true", help="print JSON")
    flags = parser.parse_args()
    repository = flags.repository.resolve()
    helps = {name: _timed(repository, "-m", "calm_beam.launch.cli", name, "--help") for name in COMMANDS}
    with tempfile.TemporaryDirectory() as folder:
        runs = _counted_runs(repository, pathlib.Path(folder))
    if flags.json:
        content = {
            "machine": describe_machine(),
            "commit": _commit(repository),
            "runs": {name: dataclasses.asdict(run) for name, run in runs.items()},
            "help_cpu_seconds": {name: run.cpu_seconds for name, run in helps.items()},
        }
        print(json.dumps(content, indent=1))
        return
    print(f"{describe_machine()}; commit {_commit(repository)}")
    for name, run in runs.items():
        print(
            f"{name:<16} {run.programs:4} programs, {run.from_cache:3} from the cache, {run.compiling:6.1f} s "
            f"compiling, {run.with_tracing:6.1f} s with tracing, {run.seconds:6.1f} s in all, "
            f"{run.cpu_seconds:6.1f} CPU-seconds"
        )
    for name, run in helps.items():
        print(f"{name} --help: {run.cpu_seconds:.2f} CPU-seconds")


def _counted_runs(repository: pathlib.Path, folder: pathlib.Path) -> dict[str, _Run]:
    demo = repository / "calm_beam" / "demo"
    commands = {
        "calibrate": [],
        "train": [
            f"--checkpoint={demo / 'model'}",
            f"--data={demo / 'calibration.jsonl.gz'}",
            f"--steps={_STEPS}",
        ],
    }
    runs = {}
    for command, flags in commands.items():
        for kind in ("cold", "warm"):
            counts, output = folder / "counts.json", folder / f"{command}-{kind}"
            cache = folder / f"{command}-cache"
            arguments = ("-c", _COUNTED, str(counts), command, *flags, f"--output={output}")
            run = _timed(repository, *arguments, CALM_BEAM_CACHE=str(cache))
            counted = json.loads(counts.read_text(encoding="utf-8"))
            runs[f"{command}, {kind}"] = dataclasses.replace(run, **counted)
    return runs


def _timed(repository: pathlib.Path, *arguments: str, **environment: str) -> _Run:
    """Returns what a Python process in a checkout takes."""
    inherited = {name: value for name, value in os.environ.items() if name != "JAX_COMPILATION_CACHE_DIR"}
    before, start = _children_cpu(), time.perf_counter()
    subprocess.run(
        [sys.executable, *arguments],
        cwd=repository,
        env={**inherited, "PYTHONPATH": str(repository), **environment},
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        check=True,
    )
    return _Run(seconds=time.perf_counter() - start, cpu_seconds=_children_cpu() - before)


def _children_cpu() -> float:
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


def _commit(repository: pathlib.Path) -> str:
    described = ["git", "-C", str(repository), "describe", "--always", "--dirty"]
    return subprocess.run(described, capture_output=True, text=True, check=True).stdout.strip()


if __name__ == "__main__":
    main()
