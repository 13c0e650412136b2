"""The order in which native code reads the weights of a head."""

import numpy as np

BLOCK = 64
"""Entries of the vocabulary that it takes at a time."""


def packed(quantised: np.ndarray) -> np.ndarray:
    """Returns weights in the order that the code reads them in.

    Args:
      quantised: int8, shape (vocabulary, width); the vocabulary is a multiple of `BLOCK`.

    Returns:
      uint8, shape (vocabulary / 16, width / 4, 16, 4), the width rounded up. Numbers are 128 more: the processor
      multiplies numbers without a sign by such with one.
    """
    width = quantised.shape[1]
    shifted = (np.pad(quantised, ((0, 0), (0, -width % 4))).view(np.uint8)) ^ np.uint8(128)
    return np.ascontiguousarray(shifted.reshape(len(quantised) // 16, 16, -1, 4).transpose(0, 2, 1, 3))
