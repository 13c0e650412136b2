from .calibration.guarantee import Guarantee as Guarantee
from .checkpoints import load_checkpoint as load_checkpoint
from .errors import CalmBeamError as CalmBeamError
from .exits.rule import ExitRule as ExitRule
from .exits.thresholds import uniform_grid as grid
from .inputs.vocabularies.vocabulary import open_vocabulary as open_vocabulary
from .launch.calibrate.command import calibrate as calibrate
from .launch.certify.run import certify as certify
from .launch.generate.pipeline import generate as generate
from .launch.suitability.command import suitability as suitability
from .launch.verify.thresholds import verify as verify
from .manifest import Manifest as Manifest
from .manifest import read_manifest as read_manifest
from .risk.monitor import RiskMonitor as RiskMonitor
from .risk.testing import LossSums as LossSums
from .risk.testing import RiskTest as RiskTest
from .risk.testing import control_risk as control_risk
from .serving import Answer as Answer
from .serving import ContinuousGenerator as ContinuousGenerator
from .serving import Generator as Generator
from .serving import LossProbe as LossProbe

__version__: str

__all__ = [
    "Answer",
    "CalmBeamError",
    "ContinuousGenerator",
    "ExitRule",
    "Generator",
    "Guarantee",
    "LossProbe",
    "LossSums",
    "Manifest",
    "RiskMonitor",
    "RiskTest",
    "__version__",
    "calibrate",
    "certify",
    "control_risk",
    "generate",
    "grid",
    "load_checkpoint",
    "open_vocabulary",
    "read_manifest",
    "suitability",
    "verify",
]
