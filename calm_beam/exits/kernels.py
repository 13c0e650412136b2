"""Kernels for accelerators are taken where they give what the plain code gives."""

import functools
import logging
from collections.abc import Callable
from typing import Any

import jax
import numpy as np

_LOGGER = logging.getLogger(__name__)

PLATFORMS = ("gpu", "tpu")
"""Where there are any."""


def agrees(compare: Callable[[], None], *, kernel: str, platform: str, width: int) -> bool:
    """Returns whether a kernel compiles here and gives the plain code's numbers; warns if not.

    Args:
      compare: Raises an error unless both hold.
      kernel: What the kernel is called.
      platform: One of `PLATFORMS`.
      width: Of the head that it is for.
    """
    try:
        compare()
    except Exception as error:  # Whatever the compiler raises: the plain code computes the same, only slower.
        _LOGGER.warning(
            "%s is not used on this %s, for a head of width %d: it does not compile, or gives other numbers than the "
            "plain code, which is used instead: the results stand, decoding is slower. Report this with the versions "
            "of jax and jaxlib. Cause: %s: %s",
            kernel,
            platform,
            width,
            type(error).__name__,
            error,
        )
        return False
    return True


def run_now(function: Callable[..., Any], *arrays: Any, **options: Any) -> Any:
    """Returns what a function makes of arrays of numpy's. It runs at once, compiled, also where a caller is traced."""
    compiled = jax.jit(functools.partial(function, **options)).lower(*arrays).compile()
    return jax.tree.map(np.asarray, compiled(*arrays))
