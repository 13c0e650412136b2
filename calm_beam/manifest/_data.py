"""The calibration data in a manifest: the examples, their groups and clusters, and texts that metrics did not see."""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Annotated, ClassVar

from calm_beam.errors import ManifestError
from calm_beam.storage.record_values import AtLeast, Cost, Count, Items, OneOf, Positive, String, Text, shown
from calm_beam.storage.records import Record

from ._model import EngineRecord

# Readers hold a manifest in memory; the whole list is in `failures.jsonl` next to it.
MOST_FAILED_IDS = 1000
_FAILED = Items(1, "name those that failed, each once", MOST_FAILED_IDS, unique=True)
_SORTED = "have one or more {}, ascending, each once"
SERVED_DECODERS = ("batch",)
MOST_SAMPLED_IDS = 256
"""Largest number of id digests in a manifest of kind settings."""


_IdDigest = Annotated[str, String(form="[0-9a-f]{16}")]


@dataclass(frozen=True, kw_only=True)
class GroupRecord(Record):
    """A group of the calibration set.

    Attributes:
      name: Name of the group in the data.
      examples: Number of its examples; 0 if a sequential calibration stopped before the first of them.
    """

    name: Text
    examples: Count

    @property
    def units(self) -> int:
        """Number of independent units."""
        return self.examples


