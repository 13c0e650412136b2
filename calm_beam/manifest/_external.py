"""The manifest of kind external: what was proved of a sweep that was made elsewhere."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import pairwise
from typing import Annotated, ClassVar, Unpack

from calm_beam.risk.stopping import Proved

from ._checks import ManifestError, shown
from ._choice import ANY_ENTRY, EntryChoice, EntryWords
from ._earlier_plans import EarlierPlan
from ._manifest import EXTERNAL, WrittenManifest
from ._plan import SettledPlan
from ._record import Record
from ._sequential import ExternalSequentialPlan, SequentialRecord, check_declared_rounds
from ._tests import AskedTest, LookRecord, StepRecord, TestedEntry
from ._values import Cost, Count, Text, Unit, UtcTime, one_of
from .records import CountedData, GroupRecord, check_clusters

EXTERNAL_DIRECTIONS = ("higher", "lower")
"""Which scores of a metric are better."""

EXTERNAL_LOSSES = ("given", "signed", "relu")
"""Losses of an external sweep: in [0, 1] as they were given; in [-1, 1]; what is positive of the latter."""


MOST_SAMPLED_IDS = 256
"""How many digests of ids a manifest of kind external has at most."""


@dataclass(frozen=True, kw_only=True)
class SettingRecord(Record):
    """One setting of what was swept.

    Attributes:
      name: What it is called.
      cost: Its cost, or the mean over the examples where that differs between them; None where nobody told one.
      fingerprint: Identifies examples and losses under this setting.
    """

    name: Text
    cost: Cost | None
    fingerprint: Text


@dataclass(frozen=True, kw_only=True)
class ExternalGroup(GroupRecord):
    """A group of examples that has entries of its own.

    Attributes:
      clusters: Number of clusters that they are in, where clusters are the independent units; None otherwise.
    """

    clusters: Count | None

    def __post_init__(self) -> None:
        super().__post_init__()
        check_clusters(self.examples, self.clusters)

    @property
    def units(self) -> int:
        """Number of independent units."""
        return self.examples if self.clusters is None else self.clusters


@dataclass(frozen=True, kw_only=True)
class ExternalDataRecord(CountedData):
    """The examples of the sweep.

    Attributes:
      groups: The groups that have entries of their own, by name, ascending.
      id_sample: The smallest digests of ids, up to `MOST_SAMPLED_IDS` of them, ascending: to notice examples that come
        again; None in manifests of earlier writers.
    """

    _OPTIONAL: ClassVar[tuple[str, ...]] = ("id_sample",)
    _FIRST: ClassVar[tuple[str, ...]] = ("patterns", "examples", "clusters", "groups", "fingerprint")

    groups: tuple[ExternalGroup, ...]
    id_sample: tuple[Text, ...] | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        names = [group.name for group in self.groups]
        if names != sorted(set(names)):
            raise ManifestError(f"groups must be sorted by name, each once, got {shown(names)}")
        for index, group in enumerate(self.groups):
            if (group.clusters is None) != (self.clusters is None):
                raise ManifestError(f"groups[{index}].clusters must be null exactly if clusters is")
        total = sum(group.examples for group in self.groups)
        if self.groups and total != self.examples:
            raise ManifestError(f"groups must have {self.examples} examples together, as examples says, got {total}")
        if self.id_sample is not None:
            expected = min(self.examples, MOST_SAMPLED_IDS)
            if list(self.id_sample) != sorted(set(self.id_sample)) or len(self.id_sample) != expected:
                raise ManifestError(f"id_sample must have {expected} digests, ascending, got {shown(self.id_sample)}")

    def units_of(self, group: str | None) -> int:
        """Returns the number of independent units in a group; None for all.

        Raises:
          ManifestError: If there is no such group.
        """
        if group is None:
            return self.units
        found = next((each for each in self.groups if each.name == group), None)
        if found is None:
            raise ManifestError(f"group must be one of data.groups, got {shown(group)}")
        return found.units


@dataclass(frozen=True, kw_only=True)
class ExternalTest(AskedTest):
    """One promise that was asked for, of settings.

    Attributes:
      loss: One of `EXTERNAL_LOSSES`.
      tail: A loss that an example may have: delta is then the share of examples that may lose more. None where the mean
        loss is bounded.
    """

    _FIRST: ClassVar[tuple[str, ...]] = ("group", "loss", "tail")

    loss: Annotated[str, one_of(EXTERNAL_LOSSES)]
    tail: Unit | None

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.tail is not None and self.tail >= 1:
            raise ManifestError(f"tail must be below 1, got {shown(self.tail)}")

    @property
    def is_signed(self) -> bool:
        """Whether losses lie in [-1, 1] and not in [0, 1]; those of a tail are 0 and 1."""
        return self.loss == "signed" and self.tail is None


@dataclass(frozen=True, kw_only=True)
class ExternalPlan(SettledPlan[ExternalTest, ExternalSequentialPlan]):
    """What was settled before any loss was summed.

    Attributes:
      order: All settings in testing order, the safest first.
      baseline: Run whose scores the others are compared with; None where losses were given.
      task: Task of the scores; None where nobody named one.
      metric: Metric of the scores; None where losses were given.
      direction: Which scores of the metric are better, one of `EXTERNAL_DIRECTIONS`; None where losses were given, and
        in manifests of earlier writers, which took higher ones for better without asking.
    """

    _OPTIONAL: ClassVar[tuple[str, ...]] = ("direction", "sequential")
    _FIRST: ClassVar[tuple[str, ...]] = (
        *("order", "tests", "joint_epsilon", "group_key", "cluster_key", "salt"),
        *("baseline", "task", "metric", "direction"),
    )
    _TESTED: ClassVar[str] = "settings"

    order: tuple[Text, ...]
    baseline: Text | None
    task: Text | None
    metric: Text | None
    direction: Annotated[str, one_of(EXTERNAL_DIRECTIONS)] | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        if not self.order or len(set(self.order)) != len(self.order):
            raise ManifestError(f"order must name one or more settings, each once, got {shown(self.order)}")
        if self.direction is not None and self.metric is None:
            raise ManifestError(f"direction must be null without metric, got {shown(self.direction)}")
        if self.sequential is not None:
            try:
                self.sequential.check_order(self.order)
            except ManifestError as error:
                raise ManifestError(f"sequential.{error}") from None

    @property
    def _grid(self) -> Sequence[object]:
        return self.order


@dataclass(frozen=True, kw_only=True)
class ExternalStep(StepRecord):
    """The test of one setting.

    Attributes:
      setting: The setting.
      cost: Cost of the setting; None where nobody told one.
    """

    _FIRST: ClassVar[tuple[str, ...]] = ("setting",)

    setting: Text
    cost: Cost | None

    @property
    def tested(self) -> str:
        """The setting."""
        return self.setting


@dataclass(frozen=True, kw_only=True)
class ExternalLook(LookRecord):
    """What an entry had come to after a round.

    Attributes:
      setting: The last setting in testing order that was accepted by then; None for none.
      cost: Its cost, or the mean over the examples counted by then; None where nobody told, and without a setting.
    """

    _FIRST: ClassVar[tuple[str, ...]] = ("n", "setting", "cost")

    setting: Text | None
    cost: Cost | None

    def proved(self, grid: Sequence[object]) -> Proved:
        """Returns the setting by its place, and its cost; infinity where nobody told, and without a setting."""
        return Proved(
            -1 if self.setting is None else grid.index(self.setting), math.inf if self.cost is None else self.cost
        )


@dataclass(frozen=True, kw_only=True)
class ExternalCalibration(ExternalTest, TestedEntry[ExternalStep, ExternalLook]):
    """One promise of settings, and the tests it rests on.

    Attributes:
      setting: The last setting in testing order that was accepted; None if none was.
      cost: Its cost; None where nobody told one, and where there is no setting.
      risk: Its empirical risk; None where there is no setting.
    """

    _OPTIONAL: ClassVar[tuple[str, ...]] = ("looks", "example_risk")
    _FIRST: ClassVar[tuple[str, ...]] = (
        *("group", "loss", "tail", "delta", "epsilon", "p_value", "procedure"),
        *("setting", "cost", "risk"),
    )
    _TESTED: ClassVar[str] = "setting"
    _NOTHING: ClassVar[str] = "without a setting"

    setting: str | None
    cost: float | None
    risk: float | None

    def __post_init__(self) -> None:
        super().__post_init__()
        if len({step.setting for step in self.path}) != len(self.path):
            raise ManifestError(f"path must test every setting once, got {shown([step.setting for step in self.path])}")
        chosen = self.chosen
        for name in ("setting", "cost", "risk"):
            expected = None if chosen is None else getattr(chosen, name)
            if getattr(self, name) != expected:
                raise ManifestError(
                    f"{name} must be {shown(expected)}, as the last one rejected in path says (null for none), "
                    f"got {shown(getattr(self, name))}"
                )
        if self.looks is not None:
            self._check_looks(self.looks)

    @property
    def _is_promised(self) -> bool:
        return self.setting is not None

    def _check_looks(self, looks: tuple[ExternalLook, ...]) -> None:
        # What was accepted at a look stays accepted, so that a later look has it or a later setting.
        places: dict[str | None, int] = {None: -1}
        places |= {step.setting: place for place, step in enumerate(self.path) if step.rejected}
        for index, look in enumerate(looks):
            if look.setting not in places:
                raise ManifestError(
                    f"looks[{index}].setting must be one that path rejects, or null, got {shown(look.setting)}"
                )
            if look.setting is None and look.cost is not None:
                raise ManifestError(f"looks[{index}].cost must be null without a setting, got {shown(look.cost)}")
        for index, (before, look) in enumerate(pairwise(looks), start=1):
            if places[look.setting] < places[before.setting]:
                raise ManifestError(
                    f"looks[{index}].setting must not come before {shown(before.setting)}, which was accepted before, "
                    f"got {shown(look.setting)}"
                )
        self._check_end(looks, {"setting": self.setting, "cost": self.cost})


@dataclass(frozen=True, kw_only=True)
class ExternalManifest(WrittenManifest):
    """What was proved of the settings of a sweep that was made elsewhere.

    Attributes:
      created: When the run was started, ISO 8601 in UTC, ending in Z.
      settings: All settings in testing order.
      data: The examples.
      plan: What was settled before any loss was summed.
      earlier_plans: Plans that were asked in the same output directory before, the earliest first; None where there
        were none, and in manifests that do not say.
      sequential: How it ended, if it was watched round by round; None where all examples count.
      calibrations: The promises, at least one.
      guarantee: What they mean, in words.
      software: Versions by name. Copied, so that later changes to the caller's dict do not reach the manifest.
    """

    KIND: ClassVar[str | None] = EXTERNAL
    _HTML: ClassVar[str] = "external_manifest_html"
    _OPTIONAL: ClassVar[tuple[str, ...]] = ("earlier_plans", "sequential")

    created: UtcTime
    settings: tuple[SettingRecord, ...]
    data: ExternalDataRecord
    plan: ExternalPlan
    earlier_plans: tuple[EarlierPlan, ...] | None = None
    sequential: SequentialRecord | None = None
    calibrations: tuple[ExternalCalibration, ...]
    guarantee: Text
    # Left out of the hash only because a dict has none; equality does compare it.
    software: Mapping[str, str] = field(hash=False)

    @classmethod
    def _check_kind(cls, value: object) -> None:
        if isinstance(value, Mapping) and value.get("kind") != cls.KIND:
            raise ManifestError(
                f"kind must be {shown(cls.KIND)}, got {shown(value.get('kind'))}: read_manifest reads manifests of "
                "calibrate, which have no kind"
            )

    def __post_init__(self) -> None:
        super().__post_init__()
        names = tuple(setting.name for setting in self.settings)
        if names != self.plan.order:
            raise ManifestError(f"settings must be those of plan.order, in that order, got {shown(names)}")
        for key, present in (("cluster", self.data.clusters is not None), ("group", bool(self.data.groups))):
            if (getattr(self.plan, f"{key}_key") is not None) != present:
                raise ManifestError(f"data.{key}s must be there exactly if plan.{key}_key is not null")
        self.plan.check_calibrations(self.calibrations)
        self._check_steps()
        planned = self.plan.sequential
        check_declared_rounds(
            self.calibrations,
            planned,
            self.sequential,
            order=self.plan.order,
            examples=self.data.examples,
            has_clusters=self.data.clusters is not None,
        )
        declared = None if planned is None else planned.costs
        found = tuple(setting.cost for setting in self.settings)
        if declared is not None and found != declared:
            raise ManifestError(f"settings must cost what plan.sequential.costs says, got {shown(found)}")

    def _check_steps(self) -> None:
        """Refuses tests that are at odds with the data or with what settings cost."""
        costs = {setting.name: setting.cost for setting in self.settings}
        for place, entry in enumerate(self.calibrations):
            try:
                units = self.data.units_of(entry.group)
            except ManifestError as error:
                raise ManifestError(f"calibrations[{place}].{error}") from None
            if entry.example_risk is not None and self.data.clusters is None:
                raise ManifestError(f"calibrations[{place}].example_risk must be left out where data.clusters is null")
            for index, step in enumerate(entry.path):
                at = f"calibrations[{place}].path[{index}]"
                if step.n != units:
                    raise ManifestError(f"{at}.n must be {units}, as data says, got {step.n}")
                if step.cost != costs[step.setting]:
                    raise ManifestError(
                        f"{at}.cost must be {shown(costs[step.setting])}, as settings says, got {shown(step.cost)}"
                    )

    def calibration(self, choice: EntryChoice = ANY_ENTRY, **words: Unpack[EntryWords]) -> ExternalCalibration:
        """Returns the one entry with these values; delta and epsilon may be left out where one matches the rest.

        Args:
          choice: Which entry, as one value.
          words: Or word by word, which counts before `choice`:
            group: Its group of examples; None for the entry of all examples.
            tail: The loss that an example may have; None for the entry of the mean loss.
            delta: Risk tolerance, exactly as calibrated.
            epsilon: Allowed probability of breaking it, exactly as calibrated.

        Returns:
          The entry. Its `setting` is None where none was found safe.

        Raises:
          ManifestError: If no entry or more than one matches; the message lists those there are.
        """
        choice = replace(choice, **words)
        choice.check_for_settings()
        found = [entry for entry in choice.among(self.calibrations) if entry.tail == choice.tail]
        if len(found) == 1:
            return found[0]
        there = "; ".join(
            ", ".join(f"{name}={shown(getattr(entry, name))}" for name in ("group", "tail", "delta", "epsilon"))
            for entry in self.calibrations
        )
        asked = {"group": choice.group, "tail": choice.tail, **choice.promise()}
        described = ", ".join(f"{name}={shown(value)}" for name, value in asked.items())
        raise ManifestError(f"{len(found)} calibrations have {described}, expected one. The manifest has: {there}.")
