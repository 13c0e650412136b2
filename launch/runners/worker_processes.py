"""Worker processes of Beam's `FnApiRunner`: losing one ends the run with a message, and only this machine reaches them.

With Beam alone, a run waits for ever for a worker that was killed. Here every request to such a worker is answered
with an error, and the workers that are left are stopped.

Workers whose runner was killed end with one line. Nothing tells them that it is gone; gRPC notices it in every
thread, and each would print a traceback.

Beam and gRPC wait until a time of day. Where a machine's clock is set back, by its owner or after a pause of a
virtual machine, such a time comes late or never, and a run with worker processes does not end. So their modules
see a `time` whose time of day advances with the monotonic clock. gRPC also gives times of day to its core, which
reads the machine's clock. Modules that do so see that clock.

Source: ours. No issue of Beam about a killed worker of `FnApiRunner`, or about clocks, was found.
"""

import contextlib
import importlib
import ipaddress
import os
import signal
import socket
import subprocess
import sys
import threading
import time
import types
from collections.abc import Callable, Iterator, Mapping
from typing import Any, TextIO

import grpc
from apache_beam.options.pipeline_options import PipelineOptions
from apache_beam.portability import common_urns, python_urns
from apache_beam.portability.api import (
    beam_fn_api_pb2,
    beam_fn_api_pb2_grpc,
    beam_provision_api_pb2,
    beam_runner_api_pb2,
    endpoints_pb2,
)
from apache_beam.runners.portability.fn_api_runner.fn_runner import ExtendedProvisionInfo
from apache_beam.runners.portability.fn_api_runner.worker_handlers import (
    DATA_BUFFER_TIME_LIMIT_MS,
    ControlConnection,
    ExternalWorkerHandler,
    GrpcWorkerHandler,
    WorkerHandler,
)
from apache_beam.runners.portability.local_job_service import BeamFnLoggingServicer
from apache_beam.runners.portability.portable_runner import JobServiceHandle
from apache_beam.runners.worker.data_plane import _GrpcDataChannel
from apache_beam.utils import thread_pool_executor
from google.protobuf import json_format, text_format

from calm_beam.errors import CalmBeamError

from .loopback import HOST, listen_on_loopback, require_loopback

SPEAKS = "CALM_BEAM_SPEAKS"
"""Set in the environment of the one worker that says what has happened."""
RUNNER = "CALM_BEAM_RUNNER"
"""The variable that names the process id of the runner to its workers."""

# Connections of a process that is killed close shortly before its children have another parent. Workers that are well
# hardly say anything, so that each line may wait.
_SECONDS_BETWEEN = 0.1
_SECONDS_BETWEEN_LOOKS = 2.0
_LAST_WORDS = (
    b"calm-beam: the command was killed, and its workers end. What is finished is kept: --resume goes on with it, "
    b"where the command has that.\n"
)


class _UntilOrphaned:
    """Standard error of a process that ends once its parent is gone, before it says anything."""

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream
        # Not the parent that this process has by now: the runner may have been killed while modules were imported.
        self._parent = int(os.environ[RUNNER])
        self._turn = threading.Lock()

    def write(self, text: str) -> int:
        self.look()
        return self._stream.write(text)

    def look(self) -> None:
        """Ends the process if its parent is gone."""
        with self._turn:
            time.sleep(_SECONDS_BETWEEN)
            if os.getppid() != self._parent:
                if os.environ.get(SPEAKS):
                    os.write(2, _LAST_WORDS)
                os._exit(1)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)


def end_with_the_runner() -> None:
    """Has this process end once the runner that started it is gone; to be called early."""
    stream = _UntilOrphaned(sys.stderr)
    sys.stderr = stream

    def watch() -> None:
        while True:
            time.sleep(_SECONDS_BETWEEN_LOOKS)
            stream.look()

    threading.Thread(target=watch, name="calm-beam-orphan", daemon=True).start()


_WAITING = ("apache_beam.runners.worker.data_plane", "grpc._common", "grpc._utilities")
_TELLING_THE_CORE = ("grpc._channel", "grpc._server")


