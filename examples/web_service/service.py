"""A web service that answers prompts under a manifest.

    python service.py --manifest=calibration --checkpoint=model --port=8000

POST /generate takes {"prompt": "..."} and gives text, tokens and the layer at which each token left. What the client
got wrong is a status of 4xx and says what; 503 means: busy, come again. GET /health says what is served. A request
that is not there as a whole after some seconds is answered with 408, and its connection is closed.
"""

import argparse
import asyncio
import contextlib
import dataclasses
import logging
import time
import uuid
from collections.abc import AsyncIterator, Awaitable, Callable

import fastapi
import h11
import pydantic
import uvicorn
from uvicorn.protocols.http.h11_impl import H11Protocol

from calm_beam.decoding.compilation import use_compilation_cache
from calm_beam.serving import Answer, Generator, LossProbe, OutputError, PromptError

# Of a letter in JSON: two halves of a surrogate pair, escaped.
_MOST_BYTES_PER_CHARACTER = 12
_MOST_BYTES_BESIDES = 1000

_log = logging.getLogger("uvicorn.error")


@dataclasses.dataclass(frozen=True, kw_only=True)
class Limits:
    """What the service takes upon itself.

    Attributes:
      prompt_characters: Longest prompt; what is longer is refused before it is tokenized.
      running: Prompts that are decoded at the same time, each in a thread.
      waiting: Requests that wait for their turn; more are turned away.
      arrival_seconds: How long a request may take to arrive, from the connection or its first byte to its last.
    """

    prompt_characters: int = 4000
    running: int = 2
    waiting: int = 32
    arrival_seconds: float = 10.0


class Question(pydantic.BaseModel):
    """The body of POST /generate."""

    model_config = pydantic.ConfigDict(extra="forbid")

    prompt: str


def build_app(generator: Generator, *, probe: LossProbe | None = None, limits: Limits = Limits()) -> fastapi.FastAPI:
    """Returns the service.

    Args:
      generator: What answers. It is compiled before the first request is taken.
      probe: Measures the losses of a sample of the requests, if there is one.
      limits: What the service takes upon itself.
    """
    turns = asyncio.Semaphore(limits.running)
    waiting = 0

    @contextlib.asynccontextmanager
    async def warmed_up(_: fastapi.FastAPI) -> AsyncIterator[None]:
        _log.info("Compiling for every width of prompt. The first time takes a while; requests are taken after it.")
        start = time.monotonic()
        for ready in (generator, probe):
            if ready is not None:
                await asyncio.to_thread(ready.warm_up)
        _log.info("Compiled in %.0f s.", time.monotonic() - start)
        yield

    app = fastapi.FastAPI(title="calm-beam", lifespan=warmed_up)

    @app.middleware("http")
    async def bounded(
        request: fastapi.Request, answer: Callable[[fastapi.Request], Awaitable[fastapi.Response]]
    ) -> fastapi.Response:
        """Refuses bodies that are too long before they are read."""
        most = _MOST_BYTES_PER_CHARACTER * limits.prompt_characters + _MOST_BYTES_BESIDES
        length = request.headers.get("content-length", "0")
        if "transfer-encoding" in request.headers:
            return fastapi.responses.JSONResponse({"detail": "Content-Length is missing"}, 411)
        if int(length) > most:
            return fastapi.responses.JSONResponse({"detail": f"the body is longer than {most} bytes"}, 413)
        return await answer(request)

    @app.exception_handler(fastapi.exceptions.RequestValidationError)
    async def refused(_: fastapi.Request, error: fastapi.exceptions.RequestValidationError) -> fastapi.Response:
        """Says what is wrong with a body without repeating it: it may hold what no answer can hold."""
        found = "; ".join(f"{'.'.join(map(str, part['loc']))}: {part['msg']}" for part in error.errors())
        return fastapi.responses.JSONResponse({"detail": ascii(found)[1:-1]}, 422)

    @app.get("/health")
    async def health() -> dict[str, object]:
        entry = generator.entry
        return {
            "model": generator.manifest.model.fingerprint,
            "manifest": generator.manifest.digest,
            "threshold": entry.threshold,
            "delta": entry.delta,
            "epsilon": entry.epsilon,
        }

    @app.post("/generate")
    async def generate(question: Question) -> dict[str, object]:
        nonlocal waiting
        if len(question.prompt) > limits.prompt_characters:
            raise fastapi.HTTPException(413, f"the prompt is longer than {limits.prompt_characters} characters")
        if waiting >= limits.running + limits.waiting:
            raise fastapi.HTTPException(503, "busy, try again later", headers={"Retry-After": "1"})
        waiting += 1
        try:
            async with turns:
                answer = await asyncio.to_thread(_answer, generator, probe, question.prompt)
        except PromptError as error:
            raise fastapi.HTTPException(422, str(error)) from error
        except OutputError as error:
            _log.error("no output: %s", error)
            raise fastapi.HTTPException(500, "the model gave no output") from error
        finally:
            waiting -= 1
        fields = dataclasses.asdict(answer)
        # The promise is that of every answer here: `/health` says it.
        del fields["group"], fields["entry"]
        return {
            **fields,
            "layers_used": answer.layers_used,
            "layers_saved": answer.layers_saved,
        }

    return app


