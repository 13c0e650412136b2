"""What decoding a shard takes, measured where it is decoded.

Importing this loads JAX.
"""

import contextlib
import functools
import os
import time
import uuid
from collections.abc import Callable
from types import TracebackType
from typing import Protocol, Self

import jax

from calm_beam.decoding.compilation import CompileTime
from calm_beam.decoding.work import Work
from calm_beam.storage import size
from calm_beam.storage.free_memory import peak_bytes

from .job import StoredGenerations
from .shards import StoredShard
from .timing import Lap, ShardTiming

# Of a lap. A single step would be measured by the outputs that happen to end in it.
_STEPS = 4


class _Decoder(Protocol):
    """What is timed."""

    @property
    def work(self) -> Work: ...

    @property
    def slots(self) -> int: ...


class ShardStopwatch:
    """Measures the decoding of one shard while the context is open, and until the shard is stored."""

    def __init__(self, decoder: _Decoder, *, lanes: int, clock: Callable[[], float] = time.perf_counter) -> None:
        """Starts.

        Args:
          decoder: Counts its work.
          lanes: How many it decodes.
          clock: Returns seconds.
        """
        self._decoder, self._lanes, self._clock = decoder, lanes, clock
        self._compiling = CompileTime()
        self._began, self._cpu = time.time(), time.process_time()
        self._start = self._lap_start = clock()
        self._before = self._lap_before = decoder.work
        self._lap_compiling = 0.0
        self._laps: list[Lap] = []

    def __enter__(self) -> Self:
        self._compiling.__enter__()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._compiling.__exit__(kind, error, trace)

    def lap(self) -> None:
        """Is called after every output; ends a lap if there were enough steps."""
        work = self._decoder.work
        steps = work.steps - self._lap_before.steps
        if steps < _STEPS:
            return
        now, compiling = self._clock(), self._compiling.seconds()
        seconds = now - self._lap_start - (compiling - self._lap_compiling)
        self._laps.append(
            Lap(
                steps=steps,
                rows=work.layer_rows - self._lap_before.layer_rows,
                seconds=round(max(0.0, seconds), 6),
            )
        )
        self._lap_start, self._lap_before, self._lap_compiling = now, work, compiling

    def write_timing(self, where: StoredGenerations, stored: StoredShard, *, load_seconds: float) -> None:
        """Writes what was measured beside a shard that is stored now; a disk or a store that refuses it ends nothing.

        Args:
          where: The folder.
          stored: The shard.
          load_seconds: As in `timing`.
        """
        with contextlib.suppress(OSError):
            timing = self.timing(stored, where.shard_path(stored.shard), load_seconds=load_seconds)
            timing.write(where.directory, num_shards=where.job.num_shards)

    def timing(self, stored: StoredShard, path: str, *, load_seconds: float) -> ShardTiming:
        """Returns what was measured, now that the shard is stored.

        Args:
          stored: The shard.
          path: Its file.
          load_seconds: What loading the model has taken since another shard was asked.
        """
        work = self._decoder.work - self._before
        return ShardTiming(
            shard=stored.shard,
            digest=stored.digest,
            examples=stored.examples,
            lanes=self._lanes,
            slots=self._decoder.slots,
            began=round(self._began, 3),
            seconds=round(self._clock() - self._start, 6),
            compile_seconds=round(self._compiling.seconds(), 6),
            cpu_seconds=round(time.process_time() - self._cpu, 6),
            load_seconds=round(load_seconds, 3),
            steps=work.steps,
            rows=work.layer_rows,
            padded_rows=work.padded_rows,
            projections=work.projection_rows,
            tokens=work.tokens,
            laps=tuple(self._laps),
            bytes=size(path),
            peak_bytes=peak_bytes(),
            worker=_worker(os.getpid()),
            device=jax.local_devices()[0].device_kind,
            cores=len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1,
        )


@functools.cache
def _worker(_: int) -> str:
    """Returns a text of a process, of which the argument is the number, so that one that forks gets another."""
    return uuid.uuid4().hex
