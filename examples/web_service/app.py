"""The service as an ASGI app."""

import asyncio
import contextlib
import logging
import time
from collections.abc import AsyncIterator

import fastapi

from calm_beam.serving import Generator, LossProbe

from .completions import add_completions
from .desk import Desk
from .generate import add_generate
from .limits import Limits
from .refusals import BoundedBodies, add_refusals

# Of a letter in JSON: two halves of a surrogate pair, escaped.
_MOST_BYTES_PER_CHARACTER = 12
_MOST_BYTES_BESIDES = 1000

_LIMITS = Limits()

_log = logging.getLogger("uvicorn.error")


def build_app(
    generator: Generator, *, probe: LossProbe | None = None, limits: Limits = _LIMITS, model: str = "calm-beam"
) -> fastapi.FastAPI:
    """Returns the service.

    Args:
      generator: What answers. All it needs is compiled before the first request is taken.
      probe: Measures the losses of a sample of the requests, if there is one.
      limits: What the service takes upon itself.
      model: What clients of `/v1/completions` call the model.
    """
    desk = Desk(generator, probe=probe, limits=limits)

    @contextlib.asynccontextmanager
    async def opened(_: fastapi.FastAPI) -> AsyncIterator[None]:
        _log.info("Compiling for every width of prompt. The first time takes a while; requests are taken after it.")
        start = time.monotonic()
        await asyncio.to_thread(desk.open)
        _log.info("Compiled in %.0f s.", time.monotonic() - start)
        yield
        await asyncio.to_thread(desk.close)

    app = fastapi.FastAPI(title="calm-beam", lifespan=opened)
    app.add_middleware(
        BoundedBodies, most_bytes=_MOST_BYTES_PER_CHARACTER * limits.prompt_characters + _MOST_BYTES_BESIDES
    )
    add_refusals(app)
    add_generate(app, desk, limits=limits)
    add_completions(app, desk, limits=limits, model=model)

    @app.get("/health")
    async def health() -> dict[str, object]:
        entry = generator.entry
        return {
            "model": generator.manifest.model.fingerprint,
            "manifest": generator.manifest.digest,
            "threshold": entry.threshold,
            "delta": entry.delta,
            "epsilon": entry.epsilon,
            **desk.numbers(),
        }

    return app
