"""Files of a result: their names, reading a manifest, and writing one.

A manifest is read where it is served, and refused if it cannot be trusted. It is written atomically, and never
replaces another one by accident.
"""

import datetime
import json
import os
import re
from typing import Any

from calm_beam.errors import ManifestError
from calm_beam.storage import strict_json
from calm_beam.storage.record_values import shown

from ._manifest import Manifest, SettingManifest, about_settings, check_digest, version_of

MANIFEST = "manifest.json"
RISK_TABLE = "risk_table.csv"
FAILURES = "failures.jsonl"
REPORT = "report.html"


# A manifest with a hundred entries of a thousand thresholds has a tenth of this.
_MOST_BYTES = 256 << 20


def read_manifest(path: str | os.PathLike[str], *, model_fingerprint: str | None = None) -> Manifest:
    """Returns the manifest in a file, after checking that it can be trusted.

    Args:
      path: A local file, the local folder of a calibration, or `gs://bucket/name`, for which google-cloud-storage has
        to be installed.
      model_fingerprint: Fingerprint of the model about to be served. None leaves the check to the caller.

    Returns:
      The manifest.

    Raises:
      ManifestError: If it cannot be trusted; see `parse_manifest`.
      OSError: If the file cannot be read.
    """
    return parse_manifest(_content(path), source=f"manifest {os.fspath(path)}", model_fingerprint=model_fingerprint)


def read_setting_manifest(path: str | os.PathLike[str]) -> SettingManifest:
    """Returns the manifest of kind settings in a file, as `calm-beam certify` writes it, after checking it.

    Args:
      path: A local file, or `gs://bucket/name`.

    Raises:
      ManifestError: If it is not a manifest of settings, or cannot be trusted.
      OSError: If the file cannot be read.
    """
    manifest = read_any_manifest(path)
    if not isinstance(manifest, SettingManifest):
        raise ManifestError(
            f"manifest {os.fspath(path)}: is one of calibrate, and not of kind settings. read_manifest reads it."
        )
    return manifest


def read_any_manifest(path: str | os.PathLike[str]) -> Manifest | SettingManifest:
    """Returns the manifest in a file, of any kind and version.

    Raises:
      ManifestError: If it cannot be trusted.
      OSError: If the file cannot be read.
    """
    return _parsed(_content(path), source=f"manifest {os.fspath(path)}")


def _content(path: str | os.PathLike[str]) -> bytes:
    # Imported here: it takes as long as all the rest, and callers with a manifest's text need no files.
    from calm_beam.storage import open_input

    if os.path.isdir(path):
        folder, path = path, os.path.join(path, MANIFEST)
        if not os.path.exists(path):
            raise ManifestError(f"manifest {os.fspath(folder)}: is a folder, and has no {MANIFEST}.")
    try:
        with open_input(path) as file:
            content = file.read(_MOST_BYTES + 1)
    except FileNotFoundError:
        raise FileNotFoundError(
            f"manifest {os.fspath(path)}: no such file. Name the {MANIFEST} of a calibration, or its folder."
        ) from None
    if len(content) > _MOST_BYTES:
        raise ManifestError(
            f"manifest {os.fspath(path)}: has more than {_MOST_BYTES >> 20} MiB, so it is not a manifest. Name the "
            "manifest.json of a calibration."
        )
    return content


def parse_manifest(text: str | bytes, *, source: str = "manifest", model_fingerprint: str | None = None) -> Manifest:
    """Returns the manifest in a JSON text, after checking that it can be trusted.

    Args:
      text: The content of a manifest file, as text or as UTF-8 bytes.
      source: Its name in error messages.
      model_fingerprint: Fingerprint of the model about to be served. None leaves the check to the caller.

    Returns:
      The manifest.

    Raises:
      ManifestError: If the text is not JSON or has a key twice, the schema is unknown, the digest is wrong, the content
        violates the schema or contradicts itself, or the model is another one. Checked in this order.
    """
    manifest = _parsed(text, source=source)
    if isinstance(manifest, SettingManifest):
        raise ManifestError(f"{source}: {about_settings()}")
    if model_fingerprint is not None and manifest.model.fingerprint != model_fingerprint:
        raise ManifestError(
            f"{source}: model.fingerprint is {shown(manifest.model.fingerprint)} (from {manifest.model.uri}), but the "
            f"model to serve has {shown(model_fingerprint)}. Its thresholds hold for no other model: serve that one, "
            "or calibrate this one."
        )
    return manifest


def _parsed(text: str | bytes, *, source: str) -> Manifest | SettingManifest:
    """Returns the manifest in a JSON text; errors begin with `source`."""
    try:
        content = _load_json(text)
        version_of(content)
        # Checked first: a number changed by hand should be reported as such, not as a contradiction.
        check_digest(content)
        kind = content.get("kind")
        return (SettingManifest if kind in SettingManifest.kinds() else Manifest).from_dict(content)
    except ManifestError as error:
        raise ManifestError(f"{source}: {error}") from None


def _load_json(text: str | bytes) -> Any:
    """Returns the parsed text."""
    try:
        return strict_json.loads(text)
    except strict_json.StrictJSONError as error:
        raise ManifestError(str(error)) from None


# As json.dumps indents it. JSON strings have no line breaks, so this never matches inside one.
_LIST_OF_NUMBERS = re.compile(r"\[\n\s+([-+.0-9eE]+(?:,\n\s+[-+.0-9eE]+)*)\n\s+\]")


def manifest_text(manifest: Manifest | SettingManifest) -> str:
    """Returns the content of the manifest's file: indented JSON with its digest, and a final newline.

    A list of numbers is written in one line.

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
    """Writes the manifest to a file atomically.

    Readers of the path, at any moment or after a crash, find the old file or the new one, never a part. If several
    processes write at the same time, with or without `overwrite`, one succeeds and the others get an error; writing the
    same manifest again succeeds.

    Args:
      manifest: The manifest.
      path: A local file in a folder that exists, or `gs://bucket/name`.
      overwrite: Whether an existing manifest may be replaced.
      replaces: With `overwrite`, the `storage.version` of the file when the run began, empty if there was none: a file
        that appeared since then is not replaced. None for the version that it has now.
        appeared since then is not replaced. None for the version that it has now.

    Raises:
      ManifestError: If another manifest exists, or has appeared meanwhile; names it.
      OSError: If the file cannot be written. The path is then as it was before.
    """
    # Imported here, as in the reader.
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
    """Returns the error of a run that did not publish since another run did; it names the other result."""
    return ManifestError(
        f"manifest {path}: another one was published there first ({_known_by(path)}), and this one was not: no run "
        "replaces what it did not find when it began. Publish to another place, or, to replace that one, run again "
        "with --overwrite."
    )


def _known_by(path: str) -> str:
    """Returns the values by which a user recognises a manifest."""
    try:
        found = read_any_manifest(path)
    except FileNotFoundError:
        return "which is not there yet, though other files of its folder are"
    except (ManifestError, OSError) as error:
        return f"which cannot be read: {error}"
    return f"of {found.created}, {found.digest}"


def time_of_now() -> str:
    """Returns the current time as in manifests: ISO 8601 in UTC, to the second, ending in Z."""
    return datetime.datetime.now(datetime.UTC).replace(microsecond=0).isoformat().replace("+00:00", "Z")
