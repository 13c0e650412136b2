"""Worker processes that fail or are lost end a run with a message."""

import os
import pathlib
import re
import signal
import time
from collections.abc import Callable, Iterator, Sequence

import apache_beam as beam
import grpc
import pytest
from apache_beam.options.pipeline_options import PipelineOptions
from apache_beam.portability.api import beam_fn_api_pb2

from calm_beam.inputs.examples import DataError
from calm_beam.launch.runners import PipelineError, make_runner, run_pipeline, worker_processes
from calm_beam.launch.runners.worker_processes import _WatchedConnection, provision_info
from tests.worker_pools import flags_of_two_workers, worker_pool

pytestmark = pytest.mark.timeout(300)

# Far beyond the timeout: a run that waits for this fails its test.
_LONG_SECONDS = 3000


def _failure(flags: Sequence[str], function: Callable[[int], None]) -> str:
    """Returns the message of a run in which two workers apply a function to one element each."""
    options = PipelineOptions(list(flags))
    pipeline = beam.Pipeline(runner=make_runner(options), options=options)
    _ = pipeline | beam.Create([0, 1]) | beam.Reshuffle() | beam.Map(function)
    with pytest.raises(PipelineError) as caught:
        run_pipeline(pipeline)
    return str(caught.value)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("kind", "message"),
    [
        ("processes", r"worker process \d+ was killed \(SIGKILL\) before its work was done\. Finished shards are kept"),
        ("pool", r"a worker of the pool at localhost:\d+ was lost before its work was done: killed, or its machine is"),
        ("job service", r"a worker of the pool at localhost:\d+ was lost before its work was done: killed, or its "),
    ],
)
def test_a_killed_worker_ends_the_run(kind: str, message: str) -> None:
    """A killed worker ends the run with the reason while the other still works, whichever it was."""
    parent = os.getpid()

    def be_killed(element: int) -> None:
        assert os.getpid() != parent
        if element == 1:
            os.kill(os.getpid(), signal.SIGKILL)
        time.sleep(_LONG_SECONDS)

    with flags_of_two_workers(kind) as flags:
        assert re.match(message, _failure(flags, be_killed))


@pytest.mark.slow
@pytest.mark.parametrize("failing", [0, 1])
def test_a_failure_does_not_wait_for_other_workers(failing: int) -> None:
    """A worker's error ends the run with its message while the other still works, whichever it was."""

    def fail(element: int) -> None:
        if element == failing:
            raise DataError("a.jsonl, line 3: bad")
        time.sleep(_LONG_SECONDS)

    with flags_of_two_workers("processes") as flags:
        assert _failure(flags, fail) == "a.jsonl, line 3: bad"


def _broken() -> Iterator[object]:
    yield from ()
    raise grpc.RpcError


@pytest.mark.parametrize("ended", [iter(()), _broken()], ids=["at its end", "broken"])
def test_a_stream_that_ends_is_a_lost_worker(ended: Iterator[object]) -> None:
    """A stream that gRPC ends in any way is a lost worker, and ends every wait for workers of the run."""
    connections: dict[str, _WatchedConnection] = {}
    for name in ("lost", "other"):
        connections[name] = _WatchedConnection(lambda: "it is gone", connections)
    futures = [
        connection.push(beam_fn_api_pb2.InstructionRequest(instruction_id="bundle_1"))
        for connection in connections.values()
    ]
    connections["lost"].set_input(ended)
    for future in futures:
        answer = future.get(timeout=30)
        assert answer is not None
        assert answer.error == "\ncalm_beam.launch.runners.worker_processes.WorkerError: it is gone"


def test_processes_that_do_not_start(monkeypatch: pytest.MonkeyPatch) -> None:
    """A worker process that ends before it connects is not waited for."""
    monkeypatch.setattr(worker_processes, "_WORKER_MAIN", "import sys; sys.exit(3)")
    with flags_of_two_workers("processes") as flags:
        message = _failure(flags, print)
    assert "ended with status 3 before its work was done." in message


def test_pools_whose_workers_do_not_start(monkeypatch: pytest.MonkeyPatch, tmp_path: pathlib.Path) -> None:
    """A pool that starts a broken python is reported with what to check."""
    (tmp_path / "python").write_text("#!/bin/sh\nexit 1\n")
    (tmp_path / "python").chmod(0o755)
    monkeypatch.setattr(worker_processes, "_CONNECT_SECONDS", 1)
    with worker_pool() as address:
        monkeypatch.setenv("PATH", f"{tmp_path}{os.pathsep}{os.environ['PATH']}")
        flags = ("--environment_type=EXTERNAL", f"--environment_config={address}")
        message = _failure(flags, print)
    assert message == (
        f"a worker of the pool at {address} has not connected within 1 s. The pool starts the `python` on its PATH, "
        "which needs calm-beam"
    )


def test_pools_that_are_not_there() -> None:
    """If no pool listens, the message says how to start one."""
    message = _failure(("--environment_type=EXTERNAL", "--environment_config=localhost:1"), print)
    assert message == (
        "no worker pool answers at localhost:1. Start one there: python -m calm_beam.launch.worker_pool --port=1"
    )


def test_workers_are_told_the_options() -> None:
    """Worker processes are started with the names of the given options, and no others."""
    info = provision_info(PipelineOptions(["--direct_num_workers=2", "--project=p"]))
    assert dict(info.provision_info.pipeline_options) == {
        "beam:option:direct_num_workers:v1": "2",
        "beam:option:project:v1": "p",
    }
