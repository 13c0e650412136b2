"""Reading a manifest where it is served, and refusing one that cannot be trusted."""

import os
from typing import Any

from calm_beam.errors import ManifestError
from calm_beam.storage import strict_json
from calm_beam.storage.record_values import shown

from ._manifest import Manifest, SettingManifest, about_settings, check_digest, version_of

# A thousand thresholds of a hundred entries have a tenth of that.
_MOST_BYTES = 256 << 20


def read_manifest(path: str | os.PathLike[str], *, model_fingerprint: str | None = None) -> Manifest:
    """Returns the manifest in a file, after checking that it can be trusted.

    Args:
      path: A local file, or `gs://bucket/name`, for which google-cloud-storage has to be installed.
      model_fingerprint: Fingerprint of the model about to be served. None leaves the check to the caller.

    Returns:
      The manifest.

    Raises:
      ManifestError: As `parse_manifest`.
      OSError: If the file cannot be read.
    """
    return parse_manifest(_content(path), source=f"manifest {os.fspath(path)}", model_fingerprint=model_fingerprint)


def read_setting_manifest(path: str | os.PathLike[str]) -> SettingManifest:
    """Returns the manifest of kind settings in a file, as `calm-beam certify` writes it, after checking it.

    Args:
      path: A local file, or `gs://bucket/name`.

    Raises:
      ManifestError: If it is none, or cannot be trusted.
      OSError: If the file cannot be read.
    """
    manifest = read_any_manifest(path)
    if not isinstance(manifest, SettingManifest):
        raise ManifestError(
            f"manifest {os.fspath(path)}: is one of calibrate, and not of kind settings. read_manifest reads it."
        )
    return manifest


def read_any_manifest(path: str | os.PathLike[str]) -> Manifest | SettingManifest:
    """Returns the manifest in a file, of whatever kind and version it says that it is.

    Raises:
      ManifestError: If it cannot be trusted.
      OSError: If the file cannot be read.
    """
    return _parsed(_content(path), source=f"manifest {os.fspath(path)}")


def _content(path: str | os.PathLike[str]) -> bytes:
    # Here, since it takes as long to import as all the rest, and who gets a manifest otherwise needs no files.
    from calm_beam.storage import open_input

    if os.path.isdir(path):
        raise ManifestError(f"manifest {os.fspath(path)}: is a folder. Name the manifest.json in it.")
    with open_input(path) as file:
        content = file.read(_MOST_BYTES + 1)
    if len(content) > _MOST_BYTES:
        raise ManifestError(
            f"manifest {os.fspath(path)}: has more than {_MOST_BYTES >> 20} MiB, so it is not a manifest. Name the "
            "manifest.json of a calibration."
        )
    return content


def parse_manifest(text: str | bytes, *, source: str = "manifest", model_fingerprint: str | None = None) -> Manifest:
    """Returns the manifest that a JSON text holds, after checking that it can be trusted.

    Args:
      text: The content of a manifest file, as text or as UTF-8 bytes.
      source: What error messages call it.
      model_fingerprint: Fingerprint of the model about to be served. None leaves the check to the caller.

    Returns:
      The manifest.

    Raises:
      ManifestError: If the text is not JSON or names a key twice, the schema is another one, the digest is wrong, the
        content is not as the schema says or contradicts itself, or the model is another one. Checked in this order.
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
    """Returns the manifest that a JSON text holds, whose errors begin with what the text is called."""
    try:
        content = _load_json(text)
        version_of(content)
        # Before the rest: who changed a number by hand should hear of that, not of what it then contradicts.
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
