"""Promises that hold together, of which those that have nothing left to test hand their epsilon on to the others.

The standard library alone is used: who reads a manifest computes the levels again.
"""

import math
from collections.abc import Callable, Sequence


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
