"""Apache Beam transforms: reading, sweeping, scoring, testing and writing, each usable in a pipeline of your own."""

from .calibrate import Calibrate as Calibrate
from .calibrate import CalibrateGenerations as CalibrateGenerations
from .calibrate import CalibrateVariants as CalibrateVariants
from .decode import DecodeExamples as DecodeExamples
from .examples import ReadExamples as ReadExamples
from .losses import ControlRisk as ControlRisk
from .losses import SumLosses as SumLosses
from .rounds import CountRounds as CountRounds
from .sweep import ReadGenerations as ReadGenerations
from .sweep import Sweep as Sweep
from .write_manifest import WriteManifest as WriteManifest
