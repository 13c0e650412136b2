"""What is settled of promises before any loss is seen: the names of tail losses, the levels of tests, the rule to stop.

The standard library alone is used: a reader of a manifest computes all of it again.

A tail loss says whether another loss exceeds a number. Its expectation is a share of outputs: that of
`dissimilarity>0.3` at most delta means that at most a share delta of outputs is less similar than 0.7.

Promises may hold together. Those that have nothing left to test hand their epsilon on to the others.

A test may be watched while examples come in, until it has proved enough. Whatever decides when to stop, an e-process
stays valid: so a rule may look at everything that was found up to now. It is settled beforehand all the same, so that a
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
      above: In [0, 1).

    Raises:
      ValueError: If either is something else.
    """
    if loss not in TAILED:
        raise ValueError(f"a tail must be of the loss {' or '.join(TAILED)}, got {loss!r}.")
    if not 0 <= above < 1:
        raise ValueError(f"tail must be in [0, 1), got {above}: an output loses at most 1.")
    # -0.0 is 0.0.
    return f"{loss}>{float(above) + 0.0!r}"


def split_tail(name: str) -> tuple[str, float | None]:
    """Returns a loss and what it has to exceed; None for a loss that is counted as it is.

    >>> split_tail("dissimilarity>0.3"), split_tail("signed")
    (('dissimilarity', 0.3), ('signed', None))

    Raises:
      ValueError: If it is not a name of `tail_name`'s, though it has its sign.
    """
    loss, sign, number = name.partition(">")
    if not sign:
        return name, None
    try:
        above = float(number)
    except ValueError:
        above = math.nan
    # One name for one loss, since losses are compared by their names.
    if math.isnan(above) or name != tail_name(loss, above):
        raise ValueError(f"a tail must be written as {tail_name('relu', 0.3)!r} is, got {name!r}.")
    return loss, above


def tail_in_words(name: str) -> str:
    """Returns what a loss has to exceed to count, to be put behind the kind of loss; nothing where the mean is meant.

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

    A promise is tested as its procedure says, at its own epsilon first. One of which everything was found safe has
    nothing left to test: its level goes to the others, in proportion to their epsilons. So do those of promises that
    have nothing to test from the beginning.

    The chance of any wrong rejection is at most the sum of the epsilons, however the tests depend on each other, if
    every procedure keeps its level, and rejects no less at a higher one. Be W the promises that test something which is
    not safe. While none of these has ended, none is tested at more than its epsilon times the sum of all divided by
    that of W. At those levels, which the data do not change, all procedures of W together err with probability at most
    the sum of all epsilons. Where none errs there, none of W rejects all that it tests, so none ends, and the levels of
    W never grow beyond those. The p-values must not depend on the level at which they are looked at.

    Args:
      epsilons: Of each promise, in (0, 1).
      has_ended: Whether a promise, given by its place, has found everything safe that it tests, at a level. What is so
        at some level is so at any above. None of them without it.
      has_begun: Whether a promise tests anything; None: all do. What decides that must not depend on the losses that
        are tested by.

    Returns:
      For each promise the level of its tests; of one that has ended that at which it did, and of one without tests its
      epsilon.

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
