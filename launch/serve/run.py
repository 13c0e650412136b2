"""Running the service, an ASGI app: the port opens at once, and SIGTERM ends it at any time.

Its protocol for uvicorn waits for no request for ever, and refuses in the form of errors that the service uses.
"""

import asyncio
import contextlib
import copy
import errno
import json
import logging
import signal
import socket
import threading
from collections.abc import AsyncIterator
from types import FrameType
from typing import TYPE_CHECKING, Any

import fastapi
import h11
import uvicorn
from prometheus_client import exposition
from uvicorn.protocols.http.h11_impl import H11Protocol

from calm_beam.launch.flags import UsageError, as_usage, naming
from calm_beam.launch.flags.shared_options import declared, entry_in_words, metric_settings, one_entry
from calm_beam.launch.terminal import say
from calm_beam.launch.terminal.interrupts import leave_at_once
from calm_beam.manifest import ManifestError, times_as_fast
from calm_beam.serving.watched import make_losses_file

from .answers import BoundedBodies, add_refusals, error_fields, not_ready
from .completions import add_completions
from .desk import Desk, Load, NotReadyError
from .metrics import HEALTH_PAGES, Counted, DeskCollector, ServiceMetrics
from .request import Limits, Served, ServeRequest

if TYPE_CHECKING:
    from calm_beam.serving import Generator, LossProbe


# Probes and load balancers may ask for the head alone.
_READ = ["GET", "HEAD"]


def build_app(served: Served, *, load: Load) -> tuple[fastapi.FastAPI, Desk]:
    """Returns the service, and the desk at which its prompts are handed in.

    Args:
      served: What is promised.
      load: Returns what answers; called in a thread once the service has started.
    """
    metrics = ServiceMetrics()
    desk = Desk(served, load=load, metrics=metrics)
    metrics.registry.register(DeskCollector(desk))

    @contextlib.asynccontextmanager
    async def opened(_: fastapi.FastAPI) -> AsyncIterator[None]:
        desk.open()
        yield
        await asyncio.to_thread(desk.close)

    app = fastapi.FastAPI(title="calm-beam", lifespan=opened)
    app.add_middleware(BoundedBodies, most_bytes=served.limits.body_bytes)
    add_refusals(app)
    add_completions(app, desk)
    _add_probes(app, desk)
    _add_pages(app, served, metrics)
    app.add_middleware(Counted, metrics=metrics, routes=app.routes)
    return app, desk


def _add_probes(app: fastapi.FastAPI, desk: Desk) -> None:
    """Has an app say whether it lives, and whether it is ready."""

    @app.api_route("/healthz", methods=_READ)
    async def healthz() -> dict[str, str]:
        return {"status": "alive", "phase": desk.phase}

    @app.api_route("/readyz", methods=_READ)
    async def readyz() -> dict[str, str]:
        if not desk.is_ready:
            raise not_ready(NotReadyError(f"not ready: {desk.phase}"))
        return {"status": "ready"}


def _add_pages(app: fastapi.FastAPI, served: Served, metrics: ServiceMetrics) -> None:
    """Has an app show its manifest, and what it counts."""

    @app.api_route("/manifest", methods=_READ)
    async def manifest() -> fastapi.Response:
        return fastapi.Response(served.content, media_type="application/json")

    @app.api_route("/metrics", methods=_READ)
    async def counted(request: fastapi.Request) -> fastapi.Response:
        encode, media_type = exposition.choose_encoder(request.headers.get("accept", ""))
        return fastapi.Response(encode(metrics.registry), headers={"Content-Type": media_type})


class TimedProtocol(H11Protocol):
    """HTTP for requests that arrive in time.

    uvicorn itself waits for ever: clients that send a byte now and then would hold all connections that there are.

    Attributes:
      arrival_seconds: How long a request may take to arrive.
    """

    arrival_seconds: float
    _timer: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """Begins to wait for a request."""
        super().connection_made(transport)
        self._start_timer()

    def data_received(self, data: bytes) -> None:
        """Takes a part of a request."""
        # Bytes of the next request on the same connection restart the timeout.
        self._start_timer()
        super().data_received(data)
        if self.conn.their_state not in (h11.IDLE, h11.SEND_BODY):
            self._stop_timer()

    def connection_lost(self, exc: Exception | None) -> None:
        """Waits no longer."""
        self._stop_timer()
        super().connection_lost(exc)

    def send_400_response(self, msg: str) -> None:
        """Refuses what is no HTTP."""
        self._refuse("400 Bad Request", msg)

    def _start_timer(self) -> None:
        if self._timer is None:
            self._timer = self.loop.call_later(self.arrival_seconds, self._end_connection)

    def _stop_timer(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _end_connection(self) -> None:
        # Unless it has been answered already, say for being too long.
        if self.conn.our_state in (h11.IDLE, h11.SEND_RESPONSE):
            self._refuse("408 Request Timeout", f"the request did not arrive within {self.arrival_seconds:g} seconds")
        self.transport.close()

    def _refuse(self, status: str, message: str) -> None:
        """Answers what never became a request of the app's, and ends the connection."""
        body = json.dumps(error_fields(int(status.split()[0]), message))
        head = f"HTTP/1.1 {status}\r\nConnection: close\r\nContent-Type: application/json"
        self.transport.write(f"{head}\r\nContent-Length: {len(body)}\r\n\r\n{body}".encode())
        self.transport.close()


def protocol_with(limits: Limits) -> type[TimedProtocol]:
    """Returns the protocol for uvicorn (its option `http`) that waits for no request longer than the limits say."""
    return type("LimitedProtocol", (TimedProtocol,), {"arrival_seconds": limits.arrival_seconds})


# Beyond what requests may take, for what is measured of them.
_SECONDS_TO_MEASURE = 5
_OF_MACHINES = (*HEALTH_PAGES, "/metrics")

_log = logging.getLogger("uvicorn.error")


def run(request: ServeRequest, served: Served) -> int:
    """Serves until it is told to end, and returns the exit status of the command.

    Raises:
      UsageError: If the address is taken, or the model is not the manifest's.
    """
    if request.losses is not None:
        with naming("--losses"):
            make_losses_file(request.losses)
    listener = _bound(request)
    say(f"{served_in_words(served)}: http://{request.host}:{request.port}/v1")
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


def served_in_words(served: Served) -> str:
    """Returns what answers, with its measured speed in batches, as this decodes, if the manifest has one."""
    if served.is_full_model:
        return "the full model (--full_model)"
    manifest, entry = served.manifest, served.entry
    place = manifest.calibrations.index(entry)
    of_batches = (each for each in manifest.speeds or () if place in each.calibrations and each.batch > 1)
    speed = next(of_batches, None)
    if speed is None:
        return entry_in_words(entry)
    return f"{entry_in_words(entry)}, {times_as_fast(speed.factor)} in batches of {speed.batch}, when it was calibrated"


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
        where = f"--host={request.host} --port={request.port}"
        if error.errno == errno.EADDRINUSE:
            raise UsageError(f"{where}: port {request.port} is in use already. Pass another --port.") from error
        raise UsageError(f"{where}: {error.strerror or error}.") from error
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
    """Returns whether a line of the request log is worth keeping: health checks and scrapes come every few seconds."""
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
                choice=one_entry(request, manifest),
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
    if request.full_model:
        generator = generator.full_model()
    _log.info("%s", generator.memory)
    if caution := generator.other_engine_in_words():
        _log.warning("caution: %s", caution)
    return generator, probe
