"""Folders that workers and this machine share are chosen, checked and removed."""

import contextlib
import pathlib
import tempfile
from typing import TYPE_CHECKING

import pytest
from apache_beam.options.pipeline_options import PipelineOptions

from calm_beam import storage
from calm_beam.launch.flags import UsageError
from calm_beam.launch.runners import Workers
from calm_beam.launch.runners.workers import passing_folder, shared_place
from calm_beam.outputs import OutputsError
from calm_beam.outputs.stored_shards import check_folder
from tests.cloud.guard import Fault
from tests.pipelines import build_assignment

if TYPE_CHECKING:
    from tests.cloud.service import CloudService

_REMOTE = "--runner=PortableRunner"


def _workers(*flags: str) -> Workers:
    return Workers(options=PipelineOptions(list(flags)))


def test_places_beside_an_output(tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The shared folder is in the output's folder, or local for local workers with an output in the cloud."""
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "temporary"))
    local = str(tmp_path / "out.jsonl")
    assert shared_place(_workers(), next_to=local) == str(tmp_path)
    assert shared_place(_workers(_REMOTE, "--temp_location=elsewhere"), next_to=local) == str(tmp_path)
    assert shared_place(_workers(), next_to="gs://b/out/rows.jsonl") == str(tmp_path / "temporary")
    assert shared_place(_workers(_REMOTE), next_to="gs://b/out/rows.jsonl") == "gs://b/out"
    monkeypatch.chdir(tmp_path)
    assert shared_place(_workers(_REMOTE), next_to="out.jsonl") == str(tmp_path)


def test_places_of_nothing(tmp_path: pathlib.Path, bucket: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without an output, Beam's flags name the folder; the default is this machine's folder for temporary files."""
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "temporary"))
    assert shared_place(_workers()) == shared_place(_workers(_REMOTE)) == str(tmp_path / "temporary")
    assert shared_place(_workers(_REMOTE, f"--temp_location={tmp_path}")) == str(tmp_path)
    assert shared_place(_workers(_REMOTE, f"--temp_location={bucket}/temp")) == f"{bucket}/temp"
    assert shared_place(_workers(_REMOTE, f"--staging_location={bucket}/staging")) == f"{bucket}/staging"
    # Local workers need no cloud folder.
    assert shared_place(_workers(f"--temp_location={bucket}/temp")) == str(tmp_path / "temporary")


def test_places_that_do_not_do(tmp_path: pathlib.Path, bucket: str, cloud: "CloudService") -> None:
    """A folder that is missing or not writable is refused before any work."""
    with pytest.raises(UsageError, match=r"^--temp_location .*none: no such folder"):
        shared_place(_workers(_REMOTE, f"--temp_location={tmp_path / 'none'}"))
    cloud.guard.faults.append(Fault(403, "POST", "/upload/", times=10**6))
    with pytest.raises(UsageError, match=r"^--temp_location .*permission denied"):
        shared_place(_workers(_REMOTE, f"--temp_location={bucket}/temp"))


@pytest.mark.parametrize("error", [None, ValueError, KeyboardInterrupt])
def test_a_folder_passes(error: type[BaseException] | None, tmp_path: pathlib.Path, bucket: str) -> None:
    """The folder is removed with its contents however the block ends, and other files next to it stay."""
    for place in (str(tmp_path), f"{bucket}/out"):
        _write(f"{place}/.rows.other")
        ends = contextlib.nullcontext() if error is None else pytest.raises(error)
        with ends, passing_folder(place, name=".rows.") as folder:
            assert folder.startswith(f"{place}/.rows.")
            for name in ("a", "b"):
                _write(f"{folder}/{name}")
            assert len(storage.list_files(f"{folder}/*")) == 2
            if error is not None:
                raise error
        assert not storage.exists(folder)
        assert storage.is_file(f"{place}/.rows.other")


def test_a_job_that_goes_on_keeps_its_folder(bucket: str) -> None:
    """An interrupt that leaves a job running says where the job will write, and that nothing reads it."""

    def interrupted() -> None:
        with passing_folder(f"{bucket}/out", name=".rows.") as folder:
            _write(f"{folder}/a")
            raise KeyboardInterrupt("the job goes on: https://console")

    with pytest.raises(KeyboardInterrupt) as caught:
        interrupted()
    (left,) = [file.path for file in storage.list_below(f"{bucket}/out")]
    assert str(caught.value) == (
        f"the job goes on: https://console; nobody will read what it decodes: cancel it, and remove {left[:-2]}"
    )


def test_what_cannot_be_removed_is_told(bucket: str, cloud: "CloudService", capsys: pytest.CaptureFixture[str]) -> None:
    """A folder that cannot be removed is reported, and the finished run succeeds."""
    with passing_folder(f"{bucket}/out", name=".rows.") as folder:
        _write(f"{folder}/a")
        cloud.guard.faults.append(Fault(403, "DELETE", "", times=10**6))
    assert f"caution: {folder} could not be removed, and is of no more use" in capsys.readouterr().err


def test_folders_of_other_machines_are_refused(tmp_path: pathlib.Path) -> None:
    """A worker that does not see the folder fails before decoding; one that does continues (the twin)."""
    check_folder(build_assignment(str(tmp_path), model="model"), [0])
    with pytest.raises(OutputsError, match="none: workers do not see this folder, which is on the disk of the"):
        check_folder(build_assignment(str(tmp_path / "none"), model="model"), [0])


def _write(path: str) -> None:
    storage.make_folder(storage.parent(path))
    with storage.replacing(path) as temporary:
        temporary.write_text("a")
