"""CALM, "State propagation": the ablation that does badly."""

from .propagation import PassedOn, Propagation

PROJECTED = Propagation(
    name="projected",
    meaning="skipped layers copy keys and values of the exit layer",
    passed_on=PassedOn.KEYS_VALUES,
)
