"""A sweep as a job: what is asked for, what was prepared for it, what its workers know, and where its outputs go.

Everything here happens before a worker starts; what workers do is in `calm_beam.decoding` and `calm_beam.transforms`.
"""

from .request import SweepRequest as SweepRequest
from .worker_plan import DecodePlan as DecodePlan
