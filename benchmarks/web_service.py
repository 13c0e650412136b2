r"""Throughput and latency of the web service under load, against one prompt at a time and against the full model.

    python -m benchmarks.web_service --calibration=build/demo-calibration \
        --data=calm_beam/inputs/demo/calibration.jsonl.gz --consistency=textual --delta=0.05 \
        --clients 1 8 32 --rates 10 20 --json

Starts each service on loopback in a process of its own: that of `calm-beam serve`, which decodes all requests in one
batch; the same with the full model; and a plain one that decodes a prompt in each of two threads by
`Generator.generate`. Load comes in two ways: from so many clients that each ask as soon as they are answered
(`--clients`), and at random times, so many a second (`--rates`), whether or not the service keeps up. Requests
refused with 503 are counted, and sent again by clients of the first kind. Services that stream are asked for streams:
the time to the first token is printed with that to the whole answer. Clients run on the same machine, and use a part
of it. Each service is warmed up before anything is timed; programs compiled since are kept on disk.
"""

import argparse
import asyncio
import contextlib
import dataclasses
import gzip
import itertools
import json
import multiprocessing
import random
import socket
import time
from collections.abc import AsyncIterator, Awaitable, Iterator, Sequence

import fastapi
import httpx
import numpy as np
import uvicorn

from calm_beam.decoding.compilation import use_compilation_cache
from calm_beam.launch.serve.answers import answer_fields
from calm_beam.launch.serve.completions import CompletionQuestion
from calm_beam.launch.serve.request import Limits, Served
from calm_beam.launch.serve.run import build_app
from calm_beam.manifest import MANIFEST, EntryChoice, read_manifest
from calm_beam.serving import Generator
from calm_beam.storage import joined

from .machine import describe_machine

_BATCH, _SINGLE, _FULL = "batch", "one at a time", "full model"
_SERVICES = (_BATCH, _SINGLE, _FULL)
_THREADS = 2
_BUSY = 503
_AGAIN_SECONDS = 0.05


@dataclasses.dataclass(frozen=True, kw_only=True)
class _Served:
    """The recipe of a service; a process of its own builds it."""

    service: str
    calibration: str
    checkpoint: str
    consistency: str | None
    metric: str | None
    delta: float | None
    batch_size: int | None
    waiting: int

    def generator(self) -> Generator:
        return Generator.from_manifest(
            joined(self.calibration, MANIFEST),
            self.checkpoint,
            choice=EntryChoice.named_by(self),
            batch_size=self.batch_size,
        )

    def app(self) -> fastapi.FastAPI:
        if self.service == _SINGLE:
            return _app_of_one_at_a_time(self.generator(), waiting=self.waiting)
        manifest = read_manifest(joined(self.calibration, MANIFEST))
        served = Served(
            manifest=manifest,
            entry=manifest.calibration(EntryChoice.named_by(self)),
            content=b"",
            limits=Limits(waiting=self.waiting),
        )
        return build_app(served, load=self._load)[0]

    def _load(self) -> tuple[Generator, None]:
        generator = self.generator()
        return (generator.full_model() if self.service == _FULL else generator), None


@dataclasses.dataclass(frozen=True, kw_only=True)
class _Heard:
    """A request that was answered.

    Attributes:
      first_seconds: Until its first token, or until all of it where it comes as a whole.
      seconds: Until all of it.
      tokens: Of the answer.
      layers_used: Over all of them.
    """

    first_seconds: float
    seconds: float
    tokens: int
    layers_used: int


@dataclasses.dataclass(frozen=True, kw_only=True)
class Load:
    """The results of a service under one load.

    Attributes:
      service: Which.
      load: As text.
      answered: Requests with an answer.
      turned_away: Times that the service was busy.
      requests_per_second: Answered, from the first request to the last answer.
      tokens_per_second: Likewise.
      layers_per_token: Decoder layers used.
      latency_msec: Median, 95th and 99th percentile of the time to the whole answer.
      first_token_msec: Likewise, to the first token.
    """

    service: str
    load: str
    answered: int
    turned_away: int
    requests_per_second: float
    tokens_per_second: float
    layers_per_token: float
    latency_msec: tuple[float, ...]
    first_token_msec: tuple[float, ...]


