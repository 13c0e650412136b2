"""Every case of the table ends soon with a clear message, and leaves nothing behind."""

import pathlib
import re
import shutil

import pytest

from .cases import CASES, Case
from .forks import Ended, run_command, run_interpreter
from .odd_cases import ODD_CASES
from .place import build_place

pytestmark = pytest.mark.slow

_LIMIT = 120
"""Seconds; far above what any case takes on an idle machine (`python -m tests.malformed` prints that)."""
_MOST_MIB = 2048

# Of a few examples, which most cases have.
_TOO_FEW = re.compile(r"caution: .* cannot be proved by \d+ examples, .*")
_LISTED_PLAN = re.compile(r"\w+/plans/\d{5}\.json")
_PROGRESS = ("exits: ", "engine: ", "reading", "loading", "compiling", "decoded ")


ALL_CASES = {**CASES, **ODD_CASES}
assert len(ALL_CASES) == len(CASES) + len(ODD_CASES), "every case has a name of its own"


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> pathlib.Path:
    """A valid folder, to be copied."""
    return build_place(tmp_path_factory.mktemp("place"))


def run_case(case: Case, place: pathlib.Path, folder: pathlib.Path) -> Ended:
    """Runs a case in a copy of the place, below `folder`."""
    here = folder / "here"
    shutil.copytree(place, here, symlinks=True)
    case.spoil(here)
    temporary = folder / "temporary"
    temporary.mkdir()
    run = run_interpreter if case.is_fresh else run_command
    return run(
        case.argv,
        folder=folder,
        stdin=case.stdin,
        environment={**case.environment, "TMPDIR": str(temporary)},
        limit=_LIMIT,
    )


def _content(here: pathlib.Path) -> dict[str, bytes | str]:
    """Returns what is in a folder: bytes of files, targets of links."""
    return {
        str(path.relative_to(here)): str(path.readlink()) if path.is_symlink() else path.read_bytes()
        for path in sorted(here.rglob("*"))
        if (path.is_symlink() or path.is_file()) and "__pycache__" not in path.parts
    }


def problems(case: Case, place: pathlib.Path, folder: pathlib.Path) -> tuple[Ended, list[str]]:
    """Runs a case; returns how it ended, and a text for everything that is wrong with it."""
    twin = folder / "twin"
    shutil.copytree(place, twin, symlinks=True)
    case.spoil(twin)
    before = _content(twin)
    ended = run_case(case, place, folder)
    found = []
    if ended.status not in case.statuses:
        found.append(f"status {ended.status}, expected one of {case.statuses}")
    if "Traceback" in ended.err + ended.out:
        found.append("a traceback")
    said = [
        line
        for line in ended.err.splitlines()
        if line and not line.startswith(_PROGRESS) and not _TOO_FEW.fullmatch(line)
    ]
    if len(said) > case.lines:
        found.append(f"{len(said)} lines of message")
    found += [f"does not name {name!r}" for name in case.names if name not in ended.err]
    if "\x1b" in ended.err + ended.out or "\u202e" in ended.err + ended.out:
        found.append("an escape sequence or a bidirectional override")
    after = _content(folder / "here")
    found += [
        f"{name} appeared, changed or is gone"
        for name in sorted(before.keys() | after.keys())
        if before.get(name) != after.get(name)
        and not name.startswith(case.may_write or ("\0",))
        # A plan is listed before anything is decoded, and stays listed.
        and not (name not in before and _LISTED_PLAN.fullmatch(name))
    ]
    left = sorted(path.name for path in (folder / "temporary").iterdir())
    found += [f"left {name} in the folder for temporary files" for name in left]
    if ended.peak_mib > _MOST_MIB:
        found.append(f"took {ended.peak_mib:.0f} MiB")
    return ended, found


@pytest.mark.parametrize("name", ALL_CASES)
def test_case(name: str, place: pathlib.Path, tmp_path: pathlib.Path) -> None:
    """Each case prints one or two clear lines that name the error, with the right status, and leaves no files.

    It stays within 2 GiB.
    """
    ended, found = problems(ALL_CASES[name], place, tmp_path)
    assert found == [], f"{ended.err[-3000:]}\n{ended.out[-300:]}"
