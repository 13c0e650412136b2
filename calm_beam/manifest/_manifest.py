"""The manifest as a whole: its parts, what must agree between them, its digest."""

import functools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Annotated, Any, ClassVar, Generic, Self, TypeVar, Unpack

from calm_beam.errors import ManifestError
from calm_beam.inputs.vocabularies import VocabularyRecord
from calm_beam.storage.record_values import Items, Text, UtcTime, shown
from calm_beam.storage.records import Record, checked_keys
from calm_beam.storage.strict_json import content_digest
from calm_beam.text import counted

from ._data import ConfirmationRecord, CountedData, DataRecord, ElsewhereRecord, SettingDataRecord, SettingRecord
from ._entries import (
    ANY_ENTRY,
    GUARANTEE,
    PROMISE,
    SETTINGS,
    THRESHOLDS,
    Calibration,
    EntryChoice,
    EntryWords,
    PathEntry,
    SettingCalibration,
    with_words,
)
from ._model import (
    CostRecord,
    DecodeRecord,
    EngineRecord,
    ModelRecord,
    SpeedRecord,
    Variant,
    check_positions,
    check_speeds,
)
from ._plan import EarlierPlans, ParetoPlan, Plan, SettingPlan, SettledPlan
from ._rounds import (
    SequentialPlan,
    SequentialRecord,
    SettingSequentialPlan,
    check_rounds,
    rules_of_ends,
)
from ._tests import OF_VARIANTS
from .notebook import html_of

SCHEMAS = {1: "calm-beam/manifest/v1", 2: "calm-beam/manifest/v2"}
"""The `schema` of files, by format version. The last is written, all are read."""

SCHEMA = SCHEMAS[2]

_WITHOUT_GROUPS = ": the manifest was calibrated without --group_key."
_Entry = TypeVar("_Entry", Calibration, SettingCalibration)


class EntryChoiceError(ManifestError):
    """A choice that no entry matches, or several.

    Attributes:
      reason: Why, without a list of the entries.
      entries: Those to choose from.
    """

    def __init__(self, reason: str, entries: Sequence[Calibration] | Sequence[SettingCalibration]) -> None:
        """Names the entries after the reason."""
        super().__init__(f"{reason}: {_listed(entries)}.")
        self.reason = reason
        self.entries = tuple(entries)


