"""Every program of a device: compiled, and run once on zeros, so that whatever a device does not take shows at once.

These are the programs that `make accelerators` has compiled for devices that were not there. As many are compiled side
by side as there are cores, since that takes most of the time.
"""

import concurrent.futures
import functools
import os
import re
import time
from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp

from benchmarks.programs import MODELS, Program, programs
from calm_beam.precision import DTYPES, Precision

from .part import Case, Clock, Scale


def measure(scale: Scale, clock: Clock) -> Iterator[Case]:
    """Yields the seconds to compile each program, in parallel with others, and those of a call on zeros."""
    pool = concurrent.futures.ThreadPoolExecutor(os.cpu_count())
    try:
        yield from clock.within(_cases(scale, pool))
    finally:
        # Programs that the remaining time allows are compiled; the rest is not waited for.
        pool.shutdown(cancel_futures=True)


def _cases(scale: Scale, pool: concurrent.futures.Executor) -> Iterator[tuple[Case, Callable[[], Case]]]:
    found = []
    for dtype in DTYPES:
        for name, config in MODELS.items():
            for program in programs(config, Precision(dtype=dtype), devices=jax.local_devices()[:1]):
                if re.search(scale.programs, program.name):
                    case = {"measured": "program", "model": name, "in": dtype, "program": program.name}
                    found.append((case, program, pool.submit(_compiled, program)))
    for case, program, compiled in found:
        yield case, functools.partial(_measured, program, compiled)


def _compiled(program: Program) -> tuple[Any, float]:
    """Returns the program of the device, and the seconds that it took."""
    start = time.perf_counter()
    made = program.function.lower(*program.arguments, **program.options).compile()
    return made, time.perf_counter() - start


def _measured(program: Program, compiled: "concurrent.futures.Future[tuple[Any, float]]") -> Case:
    made, seconds = compiled.result()
    memory = made.memory_analysis()
    arguments, options = jax.tree.map(_zeros, (program.arguments, dict(program.options)))
    jax.block_until_ready((arguments, options))
    start = time.perf_counter()
    jax.block_until_ready(program.function(*arguments, **options))
    return {
        "compile_seconds": seconds,
        "first_call_seconds": time.perf_counter() - start,
        "temporary_bytes": None if memory is None else int(memory.temp_size_in_bytes),
    }


def _zeros(value: Any) -> Any:
    """Returns an array of zeros where there was one without numbers."""
    if not isinstance(value, jax.ShapeDtypeStruct):
        return value
    if jnp.issubdtype(value.dtype, jax.dtypes.prng_key):
        return jax.device_put(jax.random.key(0), value.sharding)
    return jax.device_put(jnp.zeros(value.shape, value.dtype), value.sharding)
