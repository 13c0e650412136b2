"""Versions of the software that decodes and scores, for manifests and folders of generations."""

import importlib.metadata
import platform
from collections.abc import Mapping

from calm_beam import __version__

# Both decide numbers, and the first group is not needed where stored generations are calibrated again.
_DECODING_ONLY = ("jax", "flax", "sentencepiece")
_BOTH = ("numpy",)
_SCORING_ONLY = ("apache-beam", "scipy", "rouge-score")


def decoding_versions() -> dict[str, str]:
    """Returns the versions here of what decides tokens."""
    return _versions(_DECODING_ONLY + _BOTH)


def run_versions(decoded_with: Mapping[str, str]) -> dict[str, str]:
    """Returns the versions of what a calibration rests on.

    Args:
      decoded_with: What the generations were decoded with. Where that differs from what scores them here, its version
        stands under `NAME (decoding)`.
    """
    scoring = _versions(_BOTH + _SCORING_ONLY)
    others = {
        name if name not in scoring else f"{name} (decoding)": version
        for name, version in decoded_with.items()
        if scoring.get(name) != version
    }
    return {**scoring, **others}


def _versions(packages: tuple[str, ...]) -> dict[str, str]:
    found = {package: importlib.metadata.version(package) for package in packages}
    return {"calm-beam": __version__, "python": platform.python_version(), **found}
