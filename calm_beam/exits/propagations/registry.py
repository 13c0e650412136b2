"""The state propagations by name."""

import types
from collections.abc import Mapping

from .from_exit import FROM_EXIT
from .from_first_exit import FROM_FIRST_EXIT
from .full_cache import FULL_CACHE
from .projected import PROJECTED
from .propagation import Propagation

PROPAGATIONS: Mapping[str, Propagation] = types.MappingProxyType(
    {propagation.name: propagation for propagation in (FROM_EXIT, FROM_FIRST_EXIT, FULL_CACHE, PROJECTED)}
)
