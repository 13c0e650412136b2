"""Finding the manifest that `--manifest` names."""

import pathlib

from .flags import UsageError, refuse_cloud_paths
from .staging import MANIFEST


def find_manifest(name: str) -> pathlib.Path:
    """Returns the path of a manifest, given it or the calibration directory that holds it.

    Raises:
      UsageError: If there is none, or it is on an object store.
    """
    refuse_cloud_paths([("--manifest", name)])
    path = pathlib.Path(name)
    path = path / MANIFEST if path.is_dir() else path
    if not path.is_file():
        raise UsageError(f"--manifest {name}: no such file.")
    return path
