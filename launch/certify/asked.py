"""The tests that the flags of `calm-beam certify` ask for, of all examples and of their groups."""

import argparse
from collections.abc import Sequence

from calm_beam.calibration.groups import MOST_GROUPS
from calm_beam.calibration.settings_plan import all_tests
from calm_beam.launch.flags import UsageError
from calm_beam.manifest import SettingTest


def tests_of(
    flags: argparse.Namespace, *, loss: str, groups: Sequence[str], losses: int | None
) -> tuple[SettingTest, ...]:
    """Returns what the flags ask.

    Args:
      flags: Those of `certify_parser`.
      loss: What the losses are.
      groups: Groups of examples with tests of their own.
      losses: As in `all_tests`.

    Raises:
      UsageError: As `all_tests`.
    """
    return all_tests(
        groups=groups,
        deltas=flags.delta,
        epsilons=flags.epsilon,
        tails=flags.tail,
        loss=loss,
        p_value=flags.p_value,
        procedure=flags.procedure,
        joint=flags.joint,
        clustered=flags.cluster_key is not None,
        watched=flags.sequential,
        losses=losses,
    )


def groups_of(flags: argparse.Namespace, names: Sequence[str] | None) -> tuple[str, ...]:
    """Returns the groups that have tests of their own, ascending.

    Args:
      flags: As above.
      names: The group of every example; None without groups.

    Raises:
      UsageError: If they are too many.
    """
    groups = tuple(sorted(set(names or ())))
    if len(groups) > MOST_GROUPS:
        raise UsageError(
            f"--group_key={flags.group_key}: there are {len(groups)} groups, more than {MOST_GROUPS}. Each of them "
            "needs hundreds of examples to prove anything: name a column with few values."
        )
    return groups