@dataclass(frozen=True, kw_only=True)
class WrittenManifest(Record, Generic[_Entry]):
    """The results of tests, with their data and plan, whether thresholds or settings were tested.

    Attributes:
      created: When the run was started, ISO 8601 in UTC, ending in Z.
      data: The examples.
      plan: The plan, settled before any loss was seen.
      earlier_plans: Earlier plans on the same outputs or losses, the earliest first, from the list next to them; None
        if there were none, and in manifests that do not record them.
      sequential: How the run ended, if it was watched round by round; None if all examples count.
      calibrations: The promises, at least one.
      guarantee: The meaning of the promises, as text.
      software: Versions of the software that made it, by name.
      schema_version: Version of the format in which it was read and is written: one of `SCHEMAS`.
    """

    # The kind, in files of the second version and of the first; None if the latter have no kind.
    KIND: ClassVar[str]
    _KIND_IN_FIRST: ClassVar[str | None] = None
    # The function that shows it in a notebook.
    _HTML: ClassVar[str]

    created: UtcTime
    data: CountedData
    plan: SettledPlan[Any, Any] | None
    earlier_plans: EarlierPlans | None = None
    sequential: SequentialRecord | None = None
    calibrations: Annotated[tuple[_Entry, ...], Items(1, "have at least one entry")]
    guarantee: Text
    # Left out of the hash only because a dict has none; equality does compare it.
    software: Mapping[Text, Text] = field(hash=False)
    schema_version: int = max(SCHEMAS)

    @classmethod
    def file_keys(cls) -> list[str]:
        """Returns the manifest's keys without schema, kind and digest, in the order of the file."""
        return [key for key in super().file_keys() if key != "schema_version"]

    @classmethod
    def kinds(cls) -> tuple[str | None, ...]:
        """Returns the names of the kind in files of all versions."""
        return cls.KIND, cls._KIND_IN_FIRST

    @classmethod
    def heads(cls, version: int) -> dict[str, str]:
        """Returns the leading keys of a file of a version, which identify its schema and kind."""
        kind = cls.KIND if version > 1 else cls._KIND_IN_FIRST
        return {"schema": SCHEMAS[version], **({} if kind is None else {"kind": kind})}

    @classmethod
    def from_dict(cls, value: object, *, at: str = "") -> Self:
        """Returns the manifest that plain JSON values describe, as `to_dict` gives them.

        Args:
          value: A dict with exactly the keys of the schema, "schema", "kind" and "digest" included; the first version
            has "kind" for settings only, and it is `external`.
          at: Put before the key path in error messages.

        Returns:
          The manifest.

        Raises:
          ManifestError: If the schema or the kind is wrong, a key is unknown or missing, a value has the wrong type or
            is at odds with another value, or the digest does not match the rest.
        """
        version = version_of(value)
        assert isinstance(value, Mapping)
        first: dict[str, str] = cls.heads(version)
        if value.get("kind") != first.get("kind"):
            raise cls._of_another_kind(value.get("kind"), expected=first.get("kind"))
        given = checked_keys(value, [*first, *cls.file_keys(), "digest"], optional=cls.optional_keys(), at=at)
        manifest = super().from_dict({k: v for k, v in given.items() if k not in (*first, "digest")}, at=at)
        object.__setattr__(manifest, "schema_version", version)
        manifest._check_form()
        check_digest(given)
        return manifest

    @classmethod
    def _of_another_kind(cls, kind: object, *, expected: str | None) -> ManifestError:
        """Returns the error about a manifest of another kind than expected; None is a manifest without a kind."""
        return ManifestError(f"kind must be {'left out' if expected is None else shown(expected)}, got {shown(kind)}")

    def __post_init__(self) -> None:
        super().__post_init__()
        # Copied, so that later changes to the caller's dict do not reach the manifest.
        object.__setattr__(self, "software", dict(self.software))
        self._check_form()
        self._check_parts()
        for index, entry in enumerate(self.calibrations):
            self._check_entry(entry, at=f"calibrations[{index}]")
        if self.plan is not None:
            groups = [group.name for group in self.data.groups or ()] or None
            for key, there in (("cluster", self.data.clusters), ("group", groups)):
                of_plan = getattr(self.plan, f"{key}_key")
                if (of_plan is None) != (there is None):
                    raise ManifestError(
                        f"data.{key}s must be there exactly if plan.{key}_key is not null, got {shown(there)} and "
                        f"{shown(of_plan)}"
                    )
            self.plan.check_calibrations(self.calibrations)
        check_rounds(
            self.calibrations,
            None if self.plan is None else self.plan.sequential,
            self.sequential,
            grid=() if self.plan is None else self.plan.grid,
            data=self.data,
        )

    def _check_form(self) -> None:
        """Refuses values that the format of its version does not have."""
        if self.schema_version not in SCHEMAS:
            known = ", ".join(map(str, SCHEMAS))
            raise ManifestError(f"schema_version must be one of {known}, got {shown(self.schema_version)}")

    def _check_parts(self) -> None:
        """Refuses parts that are at odds with each other, before entries are checked."""

    def _check_entry(self, entry: _Entry, *, at: str) -> None:
        """Refuses an entry that is at odds with the rest of the manifest."""
        if self.data.units_of(entry.group) is None:
            raise ManifestError(f"{at}.group must be one of data.groups, got {shown(entry.group)}")
        if entry.example_risk is not None and self.data.clusters is None:
            raise ManifestError(f"{at}.example_risk must be left out where there is no data.clusters")

    # Cached, since a service tells it in every answer.
    @functools.cached_property
    def digest(self) -> str:
        """The digest of the content, `"sha256:"` and 64 hexadecimal digits."""
        return content_digest(self._content())

    def _repr_html_(self) -> str | None:
        """Returns the HTML that a notebook shows; None, for plain text, in calm-beam-serving."""
        return html_of(self, self._HTML)

    def __str__(self) -> str:
        """Returns what is promised, a line for each entry."""
        entries = counted(len(self.calibrations), "entry", several="entries")
        return "\n".join([f"Manifest of {self.created}, {entries}:", *(f"  {each}" for each in self.calibrations)])

    def to_dict(self) -> dict[str, object]:
        """Returns the manifest as plain JSON values, with "schema" and "kind" first and "digest" last."""
        content = self._content()
        return {**content, "digest": content_digest(content)}

    def _content(self) -> dict[str, object]:
        return {**self.heads(self.schema_version), **super().to_dict()}

    def error_of(self, entry: _Entry) -> float:
        """Returns the probability with which the promise of an entry may be broken, taken alone.

        This is the level of its tests, if it was settled beforehand. If other entries have passed theirs on, losses
        decided the level, and only the joint promise of all entries is certain.
        """
        plan = self.plan
        is_raised = plan is not None and plan.hands_on and entry.promised_epsilon != entry.epsilon
        if plan is None or plan.joint_epsilon is None or not is_raised:
            return entry.promised_epsilon
        return plan.joint_epsilon

    def stated_error_of(self, entry: _Entry) -> float:
        """Returns the probability that is stated with a promise: of all together where they are joint, or its own."""
        joint = None if self.plan is None else self.plan.joint_epsilon
        return self.error_of(entry) if joint is None else joint

    def calibration(self, choice: EntryChoice = ANY_ENTRY, **words: Unpack[EntryWords]) -> _Entry:
        """Returns the one entry with these values; any may be left out if one entry matches the rest.

        For thresholds without any value, it is the entry that the plan says will be served, if it says so. A group is
        then served by the entry of the same promise about the group.

        Args:
          choice: The choice, as one value.
          words: Fields of `EntryChoice`, which override those of `choice`.

        Returns:
          The entry. Its `threshold` is None if no threshold was found safe: then never exit early. So is `setting`.

        Raises:
          EntryChoiceError: If no entry or more than one matches; the message lists those there are.
          ManifestError: If it names a group or a value that no entry has.
        """
        choice = with_words(choice, words, function=self.calibration)
        found = self.matching(choice)
        if len(found) == 1:
            return found[0]
        asked = self._asked(choice)
        described = ", ".join(
            f"{name}={value if isinstance(value, str) else shown(value)}" for name, value in asked.items()
        )
        if not found:
            there = self.of_group(choice.group) or self.calibrations
            raise EntryChoiceError(f"no calibration has {described}. The manifest has", there)
        differing = [
            name for name in PROMISE if name not in asked and len({getattr(entry, name, None) for entry in found}) > 1
        ]
        remedy = f"Say which {' and '.join(differing)}" if differing else "Choose one from `calibrations`"
        has = f"{len(found)} calibrations have {described}" if asked else f"there are {len(found)} calibrations"
        raise EntryChoiceError(f"{has}. {remedy}", found)

    def _asked(self, choice: EntryChoice) -> dict[str, str | float | None]:
        """Returns the values of a choice, as messages print them."""
        return {**choice.promise()}

    def matching(self, choice: EntryChoice) -> tuple[_Entry, ...]:
        """Returns the entries that match a choice.

        Raises:
          ManifestError: If it names a group that the manifest does not know, or a value that no entry of the kind has.
        """
        choice.check_for(self.KIND)
        names = [group.name for group in self.data.groups or ()]
        if choice.group is not None and choice.group not in names:
            there = f". The manifest has: {', '.join(names)}." if names else _WITHOUT_GROUPS
            raise ManifestError(f"there is no group {shown(choice.group)}{there}")
        return choice.among(self.calibrations)

    def of_group(self, group: str | None) -> tuple[_Entry, ...]:
        """Returns the entries about a group; for None, those about all prompts or examples."""
        return tuple(entry for entry in self.calibrations if entry.group == group)


