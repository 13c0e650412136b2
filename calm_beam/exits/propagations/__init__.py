"""State propagations: one module each, and a registry.

Standard library only: manifests are checked by these names.
"""

from .propagation import PassedOn as PassedOn
from .propagation import Propagation as Propagation
from .registry import PROPAGATIONS as PROPAGATIONS
