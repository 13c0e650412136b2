"""Sums of digests, added in batches, are those of Python's integers."""

import hashlib

import hypothesis
from hypothesis import strategies

from calm_beam.risk.digest_sums import MODULUS, sum_of_digests


@hypothesis.given(strategies.lists(strategies.binary(min_size=32, max_size=32), max_size=20))
def test_sums_are_those_of_integers(digests: list[bytes]) -> None:
    """Carries pass from word to word, and what leaves 256 bits is dropped."""
    assert sum_of_digests(b"".join(digests)) == sum(int.from_bytes(each, "big") for each in digests) % MODULUS


def test_many_digests() -> None:
    """Of many, no word overflows."""
    digests = [hashlib.sha256(str(index).encode()).digest() for index in range(5000)]
    expected = sum(int.from_bytes(each, "big") for each in digests) % MODULUS
    assert sum_of_digests(b"".join(digests)) == expected
    assert sum_of_digests(b"\xff" * 32 * 1000) == -1000 % MODULUS
