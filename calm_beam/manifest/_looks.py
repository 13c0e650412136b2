"""What must agree between the looks of one entry, whatever was tested: thresholds or settings."""

import math
from collections.abc import Mapping, Sequence
from itertools import pairwise
from typing import Protocol

from ._checks import ManifestError, shown

# p-values are not published below e to the power of minus this, 1e-300, and rounded up.
_MOST_LOG_CAPITAL = 300 * math.log(10)
_LOG_ROUNDING = 1e-6


class Looked(Protocol):
    """What an entry had come to after a round."""

    @property
    def n(self) -> int:
        """Independent units counted by then."""
        ...

    @property
    def log_capital(self) -> float:
        """Natural logarithm of the capital won by then."""
        ...


def check_counted(at: str, n: int, *, group: str | None) -> None:
    """Refuses 0 counted units but for a group, of which the first rounds may have no example."""
    if n == 0 and group is None:
        raise ManifestError(f"{at}.n must be an integer of at least 1, got 0")


def check_counts(looks: Sequence[Looked], *, group: str | None) -> None:
    """Refuses looks that are none, or whose counts do not grow from round to round."""
    if not looks:
        raise ManifestError("looks must have an entry for every round, got []")
    for index, look in enumerate(looks):
        check_counted(f"looks[{index}]", look.n, group=group)
    for index, (before, look) in enumerate(pairwise(looks), start=1):
        # A round may have no example of a group.
        if look.n < before.n or (look.n == before.n and group is None):
            raise ManifestError(
                f"looks[{index}].n must be {'above' if group is None else 'at least'} that of the round "
                f"before, {before.n}, got {look.n}"
            )


def check_last(looks: Sequence[Looked], expected: Mapping[str, object]) -> None:
    """Refuses a last look at which an attribute is not what it is at the end."""
    for name, value in expected.items():
        found = getattr(looks[-1], name)
        if found != value:
            raise ManifestError(
                f"looks[{len(looks) - 1}].{name} must be {shown(value)}, as at the end, got {shown(found)}"
            )


def check_capital(looks: Sequence[Looked], p_value: float, *, at: object) -> None:
    """Refuses capitals of which a p-value, that of the threshold or setting which is named, is not the inverse."""
    largest = max(look.log_capital for look in looks)
    if abs(math.log(p_value) + min(max(largest, 0), _MOST_LOG_CAPITAL)) > _LOG_ROUNDING:
        raise ManifestError(
            f"looks must come to a capital of 1 / {shown(p_value)}, which the p-value at {shown(at)} is made of, got "
            f"e^{largest:.6g}"
        )
