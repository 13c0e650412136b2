"""Local copies of Cloud Storage objects."""

import os
import pathlib
import subprocess
import sys
import threading
from typing import TYPE_CHECKING

import pytest

from calm_beam import storage
from calm_beam.storage import CloudFile, StorageError, cached_folder, list_below
from tests.cloud.guard import Fault

if TYPE_CHECKING:
    from tests.cloud.service import CloudService

pytestmark = pytest.mark.timeout(60)

_CONTENT = {"a": b"1", "d/b": b"22" * 1000, "d/e/c": b""}


@pytest.fixture
def folder(bucket: str) -> str:
    """A folder with three objects."""
    for name, content in _CONTENT.items():
        _write(f"{bucket}/model/{name}", content)
    return f"{bucket}/model"


def _write(path: str, content: bytes) -> None:
    with storage.replacing(path) as temporary:
        temporary.write_bytes(content)


def _fetch(folder: str) -> pathlib.Path:
    return cached_folder(folder, list_below(folder))


def _files(folder: pathlib.Path) -> dict[str, bytes]:
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def _downloads(cloud: "CloudService") -> int:
    return sum("alt=media" in place for _, place in cloud.guard.requests)


def test_objects_become_files(folder: str) -> None:
    """The copy has every object under its name in the folder."""
    assert _files(_fetch(folder)) == _CONTENT


def test_a_copy_is_made_once(cloud: "CloudService", folder: str) -> None:
    """A second use downloads nothing, in this process or another one."""
    copy = _fetch(folder)
    assert _downloads(cloud) == 3
    assert _fetch(folder) == copy
    code = (
        "from calm_beam.storage import cached_folder, list_below\n"
        f"print(cached_folder({folder!r}, list_below({folder!r})))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=50)
    assert done.stdout.strip() == str(copy)
    assert _downloads(cloud) == 3


def test_those_who_come_at_once_share_one_download(cloud: "CloudService", folder: str) -> None:
    """Of several concurrent users of the same copy, one downloads and the others wait."""
    copies: list[pathlib.Path] = []
    threads = [threading.Thread(target=lambda: copies.append(_fetch(folder))) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(copies) == 4
    assert len(set(copies)) == 1
    assert _downloads(cloud) == 3


def test_another_content_is_another_copy(folder: str) -> None:
    """A rewritten object gives a new copy, and the old one is unchanged for its users."""
    old = _fetch(folder)
    _write(f"{folder}/a", b"2")
    new = _fetch(folder)
    assert _files(new) == {**_CONTENT, "a": b"2"}
    assert _files(old) == _CONTENT


def test_the_same_content_elsewhere_is_another_copy(bucket: str, folder: str) -> None:
    """Equal content from another address is another copy."""
    for name, content in _CONTENT.items():
        _write(f"{bucket}/other/{name}", content)
    assert _fetch(f"{bucket}/other") != _fetch(folder)


@pytest.mark.parametrize("damage", ["changed", "cut", "missing"])
def test_a_damaged_copy_is_made_anew(folder: str, damage: str) -> None:
    """A copy that differs from the stored one, to the last bit, is downloaded again."""
    copy = _fetch(folder)
    file = copy / "d" / "b"
    if damage == "missing":
        file.unlink()
    else:
        file.write_bytes(b"23" * 1000 if damage == "changed" else b"22")
    assert _files(_fetch(folder)) == _CONTENT


def test_damage_on_the_way_is_told(cloud: "CloudService", folder: str, tmp_path: pathlib.Path) -> None:
    """An object that arrives with another checksum is not kept."""
    cloud.guard.corrupted.add("model/d/b")
    with pytest.raises(StorageError, match=r"model/d/b: what arrived has another checksum than what was stored\. Try"):
        _fetch(folder)
    assert [path for path in (tmp_path / "cache").iterdir() if path.is_dir()] == []
    cloud.guard.corrupted.clear()
    assert _files(_fetch(folder)) == _CONTENT


def test_an_object_that_was_replaced_since_is_told(folder: str) -> None:
    """If a listed object was replaced, there is an error instead of a mixed copy."""
    files = list_below(folder)
    _write(f"{folder}/a", b"2")
    with pytest.raises(StorageError, match=r"model/a: was replaced or removed while it was read"):
        cached_folder(folder, files)


def test_a_failed_download_leaves_nothing(cloud: "CloudService", folder: str, tmp_path: pathlib.Path) -> None:
    """After a failure there is no copy, and the next attempt makes a complete one."""
    cloud.guard.faults.append(Fault(403, "GET", "d/b?"))
    with pytest.raises(PermissionError, match="model/d/b: permission denied"):
        _fetch(folder)
    assert [path for path in (tmp_path / "cache").iterdir() if path.is_dir()] == []
    assert _files(_fetch(folder)) == _CONTENT


def test_leftovers_of_killed_processes_are_removed(folder: str, tmp_path: pathlib.Path) -> None:
    """Partial downloads of killed processes are removed with the next download."""
    copy = _fetch(folder)
    leftover = tmp_path / "cache" / f".{copy.name}.123456.partial"
    leftover.mkdir()
    (copy / "a").write_bytes(b"damaged")
    _fetch(folder)
    assert not leftover.exists()


@pytest.mark.parametrize("name", ["../outside", "a//b", "d/../../x", "d/.", "a\\b"])
def test_names_that_lead_elsewhere_are_refused(tmp_path: pathlib.Path, name: str) -> None:
    """An object whose name leads outside of the copy is not written."""
    file = CloudFile(path=f"gs://b/model/{name}", generation=1, size=1, crc32c="")
    with pytest.raises(StorageError, match=r"has no name on a local disk\. Rename it"):
        cached_folder("gs://b/model", [file])


def test_a_cache_that_cannot_be_written_is_told(
    folder: str, tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """If the cache cannot be written, the message names the variable that moves it."""
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("CALM_BEAM_CACHE", str(tmp_path / "file" / "cache"))
    with pytest.raises(StorageError, match=r"cannot be kept here \(.*\)\. Set CALM_BEAM_CACHE to a folder that can be"):
        _fetch(folder)


def test_the_cache_is_the_users_own(folder: str, tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """By default copies are in the user's cache, which other users cannot read."""
    monkeypatch.delenv("CALM_BEAM_CACHE")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "xdg"))
    copy = _fetch(folder)
    assert copy.parent == tmp_path / "xdg" / "calm-beam"
    assert os.stat(copy.parent).st_mode & 0o077 == 0
