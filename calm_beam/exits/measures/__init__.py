"""Confidence measures: all that depends on a measure stands with it.

Calibration makes any measure valid, good or bad: the guarantee assumes nothing about confidences. A good one exits
earlier.

Importing the package loads the standard library alone, since manifests are checked by its names. Functions import
JAX when they are called.
"""

from .built_in import COMPARABLE as COMPARABLE
from .built_in import MEASURES as MEASURES
from .built_in import is_measure_name as is_measure_name
from .built_in import measure_named as measure_named
from .measure import Measure as Measure
from .measure import MeasureError as MeasureError
from .measure import Need as Need
from .measure import check_may_run as check_may_run
from .measure import check_named as check_named
from .measure import check_traces as check_traces
from .measure import is_own as is_own
from .measure import source_digest as source_digest
