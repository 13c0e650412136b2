"""Testing many thresholds at once, so that the chance of accepting any bad one (the FWER) is at most epsilon.

Each procedure takes p-values in testing order and says which nulls "the risk at this threshold exceeds delta" are
rejected. Whatever is chosen among the rejected thresholds, by whatever criterion, is then safe with probability at
least 1 - epsilon. Which procedure is used has to be settled before the losses are seen.
"""

from .bonferroni import bonferroni_test as bonferroni_test
from .fallback import fallback_test as fallback_test
from .fixed_sequence import fixed_sequence_test as fixed_sequence_test
from .holm import holm_test as holm_test
from .multi_start import multi_start_test as multi_start_test
from .pareto import pareto_path as pareto_path
from .pareto import pareto_test as pareto_test
from .registry import PROCEDURES as PROCEDURES
from .registry import Procedure as Procedure
from .result import FwerResult as FwerResult
