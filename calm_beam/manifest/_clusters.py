"""What is bounded where clusters are the independent units, in words."""

from ._external import ExternalManifest
from ._manifest import Manifest


def clusters_in_words(manifest: Manifest | ExternalManifest) -> str:
    """Returns that delta bounds the loss per cluster, and what was measured over examples; empty without clusters."""
    if manifest.data.clusters is None:
        return ""
    measured = [
        f"{entry.risk:.4f} and {entry.example_risk:.4f} (delta {entry.delta:g})"
        for entry in manifest.calibrations
        if entry.risk is not None and entry.example_risk is not None
    ]
    figures = f" Measured per cluster and over examples: {'; '.join(measured)}." if measured else ""
    return (
        "Every cluster weighs the same, however many examples it has: delta bounds the expected loss per cluster. "
        f"Nothing is promised of the mean over examples.{figures}"
    )
