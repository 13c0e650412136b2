"""State propagations: what a layer that a token skipped computes its keys and values from.

Standard library only: manifests are checked by these names.
"""

import dataclasses
import enum
import types
from collections.abc import Mapping


class PassedOn(enum.Enum):
    """The input of a skipped layer k > j for a token that exits at layer j; decoders never depend on a name.

    EXIT_STATE: The state d^j, from which layer k computes keys and values with its own weights.
    FIRST_STATE: The output of the first exit layer, from which layer k computes keys and values.
    KEYS_VALUES: The keys and values of layer j, copied.
    NOTHING: No layer is skipped: every layer computes its own keys and values.
    """

    EXIT_STATE = enum.auto()
    FIRST_STATE = enum.auto()
    KEYS_VALUES = enum.auto()
    NOTHING = enum.auto()


@dataclasses.dataclass(frozen=True, kw_only=True)
class Propagation:
    """A way of state propagation.

    Attributes:
      name: Name in flags and manifests.
      meaning: A short description.
      passed_on: The input of skipped layers.
    """

    name: str
    meaning: str
    passed_on: PassedOn

    @property
    def separates_exit(self) -> bool:
        """Whether the layer right above the exit stores other keys and values than it would have computed itself.

        If so, the cache of layer i differs between an exit at i - 1 and a later one. With EXIT_STATE it does not: both
        are the layer's keys and values of d^(i-1).
        """
        return self.passed_on in (PassedOn.FIRST_STATE, PassedOn.KEYS_VALUES)

    @property
    def needs_full_model(self) -> bool:
        """Whether every layer has to run for every token, so that exits save nothing."""
        return self.passed_on is PassedOn.NOTHING


# CALM, "State propagation": d^k = d^j.
FROM_EXIT = Propagation(
    name="from_exit",
    meaning="skipped layers make keys and values of the exit layer's state",
    passed_on=PassedOn.EXIT_STATE,
)

# The released T5X code passes on `decoder_hidden`, which is the first exit's state.
FROM_FIRST_EXIT = Propagation(
    name="from_first_exit",
    meaning="skipped layers make keys and values of the state of the first layer that may exit",
    passed_on=PassedOn.FIRST_STATE,
)

# Nothing is skipped.
FULL_CACHE = Propagation(
    name="full_cache",
    meaning="nothing is skipped, the cache is the full model's; for analysis",
    passed_on=PassedOn.NOTHING,
)

# CALM, "State propagation": the ablation that does badly.
PROJECTED = Propagation(
    name="projected",
    meaning="skipped layers copy keys and values of the exit layer",
    passed_on=PassedOn.KEYS_VALUES,
)

PROPAGATIONS: Mapping[str, Propagation] = types.MappingProxyType(
    {propagation.name: propagation for propagation in (FROM_EXIT, FROM_FIRST_EXIT, FULL_CACHE, PROJECTED)}
)
"""The state propagations by name."""