@dataclass(frozen=True, kw_only=True)
class SettingGroup(GroupRecord):
    """A group of examples that has its own entries.

    Attributes:
      clusters: Number of clusters of the examples, if clusters are the independent units; None otherwise.
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
class CountedData(Record):
    """The examples that a proof rests on, of a calibration set or of a sweep that was made elsewhere.

    Attributes:
      patterns: Files or runs that the examples, or their losses, were read from.
      examples: Number of examples, failed ones included.
      clusters: Number of clusters, if clusters are the independent units; None otherwise.
      groups: The groups of the examples, by name, ascending.
      fingerprint: Fingerprint of the examples; for a sweep, also of their losses under all settings.
    """

    patterns: tuple[Text, ...]
    examples: Positive
    clusters: Positive | None
    groups: tuple[GroupRecord, ...] | None
    fingerprint: Text

    def __post_init__(self) -> None:
        super().__post_init__()
        check_clusters(self.examples, self.clusters)
        if not self.groups:
            return
        check_ascending("groups", [group.name for group in self.groups], of="names")
        if (total := sum(group.examples for group in self.groups)) != self.examples:
            raise ManifestError(f"groups must have all examples, of which there are {self.examples}, got {total}")

    @property
    def units(self) -> int:
        """Number of independent units: clusters if there are any, examples otherwise."""
        return self.examples if self.clusters is None else self.clusters

    def units_of(self, group: str | None) -> int | None:
        """Returns the number of independent units that tested a promise about a group; None for an unknown group.

        A `group` of None means a promise about all: returns the number of all units.
        """
        if group is None:
            return self.units
        return next((each.units for each in self.groups or () if each.name == group), None)


def check_ascending(key: str, names: Sequence[str], *, of: str) -> None:
    """Refuses names that do not ascend, each once."""
    if any(after <= before for before, after in pairwise(names)):
        raise ManifestError(f"{key} must {_SORTED.format(of)}, got {shown(names)}")


def check_clusters(examples: int, clusters: int | None) -> None:
    """Refuses a number of clusters that is impossible for this many examples."""
    if clusters is not None:
        # If there are examples, there is at least one cluster.
        AtLeast(min(1, examples))("clusters", clusters)
        if clusters > examples:
            raise ManifestError(f"clusters must be at most examples, which is {examples}, got {clusters}")


@dataclass(frozen=True, kw_only=True)
class UnseenRecord(Record):
    """Examples with texts of which a metric saw nothing, or too little; at most a tenth of all, or the run fails.

    Attributes:
      metric: Name of the metric.
      no_token: Examples with two different texts that were compared and in which the metric saw no token: they score 0.
      few_letters: Examples where the metric's tokeniser drops more than half of the letters and digits of the full
        model's output, or of a reference it is compared with.
    """

    metric: Text
    no_token: Count
    few_letters: Count

    def __post_init__(self) -> None:
        super().__post_init__()
        if not self.no_token and not self.few_letters:
            raise ManifestError("no_token or few_letters must be above 0, got 0 and 0: leave the metric out")


@dataclass(frozen=True, kw_only=True)
class DataRecord(CountedData):
    """The calibration set.

    Attributes:
      choosing: Number of independent units that chose what to test and in which order; the others tested it. None if
        the order was fixed beforehand.
      groups: The groups of its examples, by name in ascending order; None if groups are not distinguished.
      duplicates: Examples whose input had already occurred; they weaken the assumption of independent draws.
      failed: Examples that could not be decoded or scored and count with loss 1 at every threshold.
      failed_ids: Their ids in ascending order, the first `MOST_FAILED_IDS` of them; None in manifests that do not
        record them, and if none failed. `failures.jsonl` next to the manifest lists all of them, with reasons.
      truncated: Examples whose input was cut to the maximum length.
      several_turns: Examples that are chats of several turns; None for none, and a promise about chats of one turn.
      unseen: Examples with texts that a metric did not see, by metric in ascending order; None if there are none, and
        in manifests that do not record them.
    """

    _FIRST: ClassVar[tuple[str, ...]] = (
        *("patterns", "examples", "clusters", "choosing", "groups"),
        *("duplicates", "failed", "failed_ids", "truncated", "several_turns", "unseen"),
    )

    clusters: Positive | None = None
    choosing: Positive | None = None
    groups: Annotated[tuple[GroupRecord, ...], Items(1, _SORTED.format("names"))] | None = None
    duplicates: Count
    failed: Count
    failed_ids: Annotated[tuple[Text, ...], _FAILED] | None = None
    truncated: Count
    several_turns: Positive | None = None
    unseen: Annotated[tuple[UnseenRecord, ...], Items(1, _SORTED.format("metrics"))] | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        for key in ("duplicates", "failed", "truncated", "several_turns"):
            count = getattr(self, key)
            if count is not None and count > self.examples:
                raise ManifestError(f"{key} must be at most examples, which is {self.examples}, got {count}")
        if self.failed_ids is not None:
            self._check_failed_ids(self.failed_ids)
        check_unseen(self.unseen, examples=self.examples)
        if self.choosing is not None and self.choosing >= self.units:
            raise ManifestError(f"choosing must leave others to test, of {self.units} {self.unit}, got {self.choosing}")
        if self.groups is not None and self.clusters is not None:
            raise ManifestError("groups must be left out where there are clusters, which may hold several of them")
        if self.groups is not None and self.choosing is not None:
            raise ManifestError("groups must be left out where some of the examples have chosen what was tested")

    def _check_failed_ids(self, failed_ids: tuple[str, ...]) -> None:
        if any(after <= before for before, after in pairwise(failed_ids)):
            raise ManifestError(f"failed_ids must ascend, each id once, got {shown(failed_ids)}")
        listed = min(self.failed, MOST_FAILED_IDS)
        if not failed_ids or len(failed_ids) != listed:
            raise ManifestError(
                f"failed_ids must have {listed} ids, since failed is {self.failed} (left out where that is 0), "
                f"got {len(failed_ids)}"
            )

    @property
    def unit(self) -> str:
        """The kind of independent units: `examples` or `clusters`."""
        return "examples" if self.clusters is None else "clusters"

    def units_of(self, group: str | None) -> int | None:
        """Returns the number of independent units that tested a promise about a group; None for an unknown group.

        A `group` of None means a promise about all prompts: returns the number of all units, except those that chose
        what to test.
        """
        return self.units - (self.choosing or 0) if group is None else super().units_of(group)


@dataclass(frozen=True, kw_only=True)
class ConfirmationRecord(Record):
    """The holdout part of the calibration set, and how it was decoded at the chosen thresholds.

    Attributes:
      decoder: One of `SERVED_DECODERS`: the decoder of its outputs, the full model's included.
      exit_head: Requested form of the output head; `auto` is resolved by `calm_beam.decoding.engine_choice`.
      dtype: Type in which the model computed, the same as in `decode`.
      data: The holdout's examples, recorded as in `data` of the manifest, with the same patterns and groups.
      engine: The engine that computed the outputs; None in manifests that do not record it.
    """

    decoder: Annotated[str, OneOf(SERVED_DECODERS)]
    exit_head: Text
    dtype: Text
    data: DataRecord
    engine: EngineRecord | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.data.choosing is not None:
            raise ManifestError(f"data.choosing must be left out, since these chose nothing, got {self.data.choosing}")


@dataclass(frozen=True, kw_only=True)
class SettingRecord(Record):
    """One setting of the sweep.

    Attributes:
      name: Name of the setting.
      cost: Its cost, or the mean over the examples if the cost differs between them; None if none was given.
      fingerprint: Fingerprint of examples and losses under this setting.
    """

    name: Text
    cost: Cost | None
    fingerprint: Text


@dataclass(frozen=True, kw_only=True)
class ElsewhereRecord(Record):
    """The decoder of the outputs that losses were computed from, if it is not one of calm-beam's.

    Attributes:
      name: Name that its user gave it. It runs elsewhere: a manifest cannot distinguish decoders of the same name.
      outputs: Digest of the stored outputs.
      failed: Number of examples without an answer, which count with loss 1 under every setting.
      duplicates: Number of examples whose prompt already occurred.
    """

    name: Text
    outputs: Text
    failed: Count
    duplicates: Count


@dataclass(frozen=True, kw_only=True)
class SettingDataRecord(CountedData):
    """The examples of the sweep.

    Attributes:
      groups: The groups that have their own entries, by name, ascending.
      id_sample: The smallest of the ids' digests (the first 16 hexadecimal digits of SHA-256), up to `MOST_SAMPLED_IDS`
        of them, ascending: used to notice repeated examples; None in manifests of earlier writers.
    """

    _FIRST: ClassVar[tuple[str, ...]] = ("patterns", "examples", "clusters", "groups", "fingerprint")

    groups: tuple[SettingGroup, ...]
    id_sample: Annotated[tuple[_IdDigest, ...], Items(1, "have a digest", MOST_SAMPLED_IDS, unique=True)] | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        for index, group in enumerate(self.groups):
            if (group.clusters is None) != (self.clusters is None):
                raise ManifestError(f"groups[{index}].clusters must be null exactly if clusters is")
        if self.id_sample is not None:
            expected = min(self.examples, MOST_SAMPLED_IDS)
            if list(self.id_sample) != sorted(set(self.id_sample)) or len(self.id_sample) != expected:
                raise ManifestError(f"id_sample must have {expected} digests, ascending, got {shown(self.id_sample)}")


def check_unseen(records: tuple[UnseenRecord, ...] | None, *, examples: int) -> None:
    """Refuses records that are not by metric in ascending order, or count more examples than there are."""
    if records is None:
        return
    check_ascending("unseen", [record.metric for record in records], of="metrics")
    for index, record in enumerate(records):
        for key, count in (("no_token", record.no_token), ("few_letters", record.few_letters)):
            if count > examples:
                raise ManifestError(f"unseen[{index}].{key} must be at most examples, which is {examples}, got {count}")
