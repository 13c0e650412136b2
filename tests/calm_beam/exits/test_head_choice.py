"""Which form of the head decides, and the heads of that form."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from calm_beam.arithmetic import FLOAT32, Arithmetic
from calm_beam.exits.head_choice import heads_of_form
from calm_beam.exits.head_forms import EXIT_HEADS, SMALLEST_CERTIFIED, head_form
from calm_beam.exits.measures import MEASURES, Measure, Need

_OWN = Measure(name="own:own", meaning="", needs=Need.LOGITS, confidence=lambda logits: logits[..., 0])


def _form(exit_head: str, **changes: Any) -> str:
    given: dict[str, Any] = {
        "measure": MEASURES["softmax"],
        "arithmetic": FLOAT32,
        "size": SMALLEST_CERTIFIED,
        "has_native": True,
    }
    return head_form(exit_head, **{**given, **changes})


@pytest.mark.parametrize(
    ("exit_head", "has_native", "expected"),
    [
        ("exact", True, "exact"),
        ("int8", True, "uint8"),
        ("int8", False, "int8"),
        ("bfloat16", True, "bfloat16"),
        ("bfloat16", False, "bfloat16"),
        ("auto", True, "uint8"),
        ("auto", False, "exact"),
    ],
)
def test_the_form_goes_by_a_fixed_rule(exit_head: str, has_native: bool, expected: str) -> None:
    """Nothing is timed: a large head is native code's where there is some, and else exact, unless one is named."""
    assert _form(exit_head, has_native=has_native) == expected
    if exit_head != "auto":
        assert _form(exit_head, has_native=has_native, size=1) == expected


def test_small_heads_are_exact() -> None:
    """What is saved of them is less than what the bounds cost."""
    assert _form("auto", size=SMALLEST_CERTIFIED - 1) == "exact"


def test_nothing_can_be_certified_for_ones_own_measure() -> None:
    """Of logits, about which nothing is known."""
    assert {_form(exit_head, measure=_OWN) for exit_head in EXIT_HEADS} == {"exact"}


def test_other_names_are_refused() -> None:
    """With those that there are."""
    with pytest.raises(ValueError, match="exit_head must be one of auto, exact, int8, bfloat16; got 'int4'"):
        _form("int4")


def test_rounded_products_are_not_certified() -> None:
    """A head whose products are less than float32's decides alone: bounds would be about other numbers."""
    for precision in ("high", "default"):
        arithmetic = Arithmetic(matmul_precision=precision)
        assert _form("auto", arithmetic=arithmetic) == "exact"
        assert _form("exact", arithmetic=arithmetic) == "exact"
        with pytest.raises(ValueError, match=f"exit_head 'int8' needs matmul_precision highest, got '{precision}'"):
            _form("int8", arithmetic=arithmetic)


@pytest.mark.parametrize(
    ("form", "dtype", "shape"),
    [
        ("int8", jnp.int8, (2048, 32)),
        ("bfloat16", jnp.bfloat16, (2048, 32)),
        ("uint8", jnp.uint8, (128, 8, 16, 4)),
    ],
)
def test_heads_of_a_form(form: str, dtype: jnp.dtype, shape: tuple[int, ...]) -> None:
    """One for each kernel, whichever axis of it is the vocabulary."""
    weights = jnp.asarray(np.random.default_rng(0).standard_normal((32, 2048)), jnp.float32)
    one, other = heads_of_form(form, [(weights, 1), (weights.T, 0)])
    assert one is not None
    assert one.quantised.dtype == dtype
    assert one.quantised.shape == shape
    for mine, theirs in zip(jax.tree.leaves(one), jax.tree.leaves(other), strict=True):
        np.testing.assert_array_equal(mine, theirs)


def test_exact_heads_certify_nothing() -> None:
    """There is one nothing for each kernel."""
    assert heads_of_form("exact", [(jnp.zeros((4, 8)), 1)] * 2) == [None, None]
