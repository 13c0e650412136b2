"""Running the service: the port opens at once, and SIGTERM ends it whatever it is at."""

import contextlib
import copy
import logging
import signal
import socket
import threading
from types import FrameType
from typing import TYPE_CHECKING, Any

import uvicorn

from calm_beam.launch.flags import UsageError, as_usage
from calm_beam.launch.flags.manifest import entry_choice, entry_in_words
from calm_beam.launch.flags.metrics import metric_settings
from calm_beam.launch.flags.model import declared
from calm_beam.launch.terminal import say
from calm_beam.launch.terminal.interrupts import leave_at_once
from calm_beam.manifest import ManifestError

from .app import build_app
from .limits import Limits
from .request import ServeRequest
from .served import Served
from .timed_protocol import protocol_with

if TYPE_CHECKING:
    from calm_beam.serving import Generator, LossProbe

# Beyond what requests may take, for what is measured of them.
_SECONDS_TO_MEASURE = 5
_OF_MACHINES = ("/healthz", "/readyz", "/metrics")

_log = logging.getLogger("uvicorn.error")


def run(request: ServeRequest, served: Served) -> int:
    """Serves until it is told to end, and returns the exit status of the command.

    Raises:
      UsageError: If the address is taken, or the model is not the manifest's.
    """
    listener = _bound(request)
    say(f"{entry_in_words(served.entry)}: http://{request.host}:{request.port}/v1")
    app, desk = build_app(served, load=lambda: _load(request, served))
    server = _Server(_config(app, served.limits))
    desk.on_failure = server.end
    # uvicorn ends as it is told, and then tells again.
    with contextlib.suppress(KeyboardInterrupt):
        server.run(sockets=[listener])
    if desk.error is not None:
        raise desk.error
    if desk.is_opening:
        # Nothing ends a compiler, and an interpreter that goes on to its end waits for it.
        leave_at_once(0)
    return 0


class _Server(uvicorn.Server):
    """A server that ends in a bounded time, once it is told to."""

    def end(self) -> None:
        """Has the server end."""
        self.should_exit = True

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        """Ends the server at a signal."""
        super().handle_exit(sig, frame)
        _log.info("Ending after %s: what was taken is answered.", signal.Signals(sig).name)
        graceful = self.config.timeout_graceful_shutdown or 0
        watchdog = threading.Timer(graceful + _SECONDS_TO_MEASURE, leave_at_once, (0,))
        watchdog.daemon = True
        watchdog.start()


def _bound(request: ServeRequest) -> socket.socket:
    """Returns a socket that listens at the address of a request."""
    family = socket.AF_INET6 if ":" in request.host else socket.AF_INET
    listener = socket.socket(family, socket.SOCK_STREAM)
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        listener.bind((request.host, request.port))
    except OSError as error:
        listener.close()
        raise UsageError(f"--host={request.host} --port={request.port}: {error.strerror or error}.") from error
    return listener


def _config(app: Any, limits: Limits) -> uvicorn.Config:
    logs = copy.deepcopy(uvicorn.config.LOGGING_CONFIG)
    # Results alone go to standard output.
    logs["handlers"]["access"]["stream"] = "ext://sys.stderr"
    logging.getLogger("uvicorn.access").addFilter(_is_of_people)
    return uvicorn.Config(
        app,
        http=protocol_with(limits),
        ws="none",
        lifespan="on",
        log_config=logs,
        timeout_graceful_shutdown=limits.ending_seconds,
    )


def _is_of_people(record: logging.LogRecord) -> bool:
    """Returns whether a line of the log of requests is of one that somebody made: others come every few seconds."""
    arguments = record.args
    return not (isinstance(arguments, tuple) and len(arguments) > 2 and str(arguments[2]) in _OF_MACHINES)


def _load(request: ServeRequest, served: Served) -> "tuple[Generator, LossProbe | None]":
    """Returns what answers, and what measures losses."""
    # Here, since JAX takes seconds.
    from calm_beam.decoding.compilation import use_compilation_cache
    from calm_beam.serving import Generator, LossProbe

    use_compilation_cache()
    manifest = served.manifest
    try:
        with as_usage():
            generator = Generator.from_manifest(
                manifest,
                request.model_of(manifest),
                declared=declared(request),
                vocabulary=request.vocabulary,
                choice=entry_choice(request, manifest),
                **request.asked_of_decoder(),
                exact_engine=request.exact_engine,
            )
            probe = None
            if request.losses is not None:
                probe = LossProbe(
                    generator,
                    request.losses,
                    share=request.probe_share,
                    # Ids are drawn at random, and nobody else knows them.
                    salt="calm-beam serve",
                    metric=request.metric,
                    metric_settings=metric_settings(request),
                )
    except ManifestError as error:
        # The manifest is sound, but about another model than this one.
        raise UsageError(str(error)) from error
    _log.info("%s", generator.memory)
    if caution := generator.other_engine_in_words():
        _log.warning("caution: %s", caution)
    return generator, probe
