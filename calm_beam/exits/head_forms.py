"""The forms that the output head comes in."""

from calm_beam.arithmetic import Arithmetic

EXIT_HEADS = ("auto", "exact", "int8", "bfloat16")
"""What `--exit_head` takes: a form, or `auto` for the one that is fastest on this machine."""


def check_head(exit_head: str, arithmetic: Arithmetic) -> None:
    """Checks that a form of the head can decide what a model computes.

    Raises:
      ValueError: If there is no such form, or it certifies sums of exact products and the model's are rounded.
    """
    if exit_head not in EXIT_HEADS:
        raise ValueError(f"exit_head must be one of {', '.join(EXIT_HEADS)}; got {exit_head!r}.")
    if exit_head not in ("auto", "exact") and arithmetic.matmul_precision != "highest":
        raise ValueError(
            f"exit_head {exit_head!r} needs matmul_precision highest, got {arithmetic.matmul_precision!r}: its bounds "
            "are about exact products. Leave one of them out."
        )
