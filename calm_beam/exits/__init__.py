"""When a token may leave the decoder: confidence measures, threshold schedules, state propagation."""

from .rule import CONFIDENCES as CONFIDENCES
from .rule import SCHEDULES as SCHEDULES
from .rule import STATE_PROPAGATIONS as STATE_PROPAGATIONS
from .rule import ExitRule as ExitRule
from .saturation import hidden_state_saturation as hidden_state_saturation
from .schedule import threshold_factors as threshold_factors
from .softmax_response import softmax_gap as softmax_gap
from .softmax_response import softmax_max as softmax_max
