"""Threshold schedules: one module each, and a registry.

Standard library only: manifests are checked by these names.
"""

from .registry import SCHEDULES as SCHEDULES
from .schedule import Schedule as Schedule