@dataclass(frozen=True, kw_only=True)
class Manifest(WrittenManifest[Calibration]):
    """The promises of a calibration run, with the model, decoder and data that they are about.

    Thresholds on the confidence at which a decoder may stop early, and the bound on quality loss that each of them
    keeps. A manifest is consistent. Every `n` is `data.clusters` or, if that is left out, `data.examples`, and
    for a group the examples of it in `data.groups`. There are groups exactly if there is `plan.group_key`, and then
    every promise has a calibration for all prompts and one for each group. The thresholds of a path descend. If the
    procedure is `fixed_sequence`, `rejected` is whether `p_value` is at most `epsilon` and is false at most at the
    last entry. Calibrations are those of `plan`. `threshold`, `risk` and `layers` of a calibration are those of its
    last rejected path entry. `threshold_by_position` has `decode.max_decode_length` entries, which
    `decode.schedule` computes from `threshold`. `sequential` exists exactly if `plan.sequential` does, and then every
    calibration has a look for each of its rounds. `data.choosing` exists exactly if `plan.pareto` does, and then `n` is
    smaller by it. Variants are those of `plan.pareto`; a calibration with a `variant` is decoded with its `tau`,
    `min_exit_layer`, `confidence` and `exit_interval` in place of those of `decode`, and its threshold is that of its
    last rejected path entry. A calibration has a `confirmation` exactly if there is `plan.confirm_share` and a path
    entry was rejected; its tests, at most `plan.confirm_path` of them, are then of such entries in the order of `path`,
    up to the last such entry or the first test that was not rejected, and their `n` is of `confirmation.data`;
    `threshold`, `risk` and `layers` are then those of the last confirmation that was rejected, or `threshold` is null
    if none was. There is `confirmation` exactly if a calibration has one. `digest` matches the rest.

    Attributes:
      model: The model that was calibrated.
      vocabulary: Its vocabulary; None if there was none: metrics then compared token ids.
      decode: Decoding settings; an entry's own variant overrides them.
      data: The calibration set; without the holdout, if there is one.
      plan: The plan, settled before any loss was seen; None in manifests that do not record it.
      confirmation: The holdout that confirmed the promises; None if nothing was to be confirmed.
      cost: The declared cost of a token, if `plan.pareto.objective` names a cost by which variants are chosen; else
        None.
      speeds: Measured speeds of promised thresholds; None if none was measured.
    """

    _FIRST: ClassVar[tuple[str, ...]] = (
        *("created", "model", "vocabulary", "decode", "data"),
        *("plan", "earlier_plans", "sequential", "confirmation", "cost", "speeds"),
    )
    KIND: ClassVar[str] = THRESHOLDS
    SCHEMA_RULES: ClassVar[Mapping[str, Any]] = rules_of_ends(SequentialPlan)
    _HTML: ClassVar[str] = "manifest_html"

    model: ModelRecord
    vocabulary: VocabularyRecord | None
    decode: DecodeRecord
    data: DataRecord
    plan: Plan | None = None
    confirmation: ConfirmationRecord | None = None
    cost: CostRecord | None = None
    speeds: Annotated[tuple[SpeedRecord, ...], Items(1, "be left out where none was measured")] | None = None
    guarantee: Text = GUARANTEE

    @classmethod
    def _of_another_kind(cls, kind: object, *, expected: str | None) -> ManifestError:
        if kind in SettingManifest.kinds():
            return about_settings()
        return super()._of_another_kind(kind, expected=expected)

    def _check_form(self) -> None:
        super()._check_form()
        for index, entry in enumerate(self.calibrations):
            if self.schema_version == 1 and entry.rule is not None:
                raise ManifestError(f"calibrations[{index}].rule is not a key of {SCHEMAS[1]}")

    def _check_parts(self) -> None:
        if self.decode.min_exit_layer > self.model.layers:
            raise ManifestError(
                f"decode.min_exit_layer must be at most model.layers, which is {self.model.layers}, "
                f"got {self.decode.min_exit_layer}"
            )

    def __post_init__(self) -> None:
        super().__post_init__()
        self._check_groups()
        if self.plan is not None and self.plan.model != self.model.fingerprint:
            raise ManifestError(
                f"plan.model must be model.fingerprint, which is {shown(self.model.fingerprint)}, "
                f"got {shown(self.plan.model)}"
            )
        self._check_variants()
        self._check_confirmation()
        self._check_costs()

    @property
    def pareto(self) -> ParetoPlan | None:
        """How several variants are tested; None if there is one, or no plan."""
        return None if self.plan is None else self.plan.pareto

    def level_of(self, entry: Calibration) -> float:
        """Returns the level that p-values of an entry's tests are compared with."""
        return entry.path_level if self.pareto is None else self.pareto.share_of(entry.path_level)

    def _check_costs(self) -> None:
        """Refuses costs that chose nothing, choices that need missing costs, and speeds of unpromised thresholds."""
        objective = None if self.pareto is None else self.pareto.objective
        if (self.cost is None) != (objective is None):
            raise ManifestError(f"cost must be there exactly if plan.pareto.objective is, which is {shown(objective)}")
        for index, entry in enumerate(self.calibrations):
            if entry.pays is not None and objective is None:
                raise ManifestError(f"calibrations[{index}].pays must be left out without plan.pareto.objective")
        exits = [i for i, each in enumerate(self.calibrations) if each.threshold is not None or each.pays is False]
        check_speeds(self.speeds or (), exits)

    @property
    def engine(self) -> EngineRecord | None:
        """The engine of the outputs that the promises are about; None if the manifest does not record it.

        For confirmed thresholds it is the engine that decoded the holdout.
        """
        return self.decode.engine if self.confirmation is None else self.confirmation.engine

    @property
    def takes_several_turns(self) -> bool:
        """Whether some of the calibrated chats had several turns, so that the promise is about such chats too."""
        parts = (self.data, *(() if self.confirmation is None else (self.confirmation.data,)))
        return any(part.several_turns is not None for part in parts)

    def decode_of(self, entry: Calibration) -> DecodeRecord:
        """Returns the decoding settings of an entry, with its own variant if it has one."""
        return self.decode if entry.variant is None else _with_variant(self.decode, entry.variant)

    def shared_by_variants(self, field: str) -> Any:
        """Returns the value of a field of `decode`, such as `confidence`; None if each variant has its own."""
        pareto = None if self.plan is None else self.plan.pareto
        has_own = pareto is not None and getattr(pareto.variants[0], field) is not None
        return None if has_own else getattr(self.decode, field)

    def _check_entry(self, entry: Calibration, *, at: str) -> None:
        super()._check_entry(entry, at=at)
        full = self.model.layers
        for index, step in enumerate(entry.path):
            self._check_test(f"{at}.path[{index}]", step, of=entry, data=self.data, name="data")
        if entry.confirmation is not None and self.confirmation is not None:
            for where, step in entry.confirmations():
                data = self.confirmation.data
                self._check_test(f"{at}.{where}", step, of=entry, data=data, name="confirmation.data")
        if entry.threshold is None and entry.layers != full:
            raise ManifestError(
                f"{at}.layers must be model.layers, which is {full}, when threshold is null, got {shown(entry.layers)}"
            )
        if entry.threshold is not None and entry.threshold_by_position is not None:
            check_positions(
                f"{at}.threshold_by_position",
                entry.threshold_by_position,
                threshold=entry.threshold,
                decode=self.decode_of(entry),
            )
        if entry.rule is not None and entry.rule != (rule := self.decode_of(entry).rule()):
            raise ManifestError(f"{at}.rule must be {shown(rule.to_dict())}, as decode and variant say")

    def _check_test(self, at: str, entry: PathEntry, *, of: Calibration, data: DataRecord, name: str) -> None:
        """Refuses the test of a threshold that is at odds with the model, or with the named part of the data."""
        full, failed, units = self.model.layers, data.failed, data.units_of(of.group) or 0
        # Failed examples add at least this to the mean of losses that are not negative. It is unknown which group they
        # belong to, and whether they tested or chose.
        is_of_examples = data.clusters is None and of.group is None and entry.variant is None
        least_risk = failed / units if units and of.loss != "signed" and is_of_examples else -1
        if entry.n != units:
            unit = data.unit
            if data.choosing is not None:
                unit = f"{unit} less {name}.choosing"
            if of.group is not None:
                unit = f"groups' examples of {shown(of.group)}"
            raise ManifestError(
                f"{at}.n must be {name}.{unit}, which is {units} (failed examples count, with loss 1), got {entry.n}"
            )
        if entry.layers > full:
            raise ManifestError(f"{at}.layers must be at most model.layers, which is {full}, got {shown(entry.layers)}")
        # Division rounds monotonically, so a mean over losses that include these ones cannot come out below.
        if entry.risk < least_risk:
            raise ManifestError(
                f"{at}.risk must be at least {shown(least_risk)}, since {failed} of {units} examples failed and count "
                f"with loss 1, got {shown(entry.risk)}"
            )

    def _check_confirmation(self) -> None:
        """Refuses missing confirmations, and confirmations by other data than the manifest records."""
        most = 0 if self.plan is None else self.plan.most_confirmed
        for index, entry in enumerate(self.calibrations):
            expected = most > 0 and entry.chosen is not None
            if expected != (entry.confirmation is not None):
                raise ManifestError(
                    f"calibrations[{index}].confirmation must be there exactly if there is plan.confirm_share and path "
                    f"has chosen a threshold, got {'one' if entry.confirmation else 'none'}"
                )
            if len(entry.confirmation or ()) > most:
                raise ManifestError(
                    f"calibrations[{index}].confirmation must have at most as many tests as plan.confirm_path says, "
                    f"which is {most}, got {len(entry.confirmation or ())}"
                )
        has_one = any(entry.confirmation is not None for entry in self.calibrations)
        if has_one != (self.confirmation is not None):
            raise ManifestError(
                "confirmation must be there exactly if a calibration has one, got "
                f"{'one' if self.confirmation else 'none'}"
            )
        if self.confirmation is None:
            return
        self._check_confirming_epsilons()
        if self.confirmation.dtype != self.decode.dtype:
            raise ManifestError(
                f"confirmation.dtype must be decode.dtype, which is {self.decode.dtype}, got {self.confirmation.dtype}"
            )
        data, other = self.data, self.confirmation.data
        names = [None if each.groups is None else [group.name for group in each.groups] for each in (data, other)]
        if names[0] != names[1] or (data.clusters is None) != (other.clusters is None):
            raise ManifestError("confirmation.data must have clusters exactly if data has, and the groups of data")
        if other.patterns != data.patterns:
            raise ManifestError(
                f"confirmation.data.patterns must be data.patterns, which are {shown(list(data.patterns))}, got "
                f"{shown(list(other.patterns))}"
            )

    def _check_confirming_epsilons(self) -> None:
        """Refuses levels of confirmations other than those of the plan."""
        assert self.plan is not None, "without a plan there is no confirmation"
        levels = self.plan.confirmed_epsilons(
            [[step.p_value for step in entry.confirmation or ()] for entry in self.calibrations]
        )
        for index, (entry, level) in enumerate(zip(self.calibrations, levels, strict=True)):
            if entry.confirmation is not None and entry.promised_epsilon != level:
                raise ManifestError(
                    f"calibrations[{index}].confirming_epsilon must be its share of plan.joint_epsilon, which is "
                    f"{shown(level)}, got {shown(entry.promised_epsilon)}"
                )

    def _check_groups(self) -> None:
        """Refuses promises about some groups that are missing for others."""
        expected = {None, *(group.name for group in self.data.groups or ())}
        found: dict[tuple[object, ...], set[str | None]] = {}
        for entry in self.calibrations:
            found.setdefault(_promise(entry), set()).add(entry.group)
        for entry in self.calibrations:
            missing = expected - found[_promise(entry)]
            if missing:
                name = min(missing, key=str)
                raise ManifestError(
                    f"calibrations must have an entry for all prompts and one for each of data.groups; of "
                    f"{entry.named()} there is none for {'all prompts' if name is None else shown(name)}"
                )

    def _check_variants(self) -> None:
        """Refuses variants that were not planned, or are at odds with the model or the other decoding settings."""
        pareto = self.pareto
        if pareto is None:
            if found := next((each.procedure for each in self.calibrations if each.procedure in OF_VARIANTS), None):
                raise ManifestError(f"plan.pareto is missing, though there are calibrations by procedure {found}")
        elif self.decode not in (decodes := [_with_variant(self.decode, variant) for variant in pareto.variants]):
            names = pareto.variants[0].fields_of_rule()
            raise ManifestError(
                f"{' and '.join(f'decode.{name}' for name in names)} must be those of one of plan.pareto.variants, got "
                f"{' and '.join(shown(getattr(self.decode, name)) for name in names)}"
            )
        elif (highest := max(each.min_exit_layer for each in decodes)) > self.model.layers:
            raise ManifestError(
                f"plan.pareto.variants must exit from a layer of at most model.layers on, which is "
                f"{self.model.layers}, got {highest}"
            )
        share = None if pareto is None else pareto.choosing_share
        if (share is None) != (self.data.choosing is None):
            raise ManifestError(
                "data.choosing must be there exactly if plan.pareto.choosing_share is, got "
                f"{shown(self.data.choosing)} and {shown(share)}"
            )

    def matching(self, choice: EntryChoice) -> tuple[Calibration, ...]:
        """Returns the entries that match a choice; without a promise, the served entry if the plan names one.

        Raises:
          ManifestError: If it names a group that the manifest does not know, or what no entry about thresholds has.
        """
        found = super().matching(choice)
        if self.served is None or choice.promise():
            return found
        promised = self.of_same_promise(self.served)
        return (self.served,) if choice.group is None else tuple(each for each in found if each in promised)

    @property
    def served(self) -> Calibration | None:
        """The entry that the plan says will be served; None if it does not say."""
        if self.plan is None or self.plan.serve is None:
            return None
        return self.calibrations[self.plan.serve]

    def of_same_promise(self, entry: Calibration) -> tuple[Calibration, ...]:
        """Returns the entries that differ from this one at most in their group, including itself."""
        return tuple(other for other in self.calibrations if _promise(other) == _promise(entry))

    def safest(self, entry: Calibration) -> Calibration:
        """Returns the entry to serve prompts that belong to no group of the manifest.

        No promise is about such prompts. Among the entries that differ from the given one at most in their group, the
        result never exits, or else has the highest threshold.
        """
        return max(self.of_same_promise(entry), key=lambda other: 2 if other.threshold is None else other.threshold)


