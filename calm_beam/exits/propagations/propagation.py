"""The type of state propagations: how the cache of skipped layers is filled."""

import dataclasses
import enum


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
