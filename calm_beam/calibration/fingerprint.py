"""A fingerprint of a set of examples, whatever their order: the sum of their content digests."""

from collections.abc import Iterable

from calm_beam.inputs.examples import Example

_MODULUS = 2**256


def content_sum_of(examples: Iterable[Example]) -> int:
    """Returns the sum of the examples' content digests modulo 2^256."""
    return merged_sums(int.from_bytes(example.content_digest(), "big") for example in examples)


def merged_sums(content_sums: Iterable[int]) -> int:
    """Returns the content sum of several sets together.

    >>> merged_sums([2**256 - 1, 3])
    2
    """
    return sum(content_sums) % _MODULUS


def fingerprint_text(content_sum: int) -> str:
    """Returns `sha256-sum:` and 64 digits."""
    return f"sha256-sum:{content_sum:064x}"
