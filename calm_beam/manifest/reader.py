"""Reading a manifest where it is served, and refusing one that cannot be trusted."""

import json
import math
import os

from ._checks import ManifestError, shown
from ._manifest import Manifest, check_digest, check_schema

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
    # Here, since it takes as long to import as all the rest, and who gets a manifest otherwise needs no files.
    from calm_beam.storage import open_input

    with open_input(path) as file:
        content = file.read(_MOST_BYTES + 1)
    if len(content) > _MOST_BYTES:
        raise ManifestError(
            f"manifest {os.fspath(path)}: has more than {_MOST_BYTES >> 20} MiB, so it is no manifest. Name the "
            "manifest.json of a calibration."
        )
    return parse_manifest(content, source=f"manifest {os.fspath(path)}", model_fingerprint=model_fingerprint)


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
    try:
        content = _load_json(text)
        check_schema(content)
        # Before the rest: who changed a number by hand should hear of that, not of what it then contradicts.
        check_digest(content)
        manifest = Manifest.from_dict(content)
        _check_model(manifest, model_fingerprint)
    except ManifestError as error:
        raise ManifestError(f"{source}: {error}") from None
    return manifest


def _load_json(text: str | bytes) -> dict[str, object]:
    """Returns the parsed text; JSON as in RFC 8259, without the additions and silences of Python's parser."""
    try:
        decoded = text if isinstance(text, str) else text.decode("utf-8")
        return json.loads(
            decoded, object_pairs_hook=_without_duplicates, parse_constant=_refuse_constant, parse_float=_finite_float
        )
    except ManifestError:
        raise
    except UnicodeDecodeError as error:
        raise ManifestError(f"not UTF-8 text: {error}") from None
    except RecursionError:
        raise ManifestError("not JSON that can be a manifest: nested too deeply") from None
    except ValueError as error:
        raise ManifestError(f"not JSON: {error}") from None


def _without_duplicates(pairs: list[tuple[str, object]]) -> dict[str, object]:
    result: dict[str, object] = {}
    for key, value in pairs:
        if key in result:
            # Python would take the last one; another reader may take the first.
            raise ManifestError(f"key {shown(key)} occurs twice in the same object")
        result[key] = value
    return result


def _refuse_constant(name: str) -> None:
    raise ManifestError(f"not JSON: {name} is no number that JSON knows")


def _finite_float(digits: str) -> float:
    value = float(digits)
    if math.isinf(value):
        raise ManifestError(f"the number {digits} is too large for a 64-bit float")
    return value


def _check_model(manifest: Manifest, model_fingerprint: str | None) -> None:
    if model_fingerprint is not None and manifest.model.fingerprint != model_fingerprint:
        raise ManifestError(
            f"model.fingerprint is {shown(manifest.model.fingerprint)} (from {manifest.model.uri}), but the model to "
            f"serve has {shown(model_fingerprint)}. Its thresholds hold for no other model: serve that one, or "
            "calibrate this one."
        )
