"""Tokens that end an output."""

from collections.abc import Callable

import jax.numpy as jnp
import numpy as np
import pytest

from calm_beam.decoding.branches import is_end


@pytest.mark.parametrize("make", [np.array, jnp.array])
@pytest.mark.parametrize(("end_ids", "expected"), [((1,), [[0, 1], [0, 0]]), ((1, 7, 0), [[1, 1], [0, 1]])], ids=str)
def test_any_of_the_ids_ends_an_output(
    make: Callable[[list[list[int]]], np.ndarray], end_ids: tuple[int, ...], expected: list[list[int]]
) -> None:
    """On the host and on the device, one id or several end an output."""
    found = is_end(make([[0, 1], [5, 7]]), end_ids)
    assert np.asarray(found).astype(int).tolist() == expected
