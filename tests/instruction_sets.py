"""The instruction sets of native code that this machine can run, on each of which its tests are run."""

import contextlib
import os
from collections.abc import Iterator

import jax
import pytest

from calm_beam.model.native import build, library


def _available() -> tuple[str, ...]:
    named = os.environ.get(library.VARIABLE)
    if jax.default_backend() != "cpu" or (named and not library.is_available()):
        return ()
    return (named,) if named else library.instruction_sets_here()


AVAILABLE = _available()
"""The best first; those that the variable leaves, where it is set."""

TUNED = tuple(name for name in AVAILABLE if name in build.TUNED)
"""Those of them that are taken where nothing else is asked for, and that certify."""

needs_native = pytest.mark.skipif(not TUNED, reason="no native code that certifies here")
"""Marks tests of a certified head, which is native code's alone."""


@contextlib.contextmanager
def forced(name: str) -> Iterator[None]:
    """Makes native code use an instruction set, or `none`, until the block ends.

    JAX's compiled code names the native code that it calls, so callers that continue in the same process clear JAX's
    caches.
    """
    with pytest.MonkeyPatch.context() as patched:
        patched.setenv(library.VARIABLE, name)
        yield


@pytest.fixture(scope="module", params=AVAILABLE or ["none"])
def instruction_set(request: pytest.FixtureRequest) -> Iterator[str]:
    """Runs the tests of a module once on every instruction set; skips them if there is no native code."""
    if not AVAILABLE:
        pytest.skip("this machine has no native code")
    jax.clear_caches()
    with forced(request.param):
        yield request.param
    jax.clear_caches()
