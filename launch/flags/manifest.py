"""Finding the manifest that `--manifest` names, and one of its entries."""

from calm_beam.manifest import (
    MANIFEST,
    Calibration,
    DecodeRecord,
    EntryChoice,
    Manifest,
    ManifestError,
    SettingManifest,
)
from calm_beam.options.entries import Entry, RecordedPrecision
from calm_beam.storage import is_file, is_folder, joined, why_no_file
from calm_beam.text import printable_line

from . import UsageError, naming


def find_manifest(name: str) -> str:
    """Returns the path of a manifest, given it or the calibration directory that holds it.

    Raises:
      UsageError: If there is none, or Cloud Storage does not say.
    """
    with naming("--manifest"):
        path = joined(name, MANIFEST) if is_folder(name) else name
        if not is_file(path):
            raise UsageError(f"--manifest {path}: {why_no_file(path)}")
    return path


def entry_choice(request: Entry, manifest: Manifest | SettingManifest) -> EntryChoice:
    """Returns which entry of a manifest a request names.

    Raises:
      UsageError: If it names what no entry of its kind has.
    """
    choice = EntryChoice.named_by(request)
    try:
        choice.check_for(manifest.KIND, sign="--")
    except ManifestError as error:
        raise UsageError(str(error)) from error
    return choice


def check_precision(request: RecordedPrecision, decode: DecodeRecord) -> None:
    """Refuses another precision than the manifest's.

    Raises:
      UsageError: If one is asked for.
    """
    recorded = {"dtype": decode.dtype, "matmul_precision": decode.matmul_precision or "highest"}
    for name, calibrated in recorded.items():
        asked = getattr(request, name)
        if asked not in (None, calibrated):
            raise UsageError(
                f"--{name}={asked}: the manifest was calibrated with {calibrated}, and its thresholds hold for no "
                f"other. Leave --{name} out, or calibrate with {asked}."
            )


def entry_in_words(entry: Calibration) -> str:
    """Returns what an entry is about, and its threshold."""
    threshold = "never exit" if entry.threshold is None else f"threshold {entry.threshold:g}"
    if entry.variant is not None:
        threshold += f", {entry.variant.in_words()}"
    group = "" if entry.group is None else f"group {printable_line(entry.group)}: "
    return f"{group}{entry.promise_in_words()} ({threshold})"
