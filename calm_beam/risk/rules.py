"""Rules settled before any loss is seen: the names of tail losses, the levels of joint tests, the rule to stop.

Only the standard library is used: a manifest's reader computes all of this again.

A tail loss is 1 where another loss exceeds a number. Its expectation is a share of outputs: bounding that of
`dissimilarity>0.3` by delta means that at most a share delta of outputs is less similar than 0.7.

Promises may have to hold together. Those with nothing left to test pass their epsilon on to the others.

A test may be watched while examples come in, until it has proved enough. An e-process stays valid whatever decides when
to stop, so a rule may use everything found up to now. The rule is settled beforehand all the same, so that a
reader can see what was asked for.
"""

import dataclasses
import itertools
import math
from collections.abc import Callable, Sequence

# A signed loss exceeds a number exactly where its positive part does.
TAILED = ("dissimilarity", "relu")


def tail_name(loss: str, above: float) -> str:
    """Returns the name of the loss that is 1 where a loss exceeds a number, and else 0.

    >>> tail_name("relu", 0.3)
    'relu>0.3'

    Args:
      loss: One of `TAILED`.
      above: The bound that a loss must exceed, in [0, 1).

    Raises:
      ValueError: If either is something else.
    """
    if loss not in TAILED:
        raise ValueError(f"a tail must be of the loss {' or '.join(TAILED)}, got {loss!r}.")
    if not 0 <= above < 1:
        raise ValueError(f"tail must be in [0, 1), got {above}: an output loses at most 1.")
    # Adding 0.0 turns -0.0 into 0.0.
    return f"{loss}>{float(above) + 0.0!r}"


def split_tail(name: str) -> tuple[str, float | None]:
    """Returns a loss and the bound that it has to exceed; None for a loss without a bound.

    >>> split_tail("dissimilarity>0.3"), split_tail("signed")
    (('dissimilarity', 0.3), ('signed', None))

    Raises:
      ValueError: If it contains `>` but is not a name that `tail_name` returns.
    """
    loss, sign, number = name.partition(">")
    if not sign:
        return name, None
    try:
        above = float(number)
    except ValueError:
        above = math.nan
    # Each loss has exactly one name, since losses are compared by name.
    if math.isnan(above) or name != tail_name(loss, above):
        raise ValueError(f"a tail must be written as {tail_name('relu', 0.3)!r} is, got {name!r}.")
    return loss, above


def tail_in_words(name: str) -> str:
    """Returns the bound of a tail loss as text to append to the kind of loss; empty for other losses.

    >>> tail_in_words("relu>0.3"), tail_in_words("relu")
    (' > 0.3', '')
    """
    _, above = split_tail(name)
    return "" if above is None else f" > {above:g}"


def joint_levels(
    epsilons: Sequence[float],
    *,
    has_ended: Callable[[int, float], bool] = lambda place, level: False,
    has_begun: Sequence[bool] | None = None,
) -> list[float]:
    """Returns the level at which each of several promises is tested, if the sum of their epsilons is to be kept.

    A promise is tested by its own procedure, at its own epsilon first. Once everything is found safe for a promise, it
    has nothing left to test: its level goes to the others, in proportion to their epsilons. So do the levels of
    promises that have nothing to test from the beginning.

    The chance of any wrong rejection is at most the sum of the epsilons, however the tests depend on each other, if
    every procedure keeps its level, and rejects no less at a higher one. Let W be the promises that test something that
    is not safe. While none of these has ended, none is tested at more than its epsilon times the sum of all divided by
    that of W. At those levels, which the data do not change, all procedures of W together err with probability at most
    the sum of all epsilons. If none errs there, none of W rejects all that it tests, so none ends, and the levels of
    W never grow beyond those. The p-values must not depend on the level at which they are tested.

    Args:
      epsilons: Epsilon of each promise, in (0, 1).
      has_ended: Function from a promise's index and a level to whether everything it tests is found safe at that level.
        If so, it must be so at any higher level. Without the function no promise has ended.
      has_begun: Whether a promise tests anything; None: all do. This must not depend on the losses of the tests.

    Returns:
      The level of the tests of each promise; for one that has ended the level at which it did, and for one without
      tests its epsilon.

    Source: Holm (1979) with weights, where each hypothesis is a family with a procedure of its own; Bretz, Maurer,
      Brannath and Posch (2009), A graphical approach to sequentially rejective multiple test procedures.

    >>> p_values = [[0.001, 0.01], [0.002, 0.04], [0.2]]
    >>> joint_levels([0.02, 0.02, 0.02], has_ended=lambda place, level: max(p_values[place]) <= level)
    [0.02, 0.03, 0.03]
    """
    levels = list(epsilons)
    left = [place for place in range(len(levels)) if has_begun is None or has_begun[place]]
    while left:
        if len(left) < len(levels):
            factor = math.fsum(epsilons) / math.fsum(epsilons[place] for place in left)
            for place in left:
                levels[place] = epsilons[place] * factor
        open_now = [place for place in left if not has_ended(place, levels[place])]
        if len(open_now) == len(left):
            break
        left = open_now
    return levels


# Number of rounds in a row without gain that end a calibration.
ROUNDS_WITHOUT_GAIN = 5


@dataclasses.dataclass(frozen=True)
class Proved:
    """The result of one guarantee after a round.

    Attributes:
      place: Index in the testing order of the setting that it would choose; -1 for none.
      cost: Cost of that setting, such as mean layers; if there is none, the cost of the full model.
    """

    place: int
    cost: float


@dataclasses.dataclass(frozen=True, kw_only=True)
class StopRule:
    """The rule of when to stop: the first part that is met stops.

    Without any part, only a complete proof or the end of the data stops.

    Attributes:
      place: Stop once every guarantee has chosen the setting at this index of the testing order, or a later one.
      cost: Stop once the choice of every guarantee costs at most this.
      gain: Stop once every guarantee has chosen a setting, and in each of `ROUNDS_WITHOUT_GAIN` rounds since then no
        cost fell by this share of itself.
    """

    place: int | None = None
    cost: float | None = None
    gain: float | None = None

    def reason(self, looks: Sequence[Sequence[Proved]], *, settings: int) -> str | None:
        """Returns the part that stops: `place`, `cost` or `gain`, or `all_proved` if nothing is left; None to go on.

        Args:
          looks: For every round up to now, the result of each guarantee.
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
