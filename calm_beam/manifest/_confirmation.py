"""How a chosen threshold fared with examples that had no part in choosing it, in words."""

from calm_beam.text.counted import counted

from ._manifest import Manifest
from ._unseen import unseen_in_words
from .records import Calibration, threshold_in_words


def confirmation_in_words(entry: Calibration) -> str:
    """Returns what was chosen, and what of it was confirmed; empty where nothing was to be confirmed.

    A p-value is written in as many digits as show on which side of epsilon it is.
    """
    chosen, steps = entry.chosen, entry.confirmation
    if chosen is None or steps is None:
        return ""
    *_, last = steps
    named, p_value = f"chosen {threshold_in_words(*chosen.tested_as)}", p_value_beside(last.p_value, entry.epsilon)
    if last.rejected:
        return f"{named}, confirmed: p = {p_value}"
    at = threshold_in_words(*last.tested_as)
    if len(steps) > 1:
        held = steps[-2]
        return (
            f"{named}, confirmed {threshold_in_words(*held.tested_as)}: p = "
            f"{p_value_beside(held.p_value, entry.epsilon)}, not {at}: p = {p_value}"
        )
    return f"{named}, not confirmed: p = {p_value}{'' if last.tested_as == chosen.tested_as else f' at {at}'}"


def confirming_in_words(manifest: Manifest) -> str:
    """Returns which examples confirmed thresholds, and what decoded them; empty where none did."""
    found = manifest.confirmation
    if found is None:
        return ""
    data = found.data
    clusters = "" if data.clusters is None else f" in {counted(data.clusters, 'cluster')}"
    return (
        f"{counted(data.examples, 'other example')}{clusters}, which chose nothing, tested what was chosen, decoded by "
        f"the {found.decoder} decoder that serves (exit head {found.exit_head}, {found.dtype}); "
        f"{counted(data.duplicates, 'repeated input')}, {data.truncated} cut, {data.failed} failed."
        f"{' ' * bool(data.unseen)}{unseen_in_words(data.unseen or ())}"
    )


def p_value_beside(p_value: float, epsilon: float) -> str:
    """Returns a p-value in as few digits, at least two, as show on which side of epsilon it is.

    >>> p_value_beside(0.05002, 0.05), p_value_beside(0.049996, 0.05), p_value_beside(0.3123, 0.05)
    ('0.05002', '0.05', '0.31')
    """
    written = (f"{p_value:.{digits}g}" for digits in range(2, 18))
    # What is written as epsilon itself is not above it.
    right = (text for text in written if (float(text) > epsilon) == (p_value > epsilon))
    return next(right, repr(p_value))
