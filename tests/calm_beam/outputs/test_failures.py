"""The limit of failed examples."""

import re

import pytest

from calm_beam.inputs.examples import DataError
from calm_beam.outputs.finished import check_failures, failure_limit


def test_the_limit_is_what_was_asked_or_a_hundredth() -> None:
    """A given limit is used, also 0; the default is 1 % of the examples, but 10 for small sets."""
    assert failure_limit(0, examples=10**6) == 0
    assert [failure_limit(None, examples=examples) for examples in (1, 1000, 1099, 1100, 10**6)] == [
        10, 10, 10, 11, 10_000,
    ]  # fmt: skip


def test_one_more_than_the_limit_ends_the_run() -> None:
    """As many failures as the limit pass; one more is refused with the first ids, their reasons and the way out."""
    failures = [(f"row-{index}", "not finite") for index in range(7)]
    check_failures(failures, failed=7, limit=7)
    named = "; ".join(f"row-{index} (not finite)" for index in range(5))
    message = f"7 examples failed, more than the 6 that may. The first: {named}. Find out why; if that is how it is, "
    with pytest.raises(DataError, match=re.escape(message + "pass --max_failures=7 or more.")):
        check_failures(failures, failed=7, limit=6)
