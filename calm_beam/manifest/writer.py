"""Writing a manifest, whole or not at all, and over no other by accident."""

import datetime
import json
import os
import re

from calm_beam.errors import ManifestError

from ._manifest import Manifest, SettingManifest
from .reader import read_any_manifest

# As json.dumps indents it. No string holds a line break of its own, so this is never the inside of one.
_LIST_OF_NUMBERS = re.compile(r"\[\n\s+([-+.0-9eE]+(?:,\n\s+[-+.0-9eE]+)*)\n\s+\]")


def manifest_text(manifest: Manifest | SettingManifest) -> str:
    """Returns the content of the manifest's file: indented JSON with its digest, and a final newline.

    A list of numbers stands in one line.

    Args:
      manifest: The manifest.

    Returns:
      Text that `parse_manifest` turns back into an equal manifest, floats to the last bit. Encode it as UTF-8.
    """
    text = json.dumps(manifest.to_dict(), indent=2, ensure_ascii=False, allow_nan=False)
    return _LIST_OF_NUMBERS.sub(lambda found: f"[{' '.join(found[1].split())}]", text) + "\n"


def write_manifest(
    manifest: Manifest | SettingManifest,
    path: str | os.PathLike[str],
    *,
    overwrite: bool = False,
    replaces: str | None = None,
) -> None:
    """Writes the manifest to a file in a single step.

    Whoever reads the path at any moment, or after a crash, finds the old file or the new one, never a part. Of several
    who write at the same time, with or without `overwrite`, one succeeds and the others are told; writing the same
    manifest again succeeds.

    Args:
      manifest: The manifest.
      path: A local file in a folder that exists, or `gs://bucket/name`.
      overwrite: Whether a manifest that is there may be replaced.
      replaces: With `overwrite`, the `storage.version` of the file when the run began, empty if there was none: what
        appeared since then is not replaced. None for the version that it has now.

    Raises:
      ManifestError: If another manifest is there, or has appeared meanwhile; names it.
      OSError: If the file cannot be written. The path is then as it was before.
    """
    # Here, as in the reader.
    from calm_beam.storage import replacing, version

    name = os.fspath(path)
    content = manifest_text(manifest).encode("utf-8")
    if overwrite and replaces is None:
        replaces = version(name)
    try:
        with replacing(name, overwrite=overwrite, replaces=replaces) as temporary:
            temporary.write_bytes(content)
    except FileExistsError:
        raise lost_race(name) from None


def lost_race(path: str) -> ManifestError:
    """Returns the error of a run whose result is not published, since another one's was; it names that one."""
    return ManifestError(
        f"manifest {path}: another one was published there first ({_known_by(path)}), and this one was not: no run "
        "replaces what it did not find when it began. Publish to another place, or, to replace that one, run again "
        "with --overwrite."
    )


def _known_by(path: str) -> str:
    """Returns what tells a manifest from others."""
    try:
        found = read_any_manifest(path)
    except FileNotFoundError:
        return "which is not there yet, though files beside it are"
    except (ManifestError, OSError) as error:
        return f"which cannot be read: {error}"
    return f"of {found.created}, {found.digest}"


def time_of_now() -> str:
    """Returns the time as manifests have it: ISO 8601 in UTC, to the second, ending in Z."""
    return datetime.datetime.now(datetime.UTC).replace(microsecond=0).isoformat().replace("+00:00", "Z")
