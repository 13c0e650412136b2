"""The forms that the output head comes in."""

from calm_beam.arithmetic import Arithmetic
from calm_beam.errors import UsageError

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


def form_on_devices(exit_head: str, model_parallelism: int) -> str:
    """Returns the form of the head that decides where devices share a model, given what is asked for.

    Raises:
      UsageError: If it is a certified form, which is for a head that one device has whole.
    """
    if model_parallelism == 1 or exit_head == "exact":
        return exit_head
    if exit_head != "auto":
        raise UsageError(
            f"exit_head is {exit_head}, but model_parallelism is {model_parallelism}: a certified head is for a model "
            "on one device. Take auto or exact."
        )
    return "exact"
