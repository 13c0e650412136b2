"""Inputs that occur more than once in a calibration set, and what that means for a promise, in words."""

from calm_beam.text.counted import counted

from ._manifest import Manifest


def repeats_in_words(manifest: Manifest) -> str:
    """Returns how many examples repeat the input of another, and when that matters; empty where none does.

    Repeats of the traffic belong to an independent draw of it. Whoever takes them out has a sample of other traffic.
    """
    confirming = 0 if manifest.confirmation is None else manifest.confirmation.data.duplicates
    repeats = manifest.data.duplicates + confirming
    if not repeats:
        return ""
    return (
        f"{counted(repeats, 'example repeats', several='examples repeat')} an input. Leave in what repeats by itself "
        "where the model is served: a sample without it is one of other traffic. Copies that were added, such as by "
        "augmenting or joining sets, are no independent draws and void the guarantee: take those out, and no others."
    )
