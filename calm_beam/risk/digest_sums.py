"""Sums of digests modulo 2^256: a fingerprint of a set whatever its order, added in batches."""

import numpy as np

MODULUS = 2**256
DIGEST_BYTES = 32
# A digest is eight numbers of 32 bits; sums of 2^32 of them still fit into 64.
_WORDS = np.dtype(">u4")


def sum_of_digests(digests: bytes) -> int:
    r"""Returns the sum of digests modulo 2^256, each a number with its highest byte first.

    Args:
      digests: Of 32 bytes each, one after the other; at most 2^32 of them.

    Source: ours.

    >>> sum_of_digests(bytes(31) + b"\x02" + b"\xff" * 32)
    1
    """
    words = np.frombuffer(digests, _WORDS).reshape(-1, DIGEST_BYTES // _WORDS.itemsize)
    total = 0
    for word in words.sum(axis=0, dtype=np.uint64).tolist():
        total = (total << 8 * _WORDS.itemsize) + word
    return total % MODULUS
