"""Widths that prompts are padded to: few, so that XLA compiles rarely."""

from collections.abc import Sequence

_NARROWEST = 32


def bucket_width(length: int, max_input_length: int) -> int:
    """Returns the width that a prompt is padded to: the next of 32, 64, 128, ..., at most `max_input_length`.

    It depends on the prompt alone, so that it does not matter beside which others it is decoded.

    >>> bucket_width(33, 512), bucket_width(33, 48)
    (64, 48)
    """
    width = _NARROWEST
    while width < length:
        width *= 2
    return min(width, max_input_length)


def members_by_width(prompts: Sequence[Sequence[int]], max_input_length: int) -> dict[int, list[int]]:
    """Returns the indices of the prompts that are padded to each width, ascending in both.

    Raises:
      ValueError: If a prompt is empty or too long.
    """
    buckets: dict[int, list[int]] = {}
    for index, prompt in enumerate(prompts):
        if not 1 <= len(prompt) <= max_input_length:
            raise ValueError(f"prompts must have 1 to {max_input_length} tokens, prompt {index} has {len(prompt)}.")
        buckets.setdefault(bucket_width(len(prompt), max_input_length), []).append(index)
    return dict(sorted(buckets.items()))
