"""CALM, "State propagation": d^k = d^j."""

from .propagation import PassedOn, Propagation

FROM_EXIT = Propagation(
    name="from_exit",
    meaning="skipped layers make keys and values of the exit layer's state",
    passed_on=PassedOn.EXIT_STATE,
)