class _Time(types.ModuleType):
    """The replacement for `time` in a module, with another time of day."""

    def __init__(self, time_of_day: Callable[[], float]) -> None:
        super().__init__("time")
        self.time = time_of_day

    def __getattr__(self, name: str) -> Any:
        return getattr(time, name)


def wait_by_steady_clock() -> None:
    """Makes Beam and gRPC of this process wait by a clock that never goes back; a second call changes nothing.

    A version of Beam or gRPC that has no such module, or gets the time from another one, is not changed.
    """
    difference = _machine_time() - time.monotonic()

    def steady() -> float:
        return difference + time.monotonic()

    for names, time_of_day in ((_WAITING, steady), (_TELLING_THE_CORE, _machine_time)):
        for name in names:
            try:
                module = importlib.import_module(name)
            except ImportError:
                continue
            if getattr(module, "time", None) is time:
                module.time = _Time(time_of_day)  # type: ignore[attr-defined]


def _machine_time() -> float:
    return time.clock_gettime(time.CLOCK_REALTIME)


# Importing Beam takes seconds, on a busy machine many; a process that has not connected by then never will.
_CONNECT_SECONDS = 300
# For a worker to end by itself once its connection is closed; it may be in the middle of a shard of a failed run.
_STOP_SECONDS = 5
# For a process to end after its connection has broken.
_EXPLAIN_SECONDS = 5
# Beam's own main, with logs sent to the runner alone: the first warning would otherwise open the terminal to them all.
# A terminal's Ctrl-C reaches all processes, and it is the runner's to end the others. They leave at once, since what
# XLA may be compiling then can neither be stopped nor be waited for.
_WORKER_MAIN = """
import logging, os, signal, sys
signal.signal(signal.SIGINT, signal.SIG_IGN)
logging.getLogger().addHandler(logging.NullHandler())
from calm_beam.launch.runners.worker_processes import end_with_the_runner
from calm_beam.launch.runners.worker_processes import wait_by_steady_clock
end_with_the_runner()
wait_by_steady_clock()
from apache_beam.runners.worker import sdk_worker_main
sdk_worker_main.main(sys.argv)
sys.stdout.flush()
os._exit(0)
"""


def watch_workers() -> None:
    """Makes every `FnApiRunner` of this process start its worker processes as this module has them.

    Raises:
      OpenPortError: If they could be reached from other machines.
    """
    listen_on_loopback()
    wait_by_steady_clock()
    WorkerHandler.register_environment(python_urns.SUBPROCESS_SDK, bytes)(_WorkerProcess)
    WorkerHandler.register_environment(common_urns.environments.EXTERNAL.urn, beam_runner_api_pb2.ExternalPayload)(
        _PooledWorker
    )


def provision_info(options: PipelineOptions) -> ExtendedProvisionInfo:
    """Returns what worker processes are told of the options; without it they would find none."""
    encoded = JobServiceHandle.encode_pipeline_options(options.get_all_options(drop_default=True))
    return ExtendedProvisionInfo(
        beam_provision_api_pb2.ProvisionInfo(retrieval_token="unused", pipeline_options=encoded)
    )


class WorkerError(CalmBeamError, RuntimeError):
    """A worker process did not start, or was lost."""


