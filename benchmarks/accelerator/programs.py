"""Every program of a device: compiled, and run once on zeros, so that whatever a device does not take shows at once.

These are the programs that `make accelerators` has compiled for devices that were not there.
"""

import re
import time
from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp

from benchmarks.programs import MODELS, Program, programs
from calm_beam.arithmetic import DTYPES, Arithmetic

from .part import Case, Clock, Scale


def measure(scale: Scale, clock: Clock) -> Iterator[Case]:
    """Yields the seconds to compile each program, and those of a call on zeros."""
    yield from clock.within(_cases(scale))


def _cases(scale: Scale) -> Iterator[tuple[Case, Callable[[], Case]]]:
    for dtype in DTYPES:
        for name, config in MODELS.items():
            for program in programs(config, Arithmetic(dtype=dtype), devices=jax.local_devices()[:1]):
                if re.search(scale.programs, program.name):
                    case = {"measured": "program", "model": name, "in": dtype, "program": program.name}
                    yield case, _measured(program)


def _measured(program: Program) -> Callable[[], Case]:
    def measured() -> Case:
        start = time.perf_counter()
        compiled = program.function.lower(*program.arguments, **program.options).compile()
        compiling = time.perf_counter() - start
        memory = compiled.memory_analysis()
        given = jax.tree.map(_zeros, (program.arguments, dict(program.options)))
        jax.block_until_ready(given)
        start = time.perf_counter()
        arguments, options = given
        jax.block_until_ready(program.function(*arguments, **options))
        return {
            "compile_seconds": compiling,
            "first_call_seconds": time.perf_counter() - start,
            "temporary_bytes": None if memory is None else int(memory.temp_size_in_bytes),
        }

    return measured


def _zeros(value: Any) -> Any:
    """Returns an array of zeros where there was one without numbers."""
    if not isinstance(value, jax.ShapeDtypeStruct):
        return value
    if jnp.issubdtype(value.dtype, jax.dtypes.prng_key):
        return jax.device_put(jax.random.key(0), value.sharding)
    return jax.device_put(jnp.zeros(value.shape, value.dtype), value.sharding)
