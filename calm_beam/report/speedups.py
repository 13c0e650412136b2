"""Speedups that `calm-beam evaluate --speedup` measured, where they are of the calibrated model and decoding."""

import csv
import io
from typing import Any

from calm_beam.manifest import Manifest
from calm_beam.storage import joined, open_input, strict_json

from .stored import ReportError

# As `evaluate` calls them.
_PROVENANCE = "splits.json"
_TABLE = "splits.csv"


def read_speedups(directory: str, manifest: Manifest) -> dict[float, float]:
    """Returns how many times faster than the full model the decoder was, by threshold.

    Args:
      directory: Output directory of `evaluate`.
      manifest: Of the calibration.

    Raises:
      ReportError: If the files are none of evaluate's, or of another model or decoding, or if none of the manifest's
        thresholds was measured.
      OSError: If they cannot be read.
    """
    with open_input(joined(directory, _PROVENANCE)) as file:
        content = file.read()
    try:
        provenance = strict_json.loads(content)
        fingerprint, longest = provenance["model"]["fingerprint"], provenance["max_decode_length"]
        names = [measure["name"] for measure in provenance["measures"] if _is_alike(measure["rule"], manifest)]
        with open_input(joined(directory, _TABLE)) as raw, io.TextIOWrapper(raw, "utf-8", newline="") as text:
            measured = {
                float(row["threshold"]): float(row["speedup"])
                for row in csv.DictReader(text)
                if row["measure"] in names and row["threshold"] and row["speedup"]
            }
    except (KeyError, TypeError, ValueError, csv.Error) as error:
        raise ReportError(
            f"{directory}: holds no results of calm-beam evaluate as this version writes them "
            f"({type(error).__name__}: {error})."
        ) from error
    if (fingerprint, longest) != (manifest.model.fingerprint, manifest.decode.max_decode_length) or not names:
        raise ReportError(f"{directory}: is about another model, or another way of decoding, than the manifest.")
    promised = {entry.threshold for entry in manifest.calibrations}
    speedups = {threshold: factor for threshold, factor in measured.items() if threshold in promised}
    if not speedups:
        raise ReportError(
            f"{directory}: no threshold of the manifest was timed there. Pass --speedup to calm-beam evaluate, with "
            "the tolerances of the manifest."
        )
    return speedups


def _is_alike(rule: dict[str, Any], manifest: Manifest) -> bool:
    """Returns whether a measure exits as the manifest says."""
    names = ("confidence", "schedule", "tau", "state_propagation", "min_exit_layer", "exit_interval", "patience")
    return all(rule.get(name) == getattr(manifest.decode, name) for name in names)