class _WatchedConnection(ControlConnection):
    """A connection to a worker that answers with an error once it or another worker of the run has failed."""

    def __init__(self, explain: Callable[[], str], all_connections: Mapping[str, "_WatchedConnection"]) -> None:
        """Prepares a connection.

        Args:
          explain: Says why it broke.
          all_connections: Those to all workers of the run, this one included.
        """
        super().__init__()
        self.connected = threading.Event()
        self.failed = threading.Event()
        self._explain = explain
        self._all = all_connections
        self._error = ""
        self._is_closing = False

    def set_input(self, input: Any) -> None:
        super().set_input(input)
        self.connected.set()

    def push(self, req: Any) -> Any:
        future = super().push(req)
        if self.failed.is_set():
            self._answer_all()
        return future

    def close(self) -> None:
        self._is_closing = True
        super().close()

    def lose(self, reason: str) -> None:
        """Ends the run since this worker is gone, unless it is no longer needed."""
        if not self._is_closing:
            # On a line of its own, and with its module, as in the traces that come from workers.
            self._fail_all(f"\n{WorkerError.__module__}.{WorkerError.__name__}: {reason}")

    def _read(self) -> None:
        with contextlib.suppress(grpc.RpcError):
            for response in self._input:
                if response.error and response.instruction_id.startswith("bundle_"):
                    # Beam would first wait for the bundles of the other workers, which may take hours.
                    self._fail_all(response.error)
                future = self._futures_by_id.pop(response.instruction_id, None)
                if future is not None:
                    future.set(response)
        # Of a worker that was killed, gRPC tells as an error or as the end of the stream, whichever it notices first.
        if not self._is_closing:
            self.lose(self._explain())

    def _fail_all(self, error: str) -> None:
        for connection in list(self._all.values()):
            connection._error = connection._error or error
            connection.failed.set()
            connection._answer_all()

    def _answer_all(self) -> None:
        for instruction in list(self._futures_by_id):
            future = self._futures_by_id.pop(instruction, None)
            if future is not None:
                future.set(beam_fn_api_pb2.InstructionResponse(instruction_id=instruction, error=self._error))


class _WatchedData(_GrpcDataChannel):
    """Elements of a worker; once it is lost there are no more, and its connection says why."""

    def __init__(self, connection: _WatchedConnection) -> None:
        super().__init__(DATA_BUFFER_TIME_LIMIT_MS)
        self._connection = connection

    def input_elements(self, *arguments: Any, **options: Any) -> Iterator[Any]:
        try:
            yield from super().input_elements(*arguments, **options)
        except Exception:
            # Both streams break at the same time; what ended the worker takes a moment to find out.
            if not self._connection.failed.wait(2 * _EXPLAIN_SECONDS):
                raise

    def _read_inputs(self, elements_iterator: Any) -> None:
        with contextlib.suppress(grpc.RpcError):
            super()._read_inputs(elements_iterator)


def _watch(handler: GrpcWorkerHandler, explain: Callable[[], str]) -> None:
    """Gives a handler that has not started its worker connections that are watched."""
    server = handler._grpc_server
    # Beam may one day get it from elsewhere.
    require_loopback(vars(server).values())
    connections = server.control_handler._connections_by_worker_id
    handler.control_conn = connections[handler.worker_id] = _WatchedConnection(explain, connections)
    handler.data_conn = _WatchedData(handler.control_conn)
    server.data_plane_handler._connections_by_worker_id[handler.worker_id, ""] = handler.data_conn


class _WorkerProcess(GrpcWorkerHandler):
    """Starts a worker as a child of this process."""

    # Of the workers that are there, the one that says that the runner was killed.
    _speaker: subprocess.Popen[bytes] | None = None
    _turn = threading.Lock()

    def __init__(self, _: bytes, state: Any, provision: ExtendedProvisionInfo, grpc_server: Any) -> None:
        super().__init__(state, provision, grpc_server)
        _watch(self, self._explain)
        # A server of its own, whose log is Beam's: the runner's would tell every failure a second time.
        self._logging_server = grpc.server(thread_pool_executor.shared_unbounded_instance())
        self._logging_port = self._logging_server.add_insecure_port(f"{HOST}:0")
        beam_fn_api_pb2_grpc.add_BeamFnLoggingServicer_to_server(BeamFnLoggingServicer(), self._logging_server)

    def host_from_worker(self) -> str:
        return HOST

    def start_worker(self) -> None:
        self._logging_server.start()
        environment = {
            **os.environ,
            RUNNER: str(os.getpid()),
            "WORKER_ID": self.worker_id,
            "CONTROL_API_SERVICE_DESCRIPTOR": _descriptor(self.control_address),
            "LOGGING_API_SERVICE_DESCRIPTOR": _descriptor(f"{HOST}:{self._logging_port}"),
            "PIPELINE_OPTIONS": json_format.MessageToJson(self.provision_info.provision_info.pipeline_options),
        }
        with _WorkerProcess._turn:
            speaker = _WorkerProcess._speaker
            if speaker is None or speaker.poll() is not None:
                environment[SPEAKS] = "1"
            self._process = subprocess.Popen([sys.executable, "-c", _WORKER_MAIN], env=environment)
            if SPEAKS in environment:
                _WorkerProcess._speaker = self._process
        threading.Thread(target=self._await_end, daemon=True).start()
        threading.Thread(target=self._await_connection, daemon=True).start()

    def stop_worker(self) -> None:
        try:
            self._process.wait(_STOP_SECONDS)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        self._logging_server.stop(0)

    def _await_connection(self) -> None:
        if not self.control_conn.connected.wait(_CONNECT_SECONDS):
            self.control_conn.lose(f"worker process {self._process.pid} has not connected within {_CONNECT_SECONDS} s")

    def _await_end(self) -> None:
        """Also sees processes that end before they connect."""
        self._process.wait()
        self.control_conn.lose(self._explain())

    def _explain(self) -> str:
        try:
            code = self._process.wait(_EXPLAIN_SECONDS)
        except subprocess.TimeoutExpired:
            return f"worker process {self._process.pid} closed its connection before its work was done"
        how = f"was killed ({signal.Signals(-code).name})" if code < 0 else f"ended with status {code}"
        return (
            f"worker process {self._process.pid} {how} before its work was done. Finished shards are kept: more of "
            "them (--num_shards) lose less. If memory ran out, take fewer workers or a smaller --max_cache_tokens"
        )