def main() -> None:
    """Prints the table."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--calibration", required=True, help="folder of the manifest")
    parser.add_argument("--checkpoint", help="default: where the manifest says that it was")
    parser.add_argument("--data", required=True, help="JSONL with prompts as text")
    parser.add_argument("--consistency")
    parser.add_argument("--metric")
    parser.add_argument("--delta", type=float)
    parser.add_argument("--services", nargs="+", choices=_SERVICES, default=list(_SERVICES))
    parser.add_argument("--clients", type=int, nargs="*", default=[1, 8, 32], help="who ask again once they have heard")
    parser.add_argument("--rates", type=float, nargs="*", default=[], help="requests a second, at random times")
    parser.add_argument("--requests", type=int, default=400, help="of each load")
    parser.add_argument("--batch_size", type=int, help="most prompts decoded side by side; default: by memory")
    parser.add_argument("--waiting", type=int, default=64, help="prompts that may wait for their turn")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--json", action="store_true")
    flags = parser.parse_args()
    checkpoint = flags.checkpoint or read_manifest(joined(flags.calibration, MANIFEST)).model.uri
    prompts = _prompts(flags.data, flags.requests)
    if not flags.json:
        print(describe_machine())
        print(_TITLES)
    loads = []
    for service in flags.services:
        served = _Served(
            service=service,
            calibration=flags.calibration,
            checkpoint=checkpoint,
            consistency=flags.consistency,
            metric=flags.metric,
            delta=flags.delta,
            batch_size=flags.batch_size,
            waiting=flags.waiting,
        )
        with _running(served) as url:
            for load in asyncio.run(_loads(url, service, prompts, flags)):
                loads.append(load)
                if not flags.json:
                    print(_row(load), flush=True)
    if flags.json:
        print(json.dumps({"machine": describe_machine(), "loads": [dataclasses.asdict(load) for load in loads]}))


_TITLES = (
    "| service | load | answered | 503 | requests/s | tokens/s | layers/token | latency p50 / p95 / p99, ms "
    "| first token p50 / p95 / p99, ms |\n|---|---|---:|---:|---:|---:|---:|---:|---:|"
)


def _row(load: Load) -> str:
    latency, first = (
        " / ".join(f"{value:.0f}" for value in values) for values in (load.latency_msec, load.first_token_msec)
    )
    return (
        f"| {load.service} | {load.load} | {load.answered} | {load.turned_away} | {load.requests_per_second:.1f} "
        f"| {load.tokens_per_second:.0f} | {load.layers_per_token:.2f} | {latency} | {first} |"
    )


def _prompts(path: str, count: int) -> list[str]:
    """Returns the texts of the first prompts of a file, again from the first where it has too few."""
    with gzip.open(path, "rt", encoding="utf-8") if path.endswith(".gz") else open(path, encoding="utf-8") as file:
        texts = [json.loads(line)["input"] for line in itertools.islice(file, count)]
    return list(itertools.islice(itertools.cycle(texts), count))


@contextlib.contextmanager
def _running(served: _Served) -> Iterator[str]:
    """Runs a service in a process, and yields its address once it takes requests."""
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        port = listener.getsockname()[1]
    process = multiprocessing.get_context("spawn").Process(target=_serve, args=(served, port), daemon=True)
    process.start()
    url = f"http://127.0.0.1:{port}"
    try:
        while process.is_alive():
            with contextlib.suppress(httpx.TransportError):
                if httpx.get(f"{url}/readyz").status_code == httpx.codes.OK:
                    break
            time.sleep(0.2)
        else:
            raise RuntimeError(f"the service ended with status {process.exitcode}")
        yield url
    finally:
        process.terminate()
        process.join()


def _serve(served: _Served, port: int) -> None:
    use_compilation_cache()
    uvicorn.run(served.app(), host="127.0.0.1", port=port, log_level="warning", ws="none")


def _app_of_one_at_a_time(generator: Generator, *, waiting: int) -> fastapi.FastAPI:
    """Returns a service that decodes each prompt alone, in one of a few threads."""
    turns, taken = asyncio.Semaphore(_THREADS), 0

    @contextlib.asynccontextmanager
    async def warmed_up(_: fastapi.FastAPI) -> AsyncIterator[None]:
        await asyncio.to_thread(generator.warm_up)
        yield

    app = fastapi.FastAPI(lifespan=warmed_up)

    @app.get("/readyz")
    async def readyz() -> dict[str, str]:
        return {}

    @app.post("/v1/completions")
    async def complete(question: CompletionQuestion) -> dict[str, object]:
        nonlocal taken
        if taken >= _THREADS + waiting:
            raise fastapi.HTTPException(_BUSY)
        taken += 1
        try:
            async with turns:
                answer = await asyncio.to_thread(generator.generate, question.prompt)
        finally:
            taken -= 1
        return {"choices": [{"calm_beam": answer_fields(answer, group=None, is_full_model=False)}]}

    return app


async def _loads(url: str, service: str, prompts: Sequence[str], flags: argparse.Namespace) -> list[Load]:
    """Returns what a service did under each load, having been asked some of the prompts before."""
    limits = httpx.Limits(max_connections=None, max_keepalive_connections=256)
    loads = []
    async with httpx.AsyncClient(base_url=url, timeout=600, limits=limits) as client:
        asking = _Asking(client, streams=service != _SINGLE)
        await asking.by_clients(prompts[:64], count=8)
        for count in flags.clients:
            loads.append(await asking.load(service, f"{count} clients", asking.by_clients(prompts, count=count)))
        for rate in flags.rates:
            at_times = asking.at_random_times(prompts, rate=rate, seed=flags.seed)
            loads.append(await asking.load(service, f"{rate:g} a second", at_times))
    return loads


class _Asking:
    """Asks a service, and keeps what it heard."""

    def __init__(self, client: httpx.AsyncClient, *, streams: bool) -> None:
        self._client = client
        self._streams = streams
        self._heard: list[_Heard] = []
        self._turned_away = 0

    async def load(self, service: str, name: str, asked: Awaitable[None]) -> Load:
        """Returns what came of some requests, once all are answered or turned away."""
        self._heard, self._turned_away = [], 0
        start = time.perf_counter()
        await asked
        seconds = time.perf_counter() - start
        tokens = sum(heard.tokens for heard in self._heard)
        return Load(
            service=service,
            load=name,
            answered=len(self._heard),
            turned_away=self._turned_away,
            requests_per_second=len(self._heard) / seconds,
            tokens_per_second=tokens / seconds,
            layers_per_token=sum(heard.layers_used for heard in self._heard) / max(1, tokens),
            latency_msec=_percentiles([heard.seconds for heard in self._heard]),
            first_token_msec=_percentiles([heard.first_seconds for heard in self._heard]),
        )

    async def by_clients(self, prompts: Sequence[str], *, count: int) -> None:
        """Asks all prompts by so many clients, each of which asks the next once it has heard."""
        left = iter(prompts)

        async def client() -> None:
            for prompt in left:
                while not await self._ask(prompt):
                    await asyncio.sleep(_AGAIN_SECONDS)

        await asyncio.gather(*(client() for _ in range(count)))

    async def at_random_times(self, prompts: Sequence[str], *, rate: float, seed: int) -> None:
        """Asks each prompt once, so many a second: the times between them are exponential."""
        drawn = random.Random(seed)
        start, due = time.perf_counter(), 0.0
        async with asyncio.TaskGroup() as tasks:
            for prompt in prompts:
                due += drawn.expovariate(rate)
                # By the clock, so that the rate holds whatever asking takes.
                await asyncio.sleep(start + due - time.perf_counter())
                tasks.create_task(self._ask(prompt))

    async def _ask(self, prompt: str) -> bool:
        """Returns whether the service answered, having kept what it heard."""
        start, first = time.perf_counter(), None
        body = {"prompt": prompt, "stream": self._streams}
        async with self._client.stream("POST", "/v1/completions", json=body) as response:
            if response.status_code == _BUSY:
                self._turned_away += 1
                return False
            response.raise_for_status()
            if self._streams:
                last = ""
                async for line in response.aiter_lines():
                    if line.startswith("data: {"):
                        first = first or time.perf_counter()
                        last = line.removeprefix("data: ")
            else:
                last = (await response.aread()).decode()
        end = time.perf_counter()
        answer = json.loads(last)["choices"][0]["calm_beam"]
        self._heard.append(
            _Heard(
                first_seconds=(first or end) - start,
                seconds=end - start,
                tokens=len(answer["tokens"]),
                layers_used=answer["layers_used"],
            )
        )
        return True


def _percentiles(seconds: Sequence[float]) -> tuple[float, ...]:
    return tuple((np.percentile(seconds, (50, 95, 99)) * 1000).round(1).tolist()) if seconds else ()


if __name__ == "__main__":
    main()
