"""Plans that were asked of the same outputs before, and what that does to a promise, in words."""

from collections.abc import Sequence
from dataclasses import dataclass

from ._checks import ManifestError
from ._record import Record
from ._values import Text, UtcTime


@dataclass(frozen=True, kw_only=True)
class EarlierPlan(Record):
    """A plan that was asked of the same outputs before, as the list beside them says.

    Attributes:
      plan: Its digest.
      command: What asked it, such as `calibrate`.
      asked: When, ISO 8601 in UTC, ending in Z.
      answered: Whether a result of it was shown, or may have been.
    """

    plan: Text
    command: Text
    asked: UtcTime
    answered: bool


def check_earlier(earlier: Sequence[EarlierPlan] | None) -> None:
    """Refuses a list of no plans."""
    if earlier is not None and not earlier:
        raise ManifestError("earlier_plans must be left out where there are none, got []")


def plans_in_words(earlier: Sequence[EarlierPlan] | None, *, of: str = "outputs") -> str:
    """Returns which plan of the same outputs a manifest is about, and what that does to its promises.

    Args:
      earlier: The plans before it, as the manifest has them.
      of: What the plans were asked of: `outputs`, or `losses`.

    Returns:
      Two or three sentences; empty for the first plan.
    """
    if not earlier:
        return ""
    which = f"This is the {ordinal(len(earlier) + 1)} plan on these {of}, by the list beside them."
    shown = sum(each.answered for each in earlier)
    if not shown:
        what = "the earlier one" if len(earlier) == 1 else "an earlier one"
        return f"{which} No result of {what} was shown, so the promises stand."
    seen = "The result of an earlier one was" if shown == 1 else f"Results of {shown} earlier ones were"
    return (
        f"{which} {seen} shown before. Unless this plan was settled before that, or all of its examples are new, "
        "epsilon does not bound the chance that a promise here is wrong."
    )


def ordinal(number: int) -> str:
    """Returns a number as a place in an order.

    >>> [ordinal(number) for number in (1, 2, 3, 4, 11, 22, 113)]
    ['1st', '2nd', '3rd', '4th', '11th', '22nd', '113th']
    """
    ending = {1: "st", 2: "nd", 3: "rd"}.get(number % 10, "th")
    return f"{number}{'th' if 10 < number % 100 < 14 else ending}"
