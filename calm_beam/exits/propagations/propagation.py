"""What the layers that a token skipped make their keys and values of."""

import dataclasses
import enum


class PassedOn(enum.Enum):
    """What of a token that exits at layer j a skipped layer k > j is given; decoders go by it, never by a name.

    EXIT_STATE: The state d^j, of which layer k makes keys and values with its own weights.
    FIRST_STATE: The output of the first layer that may exit, likewise.
    KEYS_VALUES: The keys and values of layer j, copied.
    NOTHING: Nothing is skipped: every layer has its own, as if the token had gone through all of them.
    """

    EXIT_STATE = enum.auto()
    FIRST_STATE = enum.auto()
    KEYS_VALUES = enum.auto()
    NOTHING = enum.auto()


@dataclasses.dataclass(frozen=True, kw_only=True)
class Propagation:
    """A way of state propagation.

    Attributes:
      name: What flags and manifests call it.
      meaning: What it does, in a few words.
      passed_on: What skipped layers are given.
    """

    name: str
    meaning: str
    passed_on: PassedOn

    @property
    def separates_exit(self) -> bool:
        """Whether the layer right above the exit keeps something else than it would have made itself.

        Then layer i tells exits at i - 1 from later ones. With EXIT_STATE it does not: both are its keys and values of
        d^(i-1).
        """
        return self.passed_on in (PassedOn.FIRST_STATE, PassedOn.KEYS_VALUES)

    @property
    def needs_full_model(self) -> bool:
        """Whether every layer has to run for every token, so that exits save nothing."""
        return self.passed_on is PassedOn.NOTHING
