"""Weights in the order of native code."""

import numpy as np

from calm_beam.exits.packed_head import BLOCK, packed


def test_weights_are_packed() -> None:
    """Four columns of sixteen entries after another, and 128 more; columns that are missing are 0."""
    weights = np.random.default_rng(0).integers(-127, 128, (BLOCK, 6)).astype(np.int8)
    found = packed(weights)
    assert found.shape == (4, 2, 16, 4)
    for entry, column in ((0, 0), (17, 3), (63, 5)):
        assert found[entry // 16, column // 4, entry % 16, column % 4] == int(weights[entry, column]) + 128
    assert (found[:, 1, :, 2:] == 128).all()
