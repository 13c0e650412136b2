"""The cache of compiled code distinguishes instruction sets."""

import os
import pathlib
import subprocess
import sys

import pytest

_CODE = """
from calm_beam.decoding.compilation import use_compilation_cache
import jax
use_compilation_cache()
jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.0)
jax.jit(lambda x: x @ x)(jax.numpy.ones((64, 64)))
"""


def _compiled(folder: pathlib.Path, *, flags: str) -> set[str]:
    """Returns the names of all compiled code in a cache after a process has compiled with these flags."""
    environment = {**os.environ, "CALM_BEAM_CACHE": str(folder), "XLA_FLAGS": flags}
    subprocess.run([sys.executable, "-c", _CODE], env=environment, check=True, timeout=240)
    return {path.name for path in (folder / "compiled").rglob("*-cache")}


@pytest.mark.slow
def test_flags_of_the_compiler_are_part_of_the_key(tmp_path: pathlib.Path) -> None:
    """Code compiled with and without a limit of instructions has different cache keys."""
    plain = _compiled(tmp_path, flags="")
    assert plain
    assert _compiled(tmp_path, flags="") == plain
    limited = _compiled(tmp_path, flags="--xla_cpu_max_isa=SSE4_2")
    assert len(limited) == 2 * len(plain)
    assert _compiled(tmp_path, flags="--xla_cpu_max_isa=AVX2") > limited
    assert _compiled(tmp_path, flags="--xla_cpu_max_isa=SSE4_2") == _compiled(tmp_path, flags="")
