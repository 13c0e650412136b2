"""When a test that is watched while examples come in has proved enough.

Whatever decides when to stop, an e-process stays valid: so a rule may look at everything that was found up to now. It
is settled beforehand all the same, so that a reader can see what was asked for.
"""

import dataclasses
import itertools
from collections.abc import Sequence

# Rounds in a row without gain that end a calibration.
ROUNDS_WITHOUT_GAIN = 5


@dataclasses.dataclass(frozen=True)
class Proved:
    """What one guarantee has come to after a round.

    Attributes:
      place: Index in the testing order of the setting that it would choose; -1 for none.
      cost: Of that setting, such as mean layers; that of doing without where there is none.
    """

    place: int
    cost: float


@dataclasses.dataclass(frozen=True, kw_only=True)
class StopRule:
    """When to stop; whichever part says so first. Without any part, only what is proved or read to the end stops.

    Attributes:
      place: Once every guarantee has chosen the setting at this index of the testing order, or a later one.
      cost: Once what every guarantee has chosen costs at most this.
      gain: Once every guarantee has chosen a setting, and in each of `ROUNDS_WITHOUT_GAIN` rounds since then no cost
        fell by this share of itself.
    """

    place: int | None = None
    cost: float | None = None
    gain: float | None = None

    def reason(self, looks: Sequence[Sequence[Proved]], *, settings: int) -> str | None:
        """Returns which part says stop: `place`, `cost` or `gain`, or `all_proved` if nothing is left; None to go on.

        Args:
          looks: For every round up to now, what each guarantee has come to.
          settings: Number of settings in the testing order.

        >>> rule = StopRule(cost=4.0)
        >>> rule.reason([[Proved(0, 7.5), Proved(-1, 8.0)]], settings=20)
        >>> rule.reason([[Proved(0, 7.5), Proved(-1, 8.0)], [Proved(9, 4.0), Proved(12, 3.5)]], settings=20)
        'cost'
        """
        last = looks[-1]
        if all(proved.place == settings - 1 for proved in last):
            return "all_proved"
        if self.place is not None and all(proved.place >= self.place for proved in last):
            return "place"
        if self.cost is not None and all(proved.place >= 0 and proved.cost <= self.cost for proved in last):
            return "cost"
        if self.gain is not None and _gains_nothing(looks, share=self.gain):
            return "gain"
        return None


def _gains_nothing(looks: Sequence[Sequence[Proved]], *, share: float) -> bool:
    recent = looks[-ROUNDS_WITHOUT_GAIN - 1 :]
    if len(recent) <= ROUNDS_WITHOUT_GAIN or any(proved.place < 0 for proved in recent[0]):
        return False
    return not any(
        after.cost <= before.cost * (1 - share)
        for earlier, later in itertools.pairwise(recent)
        for before, after in zip(earlier, later, strict=True)
    )
