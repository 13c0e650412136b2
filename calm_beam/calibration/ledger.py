"""What a certification that is watched has settled and counted: a file that one call leaves to the next.

All that is proved is computed anew from the losses at every call. This file is there to refuse what would void it: a
plan that is settled anew after losses were seen, and losses of a counted round that are others than they were.
"""

import dataclasses
from collections.abc import Sequence
from typing import Self

from calm_beam.errors import UsageError
from calm_beam.manifest import EarlierEnd, ManifestError, SettingManifest, SettingPlan, content_digest
from calm_beam.risk.setting_sums import LossesError
from calm_beam.storage import is_file, open_input, strict_json
from calm_beam.storage.sealed_json import write_sealed

LEDGER = "plan.json"
_SCHEMA = "calm-beam/certifying/v1"


@dataclasses.dataclass(frozen=True, kw_only=True)
class Ledger:
    """What was settled and counted up to now.

    Attributes:
      plan: What is asked for.
      rounds: For every round that was looked at, what identifies its losses.
      continues: Where earlier rules had stopped; the earliest first.
    """

    plan: SettingPlan
    rounds: tuple[str, ...] = ()
    continues: tuple[EarlierEnd, ...] = ()

    def going_on(self, plan: SettingPlan, *, ended: SettingManifest | None, resumes: bool) -> Self:
        """Returns the ledger of a call that asks for a plan.

        Args:
          plan: What is asked for now.
          ended: The manifest in which the settled plan has ended; None if it has not.
          resumes: Whether to go on with another rule, where the rule has stopped it.

        Raises:
          UsageError: If something else is asked for than was settled.
        """
        assert plan.sequential is not None
        if plan.digest == self.plan.digest:
            return self
        if plan.without_rule().digest != self.plan.without_rule().digest:
            raise UsageError(
                f"the plan was settled at the first call, and {' and '.join(_differing(plan, self.plan))} of it cannot "
                "be changed: losses may have been seen since. Ask for what was settled, or begin anew in another "
                "--output, with other examples."
            )
        if ended is None or ended.sequential is None:
            raise UsageError(
                "the rule to stop is part of the plan, and another one was settled at the first call. Ask for that "
                "one. Once it has stopped, --resume goes on by another."
            )
        if ended.sequential.rounds == ended.sequential.of_rounds:
            raise UsageError("all examples have been counted, so that no rule goes on from there.")
        if not resumes:
            raise UsageError("it had stopped by another rule to stop. --resume goes on by this one, and says so.")
        end = EarlierEnd(plan=self.plan.digest, rounds=ended.sequential.rounds, ended_by=ended.sequential.ended_by)
        return dataclasses.replace(self, plan=plan, continues=(*self.continues, end))

    def with_rounds(self, digests: Sequence[str], *, missing: str) -> Self:
        """Returns the ledger after some rounds were looked at.

        Args:
          digests: What identifies their losses.
          missing: What the losses lack for another round, in words.

        Raises:
          LossesError: If a round that was looked at before is not among them, or has other losses.
        """
        for number, before in enumerate(self.rounds, start=1):
            if number > len(digests):
                raise LossesError(
                    f"round {number} was counted before, and is not whole now: {missing}. Restore its losses."
                )
            if digests[number - 1] != before:
                raise LossesError(
                    f"the losses or costs of round {number} are others than they were when it was counted. What was "
                    "seen must not be changed: restore them."
                )
        return dataclasses.replace(self, rounds=tuple(digests))

    def write(self, path: str, *, replaces: str) -> None:
        """Writes the file; it appears whole or not at all.

        Args:
          path: Its name.
          replaces: Its version when the call began, empty if there was none.

        Raises:
          UsageError: If another call has written it since.
        """
        content: dict[str, object] = {
            "schema": _SCHEMA,
            "plan": self.plan.to_dict(),
            "rounds": list(self.rounds),
            "continues": [end.to_dict() for end in self.continues],
        }
        try:
            write_sealed(path, content, replaces=replaces)
        except FileExistsError:
            raise UsageError(f"{path}: another call has written it meanwhile. Repeat this one.") from None

    @classmethod
    def read(cls, path: str) -> Self | None:
        """Returns what a file holds; None if there is none.

        Raises:
          UsageError: If it is not as it was written.
        """
        if not is_file(path):
            return None
        try:
            with open_input(path) as file:
                content = strict_json.loads(file.read())
            if content["schema"] != _SCHEMA or content["digest"] != content_digest(content):
                raise ValueError("it was changed after it was written")
            plan = SettingPlan.from_dict(content["plan"], at="plan")
            if plan.sequential is None:
                raise ValueError("its plan is not sequential")
            return cls(
                plan=plan,
                rounds=tuple(map(str, content["rounds"])),
                continues=tuple(EarlierEnd.from_dict(end, at="continues") for end in content["continues"]),
            )
        except (ManifestError, AttributeError, KeyError, TypeError, ValueError) as error:
            raise UsageError(
                f"{path}: is not as calm-beam writes it ({error}). Restore it, or begin anew with --overwrite."
            ) from error


# What parts of a plan are called, by key.
_NAMES = {
    "order": "the order of the settings",
    "tests": "the tests",
    "joint_epsilon": "--joint",
    "group_key": "--group_key",
    "cluster_key": "--cluster_key",
    "salt": "--seed",
    "ids": "the ids",
    "examples": "their number",
    "round_examples": "--round_examples",
    "costs": "the costs",
}


def _differing(one: SettingPlan, other: SettingPlan) -> list[str]:
    def flat(plan: SettingPlan) -> dict[str, object]:
        sequential = plan.without_rule().sequential
        assert sequential is not None
        return {**plan.to_dict(), **sequential.to_dict()}

    ours, theirs = flat(one), flat(other)
    return [name for key, name in _NAMES.items() if ours.get(key) != theirs.get(key)]
