"""calm-beam: calibrated early exits for encoder-decoder models.

    import calm_beam as calm

    manifest = calm.calibrate(output="calibration")         # the demo model on the demo data
    print(manifest.calibrations[0].threshold)

The names below are public; each loads what it needs when it is first used, so that a serving process can read a
manifest without JAX or Beam. Transforms for your own pipelines are in `calm_beam.transforms`. Names listed in
neither place may change without notice.
"""

import importlib
from typing import Any

__version__ = "0.1.0"

# Module and attribute behind each public name; `__init__.pyi` says the same to type checkers.
_PUBLIC = {
    # Calibrating.
    "calibrate": "calm_beam.launch.calibrate.command:calibrate",
    "Guarantee": "calm_beam.calibration.guarantee:Guarantee",
    "ExitRule": "calm_beam.exits.rule:ExitRule",
    "grid": "calm_beam.exits.thresholds:uniform_grid",
    "suitability": "calm_beam.launch.suitability.command:suitability",
    # Manifests and serving.
    "verify": "calm_beam.launch.verify.thresholds:verify",
    "Manifest": "calm_beam.manifest:Manifest",
    "read_manifest": "calm_beam.manifest:read_manifest",
    "generate": "calm_beam.launch.generate.pipeline:generate",
    "Generator": "calm_beam.serving:Generator",
    "ContinuousGenerator": "calm_beam.serving:ContinuousGenerator",
    "Answer": "calm_beam.serving:Answer",
    "LossProbe": "calm_beam.serving:LossProbe",
    "RiskMonitor": "calm_beam.risk.monitor:RiskMonitor",
    # Models.
    "load_checkpoint": "calm_beam.checkpoints:load_checkpoint",
    "open_vocabulary": "calm_beam.inputs.vocabularies.vocabulary:open_vocabulary",
    # Risk control of your own losses.
    "certify": "calm_beam.launch.certify.run:certify",
    "RiskTest": "calm_beam.risk.testing:RiskTest",
    "LossSums": "calm_beam.risk.testing:LossSums",
    "control_risk": "calm_beam.risk.testing:control_risk",
    # The base class of all our errors.
    "CalmBeamError": "calm_beam.errors:CalmBeamError",
}

__all__ = [*_PUBLIC, "__version__"]


def __getattr__(name: str) -> Any:
    place = _PUBLIC.get(name)
    if place is None:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    module, _, attribute = place.partition(":")
    value = getattr(importlib.import_module(module), attribute)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted(__all__)
