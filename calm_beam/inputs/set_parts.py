"""The two parts of a calibration set where one chooses thresholds, and the other confirms them as they are served.

A hash of each unit's name draws the part that it is in, by itself, before anything is known of it. Sizes vary like a
binomial, which voids nothing, since they and the losses are independent, and each test knows its own n.
"""

import dataclasses
import hashlib
from collections.abc import Mapping
from typing import Any, Self

from calm_beam.inputs.examples import Example

CALIBRATING, CONFIRMING = "calibrating", "confirming"


@dataclasses.dataclass(frozen=True, kw_only=True)
class Split:
    """One of the two parts.

    Attributes:
      name: `CALIBRATING` or `CONFIRMING`.
      confirm_share: Chance of a unit to be in the part that confirms, in (0, 1); named as files have it.
      salt: Settled before any loss is seen.
    """

    name: str
    confirm_share: float
    salt: str

    def __post_init__(self) -> None:
        if self.name not in (CALIBRATING, CONFIRMING):
            raise ValueError(f"a part is {CALIBRATING} or {CONFIRMING}, got {self.name!r}.")
        if not 0 < self.confirm_share < 1:
            raise ValueError(f"confirm_share must be in (0, 1), got {self.confirm_share}. For 30 % pass 0.3.")

    def has(self, unit: str) -> bool:
        """Returns whether a unit is in this part, by its name, which no other has."""
        return part_of(unit, salt=self.salt, holdout_share=self.confirm_share) == self.name

    def takes(self, example: Example) -> bool:
        """Returns whether an example is in this part: by its cluster, or else by its id, which no other has.

        Examples without ids of their own need to be told apart before: where equal ones stayed together, a prompt that
        comes often would be in one part alone, and neither would be a draw of what is served.
        """
        return self.has(example.id if example.cluster is None else example.cluster)

    def that_confirms(self) -> Self:
        """Returns the part that confirms what this one has chosen."""
        return dataclasses.replace(self, name=CONFIRMING)

    @classmethod
    def from_dict(cls, value: Mapping[str, Any]) -> Self:
        """Returns what `dataclasses.asdict` has made plain."""
        return cls(**value)


def part_of(unit: str, *, salt: str, holdout_share: float) -> str:
    """Returns which part of a set a unit is in, `CALIBRATING` or `CONFIRMING`.

    Args:
      unit: Its name, which no other has: id of an example, or name of a cluster.
      salt: Fixed before any loss is seen.
      holdout_share: Chance of being in the part that confirms, in (0, 1).
    """
    # Another salt than where a part chooses among variants: that draw is independent of this one.
    return CONFIRMING if is_drawn(unit, salt=f"{salt}/confirm", share=holdout_share) else CALIBRATING


def is_drawn(unit: str, *, salt: str, share: float) -> bool:
    """Returns whether a unit is drawn, by a hash of its name, with a chance of `share`; draws by other salts differ."""
    drawn = int.from_bytes(hashlib.sha256(f"{salt}\n{unit}".encode()).digest()[:8], "big")
    return drawn < round(share * 2**64)


def salt_of(seed: int) -> str:
    """Returns the salt that orders examples, and draws the parts of a set."""
    return f"calm-beam/{seed}"
