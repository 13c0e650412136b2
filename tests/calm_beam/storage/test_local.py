"""Files are written atomically."""

import errno
import os
import pathlib
import re
import socket
import stat
import types

import pytest

from calm_beam.storage import (
    StorageError,
    absolute,
    base_name,
    check_writable,
    is_cloud_path,
    joined,
    open_input,
    parent,
    remove_file,
    remove_folder,
    replacing,
    writing,
)


def test_the_file_appears_at_the_end(tmp_path: pathlib.Path) -> None:
    """Inside the block only the temporary file exists, in the same folder; after it, only the file."""
    path = tmp_path / "a.txt"
    with replacing(path) as temporary:
        temporary.write_text("new")
        assert not path.exists()
        assert temporary.parent == tmp_path
    assert path.read_text() == "new"
    assert list(tmp_path.iterdir()) == [path]


def test_readers_see_the_old_file_until_then(tmp_path: pathlib.Path) -> None:
    """A file that is being replaced keeps its content until the block has succeeded; paths may be texts."""
    path = tmp_path / "a.txt"
    path.write_text("old")
    with replacing(str(path)) as temporary:
        temporary.write_text("new")
        assert path.read_text() == "old"
    assert path.read_text() == "new"


@pytest.mark.parametrize("written", [True, False])
def test_a_failed_block_changes_nothing(tmp_path: pathlib.Path, written: bool) -> None:
    """If the block raises, before or after writing, the old file stays and the temporary one is gone."""
    path = tmp_path / "a.txt"
    path.write_text("old")

    def write_and_fail(temporary: pathlib.Path) -> None:
        if written:
            temporary.write_text("half")
        raise KeyError("disk")

    with pytest.raises(KeyError, match="disk"), replacing(path) as temporary:
        write_and_fail(temporary)
    assert path.read_text() == "old"
    assert list(tmp_path.iterdir()) == [path]


def test_a_block_that_writes_nothing_fails(tmp_path: pathlib.Path) -> None:
    """A block that writes no file raises an error, so that an old file does not look new."""
    path = tmp_path / "a.txt"
    path.write_text("old")
    with pytest.raises(FileNotFoundError), replacing(path):
        pass
    assert path.read_text() == "old"


def test_two_writers_do_not_meet(tmp_path: pathlib.Path) -> None:
    """Two writers of one path have temporary files of their own; the last to end wins with its whole file."""
    path = tmp_path / "a.txt"
    with replacing(path) as one:
        with replacing(path) as other:
            assert one != other
            one.write_text("one")
            other.write_text("other")
        assert path.read_text() == "other"
    assert path.read_text() == "one"
    assert list(tmp_path.iterdir()) == [path]


def test_others_may_read_the_file(tmp_path: pathlib.Path) -> None:
    """The file has the permissions of a file written directly."""
    plain, path = tmp_path / "plain", tmp_path / "a.txt"
    plain.write_text("x")
    with replacing(path) as temporary:
        temporary.write_text("x")
    assert stat.S_IMODE(path.stat().st_mode) == stat.S_IMODE(plain.stat().st_mode)


