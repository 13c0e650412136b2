"""The forms of the output head: exact, or certified in 8 bits by native code (`certified_head`)."""

from calm_beam.errors import UsageError
from calm_beam.precision import Precision

from .measures import Measure, Need

EXIT_HEADS = ("auto", "exact", "int8")
"""Values of `--exit_head`: a form, or `auto`, which depends on the head's size and on native code."""

GONE = {
    "bfloat16": "bfloat16 is gone: certified heads gain by native code alone, which has int8. That decides as bfloat16 "
    "did, but for near ties"
}
"""Names that earlier versions took, each with an explanation for the error message."""

# Smaller heads are exact: the bounds cost more than they save.
SMALLEST_CERTIFIED = 1 << 22
# float32 numbers that a certified head has for each entry of the vocabulary, besides its quantised weights: four, those
# of 16 outlier columns, and one for padding and the like.
_NUMBERS_OF_ENTRY = 21


def check_name(exit_head: str) -> None:
    """Checks that a form of the head exists.

    Raises:
      ValueError: If it does not exist, or no longer.
    """
    if exit_head not in EXIT_HEADS:
        gone = f" {GONE[exit_head]}." if exit_head in GONE else ""
        raise ValueError(f"exit_head must be one of {', '.join(EXIT_HEADS)}; got {exit_head!r}.{gone}")


def check_head(exit_head: str, precision: Precision) -> None:
    """Checks that a form of the head can decide in a precision.

    Raises:
      ValueError: If there is no such form, or it certifies sums of exact products and the model's products are rounded.
    """
    check_name(exit_head)
    if exit_head == "int8" and precision.matmul_precision != "highest":
        raise ValueError(
            f"exit_head {exit_head!r} needs matmul_precision highest, got {precision.matmul_precision!r}: its bounds "
            "are about exact products. Leave one of them out."
        )


def head_form(exit_head: str, *, measure: Measure, precision: Precision, size: int, why_not: str | None) -> str:
    """Returns the form of the head that decides, as it is recorded: `exact`, or `uint8`, which is int8 by native code.

    Nothing is timed: the same machine, model and request give the same form. `auto` takes `uint8` wherever there is
    native code and the head is not small; that was the fastest at every size measured.

    Args:
      exit_head: One of `EXIT_HEADS`.
      measure: The measure that decides. A user's measure of logits cannot be certified.
      precision: The model's precision. If products are rounded more than in float32, nothing can be certified: the
        bounds are about the products of real numbers.
      size: Number of weights of a head.
      why_not: The reason why native code cannot certify decisions; None if it can.

    Raises:
      UsageError: If `exit_head` is `int8`, and native code cannot certify, or the measure has no bounds.
      ValueError: As `check_head` raises.
    """
    check_head(exit_head, precision)
    if exit_head == "int8" and why_not:
        raise UsageError(
            f"exit_head is int8, but {why_not}. Native code alone decides by such a head: take --exit_head=exact, or "
            "auto."
        )
    has_no_bounds = measure.needs is Need.LOGITS and measure.bounds is None
    if exit_head == "int8" and has_no_bounds:
        raise UsageError(
            f"exit_head is int8, but nothing is known of {measure.name!r} that could bound it: such a head certifies "
            "confidences of this package alone. Take --exit_head=exact, or auto."
        )
    if why_not or has_no_bounds or not _may_certify(exit_head, precision, size=size):
        return "exact"
    return "uint8"


def _may_certify(exit_head: str, precision: Precision, *, size: int) -> bool:
    """Returns whether a certified head may decide, for a head of `size` weights."""
    if exit_head == "exact" or precision.matmul_precision != "highest":
        return False
    return exit_head != "auto" or size >= SMALLEST_CERTIFIED


def certified_bytes(
    exit_head: str, precision: Precision, *, vocab_size: int, width: int, is_by_entry: bool, heads: int
) -> int:
    """Returns the most bytes that certified heads take, in addition to the model's own weights.

    Args:
      exit_head: One of `EXIT_HEADS`, or a form that `head_form` returned.
      precision: The model's precision.
      vocab_size: Entries of the vocabulary.
      width: Width of the model.
      is_by_entry: Whether the head's weights are stored entry by entry, like an embedding; if not, they are copied.
      heads: Number of heads.
    """
    size = vocab_size * width
    if not _may_certify(exit_head, precision, size=size):
        return 0
    number_bytes = 1 + (0 if is_by_entry else precision.number_bytes)
    return heads * (number_bytes * size + 4 * _NUMBERS_OF_ENTRY * vocab_size)
