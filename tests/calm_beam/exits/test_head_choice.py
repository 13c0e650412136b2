"""Which form of the head decides."""

import functools
import logging
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from calm_beam.arithmetic import FLOAT32, Arithmetic
from calm_beam.exits import head_choice, head_forms
from calm_beam.exits.decision import decide
from calm_beam.exits.head_choice import choose_head, compiled
from calm_beam.exits.head_forms import EXIT_HEADS
from calm_beam.exits.measures import MEASURES, Measure, Need
from calm_beam.exits.quantised_head import CertifiedHead
from calm_beam.native import library

_OWN = Measure(name="own:own", meaning="", needs=Need.LOGITS, confidence=lambda logits: logits[..., 0])


def _choose(
    exit_head: str, *, measure: Measure = MEASURES["softmax"], arithmetic: Arithmetic = FLOAT32
) -> CertifiedHead | None:
    weights = jnp.asarray(np.random.default_rng(0).standard_normal((32, 2048)), arithmetic.dtype)
    settings: Any = {"vocab_axis": 1, "measure": measure, "arithmetic": arithmetic}
    return choose_head(
        exit_head,
        weights,
        **settings,
        rows=4,
        exact_for=compiled(decide, measure=settings["measure"], arithmetic=settings["arithmetic"]),
    )


@pytest.fixture(autouse=True)
def _has_no_native_code(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(library, "is_available", lambda: False)


@pytest.mark.parametrize(("exit_head", "dtype"), [("int8", jnp.int8), ("bfloat16", jnp.bfloat16)])
def test_a_form_that_is_named_is_taken(exit_head: str, dtype: jnp.dtype) -> None:
    """Whatever the size of the head."""
    head = _choose(exit_head)
    assert head is not None
    assert head.quantised.dtype == dtype
    assert head.quantised.shape == (2048, 32)


def test_native_code_takes_integers_packed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where there is some; what is of bfloat16 stays with XLA."""
    monkeypatch.setattr(library, "is_available", lambda: True)
    integers, others = _choose("int8"), _choose("bfloat16")
    assert integers is not None
    assert others is not None
    assert integers.is_packed
    assert integers.quantised.shape == (128, 8, 16, 4)
    assert not others.is_packed


@pytest.mark.parametrize("exit_head", ["exact", "auto"])
def test_small_heads_are_exact(exit_head: str) -> None:
    """Without anything being measured."""
    assert _choose(exit_head) is None


def test_either_axis_may_be_the_vocabulary() -> None:
    """Heads are stored both ways."""
    weights = jnp.asarray(np.random.default_rng(0).standard_normal((32, 2048)), jnp.float32)
    choose = functools.partial(
        choose_head, "int8", measure=MEASURES["softmax"], arithmetic=FLOAT32, rows=4, exact_for=compiled(decide)
    )
    for mine, theirs in zip(
        jax.tree.leaves(choose(weights, vocab_axis=1)), jax.tree.leaves(choose(weights.T, vocab_axis=0)), strict=True
    ):
        np.testing.assert_array_equal(mine, theirs)


def test_nothing_can_be_certified_for_ones_own_measure() -> None:
    """Of logits, about which nothing is known."""
    for exit_head in EXIT_HEADS:
        assert _choose(exit_head, measure=_OWN) is None


@pytest.mark.parametrize(
    ("seconds", "dtype"),
    [
        ({"exact": 2.0, "int8": 1.0, "bfloat16": 1.5}, jnp.int8),
        ({"exact": 2.0, "int8": 1.0, "bfloat16": 0.5}, jnp.bfloat16),
        ({"exact": 2.0, "int8": 1.9, "bfloat16": 3.0}, None),
        ({"exact": 2.0, "int8": 1.9, "bfloat16": 1.0}, jnp.bfloat16),
    ],
)
def test_auto_takes_the_fastest_and_says_so(
    seconds: dict[str, float],
    dtype: jnp.dtype | None,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    """A certified form only if it is clearly faster, since it decides some rows twice."""
    monkeypatch.setattr(head_forms, "SMALLEST_CERTIFIED", 1)
    times = iter(seconds.values())
    monkeypatch.setattr(head_choice, "_seconds", lambda *_: next(times))
    with caplog.at_level(logging.INFO, logger=head_choice.__name__):
        head = _choose("auto")
    assert (head and head.quantised.dtype) == dtype
    taken = {None: "exact", jnp.int8: "int8", jnp.bfloat16: "bfloat16"}[dtype]
    assert f"exit head: {taken}; of 4 rows, exact 2000.0 ms" in caplog.text


def test_auto_measures_what_is_there(monkeypatch: pytest.MonkeyPatch) -> None:
    """It runs, whatever it chooses; a head that is not finite is left to the exact one."""
    monkeypatch.setattr(head_forms, "SMALLEST_CERTIFIED", 1)
    for arithmetic in (FLOAT32, Arithmetic(dtype="bfloat16")):
        assert jax.tree.leaves(_choose("auto", arithmetic=arithmetic)) is not None
    weights = jnp.full((32, 2048), jnp.nan)
    settings: Any = {"vocab_axis": 1, "measure": MEASURES["softmax"], "arithmetic": FLOAT32}
    assert (
        choose_head(
            "auto",
            weights,
            **settings,
            rows=4,
            exact_for=compiled(decide, measure=settings["measure"], arithmetic=settings["arithmetic"]),
        )
        is None
    )


def test_other_names_are_refused() -> None:
    """With those that there are."""
    with pytest.raises(ValueError, match="exit_head must be one of auto, exact, int8, bfloat16; got 'int4'"):
        _choose("int4")


def test_rounded_products_are_not_certified(monkeypatch: pytest.MonkeyPatch) -> None:
    """A head whose products are less than float32's decides alone: bounds would be about other numbers."""
    monkeypatch.setattr(head_forms, "SMALLEST_CERTIFIED", 1)
    for precision in ("high", "default"):
        arithmetic = Arithmetic(matmul_precision=precision)
        assert _choose("auto", arithmetic=arithmetic) is None
        assert _choose("exact", arithmetic=arithmetic) is None
        with pytest.raises(ValueError, match=f"exit_head 'int8' needs matmul_precision highest, got '{precision}'"):
            _choose("int8", arithmetic=arithmetic)