def test_a_folder_that_cannot_be_written_is_told(tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Write access is checked in the folder, or in the nearest existing one above it."""
    asked = []

    def access(folder: pathlib.Path, mode: int) -> bool:
        asked.append((folder, mode))
        return False

    check_writable(tmp_path / "new" / "folder" / "a.txt")
    assert list(tmp_path.iterdir()) == []
    monkeypatch.setattr(os, "access", access)
    with pytest.raises(PermissionError, match=rf"a\.txt: permission denied: {tmp_path} cannot be written\."):
        check_writable(tmp_path / "new" / "folder" / "a.txt")
    assert asked == [(tmp_path, os.W_OK)]


def test_a_file_system_that_can_only_be_read_is_told(tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A file system that can only be read is named as the reason, not a denied permission."""
    real = os.statvfs(tmp_path)
    monkeypatch.setattr(os, "access", lambda *_: False)
    monkeypatch.setattr(os, "statvfs", lambda _: types.SimpleNamespace(f_flag=real.f_flag | os.ST_RDONLY))
    with pytest.raises(OSError, match=rf"{tmp_path} is on a file system that can only be read\. Choose another place"):
        check_writable(tmp_path / "a.txt")


@pytest.mark.parametrize(
    ("number", "advice"),
    [
        (errno.ENOSPC, "No space left on device. Make room there, or choose a folder on another disk."),
        (errno.EDQUOT, "Disk quota exceeded. Make room there, or choose a folder on another disk."),
        (errno.EFBIG, "File too large. Raise the limit (ulimit -f), or choose a folder on another disk."),
        (errno.EIO, "Input/output error. The disk fails: choose a folder on another one."),
        (errno.EROFS, "Read-only file system. Choose a folder on another disk."),
    ],
)
def test_a_disk_that_takes_no_more_is_named(number: int, advice: str, tmp_path: pathlib.Path) -> None:
    """The system's error names no file; ours names the file that was to be written, and leaves none."""
    path = tmp_path / "a.txt"

    def write(temporary: pathlib.Path) -> None:
        temporary.write_text("a part")
        raise OSError(number, "Error writing bytes to file")

    expected = re.escape(f"{path}: cannot be written: {advice}")
    with pytest.raises(StorageError, match=f"^{expected}$"), replacing(path) as temporary:
        write(temporary)
    assert list(tmp_path.iterdir()) == []


def test_other_errors_stay_what_they_are(tmp_path: pathlib.Path) -> None:
    """Errors that are not the disk's are raised unchanged."""
    for error in (FileExistsError(errno.EEXIST, "exists"), StorageError("no client"), ValueError("no number")):
        with pytest.raises(type(error)) as raised, writing(tmp_path / "a"):
            raise error
        assert raised.value is error


@pytest.mark.parametrize(
    ("path", "folder", "name"),
    [
        ("out/manifest.json", "out", "manifest.json"),
        ("out/", ".", "out"),
        ("manifest.json", ".", "manifest.json"),
        ("/a/b", "/a", "b"),
        ("gs://bucket/run/a", "gs://bucket/run", "a"),
        ("gs://bucket/run/", "gs://bucket", "run"),
        ("gs://bucket", "gs://bucket", ""),
        (pathlib.Path("gs://bucket/a"), "gs://bucket", "a"),
    ],
)
def test_paths_have_parts(path: str | pathlib.Path, folder: str, name: str) -> None:
    """Folder and name of a path, of either kind, join to the path again."""
    assert (parent(path), base_name(path)) == (folder, name)
    if name:
        assert absolute(joined(folder, name)) == absolute(path)


@pytest.mark.parametrize(
    ("path", "is_cloud"),
    [
        ("gs://bucket/a", True),
        (pathlib.Path("gs://bucket/a"), True),
        ("s3://bucket/a", True),
        ("hdfs://host/a", True),
        ("/gs/a", False),
        ("gs", False),
        ("gsx://bucket", False),
        ("data/gs:/a", False),
        (pathlib.Path("a.jsonl"), False),
    ],
)
def test_cloud_paths_are_told_apart(path: str | pathlib.Path, is_cloud: bool) -> None:
    """Object stores are recognised as text and as pathlib writes them; similar local paths are not."""
    assert is_cloud_path(path) == is_cloud


def _elsewhere(folder: pathlib.Path) -> pathlib.Path:
    """Makes a folder with a file in a subfolder, which must not be removed."""
    kept = folder / "elsewhere" / "run" / "kept.txt"
    kept.parent.mkdir(parents=True)
    kept.write_text("kept")
    return kept


@pytest.mark.parametrize("linked", ["generations", "generations/run"])
def test_nothing_is_removed_through_a_link(tmp_path: pathlib.Path, linked: str) -> None:
    """A folder that is a link, or is behind one below the output, is refused by the link's name, and unchanged."""
    kept = _elsewhere(tmp_path)
    link = tmp_path / "out" / linked
    link.parent.mkdir(parents=True)
    link.symlink_to(kept.parent.parent if linked == "generations" else kept.parent)
    with pytest.raises(OSError, match=f"^{link}: is a symbolic link, and what lies behind it is not removed"):
        remove_folder(tmp_path / "out" / "generations" / "run", inside=tmp_path / "out")
    assert kept.read_text() == "kept"
    assert link.is_symlink()


def test_links_in_a_folder_are_removed_alone(tmp_path: pathlib.Path) -> None:
    """Removing a folder removes the links in it, but not their targets; an output may be a link."""
    kept = _elsewhere(tmp_path)
    run = tmp_path / "disk" / "run"
    run.mkdir(parents=True)
    (run / "folder").symlink_to(kept.parent)
    (run / "file").symlink_to(kept)
    (run / "nowhere").symlink_to(tmp_path / "absent")
    (tmp_path / "out").symlink_to(tmp_path / "disk")
    remove_folder(tmp_path / "out" / "run", inside=tmp_path / "out")
    assert not run.exists()
    assert kept.read_text() == "kept"
    remove_folder(tmp_path / "out" / "run", inside=tmp_path / "out")


def test_a_file_that_is_a_link_is_replaced_and_removed_alone(tmp_path: pathlib.Path) -> None:
    """Replacing or removing a file that is a link does not change its target."""
    kept = _elsewhere(tmp_path)
    link = tmp_path / "link"
    link.symlink_to(kept)
    with replacing(link) as temporary:
        temporary.write_text("new")
    assert not link.is_symlink()
    link.unlink()
    link.symlink_to(kept)
    remove_file(link)
    assert not link.is_symlink()
    assert kept.read_text() == "kept"


def test_only_files_are_written_over(tmp_path: pathlib.Path) -> None:
    """A pipe or a device is not replaced by a file; a file is not a folder for another."""
    (tmp_path / "file").write_text("mine")
    check_writable(tmp_path / "file")
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(FileExistsError, match="pipe: exists and is not a file that can be overwritten"):
        check_writable(tmp_path / "pipe")
    with pytest.raises(FileExistsError, match="/dev/null"):
        check_writable("/dev/null")
    with pytest.raises(NotADirectoryError, match="file is a file, expected a folder"):
        check_writable(tmp_path / "file" / "below")


def test_errors_while_reading_name_the_file() -> None:
    """However a file is read, a system error's message begins with its name."""
    for read in (
        lambda file: file.read(),
        lambda file: file.read(10),
        lambda file: file.readline(),
        lambda file: list(file),
        lambda file: file.seek(0, 2),
    ):
        with (
            open_input("/proc/self/mem") as file,
            pytest.raises(StorageError, match=r"^/proc/self/mem: cannot be read \(.+\)\. Name a file"),
        ):
            read(file)


def test_what_has_no_end_is_not_opened(tmp_path: pathlib.Path) -> None:
    """Pipes, devices and sockets are refused, behind a link too; folders are as usual."""
    os.mkfifo(tmp_path / "pipe")
    (tmp_path / "link").symlink_to("/dev/zero")
    place = tmp_path / "socket"
    with socket.socket(socket.AF_UNIX) as bound:
        bound.bind(str(place))
        for name, kind in (("pipe", "pipe"), ("link", "device"), ("socket", "socket")):
            with pytest.raises(StorageError, match=rf"{name}: is a {kind}, expected a file\."):
                open_input(tmp_path / name)
    with pytest.raises(IsADirectoryError):
        open_input(tmp_path)
    with pytest.raises(FileNotFoundError):
        open_input(tmp_path / "absent")


def test_a_file_is_read_in_every_way(tmp_path: pathlib.Path) -> None:
    """It is a buffered file like any other: lines, positions and views."""
    (tmp_path / "file").write_bytes(b"one\ntwo\nthree")
    with open_input(tmp_path / "file") as file:
        assert (file.readline(), file.tell(), list(file)) == (b"one\n", 4, [b"two\n", b"three"])
        assert (file.seek(-5, 2), file.read(), file.seekable(), file.fileno() > 2) == (8, b"three", True, True)
