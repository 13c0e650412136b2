"""Expectations of compiled programs, and messages for those that a program fails."""

from calm_beam.precision import Precision

from .compiled import Compiled

_ADDING = (" reduce(", " dot(", " convolution(", " custom-call(")


def faults(made: Compiled, precision: Precision, *, smallest: Compiled | None = None) -> list[str]:
    """Returns the faults of a program; empty if it meets all expectations.

    Args:
      made: The compiled program.
      precision: The model's precision.
      smallest: The compiled `Program.smallest`; None to skip the comparison.
    """
    program, found = made.program, []

    def expect(what: str, expected: int, counted: int) -> None:
        if counted != expected:
            found.append(f"{what}: expected {expected}, found {counted}")

    if program.conditionals is not None:
        expect("conditionals", program.conditionals, made.conditionals)
    if program.placement.parts > 1 and program.sums is not None:
        expect("exchanges between devices", program.sums, sum(made.collectives.values()))
    if program.sums is not None and (whole := made.brought_whole):
        found.append(f"brought whole to every device: arrays of [{'], ['.join(whole)}]")
    if made.memory.alias_size_in_bytes < program.donated_bytes:
        found.append(
            f"buffers are copied: {program.donated_bytes:,} bytes are given away, and "
            f"{made.memory.alias_size_in_bytes:,} written in place"
        )
    if smallest and (differing := _differing(made, smallest)):
        found.append(f"a row is computed differently in a batch: {differing[0][:200]}")
    return [*found, *(_rounded(made) if precision.dtype == "float32" else ())]


def _differing(made: Compiled, smallest: Compiled) -> list[str]:
    """Returns computations that only one of two programs has, and that may round differently."""
    one, other = made.precision, smallest.precision
    differing = [*(one - other), *(other - one)]
    # Elementwise operations have no order of summation. A GPU may fuse multiply and add, a TPU does not.
    return [each for each in differing if made.platform == "gpu" or any(word in each for word in _ADDING)]


def _rounded(made: Compiled) -> list[str]:
    found = []
    if rounded := made.rounded_products:
        found.append(f"products of float32 numbers may be rounded: {len(rounded)}, such as {rounded[0].strip()[:80]}")
    if "tf32" in made.assembly:
        found.append("products of float32 numbers are rounded to TF32 in machine code")
    return found
