"""Apache Beam transforms: reading, sweeping, scoring, testing and writing, each usable in a pipeline of your own."""

from typing import TYPE_CHECKING

from calm_beam.outputs.hosted_decoder import SettingOutput as SettingOutput
from calm_beam.serving.questions import NamedPrompt as NamedPrompt

from .calibrate import Calibrate as Calibrate
from .calibrate import CalibrateGenerations as CalibrateGenerations
from .calibrate import CalibrateVariants as CalibrateVariants
from .calibrate import ConfirmThresholds as ConfirmThresholds
from .calibrate import ControlRisk as ControlRisk
from .calibrate import SumLosses as SumLosses
from .calibrate import WriteManifest as WriteManifest
from .decode import DecodeExamples as DecodeExamples
from .decode import Generate as Generate
from .examples import ReadExamples as ReadExamples
from .examples import ReadPrompts as ReadPrompts
from .examples import ShardPrompts as ShardPrompts
from .monitor_risk import MonitoredRisks as MonitoredRisks
from .monitor_risk import MonitorRisk as MonitorRisk
from .monitor_risk import SampledLosses as SampledLosses
from .monitor_risk import require_answer as require_answer
from .rounds import CountRounds as CountRounds
from .sweep import ReadGenerations as ReadGenerations
from .sweep import Sweep as Sweep
from .sweep import SweepWith as SweepWith

if TYPE_CHECKING:
    from .early_exit import EarlyExitModelHandler as EarlyExitModelHandler


def __getattr__(name: str) -> object:
    """Loads the model handler when it is used: Beam's `RunInference` loads torch, where that is installed."""
    if name != "EarlyExitModelHandler":
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from .early_exit import EarlyExitModelHandler

    return EarlyExitModelHandler
