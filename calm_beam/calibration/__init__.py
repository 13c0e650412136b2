"""From generations to calibrated thresholds: losses, totals, tests."""

from calm_beam.upkeep.verification import FreshLosses as FreshLosses
from calm_beam.upkeep.verification import Verdict as Verdict
from calm_beam.upkeep.verification import objective_of as objective_of
from calm_beam.upkeep.verification import promised_thresholds as promised_thresholds
from calm_beam.upkeep.verification import verify as verify

from .contrast import Contrast as Contrast
from .fingerprint import content_sum_of as content_sum_of
from .fingerprint import fingerprint_text as fingerprint_text
from .layout import Layout as Layout
from .pareto import ParetoChoice as ParetoChoice
from .pareto import pareto_calibration as pareto_calibration
from .plan import Plan as Plan
from .record import RunRecord as RunRecord
from .result import RiskRow as RiskRow
from .result import calibrate as calibrate
from .result import has_ended as has_ended
from .result import risk_rows as risk_rows
from .scoring import ScoredGeneration as ScoredGeneration
from .scoring import score_by_policy as score_by_policy
from .scoring import score_generation as score_generation
from .specs import Objective as Objective
from .specs import Spec as Spec
from .specs import all_specs as all_specs
from .tally import Tally as Tally
from .totals import CalibrationTotals as CalibrationTotals
