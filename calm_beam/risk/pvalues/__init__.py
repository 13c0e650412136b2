"""p-values for the null "the risk at this threshold exceeds delta".

Each is valid for any i.i.d. losses in its range: under the null, P(p <= u) <= u for every u. Which one is used has to
be settled before the losses are seen; the least of several p-values is not a p-value.
"""

from calm_beam.risk.evidence import Evidence as Evidence
from calm_beam.risk.evidence import EvidenceError as EvidenceError

from .empirical_bernstein import empirical_bernstein_p_value as empirical_bernstein_p_value
from .exact_binomial import exact_binomial_p_value as exact_binomial_p_value
from .hoeffding import hoeffding_p_value as hoeffding_p_value
from .hoeffding_bentkus import hoeffding_bentkus_p_value as hoeffding_bentkus_p_value
from .method import PValueMethod as PValueMethod
from .registry import P_VALUES as P_VALUES
from .registry import excess_p_values as excess_p_values
from .registry import p_values_of as p_values_of
from .registry import why_not_watched as why_not_watched
from .signed_mixture import signed_mixture_p_value as signed_mixture_p_value
from .star_bets import star_bets_p_value as star_bets_p_value
from .wsr import wsr_p_value as wsr_p_value
