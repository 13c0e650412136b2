"""Apache Beam transforms: reading, decoding, scoring and testing as a pipeline."""

from .calibrate import CalibrateGenerations as CalibrateGenerations
from .decode import DecodeExamples as DecodeExamples
from .decode import DecodePlan as DecodePlan
from .examples import ReadExamples as ReadExamples
from .losses import ControlRisk as ControlRisk
from .losses import SumLosses as SumLosses
