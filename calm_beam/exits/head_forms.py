"""The forms that the output head comes in."""

from calm_beam.arithmetic import Arithmetic
from calm_beam.errors import UsageError

from .measures import Measure, Need

EXIT_HEADS = ("auto", "exact", "int8", "bfloat16")
"""What `--exit_head` takes: a form, or `auto`, which goes by the head's size and by native code being there."""

# Smaller heads are exact: what is saved is less than what the bounds cost.
SMALLEST_CERTIFIED = 1 << 22
# Numbers of float32 that a certified head has of each entry of the vocabulary, besides what it is quantised to: four,
# those of 16 columns that stand out, and one for padding and the like.
_NUMBERS_OF_ENTRY = 21


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


def head_form(exit_head: str, *, measure: Measure, arithmetic: Arithmetic, size: int, has_native: bool) -> str:
    """Returns the form of the head that decides: `exact`, `int8`, `bfloat16`, or `uint8`, which is int8 by native code.

    Nothing is timed: the same machine, model and request give the same form. `auto` takes native code's form wherever
    there is such code and the head is not small, which was the fastest at every size measured, and the exact one where
    XLA would certify, which was not (docs/measurements.md, "The certified exit head").

    Args:
      exit_head: One of `EXIT_HEADS`.
      measure: What decides. For one of the user's own, of logits, nothing can be certified.
      arithmetic: Of the model. Where products are rounded more than float32 does, nothing can be certified: the bounds
        are about the products of real numbers.
      size: Weights of a head.
      has_native: Whether native code may decide.

    Raises:
      ValueError: If `exit_head` is none of these, or one that certifies what cannot be.
    """
    check_head(exit_head, arithmetic)
    has_no_bounds = measure.needs is Need.LOGITS and measure.bounds is None
    if has_no_bounds or not may_certify(exit_head, arithmetic, size=size):
        return "exact"
    if exit_head in ("auto", "int8") and has_native:
        return "uint8"
    return "exact" if exit_head == "auto" else exit_head


def may_certify(exit_head: str, arithmetic: Arithmetic, *, size: int) -> bool:
    """Returns whether a certified head may decide, of a head with so many weights."""
    if exit_head == "exact" or arithmetic.matmul_precision != "highest":
        return False
    return exit_head != "auto" or size >= SMALLEST_CERTIFIED


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


def certified_bytes(
    exit_head: str, arithmetic: Arithmetic, *, vocab_size: int, width: int, is_by_entry: bool, heads: int
) -> int:
    """Returns what certified heads take at most, beside the model's own weights.

    Args:
      exit_head: One of `EXIT_HEADS`, or what `head_form` returned. What `auto` will take is not known: the larger form.
      arithmetic: Of the model.
      vocab_size: Entries of the vocabulary.
      width: Of the model.
      is_by_entry: Whether the head's weights are stored entry by entry, as an embedding's; if not, they are copied so.
      heads: How many heads there are.
    """
    size = vocab_size * width
    if not may_certify(exit_head, arithmetic, size=size):
        return 0
    number_bytes = (1 if exit_head in ("int8", "uint8") else 2) + (0 if is_by_entry else arithmetic.number_bytes)
    return heads * (number_bytes * size + 4 * _NUMBERS_OF_ENTRY * vocab_size)
