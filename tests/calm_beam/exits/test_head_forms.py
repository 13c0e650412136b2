"""Which form of the head decides."""

import pytest

from calm_beam.errors import UsageError
from calm_beam.exits.head_forms import form_on_devices


def test_devices_that_share_a_model_decide_by_the_exact_head() -> None:
    """A certified one is for a head that one device has whole: `auto` does without, whoever asks for one is told."""
    assert [form_on_devices(form, 2) for form in ("auto", "exact")] == ["exact", "exact"]
    assert [form_on_devices(form, 1) for form in ("auto", "int8")] == ["auto", "int8"]
    with pytest.raises(UsageError, match="exit_head is int8, but model_parallelism is 2"):
        form_on_devices("int8", 2)
