"""How native code is built; for setup.py, which cannot import what it builds, and for the code that loads and tests it.

Each instruction set has its own shared library next to this file, built from the same sources.
"""

import ctypes
import hashlib
import pathlib
import platform
import runpy

INSTRUCTION_SETS: dict[str, dict[str, tuple[str, ...]]] = {
    "x86_64": {
        "avx512_vnni": ("avx512f", "avx512bw", "avx512dq", "avx512vl", "avx512_vnni"),
        "avx2": ("fma", "f16c", "avx2"),
        "portable": (),
    },
    "aarch64": {"neon": ()},
}
"""By machine, the instruction sets that there is code for, the best first, with the processor features they need."""

TUNED = ("avx512_vnni", "avx2")
"""Instruction sets with tuned code, which are used by default.

The others have portable code: it computes no certified heads, and it was slower than XLA where it could be measured
(docs/measurements.md, "Portable code").
"""

FOLDER = pathlib.Path(__file__).parent

_SOURCES = ("layer.c", "head.c", "measures.c", "step.c", "threads.c")

# Certified heads: portable code has no products of 8-bit integers.
_SCREEN = "screen.c"

LAYOUTS = "layouts.h"
"""Name of the header with the text of `layouts`."""

# Explicit on x86 only: `-march=native` among CFLAGS must not reach a wheel.
_BASELINES = {"x86_64": ("-march=x86-64", "-mtune=generic")}
_IEEE = ("-fno-fast-math", "-fno-unsafe-math-optimizations")


def instruction_sets(machine: str | None = None) -> dict[str, tuple[str, ...]]:
    """Returns the instruction sets of a machine, with the features that each needs; none where there is no code for it.

    Args:
      machine: A name as `platform.machine()` returns it, which is the default.
    """
    return INSTRUCTION_SETS.get(machine or platform.machine(), {})


def file_name(instruction_set: str) -> str:
    """Returns a library's file name, which has a dot, so that tools that list modules do not take it for one."""
    return f"{instruction_set}.code.so"


def sources(instruction_set: str) -> list[pathlib.Path]:
    """Returns the source files of a library."""
    return [FOLDER / name for name in (*_SOURCES, *([_SCREEN] if instruction_set in TUNED else []))]


def compile_options(instruction_set: str, *, machine: str | None = None) -> list[str]:
    """Returns the compiler's options; they come last, so that no CFLAGS change the arithmetic, which is IEEE's.

    Multiplications and additions are fused only where the sources say so: then code of every compiler computes the
    same.

    Args:
      instruction_set: One of the machine's.
      machine: See `instruction_sets`.
    """
    features = instruction_sets(machine)[instruction_set]
    return [
        # -g0: debug information would contain the name of the build folder.
        *("-std=gnu11", "-O3", "-g0", "-fPIC", "-pthread", "-fno-math-errno"),
        # -Wno-psabi: vectors are passed between functions of one library only.
        "-Wno-psabi",
        *_BASELINES.get(machine or platform.machine(), ()),
        *(f"-m{feature.replace('_', '')}" for feature in features),
        *(*_IEEE, "-ffp-contract=off"),
    ]


def link_options() -> list[str]:
    """Returns the linker's options; they also prevent flushing of small numbers to zero in the whole process."""
    return ["-O3", *_IEEE, "-pthread", "-lm"]


def layouts() -> str:
    """Returns a header with what Python's structures say: a compiler checks that C's have their sizes and offsets.

    The header contains its own digest, so that loading detects a library that was built with other structures.
    """
    lines = ["/* Made of native/structures.py. */", "#include <stddef.h>"]
    shared = runpy.run_path(str(FOLDER / "structures.py"))
    lines.append(f"#define CACHED_WEIGHTS {shared['CACHED_WEIGHTS']}")
    for name, structure in shared.items():
        if isinstance(structure, type) and issubclass(structure, ctypes.Structure):
            checks = [f"sizeof({name}) == {ctypes.sizeof(structure)}"]
            checks += [
                f"offsetof({name}, {field}) == {getattr(structure, field).offset}" for field, *_ in structure._fields_
            ]
            asserts = " ".join(f'_Static_assert({check}, "native/structures.py differs");' for check in checks)
            lines.append(f"#define SAME_IN_PYTHON_{name} {asserts}")
    text = "\n".join([*lines, ""])
    return f'{text}#define CALM_BEAM_LAYOUTS "{hashlib.sha256(text.encode()).hexdigest()}"\n'


def layouts_name() -> str:
    """Returns the header's digest, which is the same for the same structures."""
    return layouts().split('"')[-2]