class _PooledWorker(ExternalWorkerHandler):
    """Asks a worker pool of this machine for a worker."""

    def __init__(self, payload: Any, state: Any, provision: ExtendedProvisionInfo, grpc_server: Any) -> None:
        super().__init__(payload, state, provision, grpc_server)
        self._pool = payload.endpoint.url
        if not is_loopback(self._pool):
            raise WorkerError(foreign_pool(self._pool))
        _watch(self, self._explain)

    def host_from_worker(self) -> str:
        return HOST

    def start_worker(self) -> None:
        try:
            super().start_worker()
        except grpc.RpcError as error:
            raise WorkerError(
                f"no worker pool answers at {self._pool}. Start one there: python -m "
                f"calm_beam.launch.worker_pool --port={self._pool.rpartition(':')[2]}"
            ) from error
        threading.Thread(target=self._await_connection, daemon=True).start()

    def stop_worker(self) -> None:
        # The pool may be gone, and its workers with it.
        with contextlib.suppress(grpc.RpcError), grpc.insecure_channel(self._pool) as channel:
            request = beam_fn_api_pb2.StopWorkerRequest(worker_id=self.worker_id)
            beam_fn_api_pb2_grpc.BeamFnExternalWorkerPoolStub(channel).StopWorker(request, timeout=3 * _STOP_SECONDS)

    def _await_connection(self) -> None:
        if not self.control_conn.connected.wait(_CONNECT_SECONDS):
            self.control_conn.lose(
                f"a worker of the pool at {self._pool} has not connected within {_CONNECT_SECONDS} s. The pool starts "
                "the `python` on its PATH, which needs calm-beam"
            )

    def _explain(self) -> str:
        return (
            f"a worker of the pool at {self._pool} was lost before its work was done: killed, or its machine is gone. "
            "If memory ran out, take fewer workers or a smaller --max_cache_tokens"
        )


def is_loopback(address: str) -> bool:
    """Returns whether an address, `HOST:PORT`, is one that only this machine reaches."""
    try:
        found = socket.getaddrinfo(address.rpartition(":")[0].strip("[]") or None, None)
    except (OSError, UnicodeError):
        return False
    # An address of IPv6 may name an interface after a percent sign.
    return all(ipaddress.ip_address(str(place[0]).partition("%")[0]).is_loopback for _, _, _, _, place in found)


def foreign_pool(address: str) -> str:
    """Returns a message on why workers of a pool on another machine are refused."""
    return (
        f"a worker pool at {address}: expected one on this machine, such as localhost:50000. Workers elsewhere would "
        "need ports of this machine that are open to the network and ask for no password. Over several machines, run "
        "on Dataflow or Flink."
    )


def _descriptor(address: str) -> str:
    descriptor: str = text_format.MessageToString(endpoints_pb2.ApiServiceDescriptor(url=address))
    return descriptor