def protocol_with(limits: Limits) -> type[H11Protocol]:
    """Returns a protocol for uvicorn (its option `http`) that waits for no request longer than the limits say.

    uvicorn itself waits for ever: clients that send a byte now and then would hold all connections that there are.
    """

    class TimedProtocol(H11Protocol):
        _timer: asyncio.TimerHandle | None = None

        def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
            super().connection_made(transport)
            self._start_timer()

        def data_received(self, data: bytes) -> None:
            # Bytes of the next request on the same connection start the time anew.
            self._start_timer()
            super().data_received(data)
            if self.conn.their_state not in (h11.IDLE, h11.SEND_BODY):
                self._stop_timer()

        def connection_lost(self, exc: Exception | None) -> None:
            self._stop_timer()
            super().connection_lost(exc)

        def _start_timer(self) -> None:
            if self._timer is None:
                self._timer = self.loop.call_later(limits.arrival_seconds, self._end_connection)

        def _stop_timer(self) -> None:
            if self._timer is not None:
                self._timer.cancel()
                self._timer = None

        def _end_connection(self) -> None:
            # Unless it has been answered already, say for being too long.
            if self.conn.our_state in (h11.IDLE, h11.SEND_RESPONSE):
                self.transport.write(b"HTTP/1.1 408 Request Timeout\r\nConnection: close\r\nContent-Length: 0\r\n\r\n")
            self.transport.close()

    return TimedProtocol


def _answer(generator: Generator, probe: LossProbe | None, prompt: str) -> Answer:
    """Returns the answer, having measured its loss if the request is sampled, which is decided first."""
    request_id = uuid.uuid4().hex
    is_sampled = probe is not None and probe.is_sampled(request_id)
    try:
        answer = generator.generate(prompt)
    except PromptError:
        # Refused, so that there is no loss.
        raise
    except Exception as error:
        if probe is not None and is_sampled:
            probe.observe_failure(request_id, error)
        raise
    if probe is not None and is_sampled:
        try:
            probe.observe(request_id, prompt, answer=answer)
        except OSError as error:
            # Whoever asked has their answer, also while the disk is full.
            _log.error("a loss could not be written: %s", error)
    return answer


def main() -> None:
    """Serves until it is told to stop."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--manifest", required=True, help="the manifest's file")
    parser.add_argument("--checkpoint", required=True, help="folder of the model that was calibrated")
    parser.add_argument(
        "--consistency", help="of the entry to serve, where the manifest has several; so the next three"
    )
    parser.add_argument("--metric")
    parser.add_argument("--delta", type=float)
    parser.add_argument("--epsilon", type=float)
    parser.add_argument("--losses", help="file for the losses of a sample of the requests")
    parser.add_argument("--share", type=float, default=0.01, help="of the requests that are measured")
    parser.add_argument("--host", default="127.0.0.1")
    parser.add_argument("--port", type=int, default=8000)
    flags = parser.parse_args()
    use_compilation_cache()
    generator = Generator.from_manifest(
        flags.manifest,
        flags.checkpoint,
        consistency=flags.consistency,
        metric=flags.metric,
        delta=flags.delta,
        epsilon=flags.epsilon,
    )
    probe = (
        LossProbe(generator, flags.losses, share=flags.share, salt="web-service", metric=flags.metric)
        if flags.losses
        else None
    )
    limits = Limits()
    app = build_app(generator, probe=probe, limits=limits)
    uvicorn.run(app, host=flags.host, port=flags.port, http=protocol_with(limits), ws="none")


if __name__ == "__main__":
    main()
