"""Token ids of references, as the text that metrics compare with outputs of prompts that are token ids."""

from collections.abc import Iterable

from calm_beam.vocabulary import EOS_ID, PAD_ID


def ids_as_text(ids: Iterable[int]) -> str:
    """Returns ids joined by spaces, up to the first eos and without padding at the end, as outputs are written.

    >>> ids_as_text([5, 7, 1, 0, 0]), ids_as_text([0])
    ('5 7', '')
    """
    kept: list[int] = []
    for index in ids:
        if index == EOS_ID:
            break
        kept.append(index)
    while kept and kept[-1] == PAD_ID:
        kept.pop()
    return " ".join(map(str, kept))
