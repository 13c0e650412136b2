"""Reports of workers, as lines of a file."""

import pathlib

from calm_beam.transforms.metrics import ProgressLog


def test_reports_are_appended(tmp_path: pathlib.Path) -> None:
    """Each report is appended as one line."""
    path = tmp_path / "progress"
    path.write_text("read 5\n")
    log = ProgressLog(str(path))
    log.report("decoded", 1)
    log.report("scored", 32)
    assert path.read_text() == "read 5\ndecoded 1\nscored 32\n"


def test_a_log_without_a_path_is_silent(tmp_path: pathlib.Path) -> None:
    """Without a shared disk, a report does nothing."""
    ProgressLog(None).report("decoded", 1)
    assert list(tmp_path.iterdir()) == []


def test_a_log_on_another_machine_is_silent(tmp_path: pathlib.Path) -> None:
    """A worker that does not find the file reports nothing, and makes no file."""
    ProgressLog(str(tmp_path / "progress")).report("decoded", 1)
    ProgressLog(str(tmp_path / "none" / "progress")).report("decoded", 1)
    assert list(tmp_path.iterdir()) == []
