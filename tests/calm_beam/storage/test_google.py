"""Files on Google Cloud Storage, against an emulator and a guard on this machine."""

import gzip
import os
import pathlib
import subprocess
import sys
import threading
from collections.abc import Callable
from typing import TYPE_CHECKING

import pytest

from calm_beam import storage
from calm_beam.storage import StorageError, _google

if TYPE_CHECKING:
    from tests.cloud.service import CloudService

pytestmark = pytest.mark.timeout(60)


def write(path: str, content: bytes, *, overwrite: bool = True, replaces: str | None = None) -> None:
    """Writes a file as the code under test does."""
    with storage.replacing(path, overwrite=overwrite, replaces=replaces) as temporary:
        temporary.write_bytes(content)


def read(path: str) -> bytes:
    """Returns a file's content."""
    with storage.open_input(path) as file:
        return file.read()


def race(racers: int, publish: Callable[[int], None]) -> list[int]:
    """Runs publishers at the same time, and returns the winners."""
    start, winners = threading.Barrier(racers), []

    def run(racer: int) -> None:
        start.wait()
        try:
            publish(racer)
        except FileExistsError:
            return
        winners.append(racer)

    threads = [threading.Thread(target=run, args=(racer,)) for racer in range(racers)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return winners


@pytest.fixture(params=["local", "cloud"])
def folder(request: pytest.FixtureRequest, tmp_path: pathlib.Path) -> str:
    """An empty folder of either kind."""
    return str(tmp_path) if request.param == "local" else str(request.getfixturevalue("bucket"))


def test_what_is_written_is_read(folder: str) -> None:
    """Bytes read back unchanged, with any content, under any name, also none at all."""
    content = bytes(range(256)) * 3 + b"\r\n--\n"
    for name, written in (("a.bin", content), ("ü b#c?.txt", b"x"), ("empty", b"")):
        path = storage.joined(folder, name)
        write(path, written)
        assert read(path) == written
        assert storage.is_file(path)
        assert not storage.is_folder(path)


def test_a_failed_block_changes_nothing(folder: str) -> None:
    """If the block raises, the old content stays."""
    path = storage.joined(folder, "a.txt")
    write(path, b"old")

    def write_and_fail(temporary: pathlib.Path) -> None:
        temporary.write_text("half")
        raise KeyError("disk")

    with pytest.raises(KeyError, match="disk"), storage.replacing(path) as temporary:
        write_and_fail(temporary)
    assert read(path) == b"old"


def test_files_and_folders_are_told_apart(folder: str) -> None:
    """A folder exists while it contains something; names with a common beginning are not in it."""
    below = storage.joined(folder, "run", "part", "a")
    storage.make_folder(storage.parent(below))
    write(below, b"1")
    assert storage.is_folder(storage.joined(folder, "run"))
    assert storage.exists(storage.joined(folder, "run"))
    assert not storage.is_file(storage.joined(folder, "run"))
    assert not storage.exists(storage.joined(folder, "ru"))
    storage.remove_folder(storage.joined(folder, "run"), inside=folder)
    assert not storage.exists(storage.joined(folder, "run"))
    storage.remove_folder(storage.joined(folder, "run"), inside=folder)


def test_removed_files_are_gone(folder: str) -> None:
    """A file is removed, alone, and removing it again is no error."""
    for name in ("a", "b"):
        write(storage.joined(folder, name), b"1")
    for _ in range(2):
        storage.remove_file(storage.joined(folder, "a"))
    assert storage.list_files(storage.joined(folder, "*")) == (storage.joined(folder, "b"),)


@pytest.mark.parametrize(
    ("pattern", "expected"),
    [
        ("d/*.jsonl", ["d/a.jsonl", "d/b.jsonl"]),
        ("d/?.jsonl", ["d/a.jsonl", "d/b.jsonl"]),
        ("d/[!a].jsonl", ["d/b.jsonl"]),
        ("*/*.jsonl", ["d/a.jsonl", "d/b.jsonl", "e/a.jsonl"]),
        ("*/a.jsonl", ["d/a.jsonl", "e/a.jsonl"]),
        ("d/a.jsonl", ["d/a.jsonl"]),
        ("d/.*", ["d/.hidden.jsonl"]),
        ("d*", ["d.txt"]),
        ("d/**.gz", ["d/c.jsonl.gz"]),
        ("nothing*", []),
        ("nothing", []),
        ("d", []),
    ],
)
def test_globs_mean_the_same_everywhere(folder: str, pattern: str, expected: list[str]) -> None:
    """A glob gives matching files, sorted: no folders, none below, no hidden ones, for either kind of path."""
    for name in ("d/b.jsonl", "d/a.jsonl", "e/a.jsonl", "d/c.jsonl.gz", "d/.hidden.jsonl", "d/f/a.jsonl", "d.txt"):
        path = storage.joined(folder, *name.split("/"))
        storage.make_folder(storage.parent(path))
        write(path, b"1")
    assert storage.list_files(f"{folder}/{pattern}") == tuple(f"{folder}/{name}" for name in expected)


def test_every_page_of_a_listing_is_read(cloud: "CloudService", bucket: str) -> None:
    """A listing in pages of a few names is read completely."""
    names = [f"{bucket}/d/{index}" for index in range(7)]
    for name in names:
        write(name, b"1")
    cloud.guard.page_size = 2
    assert storage.list_files(f"{bucket}/d/*") == tuple(names)
    assert [file.path for file in _google.list_below(f"{bucket}/d")] == names
    storage.remove_folder(f"{bucket}/d", inside=bucket)
    assert storage.list_files(f"{bucket}/d/*") == ()


def test_placeholders_of_folders_are_no_files(cloud: "CloudService", bucket: str) -> None:
    """The empty objects that consoles make for folders are not files."""
    from tests.cloud.service import raw_client

    for name in ("d/", "d/a"):
        raw_client(cloud).bucket(bucket[5:]).blob(name).upload_from_string("")
    assert storage.list_files(f"{bucket}/d/*") == (f"{bucket}/d/a",)
    assert [file.path for file in _google.list_below(f"{bucket}/d")] == [f"{bucket}/d/a"]


def test_reading_seeks(bucket: str) -> None:
    """An object reads like a file: in pieces, lines and backwards, in fewer requests than pieces."""
    content = b"".join(b"line %d\n" % index for index in range(1000))
    write(f"{bucket}/a", content)
    with storage.open_input(f"{bucket}/a") as file:
        assert file.seekable()
        assert file.readline() == b"line 0\n"
        assert file.seek(-5, os.SEEK_END) == len(content) - 5
        assert file.read() == content[-5:]
        assert file.read(1) == b""
        file.seek(7)
        assert file.read(3) == content[7:10]
        file.seek(2, os.SEEK_CUR)
        assert file.read(3) == content[12:15]
        with pytest.raises(ValueError, match="negative"):
            file.seek(-1)
    with storage.open_input(f"{bucket}/a") as file:
        assert sum(1 for _ in file) == 1000


def test_large_objects_are_written_and_read_in_parts(
    cloud: "CloudService", bucket: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Content beyond one request arrives complete in both directions, and a precondition holds."""
    monkeypatch.setattr("google.cloud.storage.blob._MAX_MULTIPART_SIZE", 2**18)
    monkeypatch.setattr(_google, "_READ_BYTES", 2**18)
    content = bytes(range(256)) * 2**12
    write(f"{bucket}/a", content, overwrite=False)
    assert any("uploadType=resumable" in place for _, place in cloud.guard.requests)
    assert read(f"{bucket}/a") == content
    with pytest.raises(FileExistsError, match="was written by another process"):
        write(f"{bucket}/a", content[1:], overwrite=False)


def test_gzip_is_read_as_it_is(bucket: str) -> None:
    """A `.gz` file is not unpacked in transit."""
    packed = gzip.compress(b"text")
    write(f"{bucket}/a.gz", packed)
    assert read(f"{bucket}/a.gz") == packed
    with gzip.open(storage.open_input(f"{bucket}/a.gz")) as file:
        assert file.read() == b"text"


def test_encoded_objects_are_refused(cloud: "CloudService", bucket: str) -> None:
    """An object whose content depends on the client is not read."""
    from tests.cloud.service import raw_client

    blob = raw_client(cloud).bucket(bucket[5:]).blob("a.jsonl")
    blob.content_encoding = "gzip"
    blob.upload_from_string(gzip.compress(b"{}"))
    with pytest.raises(StorageError, match=r"a\.jsonl: is stored with Content-Encoding gzip\. Store it as it is"):
        storage.open_input(f"{bucket}/a.jsonl")


def test_a_file_that_is_there_is_kept(folder: str) -> None:
    """Without overwrite a file is made once; a later writer is told, and nothing changes."""
    path = storage.joined(folder, "a")
    write(path, b"first", overwrite=False)
    with pytest.raises(FileExistsError, match="a: was written by another process in the meantime"):
        write(path, b"later", overwrite=False)
    assert read(path) == b"first"


def test_writing_the_same_again_is_no_loss(folder: str) -> None:
    """A repeated step writes the existing content, and succeeds."""
    path = storage.joined(folder, "a")
    for _ in range(2):
        write(path, b"same", overwrite=False)
    old = storage.version(path)
    for _ in range(2):
        write(path, b"new", replaces=old)
    assert read(path) == b"new"


def test_versions_tell_replacements(folder: str) -> None:
    """A version is empty without a file, stays with the file, and changes when the same content is written again."""
    path = storage.joined(folder, "a")
    assert storage.version(path) == ""
    write(path, b"1")
    first = storage.version(path)
    assert first == storage.version(path) != ""
    write(path, b"1")
    assert storage.version(path) not in ("", first)


def test_replacing_a_version_that_is_gone_fails(folder: str) -> None:
    """Replacing a given version fails if another one, or none, is there."""
    path = storage.joined(folder, "a")
    write(path, b"1", replaces="")
    with pytest.raises(FileExistsError):
        write(path, b"2", replaces="")
    old = storage.version(path)
    write(path, b"3", replaces=old)
    with pytest.raises(FileExistsError):
        write(path, b"4", replaces=old)
    assert read(path) == b"3"
    current = storage.version(path)
    storage.remove_file(path)
    with pytest.raises(FileExistsError):
        write(path, b"5", replaces=current)
    assert not storage.exists(path)


def test_one_of_eight_publishers_wins(folder: str) -> None:
    """Of eight concurrent writers of a new file one wins with its content; the others are told."""
    path = storage.joined(folder, "manifest.json")
    winners = race(8, lambda racer: write(path, b"by %d" % racer, overwrite=False))
    assert len(winners) == 1
    assert read(path) == b"by %d" % winners[0]


def test_one_of_eight_who_overwrite_wins(folder: str) -> None:
    """Of eight that replace the same old file one wins, and no new file is silently lost."""
    path = storage.joined(folder, "manifest.json")
    write(path, b"old")
    old = storage.version(path)
    winners = race(8, lambda racer: write(path, b"by %d" % racer, replaces=old))
    assert len(winners) == 1
    assert read(path) == b"by %d" % winners[0]


def test_without_the_guard_all_would_win(cloud: "CloudService", bucket: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """With the emulator alone all win, so the races above are decided by the guard's preconditions."""
    monkeypatch.setenv("STORAGE_EMULATOR_HOST", cloud.emulator_url)
    winners = race(8, lambda racer: write(f"{bucket}/manifest.json", b"by %d" % racer, overwrite=False))
    assert len(winners) == 8


@pytest.mark.parametrize(("size", "method"), [(10, "POST"), (2**19, "PUT")])
def test_a_lost_answer_is_no_lost_race(
    cloud: "CloudService", bucket: str, monkeypatch: pytest.MonkeyPatch, size: int, method: str
) -> None:
    """If an upload was stored but its answer lost, the retry's 412 counts as a success."""
    from tests.cloud.guard import Fault

    monkeypatch.setattr("google.cloud.storage.blob._MAX_MULTIPART_SIZE", 2**18)
    cloud.guard.faults.append(Fault(503, method, "/upload/", is_late=True))
    write(f"{bucket}/a", b"x" * size, overwrite=False)
    assert cloud.guard.faults == []
    assert sum(asked == method for asked, _ in cloud.guard.requests) >= 2
    assert read(f"{bucket}/a") == b"x" * size


def test_a_race_lost_after_a_retry_is_told(cloud: "CloudService", bucket: str) -> None:
    """An upload that failed and then finds another's file in its place has lost, retry or not."""
    from tests.cloud.guard import Fault

    write(f"{bucket}/a", b"theirs")
    cloud.guard.faults.append(Fault(503, "POST", "/upload/"))
    with pytest.raises(FileExistsError):
        write(f"{bucket}/a", b"ours", overwrite=False)
    assert read(f"{bucket}/a") == b"theirs"


def test_passing_failures_are_retried(cloud: "CloudService", bucket: str) -> None:
    """Each kind of request survives one failure of the service."""
    from tests.cloud.guard import Fault

    path = f"{bucket}/d/a"
    for method, part, use in (
        ("POST", "/upload/", lambda: write(path, b"1")),
        ("GET", "/d/a?", lambda: storage.version(path)),
        ("GET", "alt=media", lambda: read(path)),
        ("GET", "prefix=d/", lambda: storage.list_files(f"{bucket}/d/*")),
        ("DELETE", "/d/a", lambda: storage.remove_file(path)),
    ):
        cloud.guard.faults.append(Fault(503, method, part))
        assert use() in (None, b"1", (path,)) or storage.version(path)
        assert cloud.guard.faults == [], part
    assert not storage.exists(path)


def test_failures_that_do_not_pass_are_told(
    cloud: "CloudService", bucket: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A service that keeps failing is given up on at the deadline, in one line."""
    from tests.cloud.guard import Fault

    monkeypatch.setattr(_google, "_DEADLINE_SECONDS", 0.5)
    cloud.guard.faults.append(Fault(503, "GET", "/a?", times=10**6))
    with pytest.raises(StorageError, match=r"^gs://bucket-\d+/a: the request to Google Cloud Storage failed \(.*\)\.$"):
        storage.version(f"{bucket}/a")


def test_missing_permission_is_told(cloud: "CloudService", bucket: str) -> None:
    """Without permission, every operation reports the path, the service's reason and what to do."""
    from tests.cloud.guard import Fault

    path = f"{bucket}/secret/a"
    for method in ("GET", "POST", "DELETE"):
        cloud.guard.faults.append(Fault(403, method, "secret" if method != "POST" else "/upload/", times=10**6))
    message = (
        r"secret/a: permission denied \(a failure that the test asked for\)\. Give this account the role Storage "
        r"Object User on gs://bucket-\d+, or log in as another\.$"
    )
    for use in (
        storage.open_input,
        storage.version,
        storage.is_folder,
        storage.remove_file,
        lambda name: write(name, b""),
    ):
        with pytest.raises(PermissionError, match=message):
            use(path)


def test_a_missing_bucket_is_told(cloud: "CloudService") -> None:
    """A bucket that does not exist is an error for every operation, never an empty answer."""
    path = "gs://no-such-bucket/a"
    for use in (
        storage.version,
        storage.is_file,
        storage.is_folder,
        storage.open_input,
        storage.list_files,
        lambda name: storage.list_files(f"{name}/*"),
        lambda name: write(name, b""),
        lambda name: write(name, b"", overwrite=False),
    ):
        with pytest.raises(
            FileNotFoundError, match=r"^gs://no-such-bucket/a.*: there is no bucket gs://no-such-bucket\.$"
        ):
            use(path)


def test_a_missing_object_is_told(bucket: str) -> None:
    """Reading a missing object fails as on a disk."""
    with pytest.raises(FileNotFoundError, match=r"^gs://bucket-\d+/absent: no such object\.$"):
        storage.open_input(f"{bucket}/absent")


def test_a_bucket_is_no_file(bucket: str) -> None:
    """A bucket's own address is a folder, and neither written nor removed."""
    assert storage.is_folder(bucket)
    assert not storage.is_file(bucket)
    with pytest.raises(StorageError, match="is a bucket, expected the name of a file in it"):
        write(bucket, b"")
    with pytest.raises(StorageError, match="is a whole bucket, and is not removed"):
        storage.remove_folder(bucket, inside=bucket)


@pytest.mark.parametrize("path", ["s3://bucket/a", "hdfs://host/a", "gs://", "gs:///a"])
def test_other_stores_are_refused(path: str) -> None:
    """Paths of other object stores, and without a bucket, are refused by name."""
    with pytest.raises(StorageError, match="of object stores only Google Cloud Storage is supported, gs://bucket/name"):
        storage.is_file(path)


def test_an_object_that_changes_while_it_is_read_is_told(bucket: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """If the object was replaced or removed, reading fails and does not mix two contents."""
    monkeypatch.setattr(_google, "_READ_BYTES", 4)
    write(f"{bucket}/a", b"one two three")
    with storage.open_input(f"{bucket}/a") as file:
        assert file.read(2) == b"on"
        write(f"{bucket}/a", b"ONE TWO THREE")
        with pytest.raises(
            StorageError, match=r"a: was replaced or removed while it was read \(generation \d+\)\. Do not"
        ):
            file.read()
    with storage.open_input(f"{bucket}/a") as file:
        assert file.read(2) == b"ON"
        storage.remove_file(f"{bucket}/a")
        with pytest.raises(StorageError, match="a: was replaced or removed while it was read"):
            file.read()


def test_damage_on_the_way_is_told(cloud: "CloudService", bucket: str) -> None:
    """A bit changed in transit is found by the checksum at the end of reading."""
    write(f"{bucket}/a", b"content")
    cloud.guard.corrupted.add("a")
    with pytest.raises(StorageError, match="a: what arrived has another checksum than what was stored"):
        read(f"{bucket}/a")


@pytest.mark.parametrize("size", [10, 2**19])
def test_an_upload_that_arrives_damaged_is_told(
    cloud: "CloudService", bucket: str, monkeypatch: pytest.MonkeyPatch, size: int
) -> None:
    """An upload damaged in transit is refused by its checksum, and leaves no file."""
    monkeypatch.setattr("google.cloud.storage.blob._MAX_MULTIPART_SIZE", 2**18)
    cloud.guard.damage = (b"mark", b"Mark")
    with pytest.raises(StorageError, match=r"a: the request to Google Cloud Storage failed \(.*(?i:checksum|crc32c)"):
        write(f"{bucket}/a", b"mark".ljust(size, b"x"))
    assert not storage.exists(f"{bucket}/a")


def test_without_the_client_the_extra_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without google-cloud-storage, every operation says how to install it."""
    for name in [name for name in sys.modules if name.startswith(("google.cloud", "google.api_core", "google.auth"))]:
        monkeypatch.setitem(sys.modules, name, None)
    monkeypatch.setitem(sys.modules, "google.cloud.storage", None)
    monkeypatch.setitem(sys.modules, "google.auth.exceptions", None)
    monkeypatch.setitem(sys.modules, "google.api_core", None)
    for use in (
        storage.version,
        storage.is_folder,
        storage.list_files,
        storage.open_input,
        storage.remove_file,
        lambda name: storage.remove_folder(name, inside="gs://b"),
        lambda name: write(name, b""),
    ):
        with pytest.raises(StorageError, match=r"gs://b/a: .*needs the extra gcp.*: pip install 'calm-beam\[gcp\]'"):
            use("gs://b/a")


def test_without_credentials_it_is_said_how_to_log_in(tmp_path: pathlib.Path) -> None:
    """Without credentials, one line names the two ways to provide them."""
    code = "from calm_beam import storage; storage.version('gs://b/a')"
    kept = {key: value for key, value in os.environ.items() if key in ("PATH", "PYTHONPATH")}
    environment = {**kept, "HOME": str(tmp_path), "NO_GCE_CHECK": "true"}
    done = subprocess.run(
        [sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=False, timeout=60
    )
    assert done.stderr.splitlines()[-1] == (
        "calm_beam.storage._paths.StorageError: gs://b/a: there are no credentials for Google Cloud Storage. Log in "
        "with `gcloud auth application-default login`, or set GOOGLE_APPLICATION_CREDENTIALS to the key of a service "
        "account."
    )


def test_credentials_that_do_not_work_are_told(cloud: "CloudService", monkeypatch: pytest.MonkeyPatch) -> None:
    """If no token is given for the credentials, the message says so, and not that the object is missing."""
    import json

    path = pathlib.Path(os.environ["GOOGLE_APPLICATION_CREDENTIALS"])
    broken = path.with_name("broken.json")
    broken.write_text(json.dumps({**json.loads(path.read_text()), "token_uri": f"{cloud.guard.url}/no-token"}))
    monkeypatch.setenv("GOOGLE_APPLICATION_CREDENTIALS", str(broken))
    monkeypatch.delenv("STORAGE_EMULATOR_HOST")
    with pytest.raises(StorageError, match=r"^gs://b/a: the credentials do not work \(.*\)\. Log in with `gcloud"):
        storage.version("gs://b/a")
