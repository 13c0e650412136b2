"""What readers of checkpoints raise."""

from calm_beam.errors import CalmBeamError


class CheckpointError(CalmBeamError, ValueError):
    """A checkpoint that cannot be read, or is not one."""
