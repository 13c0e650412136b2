"""Output directories are replaced atomically."""

import pathlib

import pytest

from calm_beam.storage import staged


def _fill(folder: str | pathlib.Path, content: str) -> None:
    directory = pathlib.Path(folder)
    (directory / "generations").mkdir(parents=True)
    (directory / "generations" / content).write_text(content)
    (directory / "table.csv").write_text(content)


def _files(directory: pathlib.Path) -> dict[str, str]:
    return {str(path.relative_to(directory)): path.read_text() for path in directory.rglob("*") if path.is_file()}


def test_a_new_directory_appears_with_everything(tmp_path: pathlib.Path) -> None:
    """The written files appear in the output, whose parents are made, and no other files are left."""
    output = tmp_path / "runs" / "first"
    with staged(str(output)) as staging:
        _fill(staging, "new")
        assert not output.exists()
    assert _files(tmp_path) == {"runs/first/generations/new": "new", "runs/first/table.csv": "new"}


def test_an_earlier_run_is_replaced_whole(tmp_path: pathlib.Path) -> None:
    """No file of the earlier run stays among the new ones; foreign files stay."""
    _fill(tmp_path / "out", "old")
    (tmp_path / "out" / "notes.txt").write_text("mine")
    with staged(str(tmp_path / "out")) as staging:
        _fill(staging, "new")
    assert _files(tmp_path / "out") == {"generations/new": "new", "table.csv": "new", "notes.txt": "mine"}


def _fail(output: pathlib.Path) -> None:
    with staged(str(output)) as staging:
        _fill(staging, "new")
        raise RuntimeError("worker lost")


def test_a_failure_changes_nothing(tmp_path: pathlib.Path) -> None:
    """After a failure the earlier run is unchanged, and a new output does not exist."""
    _fill(tmp_path / "out", "old")
    before = _files(tmp_path)
    for output in (tmp_path / "out", tmp_path / "new" / "deep"):
        with pytest.raises(RuntimeError, match="worker lost"):
            _fail(output)
    assert _files(tmp_path) == before
    assert not (tmp_path / "new").exists()


def test_nothing_is_removed_through_a_link(tmp_path: pathlib.Path) -> None:
    """A link in the earlier run is replaced as a link, and its target stays."""
    _fill(tmp_path / "elsewhere", "kept")
    (tmp_path / "out").mkdir()
    for name in ("generations", "table.csv"):
        (tmp_path / "out" / name).symlink_to(tmp_path / "elsewhere" / name)
    with staged(str(tmp_path / "out")) as staging:
        _fill(staging, "new")
    assert _files(tmp_path / "out") == {"generations/new": "new", "table.csv": "new"}
    assert _files(tmp_path / "elsewhere") == {"generations/kept": "kept", "table.csv": "kept"}
