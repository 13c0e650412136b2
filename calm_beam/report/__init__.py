"""The report of a calibration: one HTML file that shows what is guaranteed, and what early exits do to outputs.

Everything in it is read back from what a calibration has stored: manifest, risk table, failures and generations.
"""

from .document import LARGEST_PAGE as LARGEST_PAGE
from .document import write_page as write_page
from .page import build_page as build_page
from .promise import first_shown as first_shown
from .settings import build_setting_page as build_setting_page
from .stored import Calibrated as Calibrated
from .stored import ReportError as ReportError
from .stored import StoredOutputs as StoredOutputs
from .stored import read_calibrated as read_calibrated
from .stored import read_speedups as read_speedups
from .variants import build_variants_page as build_variants_page
