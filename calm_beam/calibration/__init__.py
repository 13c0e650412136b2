"""From generations to calibrated thresholds: losses, totals, tests."""

from .confirmation import ConfirmedChoice as ConfirmedChoice
from .confirmation import confirmed_calibration as confirmed_calibration
from .contrast import Contrast as Contrast
from .fingerprint import content_sum_of as content_sum_of
from .fingerprint import fingerprint_text as fingerprint_text
from .guarantee import Guarantee as Guarantee
from .guarantee import all_specs as all_specs
from .guarantee import specs_of as specs_of
from .layout import Layout as Layout
from .outcome import CalibrationOutcome as CalibrationOutcome
from .pareto import ParetoChoice as ParetoChoice
from .pareto import pareto_calibration as pareto_calibration
from .plan import Plan as Plan
from .provenance import RunProvenance as RunProvenance
from .result import RiskRow as RiskRow
from .result import choose_thresholds as choose_thresholds
from .result import has_ended as has_ended
from .result import risk_rows as risk_rows
from .scoring import ScoredGeneration as ScoredGeneration
from .scoring import score_by_policy as score_by_policy
from .scoring import score_generation as score_generation
from .specs import Objective as Objective
from .specs import Spec as Spec
from .totals import CalibrationTotals as CalibrationTotals
