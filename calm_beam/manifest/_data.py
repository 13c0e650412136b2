"""What was calibrated on: the examples, their groups and clusters, and what metrics did not see of them."""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Annotated, ClassVar

from calm_beam.errors import ManifestError
from calm_beam.storage.record_values import AtLeast, Cost, Count, Items, OneOf, Positive, String, Text, shown
from calm_beam.storage.records import Record

from ._model import EngineRecord

# Readers hold a manifest in memory; the whole list stands in `failures.jsonl` beside it.
MOST_FAILED_IDS = 1000
_FAILED = Items(1, "name those that failed, each once", MOST_FAILED_IDS, unique=True)
_SORTED = "have one or more {}, ascending, each once"
SERVED_DECODERS = ("batch",)
MOST_SAMPLED_IDS = 256
"""How many digests of ids a manifest of kind settings has at most."""


_IdDigest = Annotated[str, String(form="[0-9a-f]{16}")]


@dataclass(frozen=True, kw_only=True)
class GroupRecord(Record):
    """A group of the calibration set.

    Attributes:
      name: What the data call it.
      examples: How many examples it has; 0 where a sequential calibration stopped before the first of them.
    """

    name: Text
    examples: Count

    @property
    def units(self) -> int:
        """Number of independent units."""
        return self.examples


@dataclass(frozen=True, kw_only=True)
class SettingGroup(GroupRecord):
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
class CountedData(Record):
    """Examples from which something was proved, of a calibration set or of a sweep that was made elsewhere.

    Attributes:
      patterns: Files or runs that they, or their losses, were read from.
      examples: Number of examples, failed ones included.
      clusters: Number of clusters, where they and not examples are the independent units; None otherwise.
      groups: The groups that the examples fall into, by name, ascending.
      fingerprint: Identifies the examples; of a sweep, their losses under all settings too.
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
        """Number of independent units: clusters where there are some, examples otherwise."""
        return self.examples if self.clusters is None else self.clusters

    def units_of(self, group: str | None) -> int | None:
        """Returns the number of independent units that tested a promise about a group; None for an unknown group.

        For None, of a promise about all: all units.
        """
        if group is None:
            return self.units
        return next((each.units for each in self.groups or () if each.name == group), None)


def check_ascending(key: str, names: Sequence[str], *, of: str) -> None:
    """Refuses names that do not ascend, each once."""
    if any(after <= before for before, after in pairwise(names)):
        raise ManifestError(f"{key} must {_SORTED.format(of)}, got {shown(names)}")


def check_clusters(examples: int, clusters: int | None) -> None:
    """Refuses a number of clusters that so many examples cannot be in."""
    if clusters is not None:
        # Where there are examples, they are in some cluster.
        AtLeast(min(1, examples))("clusters", clusters)
        if clusters > examples:
            raise ManifestError(f"clusters must be at most examples, which is {examples}, got {clusters}")


@dataclass(frozen=True, kw_only=True)
class UnseenRecord(Record):
    """Examples with texts of which a metric saw nothing, or too little; at most a tenth of them, else there is no run.

    Attributes:
      metric: Name of the metric.
      no_token: Examples with two different texts that were compared and in which the metric saw no token: they score 0.
      few_letters: Examples where the metric's tokeniser drops more than half of the letters and digits of the full
        model's output, or of a reference that it is held against.
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
      choosing: Number of independent units that have chosen what was tested, and in which order; the others tested it.
        None where the order was fixed beforehand.
      groups: The groups that its examples fall into, by name in ascending order; None where they are not told apart.
      duplicates: Examples whose input had already occurred; they weaken the assumption of independent draws.
      failed: Examples that could not be decoded or scored and count with loss 1 at every threshold.
      failed_ids: Their ids in ascending order, the first `MOST_FAILED_IDS` of them; None in manifests that do not say,
        and where none failed. `failures.jsonl` beside the manifest lists all of them, with reasons.
      truncated: Examples whose input was cut to the longest allowed.
      unseen: Examples with texts that a metric did not see, by metric in ascending order; None where there are none,
        and in manifests that do not say.
    """

    _FIRST: ClassVar[tuple[str, ...]] = (
        *("patterns", "examples", "clusters", "choosing", "groups"),
        *("duplicates", "failed", "failed_ids", "truncated", "unseen"),
    )

    clusters: Positive | None = None
    choosing: Positive | None = None
    groups: Annotated[tuple[GroupRecord, ...], Items(1, _SORTED.format("names"))] | None = None
    duplicates: Count
    failed: Count
    failed_ids: Annotated[tuple[Text, ...], _FAILED] | None = None
    truncated: Count
    unseen: Annotated[tuple[UnseenRecord, ...], Items(1, _SORTED.format("metrics"))] | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        for key, count in (("duplicates", self.duplicates), ("failed", self.failed), ("truncated", self.truncated)):
            if count > self.examples:
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
        """What the independent units are: `examples` or `clusters`."""
        return "examples" if self.clusters is None else "clusters"

    def units_of(self, group: str | None) -> int | None:
        """Returns the number of independent units that tested a promise about a group; None for an unknown group.

        For None, of a promise about all prompts: all units, but for those that have chosen what was tested.
        """
        return self.units - (self.choosing or 0) if group is None else super().units_of(group)


@dataclass(frozen=True, kw_only=True)
class ConfirmationRecord(Record):
    """The part of the calibration set that chose nothing, and what decoded it at the thresholds that were chosen.

    Attributes:
      decoder: One of `SERVED_DECODERS`: what decoded, the full model's outputs too.
      exit_head: Form of the output head that was asked for; `auto` is what `calm_beam.decoding.engine_choice` takes.
      dtype: Type in which the model computed, that of `decode`.
      data: The part: what `data` of the manifest says of the rest, with the same patterns and groups.
      engine: What computed the outputs; None in manifests that do not say.
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
class ElsewhereRecord(Record):
    """What decoded the outputs that losses were made of, where that is no decoder of calm-beam's.

    Attributes:
      name: What it is, as its user called it. It runs elsewhere: nothing here tells it from another of that name.
      outputs: Digest of the stored outputs.
      failed: Number of examples that it gave no answer for, which count with loss 1 under every setting.
      duplicates: Number of examples whose prompt an earlier one has.
    """

    name: Text
    outputs: Text
    failed: Count
    duplicates: Count


@dataclass(frozen=True, kw_only=True)
class SettingDataRecord(CountedData):
    """The examples of the sweep.

    Attributes:
      groups: The groups that have entries of their own, by name, ascending.
      id_sample: The smallest of the ids' digests (the first 16 hexadecimal digits of SHA-256), up to
        `MOST_SAMPLED_IDS` of them, ascending: to notice examples that come again; None in manifests of earlier writers.
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
    """Refuses records that are not by metric in ascending order, or of more examples than there are."""
    if records is None:
        return
    check_ascending("unseen", [record.metric for record in records], of="metrics")
    for index, record in enumerate(records):
        for key, count in (("no_token", record.no_token), ("few_letters", record.few_letters)):
            if count > examples:
                raise ManifestError(f"unseen[{index}].{key} must be at most examples, which is {examples}, got {count}")
