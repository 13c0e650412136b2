"""What is checked wherever a set is split in two, one part of which chooses what the other one tests."""

from collections.abc import Sequence

from calm_beam.risk.pvalues import P_VALUES


def check_split(*, keys: Sequence[str], p_value: str, share: tuple[str, float], fault: str) -> None:
    """Refuses to split units that cannot be told apart, for a test that needs them together, or by no share.

    Args:
      keys: One per unit.
      p_value: A key of `P_VALUES`, by which a part is tested.
      share: Name and value of the chance of a unit to be in one of the parts, in (0, 1).
      fault: What a unit in both parts would do.

    Raises:
      ValueError: If keys repeat, the p-value bets on the units one after the other, or the share is out of range.
    """
    if len(set(keys)) != len(keys):
        raise ValueError(f"keys must be distinct: a unit in both parts would {fault}.")
    if P_VALUES[p_value].needs_table:
        raise ValueError(
            f"p_value {p_value} bets on single losses in an order, which is not kept here. Take another one."
        )
    name, value = share
    if not 0 < value < 1:
        raise ValueError(f"{name} must be in (0, 1), got {value}. For 30 % pass 0.3.")


def check_parts(choosing: int, testing: int, *, verb: str) -> None:
    """Refuses parts of a set one of which is empty.

    Args:
      choosing: Units that choose.
      testing: Units of the other part.
      verb: What these do with what was chosen.

    Raises:
      ValueError: If a part is empty.
    """
    if not (choosing and testing):
        raise ValueError(
            f"of {choosing + testing} units, {choosing} were drawn to choose what the other {testing} {verb}. "
            "Both parts need some: take more examples."
        )
