"""Runs tests on every installed Python, with the lowest and with the newest versions that setup.py allows.

    make matrix
    python -m tools.matrix --output=build/matrix --resolution=lowest tests/calm_beam/risk

Each pair has its own environment in `--output`, made by uv. Versions are constrained only by the ranges: with `lowest`,
packages that setup.py itself names have their lowest version, and their dependencies the newest that fits. The table at
the end has the results; a missing Python is listed there as not run.
"""

import argparse
import dataclasses
import os
import pathlib
import shutil
import subprocess
import sys
from collections.abc import Mapping, Sequence

PYTHONS = ("3.11", "3.12", "3.13")
# uv's names for them.
RESOLUTIONS = {"lowest": "lowest-direct", "newest": "highest"}
_NOT_HERE, _NOT_INSTALLED, _FAILED, _PASSED = "not run: this Python is not here", "not installable", "failed", "passed"
_ROOT = pathlib.Path(__file__).parents[1]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Run:
    """One pair of Python and resolution, and its result.

    Attributes:
      python: Version, such as `3.12`.
      resolution: One of `RESOLUTIONS`.
      verdict: The result as text.
      last: The last line that pytest or uv printed; empty where nothing ran.
    """

    python: str
    resolution: str
    verdict: str
    last: str = ""

    @property
    def is_bad(self) -> bool:
        """Whether tests ran and did not pass."""
        return self.verdict in (_NOT_INSTALLED, _FAILED)


def main(argv: Sequence[str] | None = None) -> int:
    """Runs all pairs, prints their results, and returns 1 if any of them did not pass."""
    parser = argparse.ArgumentParser(prog="python -m tools.matrix", description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--output", type=pathlib.Path, required=True, help="folder of environments and logs")
    parser.add_argument("--python", action="append", choices=PYTHONS, help="may be given again; all by default")
    parser.add_argument("--resolution", action="append", choices=tuple(RESOLUTIONS), help="likewise")
    parser.add_argument("tests", nargs="+", help="for pytest")
    flags, rest = parser.parse_known_args(argv)
    found = pythons(os.environ)
    runs = []
    for version in flags.python or PYTHONS:
        for resolution in flags.resolution or RESOLUTIONS:
            folder = flags.output.resolve() / f"{version}-{resolution}"
            runs.append(run(version, resolution, found.get(version), folder=folder, tests=[*flags.tests, *rest]))
            print(in_words(runs[-1]), flush=True)
    print("", *map(in_words, runs), sep="\n")
    return 1 if any(each.is_bad for each in runs) else 0


def pythons(environment: Mapping[str, str]) -> dict[str, str]:
    """Returns the installed interpreters by version: those that the shell finds and can start, else pyenv's."""
    pyenv = pathlib.Path(environment.get("PYENV_ROOT") or pathlib.Path.home() / ".pyenv") / "versions"
    found = {}
    for version in PYTHONS:
        named = shutil.which(f"python{version}", path=environment.get("PATH"))
        kept = [str(path) for path in sorted(pyenv.glob(f"{version}.*/bin/python"))]
        # pyenv has shims also for versions that are not activated, and those start nothing.
        for path in [*([named] if named else []), *reversed(kept)]:
            if subprocess.run([path, "--version"], capture_output=True, timeout=60).returncode == 0:
                found[version] = path
                break
    return found


def run(python: str, resolution: str, interpreter: str | None, *, folder: pathlib.Path, tests: Sequence[str]) -> Run:
    """Makes an environment and runs tests in it; both logs are next to it."""
    if interpreter is None:
        return Run(python=python, resolution=resolution, verdict=_NOT_HERE)
    shutil.rmtree(folder, ignore_errors=True)
    folder.parent.mkdir(parents=True, exist_ok=True)
    log = folder.parent / f"{folder.name}.log"
    in_environment = str(folder / "bin" / "python")
    uv = [sys.executable, "-m", "uv"]
    install = [*uv, "pip", "install", "--python", in_environment, f"--resolution={RESOLUTIONS[resolution]}"]
    with log.open("w", encoding="utf-8") as file:
        for command in ([*uv, "venv", "--python", interpreter, str(folder)], [*install, "--editable", f"{_ROOT}[dev]"]):
            if subprocess.run(command, cwd=_ROOT, stdout=file, stderr=file).returncode != 0:
                return _ended(python, resolution, _NOT_INSTALLED, log)
        pytest = ["-m", "pytest", "-q", "-m", "not slow and not exhaustive", "-n", "auto", "--maxprocesses=4"]
        done = subprocess.run([in_environment, *pytest, *tests], cwd=_ROOT, stdout=file, stderr=file)
    return _ended(python, resolution, _PASSED if done.returncode == 0 else _FAILED, log)


def _ended(python: str, resolution: str, verdict: str, log: pathlib.Path) -> Run:
    lines = log.read_text(encoding="utf-8", errors="replace").rstrip().splitlines()
    return Run(python=python, resolution=resolution, verdict=verdict, last=lines[-1].strip("= ") if lines else "")


def in_words(each: Run) -> str:
    """Returns a line of the table.

    >>> in_words(Run(python="3.12", resolution="lowest", verdict="passed", last="9 passed in 2 s"))
    'Python 3.12, lowest versions: passed (9 passed in 2 s)'
    """
    last = f" ({each.last})" if each.last else ""
    return f"Python {each.python}, {each.resolution} versions: {each.verdict}{last}"


if __name__ == "__main__":
    sys.exit(main())
