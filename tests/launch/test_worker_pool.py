"""A worker pool separates workers to which two runners give the same id."""

import pathlib
import time

import grpc
import pytest
from apache_beam.portability.api import beam_fn_api_pb2, beam_fn_api_pb2_grpc

from calm_beam.launch.worker_pool import start_worker_pool

_WAIT_SECONDS = 20


def _ended(file: pathlib.Path) -> bool:
    """Returns whether the process that wrote a file with its id and then sleeps has ended."""
    pid = file.read_text()
    try:
        return pathlib.Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "Z"
    except OSError:
        return True


def _wait_for(files: list[pathlib.Path]) -> None:
    end = time.monotonic() + _WAIT_SECONDS
    while not all(file.is_file() and file.read_text() for file in files):
        assert time.monotonic() < end
        time.sleep(0.05)


@pytest.fixture
def stub(tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> beam_fn_api_pb2_grpc.BeamFnExternalWorkerPoolStub:
    """A pool whose workers write their process id to a file named after their control endpoint, and wait."""
    python = tmp_path / "bin" / "python"
    python.parent.mkdir()
    # The endpoint is the first text in double quotes.
    name = 'file=$(echo "$2" | cut -d\'"\' -f2)'
    python.write_text(f'#!/bin/sh\n{name}\necho -n $$ > "{tmp_path}/$file"\nexec sleep 300\n')
    python.chmod(0o755)
    monkeypatch.setenv("PATH", str(python.parent), prepend=":")
    address, server = start_worker_pool()
    with grpc.insecure_channel(address) as channel:
        yield beam_fn_api_pb2_grpc.BeamFnExternalWorkerPoolStub(channel)
    server.stop(0)


def _start(stub: beam_fn_api_pb2_grpc.BeamFnExternalWorkerPoolStub, worker: str, endpoint: str) -> None:
    request = beam_fn_api_pb2.StartWorkerRequest(worker_id=worker)
    request.control_endpoint.url = endpoint
    assert not stub.StartWorker(request).error


def _stop(stub: beam_fn_api_pb2_grpc.BeamFnExternalWorkerPoolStub, worker: str) -> None:
    stub.StopWorker(beam_fn_api_pb2.StopWorkerRequest(worker_id=worker))


def test_a_worker_is_stopped_by_its_id(
    tmp_path: pathlib.Path, stub: beam_fn_api_pb2_grpc.BeamFnExternalWorkerPoolStub
) -> None:
    """If one worker has an id, stopping it ends that process and no other (the twin)."""
    _start(stub, "1-1", "first")
    _start(stub, "2-1", "second")
    _wait_for([tmp_path / "first", tmp_path / "second"])
    _stop(stub, "1-1")
    assert _ended(tmp_path / "first")
    assert not _ended(tmp_path / "second")
    _stop(stub, "2-1")
    assert _ended(tmp_path / "second")


def test_the_worker_of_another_runner_goes_on(
    tmp_path: pathlib.Path, stub: beam_fn_api_pb2_grpc.BeamFnExternalWorkerPoolStub
) -> None:
    """If two runners on one machine give the same id, stopping one's worker does not end the other's."""
    _start(stub, "1-1", "first")
    _start(stub, "1-1", "second")
    _wait_for([tmp_path / "first", tmp_path / "second"])
    _stop(stub, "1-1")
    assert not _ended(tmp_path / "first")
    assert not _ended(tmp_path / "second")