@dataclass(frozen=True, kw_only=True)
class SettingManifest(WrittenManifest[SettingCalibration]):
    """The results for the settings of a sweep that was made elsewhere: which of them lose at most delta.

    It names no model and no exit threshold, and cannot be served. A manifest is consistent. Settings are those of
    `plan.order`. Calibrations are those of `plan` and test settings in its order. Every `n` is the number of units of
    its group. If the procedure is `fixed_sequence`, `rejected` is whether `p_value` is at most `epsilon` and is
    false at most at the last entry. `setting`, `cost` and `risk` of a calibration are those of its last rejected path
    entry. `sequential` exists exactly if `plan.sequential` does; then every calibration has a look for each of its
    rounds, and what ended it follows from `plan.sequential`. Both digests match the rest.

    Attributes:
      settings: All settings in testing order.
      decoder: The decoder, if losses were computed from stored outputs of a user's decoder; None if losses or scores
        were given.
    """

    KIND: ClassVar[str] = SETTINGS
    _KIND_IN_FIRST: ClassVar[str | None] = "external"
    _FIRST: ClassVar[tuple[str, ...]] = (
        *("created", "settings", "decoder", "data", "plan", "earlier_plans", "sequential"),
    )
    SCHEMA_RULES: ClassVar[Mapping[str, Any]] = rules_of_ends(SettingSequentialPlan)
    _HTML: ClassVar[str] = "setting_manifest_html"

    settings: Annotated[tuple[SettingRecord, ...], Items(1, "have at least one entry")]
    decoder: ElsewhereRecord | None = None
    data: SettingDataRecord
    plan: SettingPlan

    @classmethod
    def _of_another_kind(cls, kind: object, *, expected: str | None) -> ManifestError:
        error = super()._of_another_kind(kind, expected=expected)
        return ManifestError(f"{error}: read_manifest reads manifests of calibrate")

    def _check_parts(self) -> None:
        names = tuple(setting.name for setting in self.settings)
        if names != self.plan.order:
            raise ManifestError(f"settings must be those of plan.order, in that order, got {shown(names)}")
        if (self.decoder is None) != (self.plan.consistency is None):
            raise ManifestError("decoder must be there exactly if plan.consistency is")
        if self.decoder is not None:
            for key in ("failed", "duplicates"):
                if (count := getattr(self.decoder, key)) > self.data.examples:
                    raise ManifestError(
                        f"decoder.{key} must be at most {self.data.examples}, the examples, got {count}"
                    )
        declared = None if self.plan.sequential is None else self.plan.sequential.costs
        found = tuple(setting.cost for setting in self.settings)
        if declared is not None and found != declared:
            raise ManifestError(f"settings must cost what plan.sequential.costs says, got {shown(found)}")

    def _check_entry(self, entry: SettingCalibration, *, at: str) -> None:
        super()._check_entry(entry, at=at)
        units, costs = self.data.units_of(entry.group), {setting.name: setting.cost for setting in self.settings}
        for index, step in enumerate(entry.path):
            if step.n != units:
                raise ManifestError(f"{at}.path[{index}].n must be {units}, as data says, got {step.n}")
            if step.setting not in costs:
                raise ManifestError(f"{at}.path[{index}].setting must be one of settings, got {shown(step.setting)}")
            if step.cost != costs[step.setting]:
                raise ManifestError(
                    f"{at}.path[{index}].cost must be {shown(costs[step.setting])}, as settings says, got "
                    f"{shown(step.cost)}"
                )

    def _asked(self, choice: EntryChoice) -> dict[str, str | float | None]:
        return {"group": choice.group, "tail": choice.tail, **choice.promise()}

    def matching(self, choice: EntryChoice) -> tuple[SettingCalibration, ...]:
        """Returns the entries that match a choice; without a tail, only those about the mean loss.

        Raises:
          ManifestError: If it names a group that the manifest does not know, or what no entry about settings has.
        """
        return tuple(entry for entry in super().matching(choice) if entry.tail == choice.tail)


