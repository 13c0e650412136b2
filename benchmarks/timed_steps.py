"""The time of each step of a batch, by XLA or by native code."""

import collections
import contextlib
import time
from collections.abc import Callable, Iterator
from typing import Any
from unittest import mock

import jax

from calm_beam.decoding.cpu import NativeSources
from calm_beam.decoding.xla import steps as device_steps
from calm_beam.model import native_decoder
from calm_beam.model.native import library

STEPS = {
    "source": ((device_steps, "admit"), (NativeSources, "prefill")),
    "embedding": ((device_steps, "embed"),),
    "layer": (
        (library.Stack, "run"),
        (device_steps, "run_layer"),
    ),
    "decision": (
        (library, "summarise"),
        *((device_steps, name) for name in ("certify_rows", "decide_rows")),
    ),
    "fill": ((library.Stack, "keep_skipped"), *((device_steps, name) for name in ("fill_skipped", "copy_skipped"))),
}
"""By what a step is for: where the functions are that do it."""


@contextlib.contextmanager
def timed_steps() -> Iterator[tuple[dict[str, float], dict[str, int]]]:
    """Has every step waited for within the block, and gives seconds and calls by what they are for."""
    seconds, calls_of = collections.defaultdict[str, float](float), collections.defaultdict[str, int](int)
    with contextlib.ExitStack() as originals:
        # Native code takes whole steps otherwise, whose parts nobody can tell apart.
        originals.enter_context(mock.patch.object(native_decoder, "CACHED_WEIGHTS", 0))
        is_within: list[bool] = []
        for piece, functions in STEPS.items():
            for module, name in functions:
                original = getattr(module, name)
                originals.callback(setattr, module, name, original)
                setattr(module, name, _timed(original, piece, seconds, calls_of, is_within))
        yield seconds, calls_of


def _timed(
    step: Callable[..., Any],
    piece: str,
    seconds: dict[str, float],
    calls_of: dict[str, int],
    is_within: list[bool],
) -> Callable[..., Any]:
    """Returns a step that is timed, unless it is part of another: native code prefills by layers."""

    def run(*arguments: Any, **options: Any) -> Any:
        if is_within:
            return step(*arguments, **options)
        is_within.append(True)
        start = time.perf_counter()
        try:
            made = jax.block_until_ready(step(*arguments, **options))
        finally:
            is_within.pop()
        seconds[piece] += time.perf_counter() - start
        calls_of[piece] += 1
        return made

    return run
