"""Runs tests as on a processor of 2008 with one core, for results that must not depend on the machine.

    python -m tests.old_processor tests/calm_beam/decoding    # arguments are pytest's
    python -m tests.old_processor --isa=AVX2 tests/transforms
    python -m tests.old_processor --share tests/transforms    # between the cores of this machine, up to four

XLA compiles for an old instruction set, numpy and the C library use the oldest instructions they can, there is no
native code, and every process has one core. On processors other than x86-64 some of this has no effect.
"""

import argparse
import importlib
import os
import shlex
import sys

import pytest

_UMATH = importlib.import_module("numpy._core._multiarray_umath")

NUMPY_FEATURES = tuple(name for name in _UMATH.__cpu_dispatch__ if _UMATH.__cpu_features__.get(name))
"""The newer instructions that numpy would use here, and can do without."""


def environment(*, isa: str = "SSE4_2") -> dict[str, str]:
    """Returns environment variables with which a process computes as on an old processor.

    Args:
      isa: The newest instructions that XLA may use, as its flag `xla_cpu_max_isa` names them.
    """
    return {
        "XLA_FLAGS": f"{os.environ.get('XLA_FLAGS', '')} --xla_cpu_max_isa={isa}".strip(),
        "NPY_DISABLE_CPU_FEATURES": os.environ.get("NPY_DISABLE_CPU_FEATURES") or " ".join(NUMPY_FEATURES),
        # Other C libraries than GNU's ignore it.
        "GLIBC_TUNABLES": "glibc.cpu.hwcaps=-AVX2,-FMA,-FMA4,-AVX512F,-AVX512VL,-AVX512BW,-AVX512DQ",
        # Native code, none of which such a processor can run.
        "CALM_BEAM_NATIVE": "none",
    }


def main(arguments: list[str]) -> int:
    """Runs pytest with these variables; returns its exit status."""
    parser = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    parser.add_argument("--isa", default="SSE4_2")
    parser.add_argument("--share", action="store_true")
    flags, others = parser.parse_known_args(arguments)
    if f"--xla_cpu_max_isa={flags.isa}" not in os.environ.get("XLA_FLAGS", ""):
        # Libraries read these when a process starts.
        command = [sys.executable, "-m", "tests.old_processor", *arguments]
        os.execve(sys.executable, command, {**os.environ, **environment(isa=flags.isa)})
    if flags.share:
        return pytest.main([*_processes(), *others])
    if hasattr(os, "sched_setaffinity"):
        os.sched_setaffinity(0, {min(os.sched_getaffinity(0))})
    return pytest.main(others)


def _processes() -> list[str]:
    """Returns the arguments of pytest-xdist for a process on each of up to four cores, which sees no other."""
    if not hasattr(os, "sched_getaffinity"):
        return ["-n", "auto", "--maxprocesses=4", "--dist", "worksteal"]
    pythons = [f"taskset -c {core} {shlex.quote(sys.executable)}" for core in sorted(os.sched_getaffinity(0))[:4]]
    return ["--dist", "worksteal", *(part for python in pythons for part in ("--tx", f"popen//python={python}"))]


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
