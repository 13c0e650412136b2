"""Confidence measures, each with all that depends on it, and a registry.

Calibration makes any of them valid, good or bad: the guarantee assumes nothing about confidences. A good one exits
earlier.

Importing the package loads the standard library alone: manifests are checked by its names. Functions import
JAX when they are called.
"""

from .measure import Measure as Measure
from .measure import Need as Need
from .registry import COMPARABLE as COMPARABLE
from .registry import MEASURES as MEASURES
from .registry import MeasureError as MeasureError
from .registry import check_may_run as check_may_run
from .registry import check_named as check_named
from .registry import is_measure_name as is_measure_name
from .registry import is_own as is_own
from .registry import measure_named as measure_named
from .registry import source_digest as source_digest
