"""The full model's cache: no layer is skipped."""

from .propagation import PassedOn, Propagation

FULL_CACHE = Propagation(
    name="full_cache",
    meaning="nothing is skipped, the cache is the full model's; for analysis",
    passed_on=PassedOn.NOTHING,
)
