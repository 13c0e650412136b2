"""Servers of Beam's local runners, reachable from this machine only.

In Beam, the control, data, state and logging servers of a run with worker processes, and the pools that start workers,
listen on every interface without authentication: any client that reaches such a port can read the data and run code.
Here the modules of Beam that open ports see a gRPC whose servers listen on the loopback interface, and on nothing else.

Source: the job service listens on all interfaces since https://github.com/apache/beam/pull/10161, by intention.
"""

import argparse
import signal
import sys
import threading
import types
from collections.abc import Callable, Iterable, Sequence
from typing import Any, NoReturn

import apache_beam
import grpc
from apache_beam.runners.portability import abstract_job_service, local_job_service
from apache_beam.runners.portability.fn_api_runner import worker_handlers
from apache_beam.runners.worker import worker_pool_main

from calm_beam.errors import CalmBeamError

# Not `localhost`: it may have two addresses, and another process may use the other one at the same port.
HOST = "127.0.0.1"
_LAST_PORT = 65535
# All of Beam that opens ports in our processes; a test looks for others.
MODULES: tuple[types.ModuleType, ...] = (abstract_job_service, local_job_service, worker_handlers, worker_pool_main)


class OpenPortError(CalmBeamError, RuntimeError):
    """A port would be open to other machines."""


class LoopbackServer:
    """A gRPC server whose ports are open to this machine alone, whatever address it is given."""

    def __init__(self, server: grpc.Server) -> None:
        """Takes over a server that has no ports yet."""
        self._server = server

    def add_insecure_port(self, address: str) -> int:
        """Opens a port, given as `HOST:PORT` with 0 for a free one, and returns it.

        Raises:
          OSError: If it cannot be opened.
        """
        port = address.rpartition(":")[2]
        try:
            return int(self._server.add_insecure_port(f"{HOST}:{port}"))
        except RuntimeError as error:
            raise OSError(
                f"port {port} of this machine cannot be opened: it is in use, or not allowed. Name another, or 0 for a "
                "free one."
            ) from error

    def add_secure_port(self, *_: object) -> NoReturn:
        """Refuses: nothing here has credentials."""
        raise _unknown("it has credentials")

    def __getattr__(self, name: str) -> Any:
        return getattr(self._server, name)


class _LoopbackGrpc(types.ModuleType):
    """The replacement for `grpc` in modules of Beam."""

    def server(self, *arguments: Any, options: Sequence[tuple[str, Any]] | None = None, **more: Any) -> LoopbackServer:
        # Otherwise two servers may have the same port, and each gets some of the calls.
        return LoopbackServer(grpc.server(*arguments, options=[*(options or ()), ("grpc.so_reuseport", 0)], **more))

    def __getattr__(self, name: str) -> Any:
        return getattr(grpc, name)


class _WorkerServer(worker_handlers.GrpcServer):
    """The server that workers of a run connect to, checked when it has started."""

    def __init__(self, *arguments: Any, **settings: Any) -> None:
        super().__init__(*arguments, **settings)
        require_loopback(vars(self).values())


def listen_on_loopback() -> None:
    """Makes every local runner of this process listen on loopback only, including runners that others make.

    Raises:
      OpenPortError: If this version of Beam opens its ports in a way that is not known.
    """
    for module in MODULES:
        found = getattr(module, "grpc", None)
        if found is grpc:
            module.grpc = _LoopbackGrpc("grpc")  # type: ignore[attr-defined]
        elif not isinstance(found, _LoopbackGrpc):
            raise _unknown(f"{module.__name__} does not use grpc as expected")
    worker_handlers.GrpcServer = _WorkerServer


def require_loopback(values: Iterable[object]) -> None:
    """Refuses servers, among other values, that are not `LoopbackServer`; and values without any server.

    Raises:
      OpenPortError: If so.
    """
    values = list(values)
    if any(isinstance(value, grpc.Server) for value in values):
        raise _unknown("it has made a server of its own")
    if not any(isinstance(value, LoopbackServer) for value in values):
        raise _unknown("its servers are not where they were")


def serve_until_ended(
    argv: Sequence[str] | None, *, name: str, doc: str, start: Callable[[int], tuple[str, Callable[[], object]]]
) -> int:
    """Serves at the port that flags name, until it is interrupted or terminated; returns the exit status.

    Args:
      argv: The flags; None for those of the process.
      name: Name of the server, for messages; its module has the same name.
      doc: Docstring of the module.
      start: Takes the port; returns the address and what stops it.
    """
    module = name.replace(" ", "_")
    parser = argparse.ArgumentParser(prog=f"python -m calm_beam.launch.{module}", description=doc.split("\n")[0])
    parser.add_argument("--port", type=port_number, required=True, help="0 for a free one")
    flags = parser.parse_args(argv)
    try:
        address, stop = start(flags.port)
    except (OpenPortError, OSError) as error:
        print(f"{name}: {error}", file=sys.stderr)
        return 1
    ended = threading.Event()
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, lambda *_: ended.set())
    print(f"{name} at {address}", flush=True)
    ended.wait()
    stop()
    return 0


def port_number(text: str) -> int:
    """Returns the number of a port; 0 stands for a free one."""
    if not text.isascii() or not text.isdigit() or int(text) > _LAST_PORT:
        raise argparse.ArgumentTypeError(f"expected a whole number from 0 to {_LAST_PORT}, got {text!r}")
    return int(text)


def _unknown(what: str) -> OpenPortError:
    return OpenPortError(
        f"apache-beam {apache_beam.__version__} opens its ports in a way that calm-beam does not know ({what}): they "
        "might be open to other machines. Install the version that calm-beam names, or run without worker processes."
    )
