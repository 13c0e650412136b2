"""Lines are appended atomically."""

import concurrent.futures
import os
import pathlib
import subprocess
import sys

import pytest

from calm_beam.storage import append_line


def test_lines_are_added(tmp_path: pathlib.Path) -> None:
    """The file is made, and lines follow each other."""
    for line in ("one", "zwei — deux", ""):
        append_line(tmp_path / "log", line)
    assert (tmp_path / "log").read_text(encoding="utf-8") == "one\nzwei — deux\n\n"


@pytest.mark.parametrize("whole", ["", "one\ntwo\n"])
def test_half_a_line_is_taken_away(tmp_path: pathlib.Path, whole: str) -> None:
    """Half a line, left by a process that died, is removed before the next line."""
    (tmp_path / "log").write_text(f"{whole}half a l")
    append_line(tmp_path / "log", "next")
    assert (tmp_path / "log").read_text() == f"{whole}next\n"


def test_a_full_disk_leaves_the_file_as_it_was(tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A line for which there is no room, or only half of it, is not written at all."""
    append_line(tmp_path / "log", "one")
    write = os.write
    monkeypatch.setattr(os, "write", lambda descriptor, content: write(descriptor, content[:3]))
    with pytest.raises(OSError, match="no room for a whole line"):
        append_line(tmp_path / "log", "two and more")
    assert (tmp_path / "log").read_text() == "one\n"


def test_another_file_is_left_alone(tmp_path: pathlib.Path) -> None:
    """A large file without line breaks is not ours, and is not cut."""
    (tmp_path / "log").write_bytes(b"x" * 70_000)
    with pytest.raises(OSError, match="this is not a file of short lines"):
        append_line(tmp_path / "log", "one")
    assert (tmp_path / "log").stat().st_size == 70_000


@pytest.mark.timeout(120)
def test_threads_and_processes_share_a_file(tmp_path: pathlib.Path) -> None:
    """Of many concurrent writers, every line arrives complete and once."""
    code = (
        "import sys; from calm_beam.storage import append_line\n"
        "for number in range(50): append_line(sys.argv[1], sys.argv[2] * 40 + f'-{number}')"
    )
    path = str(tmp_path / "log")
    others = [subprocess.Popen([sys.executable, "-c", code, path, letter]) for letter in "ab"]
    with concurrent.futures.ThreadPoolExecutor(4) as pool:
        list(pool.map(lambda number: append_line(path, "c" * 40 + f"-{number}"), range(50)))
    assert [other.wait(100) for other in others] == [0, 0]
    expected = {f"{letter * 40}-{number}" for letter in "abc" for number in range(50)}
    lines = pathlib.Path(path).read_text().splitlines()
    assert len(lines) == 150
    assert set(lines) == expected
