"""A program compiled for a device, and the facts that can be read from the result."""

import contextlib
import dataclasses
import pathlib
import re
import tempfile
import time
from collections import Counter
from collections.abc import Iterator, Mapping
from typing import Any
from unittest import mock

import jax

from benchmarks.programs import Program
from calm_beam.decoding.compilation import GPU_OPTIONS

_COLLECTIVE = re.compile(r"= .*?\b(all-reduce|all-gather|reduce-scatter|collective-permute|all-to-all)(?:-start)?\(")
_HIGHEST = re.compile(r"operand_precision=\{highest,highest\}|\"operand_precision\":\[\"HIGHEST\",\"HIGHEST\"\]")
# Names, parameters and their order, source locations, schedules and layouts.
_UNSAID = re.compile(
    r"^%.*\) -> |ROOT |%[\w.\-]+|(?<= parameter)\(\d+\)|"
    r", (?:metadata|backend_config|sharding)=\{.*|\{[\d,]*(?::[^}]*)?\}"
)
_ARITHMETIC = re.compile(
    r"= \(?(?:f32|bf16)\[\S* (?:add|subtract|multiply|divide|exponential|rsqrt|sqrt|tanh|logistic|reduce|dot|"
    r"convolution|custom-call)\((?!.*\"ConcatBitcast\")"
)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Compiled:
    """A compiled program.

    Attributes:
      program: The program.
      platform: `tpu` or `gpu`.
      seconds: Processor time of tracing, lowering and compiling.
      text: The program after the compiler's optimisations.
      memory: The compiler's `memory_analysis`.
      cost: The compiler's `cost_analysis`.
      assembly: PTX of a program for NVIDIA's GPUs, if it was requested; else empty.
      code_bytes: Size of the program.
    """

    program: Program
    platform: str
    seconds: float
    text: str
    memory: Any
    cost: Mapping[str, float]
    assembly: str
    code_bytes: int

    @property
    def conditionals(self) -> int:
        """Number of conditionals that the compiler has kept."""
        return len(re.findall(r" conditional\(", self.text))

    @property
    def collectives(self) -> Counter[str]:
        """Number of collective operations, by kind."""
        return Counter(_COLLECTIVE.findall(self.text))

    @property
    def rounded_products(self) -> list[str]:
        """Products of float32 factors that the compiler may round, each as a line of the text."""
        return [line for line in _products(self.text) if not _HIGHEST.search(line)]

    @property
    def precision(self) -> Counter[str]:
        """The float computations of a program, without names: each fused computation, and each unfused product."""
        found: Counter[str] = Counter()
        for computation in self.text.split("\n\n"):
            # Sorted, since the compiler writes independent lines in any order.
            lines = sorted(_UNSAID.sub("", line).strip() for line in computation.splitlines())
            of_floats = [line for line in lines if _ARITHMETIC.search(line)]
            if any(" while(" in line or " fusion(" in line for line in lines):
                found.update(of_floats)
            elif of_floats:
                found["\n".join(lines)] += 1
        return found

    @property
    def brought_whole(self) -> list[str]:
        """Shapes of the arrays that are sharded over devices and gathered onto each."""
        results = [
            line.split("=", 1)[1].split("(%", 1)[0] for line in self.text.splitlines() if _COLLECTIVE.search(line)
        ]
        shapes = {sides for result in results for sides in re.findall(r"\[([\d,]+)\]", result)}
        divided = {",".join(map(str, shape)) for shape in self.program.divided_shapes}
        return sorted(shapes & divided)

    @property
    def held_bytes(self) -> int:
        """Bytes of a device's memory while it runs: arguments, results and temporaries."""
        memory = self.memory
        return int(
            memory.argument_size_in_bytes
            + memory.output_size_in_bytes
            + memory.temp_size_in_bytes
            - memory.alias_size_in_bytes
        )


def compiled(program: Program, *, platform: str, with_assembly: bool = False) -> Compiled:
    """Returns a program compiled by a device's compiler.

    Args:
      program: The program.
      platform: `tpu` or `gpu`.
      with_assembly: Whether to keep the PTX on a GPU.
    """
    begun = time.process_time()
    options: dict[str, Any] = dict(GPU_OPTIONS) if platform == "gpu" else {}
    with tempfile.TemporaryDirectory() as folder, as_on(platform), program.placement.running():
        if platform == "gpu" and with_assembly:
            options["xla_dump_to"] = folder
        traced = program.function.trace(*program.arguments, **program.options)
        lowered = traced.lower(lowering_platforms=("cuda" if platform == "gpu" else "tpu",))
        made = lowered.compile(compiler_options=options)
        assembly = "".join(file.read_text() for file in pathlib.Path(folder).glob("*.ptx"))
    seconds = time.process_time() - begun
    memory = made.memory_analysis()
    return Compiled(
        program=program,
        platform=platform,
        seconds=seconds,
        text=made.as_text() or "",
        memory=memory,
        cost=dict(made.cost_analysis() or {}),
        assembly=assembly,
        code_bytes=_code_bytes(made, memory),
    )


@contextlib.contextmanager
def as_on(platform: str) -> Iterator[None]:
    """Makes tracing take this machine for one with accelerators."""
    jax.clear_caches()
    with mock.patch.object(jax, "default_backend", return_value=platform):
        yield
    jax.clear_caches()


def _products(text: str) -> list[str]:
    """Returns the lines of products that have float32 factors."""
    types = dict(re.findall(r"^\s*(?:ROOT )?(%[\w.\-]+) = \(?(\w+)\[", text, re.MULTILINE))
    found = []
    for line in text.splitlines():
        if match := re.search(r" (?:convolution|dot)\((%[\w.\-]+)", line):
            if types.get(match[1]) == "f32":
                found.append(line)
        elif 'custom_call_target="__cublas' in line:
            found.append(line)
    return found


def _code_bytes(made: Any, memory: Any) -> int:
    size = int(memory.generated_code_size_in_bytes)
    return size or len(made.runtime_executable().serialize())
