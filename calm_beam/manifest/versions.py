"""Versions of the software that decodes and scores, for manifests and folders of generations."""

import importlib.metadata
import platform
from collections.abc import Collection, Mapping

from calm_beam import __version__

# Both groups affect numbers; the first is not needed if stored generations are calibrated again.
_DECODING_ONLY = ("jax", "flax", "sentencepiece")
_BOTH = ("numpy",)
_SCORING_ONLY = ("apache-beam", "rouge-score")
# Metrics with the extra packages that they use.
_OF_METRICS = {"chrf": "sacrebleu", "sentence_bleu": "sacrebleu", "edit_distance": "rapidfuzz", "bleurt": "tensorflow"}


def decoding_versions() -> dict[str, str]:
    """Returns the installed versions of packages that affect tokens."""
    return _versions(_DECODING_ONLY + _BOTH)


def run_versions(decoded_with: Mapping[str, str], *, metrics: Collection[str]) -> dict[str, str]:
    """Returns the versions of packages that a calibration depends on.

    Args:
      decoded_with: Versions that the generations were decoded with. If one differs from the version that scores them
        here, it is stored under `NAME (decoding)`.
      metrics: Names of the metrics that score.
    """
    # The part after an @ is the fingerprint of a checkpoint.
    families = {name.split("@")[0] for name in metrics}
    optional = tuple(sorted({_OF_METRICS[family] for family in families & _OF_METRICS.keys()}))
    scoring = _versions(_BOTH + _SCORING_ONLY + optional)
    others = {
        name if name not in scoring else f"{name} (decoding)": version
        for name, version in decoded_with.items()
        if scoring.get(name) != version
    }
    return {**scoring, **others}


def certifying_versions() -> dict[str, str]:
    """Returns the installed versions of packages that test the losses of a sweep made elsewhere."""
    return _versions(_BOTH)


def _versions(packages: tuple[str, ...]) -> dict[str, str]:
    found = {package: importlib.metadata.version(package) for package in packages}
    return {"calm-beam": __version__, "python": platform.python_version(), **found}
