"""Errors of an object store or a disk that Python has no class for."""

from calm_beam.errors import CalmBeamError


class StorageError(CalmBeamError, OSError):
    """An object store cannot be used (no client, no credentials, an address it does not have, no answer), or a disk.

    Objects that are missing, there already, or not permitted are `FileNotFoundError`, `FileExistsError` and
    `PermissionError`, as on a disk.
    """
