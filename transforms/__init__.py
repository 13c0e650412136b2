"""Apache Beam transforms: reading, sweeping, scoring, testing and writing, each usable in a pipeline of your own."""

from typing import TYPE_CHECKING

from calm_beam.outputs.hosted_decoder import SettingOutput as SettingOutput
from calm_beam.serving.questions import NamedPrompt as NamedPrompt

from .calibrate import Calibrate as Calibrate
from .calibrate import CalibrateGenerations as CalibrateGenerations
from .calibrate import CalibrateVariants as CalibrateVariants
from .confirm import ConfirmThresholds as ConfirmThresholds
from .decode import DecodeExamples as DecodeExamples
from .examples import ReadExamples as ReadExamples
from .generate import Generate as Generate
from .losses import ControlRisk as ControlRisk
from .losses import SumLosses as SumLosses
from .monitor_risk import MonitoredRisks as MonitoredRisks
from .monitor_risk import MonitorRisk as MonitorRisk
from .monitor_risk import SampledLosses as SampledLosses
from .prompts import ReadPrompts as ReadPrompts
from .prompts import ShardPrompts as ShardPrompts
from .results import require_answer as require_answer
from .rounds import CountRounds as CountRounds
from .sweep import ReadGenerations as ReadGenerations
from .sweep import Sweep as Sweep
from .sweep_with import SweepWith as SweepWith
from .write_manifest import WriteManifest as WriteManifest

if TYPE_CHECKING:
    from .early_exit import EarlyExitModelHandler as EarlyExitModelHandler


def __getattr__(name: str) -> object:
    """Loads the model handler when it is used: Beam's `RunInference` loads torch, where that is installed."""
    if name != "EarlyExitModelHandler":
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from .early_exit import EarlyExitModelHandler

    return EarlyExitModelHandler
