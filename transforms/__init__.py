"""Apache Beam transforms: reading, sweeping, scoring, testing and writing, each usable in a pipeline of your own."""

from .calibrate import Calibrate as Calibrate
from .calibrate import CalibrateGenerations as CalibrateGenerations
from .decode import DecodeExamples as DecodeExamples
from .early_exit import EarlyExitModelHandler as EarlyExitModelHandler
from .early_exit import NamedPrompt as NamedPrompt
from .early_exit import require_answer as require_answer
from .examples import ReadExamples as ReadExamples
from .losses import ControlRisk as ControlRisk
from .losses import SumLosses as SumLosses
from .monitor_risk import MonitoredRisks as MonitoredRisks
from .monitor_risk import MonitorRisk as MonitorRisk
from .monitor_risk import SampledLosses as SampledLosses
from .rounds import CountRounds as CountRounds
from .sweep import ReadGenerations as ReadGenerations
from .sweep import Sweep as Sweep
from .write_manifest import WriteManifest as WriteManifest
