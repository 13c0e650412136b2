"""Files that appear whole or not at all."""

import pathlib
import stat

import pytest

from calm_beam.storage import is_cloud_path, replacing


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
    """Without a file to move, there is an error rather than an old file that looks new."""
    path = tmp_path / "a.txt"
    path.write_text("old")
    with pytest.raises(FileNotFoundError), replacing(path):
        pass
    assert path.read_text() == "old"


def test_two_writers_do_not_meet(tmp_path: pathlib.Path) -> None:
    """Two writers of one path have temporary files of their own; the last to end wins, whole."""
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
    """The file has the permissions that a file written plainly has."""
    plain, path = tmp_path / "plain", tmp_path / "a.txt"
    plain.write_text("x")
    with replacing(path) as temporary:
        temporary.write_text("x")
    assert stat.S_IMODE(path.stat().st_mode) == stat.S_IMODE(plain.stat().st_mode)


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
    """Object stores are recognised as text and as pathlib writes them; local paths that look alike are not."""
    assert is_cloud_path(path) == is_cloud
