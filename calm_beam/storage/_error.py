"""What goes wrong with an object store, beyond what a local disk has errors for."""

from calm_beam.errors import CalmBeamError


class StorageError(CalmBeamError, OSError):
    """An object store cannot be used: no client, no credentials, an address it does not have, no answer.

    Objects that are missing, there already, or not permitted are `FileNotFoundError`, `FileExistsError` and
    `PermissionError`, as on a disk.
    """
