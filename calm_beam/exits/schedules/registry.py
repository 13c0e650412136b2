"""The threshold schedules by name."""

import types
from collections.abc import Mapping

from .constant import CONSTANT
from .decay import DECAY
from .decay_t5x import DECAY_T5X
from .schedule import Schedule

SCHEDULES: Mapping[str, Schedule] = types.MappingProxyType(
    {schedule.name: schedule for schedule in (CONSTANT, DECAY, DECAY_T5X)}
)
