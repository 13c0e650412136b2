"""Commands in processes of their own that share the time for imports.

A server process imports the modules that commands use and stays idle; each command runs in a fork of it, with a current
folder, a folder for temporary files and three streams of its own.
"""

import dataclasses
import functools
import json
import multiprocessing
import os
import pathlib
import resource
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from multiprocessing.context import ForkServerContext

_PRELOADED = [
    "apache_beam",
    "calm_beam.launch.cli",
    "calm_beam.launch.run_sweep",
    "calm_beam.decoding.decoder",
    "pyarrow",
]
_ADDRESS_SPACE = 16 << 30
"""Bytes; a command that wants more gets a MemoryError, and does not take the machine with it."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Ended:
    """How a command ended.

    Attributes:
      status: Its exit status; negative if a signal ended it, None if it had to be killed.
      out: What it wrote to stdout.
      err: What it wrote to stderr.
      seconds: How long it ran.
      peak_mib: The most memory that it, or one of its children, held at a time; 0 if it was killed.
    """

    status: int | None
    out: str
    err: str
    seconds: float
    peak_mib: float


@functools.cache
def _server() -> ForkServerContext:
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(_PRELOADED)
    return context


def run_forked(function: Callable[..., object], *arguments: object, folder: pathlib.Path, limit: float) -> Ended:
    """Runs an importable function in a fork, its streams in files of `folder`, and kills it after `limit` seconds."""
    start = time.monotonic()
    process = _server().Process(target=_call, args=(function, arguments, str(folder)))
    process.start()
    process.join(limit)
    if process.exitcode is None:
        process.kill()
        process.join()
        status = None
    else:
        status = process.exitcode
    return _ended(folder, status=status, seconds=time.monotonic() - start)


def run_command(
    argv: Sequence[str], *, folder: pathlib.Path, stdin: bytes, environment: Mapping[str, str], limit: float
) -> Ended:
    """Runs `calm-beam ARGV` in a fork, in the folder `folder / "here"`."""
    (folder / "stdin").write_bytes(stdin)
    return run_forked(_command, list(argv), dict(environment), folder=folder, limit=limit)


def run_interpreter(
    argv: Sequence[str], *, folder: pathlib.Path, stdin: bytes, environment: Mapping[str, str], limit: float
) -> Ended:
    """Does what `run_command` does in a new interpreter, for settings that are fixed at its start, as encodings are."""
    start = time.monotonic()
    try:
        done = subprocess.run(
            [sys.executable, "-m", "calm_beam.launch.cli", *argv],
            input=stdin,
            capture_output=True,
            cwd=folder / "here",
            env={**os.environ, "PYTHONPATH": os.pathsep.join(map(os.path.abspath, sys.path)), **environment},
            timeout=limit,
            check=False,
        )
        status, out, err = done.returncode, done.stdout, done.stderr
    except subprocess.TimeoutExpired:
        status, out, err = None, b"", b""
    (folder / "stdout").write_bytes(out)
    (folder / "stderr").write_bytes(err)
    return _ended(folder, status=status, seconds=time.monotonic() - start)


def _ended(folder: pathlib.Path, *, status: int | None, seconds: float) -> Ended:
    usage = folder / "usage"
    return Ended(
        status=status,
        out=(folder / "stdout").read_text(encoding="utf-8", errors="backslashreplace"),
        err=(folder / "stderr").read_text(encoding="utf-8", errors="backslashreplace"),
        seconds=seconds,
        peak_mib=json.loads(usage.read_text()) if usage.exists() else 0.0,
    )


def _call(function: Callable[..., object], arguments: Sequence[object], folder: str) -> None:
    """Calls a function in the fork; `multiprocessing` prints an exception that it raises."""
    for number, name in enumerate(("stdin", "stdout", "stderr")):
        flags = os.O_RDONLY if number == 0 else os.O_WRONLY | os.O_CREAT | os.O_TRUNC
        path = os.path.join(folder, name) if number or os.path.exists(os.path.join(folder, name)) else os.devnull
        descriptor = os.open(path, flags)
        os.dup2(descriptor, number)
        os.close(descriptor)
    sys.stdin = open(0, encoding="utf-8", closefd=False)  # noqa: SIM115 (it is there for the life of the process)
    resource.setrlimit(resource.RLIMIT_AS, (_ADDRESS_SPACE, _ADDRESS_SPACE))
    os.chdir(os.path.join(folder, "here"))
    try:
        function(*arguments)
    finally:
        sys.stdout.flush()
        peaks = [resource.getrusage(who).ru_maxrss for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
        pathlib.Path(folder, "usage").write_text(json.dumps(max(peaks) / 1024))


def _command(argv: list[str], environment: dict[str, str]) -> None:
    os.environ.update(environment)
    # Modules of the case's own, such as its metrics.
    sys.path.insert(0, os.getcwd())
    sys.argv = ["calm-beam", *argv]

    from calm_beam.launch.cli import entry_point

    entry_point()
