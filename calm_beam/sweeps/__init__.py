"""A sweep as a job: what is asked for, what was prepared for it, what workers are told and do, and what is stored.

The decoding itself is in `calm_beam.decoding`, and how the work is spread over workers in `calm_beam.transforms`.
"""

from .assignment import Assignment as Assignment
from .request import SweepRequest as SweepRequest
