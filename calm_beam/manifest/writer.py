"""Writing a manifest, whole or not at all."""

import json
import os

from calm_beam.storage import is_cloud_path, replacing

from ._checks import ManifestError
from ._manifest import Manifest


def manifest_text(manifest: Manifest) -> str:
    """Returns the content of the manifest's file: indented JSON with its digest, and a final newline.

    Args:
      manifest: The manifest.

    Returns:
      Text that `parse_manifest` turns back into an equal manifest, floats to the last bit. Encode it as UTF-8.
    """
    return json.dumps(manifest.to_dict(), indent=2, ensure_ascii=False, allow_nan=False) + "\n"


def write_manifest(manifest: Manifest, path: str | os.PathLike[str], *, overwrite: bool = True) -> None:
    """Writes the manifest to a local file, replacing an older one in a single step.

    Whoever reads the path at any moment, or after a crash, finds the old file or the new one, never a part.

    Args:
      manifest: The manifest.
      path: A local file in a folder that exists.
      overwrite: Whether an older manifest is replaced.

    Raises:
      FileExistsError: If there is a file and `overwrite` is False.
      ManifestError: If the path is on Google Cloud Storage.
      OSError: If the file cannot be written. The path is then as it was before.
    """
    name = os.fspath(path)
    if is_cloud_path(name):
        raise ManifestError(
            f"manifest {name}: only local files are written here. Write manifest_text(manifest) with a storage client."
        )
    content = manifest_text(manifest).encode("utf-8")
    with replacing(name, overwrite=overwrite) as temporary:
        temporary.write_bytes(content)
