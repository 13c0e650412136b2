"""Finding the manifest that `--manifest` names."""

from calm_beam.manifest import MANIFEST
from calm_beam.storage import is_file, is_folder, joined

from .flags import UsageError, naming


def find_manifest(name: str) -> str:
    """Returns the path of a manifest, given it or the calibration directory that holds it.

    Raises:
      UsageError: If there is none, or Cloud Storage does not say.
    """
    with naming("--manifest"):
        path = joined(name, MANIFEST) if is_folder(name) else name
        if not is_file(path):
            raise UsageError(f"--manifest {name}: no such file.")
    return path
