"""The two parts of a calibration set: selection chooses thresholds, and the holdout confirms them.

A hash of each unit's name draws its part independently, before anything is known about it. Sizes vary like a binomial.
That voids nothing, since sizes and losses are independent, and each test knows its own n.
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
      confirm_share: Chance of a unit to be in the holdout, in (0, 1); files use this name.
      salt: Fixed before any loss is seen.
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
        """Returns whether a unit is in this part, by its unique name."""
        return part_of(unit, salt=self.salt, holdout_share=self.confirm_share) == self.name

    def takes(self, example: Example) -> bool:
        """Returns whether an example is in this part, by its cluster or else by its unique id.

        Derived ids must have been made unique before: if equal examples stayed together, a frequent prompt would be in
        one part only, and neither part would be a sample of what is served.
        """
        return self.has(example.id if example.cluster is None else example.cluster)

    def that_confirms(self) -> Self:
        """Returns the holdout that belongs to this selection part."""
        return dataclasses.replace(self, name=CONFIRMING)

    @classmethod
    def from_dict(cls, value: Mapping[str, Any]) -> Self:
        """Returns the split from the values of `dataclasses.asdict`."""
        return cls(**value)


def part_of(unit: str, *, salt: str, holdout_share: float) -> str:
    """Returns the part of a unit, `CALIBRATING` (selection) or `CONFIRMING` (holdout).

    Args:
      unit: Its unique name: id of an example, or name of a cluster.
      salt: Fixed before any loss is seen.
      holdout_share: Chance of being in the holdout, in (0, 1).
    """
    # The choice among variants uses another salt, so that the two draws are independent.
    return CONFIRMING if is_drawn(unit, salt=f"{salt}/confirm", share=holdout_share) else CALIBRATING


def is_drawn(unit: str, *, salt: str, share: float) -> bool:
    """Returns whether a hash of a unit's name draws it, with chance `share`; different salts draw independently."""
    drawn = int.from_bytes(hashlib.sha256(f"{salt}\n{unit}".encode()).digest()[:8], "big")
    return drawn < round(share * 2**64)


def salt_of(seed: int) -> str:
    """Returns the salt that orders examples and draws the parts of a set."""
    return f"calm-beam/{seed}"
