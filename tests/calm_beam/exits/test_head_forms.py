"""Which form of the head decides."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from calm_beam.arithmetic import FLOAT32, Arithmetic
from calm_beam.errors import UsageError
from calm_beam.exits.head_forms import certified_bytes, form_on_devices
from calm_beam.exits.quantised_head import quantised_head


def test_devices_that_share_a_model_decide_by_the_exact_head() -> None:
    """A certified one is for a head that one device has whole: `auto` does without, whoever asks for one is told."""
    assert [form_on_devices(form, 2) for form in ("auto", "exact")] == ["exact", "exact"]
    assert [form_on_devices(form, 1) for form in ("auto", "int8")] == ["auto", "int8"]
    with pytest.raises(UsageError, match="exit_head is int8, but model_parallelism is 2"):
        form_on_devices("int8", 2)


@pytest.mark.parametrize("form", ["int8", "bfloat16"])
@pytest.mark.parametrize("is_by_entry", [True, False])
def test_certified_heads_take_no_more_than_is_said(form: str, is_by_entry: bool) -> None:
    """Compared with the arrays of one whose columns stand out; and not a tenth more, entries padded to blocks aside."""
    weights = np.random.default_rng(0).standard_normal((4000, 300)).astype(np.float32)
    weights[:, :16] *= 100
    head = quantised_head(jnp.asarray(weights), form)
    own = head._replace(weights=jnp.zeros(0)) if is_by_entry else head
    taken = sum(array.nbytes for array in jax.tree.leaves(own))
    sizes: dict[str, Any] = {"vocab_size": 4000, "width": 300, "heads": 1}
    said = certified_bytes(form, FLOAT32, **sizes, is_by_entry=is_by_entry)
    assert 0.9 * said < taken <= said
    assert certified_bytes(form, FLOAT32, **{**sizes, "heads": 3}, is_by_entry=is_by_entry) == 3 * said


def test_what_takes_no_certified_head_takes_nothing() -> None:
    """The exact head, rounded products, and `auto` where heads are small; where that may choose, the larger counts."""
    sizes: dict[str, Any] = {"vocab_size": 4000, "width": 300, "is_by_entry": True, "heads": 1}
    assert certified_bytes("exact", FLOAT32, **sizes) == 0
    assert certified_bytes("auto", FLOAT32, **sizes) == 0
    assert certified_bytes("auto", Arithmetic(matmul_precision="high"), **{**sizes, "vocab_size": 10**6}) == 0
    large = {**sizes, "vocab_size": 10**6}
    assert certified_bytes("auto", FLOAT32, **large) == certified_bytes("bfloat16", FLOAT32, **large)
