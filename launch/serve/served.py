"""What is known of a service before its model is loaded."""

import dataclasses

from calm_beam.manifest import Calibration, Manifest

from .limits import Limits

_USUAL_LIMITS = Limits()


@dataclasses.dataclass(frozen=True, kw_only=True)
class Served:
    """What a service promises, and within which limits.

    Attributes:
      manifest: What was promised.
      entry: Of it, by which prompts of no group are answered.
      content: The manifest's file, as `/manifest` shows it.
      name: What clients call the model.
      limits: What the service takes upon itself.
      is_lazy: Whether what prompts need is compiled when the first of them comes.
    """

    manifest: Manifest
    entry: Calibration
    content: bytes
    name: str = "calm-beam"
    limits: Limits = _USUAL_LIMITS
    is_lazy: bool = False
