"""Marks the cases of a table that every test run takes, and those that only `make test-exhaustive` takes."""

from collections.abc import Iterable
from typing import Any

import pytest


def sampled(cases: Iterable[Any], *, keep: Iterable[int]) -> list[Any]:
    """Returns all cases as parameters of a test, marked exhaustive but for those at the given places.

    Args:
      cases: The cases; of several parameters, tuples.
      keep: Places, from 0, of those that differ most.
    """
    params = []
    kept = set(keep)
    for place, case in enumerate(cases):
        values = case if isinstance(case, tuple) else (case,)
        params.append(pytest.param(*values, marks=() if place in kept else pytest.mark.exhaustive))
    assert kept < set(range(len(params)))
    return params
