"""A manifest is published once: one of several publishers wins, and the others are told which."""

import pathlib
import re
import subprocess
import sys
import threading
from typing import TYPE_CHECKING

import pytest

from calm_beam import storage
from calm_beam.manifest import Manifest, ManifestError, read_manifest, write_manifest
from tests.calm_beam.manifest.builders import build_manifest
from tests.cloud.guard import Fault

if TYPE_CHECKING:
    from tests.cloud.service import CloudService

pytestmark = pytest.mark.timeout(60)

_OLD = build_manifest(created="2025-01-01T00:00:00Z")
_NEW = build_manifest(created="2026-01-01T00:00:00Z")


@pytest.fixture(params=["local", "cloud"])
def path(request: pytest.FixtureRequest, tmp_path: pathlib.Path) -> str:
    """A path for a manifest, of either kind."""
    folder = str(tmp_path) if request.param == "local" else str(request.getfixturevalue("bucket"))
    return storage.joined(folder, "manifest.json")


def _by(racer: int) -> Manifest:
    return build_manifest(software={"racer": str(racer)})


def _race(
    racers: int, path: str, *, overwrite: bool = False, replaces: str | None = None
) -> tuple[list[int], list[str]]:
    """Publishes from several threads at once; returns the winners, and the messages to the others."""
    start, winners, told = threading.Barrier(racers), [], []

    def publish(racer: int) -> None:
        start.wait()
        try:
            write_manifest(_by(racer), path, overwrite=overwrite, replaces=replaces)
        except ManifestError as error:
            told.append(str(error))
        else:
            winners.append(racer)

    threads = [threading.Thread(target=publish, args=(racer,)) for racer in range(racers)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return winners, told


def test_what_is_published_is_read(path: str) -> None:
    """A manifest reads back equal from either kind of path, and is checked against the model."""
    write_manifest(_NEW, path)
    assert read_manifest(path) == _NEW
    assert read_manifest(path, model_fingerprint=_NEW.model.fingerprint) == _NEW
    with pytest.raises(ManifestError, match=rf"^manifest {re.escape(path)}: model\.fingerprint is"):
        read_manifest(path, model_fingerprint="sha256:" + "0" * 64)


def test_an_existing_manifest_is_kept(path: str) -> None:
    """Without overwrite another manifest is kept, and the error names it."""
    write_manifest(_OLD, path)
    message = (
        rf"^manifest {re.escape(path)}: another one was published there first \(of 2025-01-01T00:00:00Z, "
        rf"{_OLD.digest}\), and this one was not: .* Publish to another place, or, .* run again with --overwrite\.$"
    )
    with pytest.raises(ManifestError, match=message):
        write_manifest(_NEW, path)
    assert read_manifest(path) == _OLD


def test_overwriting_replaces(path: str) -> None:
    """With overwrite the existing manifest is replaced, also one that was there when the run began."""
    write_manifest(_OLD, path)
    write_manifest(_NEW, path, overwrite=True)
    assert read_manifest(path) == _NEW
    found = storage.version(path)
    write_manifest(_OLD, path, overwrite=True, replaces=found)
    assert read_manifest(path) == _OLD


def test_what_appeared_since_the_run_began_is_kept(path: str) -> None:
    """Overwriting replaces the manifest found when the run began, not one that another run published since."""
    found = storage.version(path)
    write_manifest(_OLD, path)
    with pytest.raises(ManifestError, match="another one was published there first"):
        write_manifest(_NEW, path, overwrite=True, replaces=found)
    assert read_manifest(path) == _OLD


def test_publishing_again_is_no_loss(path: str) -> None:
    """A repeated step publishes the same manifest twice, and succeeds both times."""
    found = storage.version(path)
    for _ in range(2):
        write_manifest(_NEW, path)
        write_manifest(_NEW, path, overwrite=True, replaces=found)
    assert read_manifest(path) == _NEW


def test_two_racing_publishers(path: str) -> None:
    """Of two concurrent publishers one wins; the other reports it with the winner's digest."""
    (winner,), (told,) = _race(2, path)
    assert read_manifest(path) == _by(winner)
    assert _by(winner).digest in told
    assert f"manifest {path}: another one was published there first" in told


def test_eight_who_overwrite(path: str) -> None:
    """Of eight that overwrite the same manifest one wins, and none is silently lost."""
    write_manifest(_OLD, path)
    (winner,), told = _race(8, path, overwrite=True, replaces=storage.version(path))
    assert read_manifest(path) == _by(winner)
    assert len(told) == 7
    assert all(_by(winner).digest in text for text in told)


def test_without_the_guard_both_would_win(cloud: "CloudService", bucket: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The emulator alone lets both publishers win: the race above is decided by the guard."""
    monkeypatch.setenv("STORAGE_EMULATOR_HOST", cloud.emulator_url)
    winners, told = _race(2, f"{bucket}/manifest.json")
    assert (sorted(winners), told) == ([0, 1], [])


def test_a_lost_answer_is_no_lost_race(cloud: "CloudService", bucket: str) -> None:
    """A publisher whose manifest was stored, but that was answered 503, has won."""
    cloud.guard.faults.append(Fault(503, "POST", "/upload/", is_late=True))
    write_manifest(_NEW, f"{bucket}/manifest.json")
    assert sum(method == "POST" for method, _ in cloud.guard.requests) == 2
    assert read_manifest(f"{bucket}/manifest.json") == _NEW


def test_a_winner_that_cannot_be_read_is_told(bucket: str) -> None:
    """If the winner's manifest cannot be read, the message says so."""
    path = f"{bucket}/manifest.json"
    with storage.replacing(path) as temporary:
        temporary.write_text("notes")
    with pytest.raises(ManifestError, match=r"published there first \(which cannot be read: manifest .*: not JSON"):
        write_manifest(_NEW, path)


def test_serving_reads_with_the_client_alone(bucket: str) -> None:
    """A process that serves reads a manifest on Cloud Storage without numpy, JAX or Beam."""
    write_manifest(_NEW, f"{bucket}/manifest.json")
    code = (
        "import sys\n"
        "from calm_beam.manifest import read_manifest\n"
        "assert not [name for name in sys.modules if name.startswith('google.cloud.storage')]\n"
        f"print(read_manifest('{bucket}/manifest.json').digest)\n"
        "print(*[name for name in ('numpy', 'scipy', 'jax', 'apache_beam') if name in sys.modules])"
    )
    # Google's packages warn of old versions of each other.
    command = [sys.executable, "-W", "ignore::FutureWarning", "-c", code]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=50)
    assert done.stderr == ""
    assert done.stdout.splitlines() == [_NEW.digest, ""]


def test_without_the_client_serving_is_told_what_to_install() -> None:
    """Without google-cloud-storage, reading a manifest on Cloud Storage names the package to install."""
    code = (
        "import sys\n"
        "sys.modules['google.cloud.storage'] = sys.modules['google.auth'] = None\n"
        "from calm_beam.manifest import read_manifest\n"
        "read_manifest('gs://b/manifest.json')"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False, timeout=50)
    assert done.stderr.splitlines()[-1] == (
        "calm_beam.storage._paths.StorageError: gs://b/manifest.json: Google Cloud Storage needs the extra gcp, which "
        "is not installed: pip install 'calm-beam[gcp]' (in a checkout: pip install '.[gcp]')."
    )
