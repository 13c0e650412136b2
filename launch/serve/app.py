"""The service as an ASGI app."""

import asyncio
import contextlib
from collections.abc import AsyncIterator

import fastapi
from prometheus_client import exposition

from .asking import not_ready
from .completions import add_completions
from .desk import Desk, Load, NotReadyError
from .metrics import Counted, DeskCollector, ServiceMetrics
from .refusals import BoundedBodies, add_refusals
from .served import Served


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

    @app.get("/healthz")
    async def healthz() -> dict[str, str]:
        return {"status": "alive", "phase": desk.phase}

    @app.get("/readyz")
    async def readyz() -> dict[str, str]:
        if not desk.is_ready:
            raise not_ready(NotReadyError(f"not ready: {desk.phase}"))
        return {"status": "ready"}


def _add_pages(app: fastapi.FastAPI, served: Served, metrics: ServiceMetrics) -> None:
    """Has an app show its manifest, and what it counts."""

    @app.get("/manifest")
    async def manifest() -> fastapi.Response:
        return fastapi.Response(served.content, media_type="application/json")

    @app.get("/metrics")
    async def counted(request: fastapi.Request) -> fastapi.Response:
        encode, media_type = exposition.choose_encoder(request.headers.get("accept", ""))
        return fastapi.Response(encode(metrics.registry), headers={"Content-Type": media_type})
