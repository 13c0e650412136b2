"""What computed the outputs that a manifest is about, and how many hung on a decision within rounding, in words."""

from ._manifest import Manifest
from .records import threshold_in_words


def engine_in_words(manifest: Manifest) -> str:
    """Returns which engine was calibrated, as a sentence."""
    engine = manifest.engine
    return "Engine: not recorded." if engine is None else f"Engine: {engine.in_words()}."


def near_ties_in_words(manifest: Manifest) -> str:
    """Returns at how many examples a near tie decided, for each chosen threshold; empty where that is not known."""
    counts: dict[str, int] = {}
    for entry in manifest.calibrations:
        step = entry.deciding
        # Those of groups are among those of all.
        if entry.group is None and step is not None and step.near_ties is not None:
            counts[threshold_in_words(step.threshold, step.variant)] = step.near_ties
    if not counts:
        return ""
    data = manifest.data if manifest.confirmation is None else manifest.confirmation.data
    is_worst = manifest.plan is not None and manifest.plan.near_ties == "worst_case"
    what = "they count with loss 1" if is_worst else "another engine may give these another output"
    each = ", ".join(f"{count:,} at threshold {threshold}" for threshold, count in counts.items())
    return f"Near ties, of {data.examples:,} examples: {each}; {what}."