def _with_variant(decode: DecodeRecord, variant: Variant) -> DecodeRecord:
    return replace(decode, **variant.fields_of_rule())


def version_of(value: object) -> int:
    """Returns the format version of a manifest; refuses JSON that is not a manifest or has an unknown version."""
    if not isinstance(value, Mapping):
        raise ManifestError(f"a manifest must be a JSON object, got {shown(value)}")
    if "schema" not in value:
        raise ManifestError(f'schema is missing, so this is not a manifest; expected "{SCHEMA}"')
    schema = value["schema"]
    for version, name in SCHEMAS.items():
        if schema == name:
            return version
    if isinstance(schema, str) and schema.startswith(SCHEMA.rpartition("/")[0] + "/"):
        known = " and ".join(f"v{version}" for version in SCHEMAS)
        raise ManifestError(f"schema is {shown(schema)}, this reader knows {known}. Upgrade calm-beam where you serve.")
    raise ManifestError(f'schema is {shown(schema)}, so this is not a calm-beam manifest; expected "{SCHEMA}"')


def about_settings() -> ManifestError:
    """Returns the error for serving a manifest about settings."""
    return ManifestError(
        "is of kind settings: it proves a setting of a sweep that was made elsewhere, and names no model and no "
        "exit threshold. Only manifests of calibrate can be served. inspect and report show this one, verify with "
        "--losses tests it, and in Python read_setting_manifest reads it."
    )


def check_digest(content: Mapping[str, object]) -> None:
    """Refuses content that does not match its digest."""
    if "digest" not in content:
        raise ManifestError("digest is missing, so nothing shows that the manifest is as it was written")
    try:
        found = content_digest(content)
    except RecursionError:
        raise ManifestError("digest cannot be checked, as the content is nested too deeply") from None
    except (TypeError, ValueError) as error:
        raise ManifestError(f"digest cannot be checked, as the content has no form in JSON: {error}") from None
    if content["digest"] != found:
        raise ManifestError(
            f"digest is {shown(content['digest'])}, but that of the content is {shown(found)}: the manifest was "
            "changed after it was written. Take the original, or calibrate again."
        )


def _promise(entry: Calibration) -> tuple[object, ...]:
    """Returns the values that identify an entry's promise, without its group."""
    return entry.consistency, entry.metric, entry.loss, entry.delta, entry.epsilon, entry.p_value, entry.procedure


def _listed(entries: Sequence[Calibration] | Sequence[SettingCalibration]) -> str:
    return "; ".join(entry.named() for entry in entries)
