"""The threshold of every position, as plain numbers: a server that compares with them needs no schedule."""

import math
import struct
from collections.abc import Sequence

from calm_beam.exits.schedules import SCHEDULES

from ._checks import ManifestError, check_number, shown
from .records import DecodeRecord

# Two correct exponentials differ by a few units in the last place of 2^-52. Less than that moves a float32, whose own
# are of 2^-23, only where the exact value lies next to the middle between two of them.
_ROUNDING = 2.0**-48


def check_positions(key: str, positions: tuple[float, ...], *, threshold: float, decode: DecodeRecord) -> None:
    """Refuses thresholds that are not those of the schedule.

    The writer computes in float64 and rounds to float32, and so do we. A constant schedule has no arithmetic that could
    differ: the numbers must be equal. A decaying one has an exponential, which mathematical libraries round differently
    in the last place: what must be equal is the float32 of a value within 2^-48 of ours, relatively. That is one
    float32 for all but one in millions of values, and one of two neighbours for those.

    Args:
      key: Where the positions stand.
      positions: Threshold of each position.
      threshold: What they are made of.
      decode: Names the schedule, and how many positions there are.

    Raises:
      ManifestError: If their number or a value differs.

    Source: CALM Eq. 5 (decaying threshold), and the formula in the released T5X code; as `calm_beam.exits.schedules`.
    """
    if len(positions) != decode.max_decode_length:
        raise ManifestError(
            f"{key} must have decode.max_decode_length entries, which is {decode.max_decode_length}, "
            f"got {len(positions)}"
        )
    for position, found in enumerate(positions):
        at = f"{key}[{position}]"
        check_number(at, found, low=0, high=1)
        low, high = _allowed(threshold, decode, position=position)
        if not low <= found <= high or found != _float32(found):
            raise ManifestError(
                f"{at} must be {shown(low)}, which schedule {decode.schedule} makes of threshold {shown(threshold)} "
                f"in float32, got {shown(found)}"
            )


def _allowed(threshold: float, decode: DecodeRecord, *, position: int) -> Sequence[float]:
    """Returns the lowest and the highest float32 that the threshold of a position can be."""
    schedule = SCHEDULES[decode.schedule]
    if not schedule.decays:
        return [_float32(threshold)] * 2
    assert decode.tau is not None
    scale, shift = schedule.factors(0.1 * math.exp(-float(decode.tau) * position / decode.max_decode_length))
    value = scale * threshold + shift
    return [_float32(min(1.0, value * factor)) for factor in (1 - _ROUNDING, 1 + _ROUNDING)]


def _float32(value: float) -> float:
    """Returns the nearest float32, of two equally near the even one."""
    return float(struct.unpack("<f", struct.pack("<f", value))[0])
