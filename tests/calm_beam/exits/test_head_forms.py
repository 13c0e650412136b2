"""The choice of the head's form, and its memory."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from calm_beam.errors import UsageError
from calm_beam.exits.certified_head import quantised_head
from calm_beam.exits.head_forms import EXIT_HEADS, GONE, SMALLEST_CERTIFIED, certified_bytes, head_form
from calm_beam.exits.measures import MEASURES, Measure, Need
from calm_beam.precision import FLOAT32, Precision

_OWN = Measure(name="own:own", meaning="", needs=Need.LOGITS, confidence=lambda logits: logits[..., 0])


def _form(exit_head: str, **changes: Any) -> str:
    given: dict[str, Any] = {
        "measure": MEASURES["softmax"],
        "precision": FLOAT32,
        "size": SMALLEST_CERTIFIED,
        "why_not": None,
    }
    return head_form(exit_head, **{**given, **changes})


@pytest.mark.parametrize(
    ("exit_head", "size", "expected"),
    [
        ("exact", SMALLEST_CERTIFIED, "exact"),
        ("int8", SMALLEST_CERTIFIED, "uint8"),
        ("int8", 1, "uint8"),
        ("auto", SMALLEST_CERTIFIED, "uint8"),
        # The savings of a small head are less than the cost of its bounds.
        ("auto", SMALLEST_CERTIFIED - 1, "exact"),
    ],
)
def test_the_form_goes_by_a_fixed_rule_of_sizes(exit_head: str, size: int, expected: str) -> None:
    """The form follows a fixed rule of sizes without timing: large heads use native code if available, or as named."""
    assert _form(exit_head, size=size) == expected


def test_without_native_code_heads_are_exact() -> None:
    """`auto` uses exact heads without native code; int8 by name is refused with the reason and what to use."""
    assert [_form(exit_head, why_not="engine is xla") for exit_head in ("auto", "exact")] == ["exact", "exact"]
    with pytest.raises(UsageError) as error:
        _form("int8", why_not="engine is xla")
    assert str(error.value) == (
        "exit_head is int8, but engine is xla. Native code alone decides by such a head: take --exit_head=exact, or "
        "auto."
    )


def test_nothing_can_be_certified_for_ones_own_measure() -> None:
    """With a user's measure of logits, for which there are no bounds, int8 by name is refused."""
    assert {_form(exit_head, measure=_OWN) for exit_head in EXIT_HEADS if exit_head != "int8"} == {"exact"}
    with pytest.raises(UsageError, match=r"^exit_head is int8, but nothing is known of 'own:own' that"):
        _form("int8", measure=_OWN)


def test_other_names_are_refused() -> None:
    """An unknown name is refused with the list of known ones, and a removed one with a note."""
    with pytest.raises(ValueError, match=r"exit_head must be one of auto, exact, int8; got 'int4'\.$"):
        _form("int4")
    with pytest.raises(ValueError, match=r"exit_head must be one of .*; got 'bfloat16'\. bfloat16 is gone: ") as error:
        _form("bfloat16")
    assert str(error.value).endswith(f"{GONE['bfloat16']}.")


def test_rounded_products_are_not_certified() -> None:
    """A head with products below float32 precision decides alone: bounds would be about other numbers."""
    for products in ("high", "default"):
        precision = Precision(matmul_precision=products)
        assert _form("auto", precision=precision) == "exact"
        assert _form("exact", precision=precision) == "exact"
        with pytest.raises(ValueError, match=f"exit_head 'int8' needs matmul_precision highest, got '{products}'"):
            _form("int8", precision=precision)


@pytest.mark.parametrize("is_by_entry", [True, False])
def test_certified_heads_take_no_more_than_is_said(is_by_entry: bool) -> None:
    """The forecast is at most a tenth above the arrays of a head with outlier columns, padding not counted."""
    weights = np.random.default_rng(0).standard_normal((4000, 300)).astype(np.float32)
    weights[:, :16] *= 100
    head = quantised_head(jnp.asarray(weights))
    own = head._replace(weights=jnp.zeros(0)) if is_by_entry else head
    taken = sum(array.nbytes for array in jax.tree.leaves(own))
    sizes: dict[str, Any] = {"vocab_size": 4000, "width": 300, "heads": 1}
    said = certified_bytes("uint8", FLOAT32, **sizes, is_by_entry=is_by_entry)
    assert 0.9 * said < taken <= said
    assert certified_bytes("uint8", FLOAT32, **{**sizes, "heads": 3}, is_by_entry=is_by_entry) == 3 * said


def test_what_takes_no_certified_head_takes_nothing() -> None:
    """The exact head, rounded products, and `auto` with small heads need no memory."""
    sizes: dict[str, Any] = {"vocab_size": 4000, "width": 300, "is_by_entry": True, "heads": 1}
    assert certified_bytes("exact", FLOAT32, **sizes) == 0
    assert certified_bytes("auto", FLOAT32, **sizes) == 0
    assert certified_bytes("auto", Precision(matmul_precision="high"), **{**sizes, "vocab_size": 10**6}) == 0
    large = {**sizes, "vocab_size": 10**6}
    assert certified_bytes("auto", FLOAT32, **large) == certified_bytes("int8", FLOAT32, **large) > 0
