"""The manifest as a whole: its parts, what must agree between them, its digest."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, ClassVar, Self, Unpack

from calm_beam.manifest.notebook import html_of
from calm_beam.storage.digest import content_digest

from ._checks import ManifestError, check_text, shown
from ._choice import ANY_ENTRY, PROMISE, EntryChoice, EntryWords
from ._earlier_plans import EarlierPlan, check_earlier
from ._guarantee import GUARANTEE
from ._plan import Plan
from ._record import SCHEMA, Record, checked_keys
from ._schedule import check_positions
from ._sequential import SequentialRecord, check_ended, check_part_of_data
from ._tests import OF_VARIANTS
from ._values import Text, UtcTime
from .records import (
    Calibration,
    ConfirmationRecord,
    DataRecord,
    DecodeRecord,
    EngineRecord,
    ModelRecord,
    PathEntry,
    Variant,
    VocabularyRecord,
)

EXTERNAL = "external"
"""The `kind` of a manifest of a sweep that was made elsewhere; those of `calibrate` have none."""


class WrittenManifest(Record):
    """What every manifest has, whatever it promises: when it was made, its promises in words, a digest.

    Its fields are those of `Manifest` and `ExternalManifest` that have these names.
    """

    KIND: ClassVar[str | None] = None
    # What shows it in a notebook.
    _HTML: ClassVar[str]

    created: UtcTime
    earlier_plans: tuple[EarlierPlan, ...] | None
    calibrations: tuple[Any, ...]
    guarantee: Text
    software: Mapping[str, str]

    @classmethod
    def from_dict(cls, value: object, *, at: str = "") -> Self:
        """Returns the manifest that plain JSON values describe, as `to_dict` gives them.

        Args:
          value: A dict with exactly the keys of the schema, "schema", "digest" and, where it has one, "kind" included.
          at: Put before the key path in error messages.

        Returns:
          The manifest.

        Raises:
          ManifestError: If the schema or the kind is another one, a key is unknown or missing, a value is of the wrong
            type or at odds with another value, or the digest does not match the rest.
        """
        check_schema(value)
        cls._check_kind(value)
        heads = ["schema"] if cls.KIND is None else ["schema", "kind"]
        given = checked_keys(value, [*heads, *cls.file_keys(), "digest"], optional=cls._OPTIONAL, at=at)
        manifest = super().from_dict({k: v for k, v in given.items() if k not in (*heads, "digest")}, at=at)
        check_digest(given)
        return manifest

    @classmethod
    def _check_kind(cls, value: object) -> None:
        """Refuses a manifest of another kind."""
        raise NotImplementedError

    def __post_init__(self) -> None:
        super().__post_init__()
        if not self.calibrations:
            raise ManifestError("calibrations must have at least one entry, got []")
        object.__setattr__(self, "software", check_software(self.software))
        check_earlier(self.earlier_plans)

    @property
    def digest(self) -> str:
        """The digest of the content, `"sha256:"` and 64 hexadecimal digits."""
        return content_digest(self._content())

    def _repr_html_(self) -> str | None:
        """Returns what a notebook shows; None, for its text, in calm-beam-serving."""
        return html_of(self, self._HTML)

    def to_dict(self) -> dict[str, object]:
        """Returns the manifest as plain JSON values, with "schema" (and "kind") first and "digest" last."""
        content = self._content()
        return {**content, "digest": content_digest(content)}

    def _content(self) -> dict[str, object]:
        kind = {} if self.KIND is None else {"kind": self.KIND}
        return {"schema": SCHEMA, **kind, **super().to_dict()}


@dataclass(frozen=True, kw_only=True)
class Manifest(WrittenManifest):
    """What a calibration run promises, for which model, decoder and data.

    Attributes:
      created: When the run was started, ISO 8601 in UTC, ending in Z.
      model: The model that was calibrated.
      vocabulary: Its vocabulary; None where there was none: metrics then compared token ids.
      decode: How it decodes; where an entry has a variant of its own, that goes before (`decode_of`).
      data: The calibration set.
      plan: What was settled before any loss was seen; None in manifests that do not say.
      earlier_plans: Plans that were asked of the same outputs before, the earliest first, by the list beside them; None
        where there were none, and in manifests that do not say.
      calibrations: The promises, at least one.
      confirmation: What has confirmed them; None where nothing was to be confirmed.
      sequential: How it ended, if it was watched round by round; None where all examples count.
      guarantee: What they mean, in words.
      software: Versions by name. Copied, so that later changes to the caller's dict do not reach the manifest.
    """

    _HTML: ClassVar[str] = "manifest_html"
    _OPTIONAL: ClassVar[tuple[str, ...]] = ("plan", "earlier_plans", "sequential", "confirmation")

    created: UtcTime
    model: ModelRecord
    vocabulary: VocabularyRecord | None
    decode: DecodeRecord
    data: DataRecord
    plan: Plan | None = None
    earlier_plans: tuple[EarlierPlan, ...] | None = None
    sequential: SequentialRecord | None = None
    confirmation: ConfirmationRecord | None = None
    calibrations: tuple[Calibration, ...]
    guarantee: Text = GUARANTEE
    # Left out of the hash only because a dict has none; equality does compare it.
    software: Mapping[str, str] = field(hash=False)

    @classmethod
    def _check_kind(cls, value: object) -> None:
        check_kind(value)

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.decode.min_exit_layer > self.model.layers:
            raise ManifestError(
                f"decode.min_exit_layer must be at most model.layers, which is {self.model.layers}, "
                f"got {self.decode.min_exit_layer}"
            )
        for index, calibration in enumerate(self.calibrations):
            self._check_against_run(calibration, at=f"calibrations[{index}]")
        self._check_groups()
        if self.plan is not None:
            self._check_against_plan(self.plan)
        self._check_rounds()
        self._check_variants()
        self._check_confirmation()

    @property
    def engine(self) -> EngineRecord | None:
        """What computed the outputs that the promises are about; None where the manifest does not say.

        Of thresholds that were confirmed, it is what decoded the examples that confirmed them.
        """
        return self.decode.engine if self.confirmation is None else self.confirmation.engine

    def decode_of(self, entry: Calibration) -> DecodeRecord:
        """Returns how an entry has to be decoded: by its own variant, where it has one."""
        return self.decode if entry.variant is None else _with_variant(self.decode, entry.variant)

    def _check_against_run(self, calibration: Calibration, *, at: str) -> None:
        """Refuses a calibration that is at odds with the model or the data."""
        full = self.model.layers
        if self.data.units_of(calibration.group) is None:
            raise ManifestError(f"{at}.group must be one of data.groups, got {shown(calibration.group)}")
        for index, entry in enumerate(calibration.path):
            self._check_test(f"{at}.path[{index}]", entry, of=calibration, data=self.data, name="data")
        if calibration.confirmation is not None and self.confirmation is not None:
            for where, step in calibration.confirmations():
                data = self.confirmation.data
                self._check_test(f"{at}.{where}", step, of=calibration, data=data, name="confirmation.data")
        if calibration.example_risk is not None and self.data.clusters is None:
            raise ManifestError(f"{at}.example_risk must be left out where there is no data.clusters")
        if calibration.threshold is None and calibration.layers != full:
            raise ManifestError(
                f"{at}.layers must be model.layers, which is {full}, when threshold is null, "
                f"got {shown(calibration.layers)}"
            )
        if calibration.threshold is not None and calibration.threshold_by_position is not None:
            check_positions(
                f"{at}.threshold_by_position",
                calibration.threshold_by_position,
                threshold=calibration.threshold,
                decode=self.decode_of(calibration),
            )

    def _check_test(self, at: str, entry: PathEntry, *, of: Calibration, data: DataRecord, name: str) -> None:
        """Refuses the test of a threshold that is at odds with the model, or with the data of this name."""
        full, failed, units = self.model.layers, data.failed, data.units_of(of.group) or 0
        # What failed examples add to the mean of losses that are at least 0. Nothing says of which group they are.
        # Nor whether they have tested, or chosen.
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
        """Refuses thresholds that were to be confirmed and were not, or by something else than is said."""
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
        """Refuses levels of confirmations that are not those of the plan."""
        assert self.plan is not None, "without a plan there is no confirmation"
        levels = self.plan.confirming_epsilons([entry.chosen is not None for entry in self.calibrations])
        for index, (entry, level) in enumerate(zip(self.calibrations, levels, strict=True)):
            if entry.promised_epsilon != level:
                raise ManifestError(
                    f"calibrations[{index}].confirming_epsilon must be its share of plan.joint_epsilon, which is "
                    f"{shown(level)}, got {shown(entry.promised_epsilon)}"
                )

    def _check_groups(self) -> None:
        """Refuses promises that are made to some groups and not to others."""
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
                    f"{_described(entry)} there is none for {'all prompts' if name is None else shown(name)}"
                )

    def _check_against_plan(self, plan: Plan) -> None:
        """Refuses a run that is not the one that was planned."""
        if plan.model != self.model.fingerprint:
            raise ManifestError(
                f"plan.model must be model.fingerprint, which is {shown(self.model.fingerprint)}, "
                f"got {shown(plan.model)}"
            )
        if (plan.cluster_key is None) != (self.data.clusters is None):
            raise ManifestError(
                "data.clusters must be there exactly if plan.cluster_key is not null, got "
                f"{shown(self.data.clusters)} and {shown(plan.cluster_key)}"
            )
        if (plan.group_key is None) != (self.data.groups is None):
            raise ManifestError(
                "data.groups must be there exactly if plan.group_key is, got "
                f"{'groups' if self.data.groups else 'none'} and {shown(plan.group_key)}"
            )
        plan.check_calibrations(self.calibrations)

    def _check_variants(self) -> None:
        """Refuses variants that nobody planned, or that are at odds with the model or the rest of the decoding."""
        pareto = self.plan.pareto if self.plan is not None else None
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

    def _check_rounds(self) -> None:
        """Refuses rounds that are at odds with the plan, the data or the entries."""
        check_ended(self.calibrations, None if self.plan is None else self.plan.sequential, self.sequential)
        if self.sequential is None or self.plan is None or self.plan.sequential is None:
            return
        ended_by = self.sequential.ended_by
        if ended_by.startswith("stop_") and getattr(self.plan.sequential, ended_by) is None:
            raise ManifestError(f"sequential.ended_by is {ended_by}, but plan.sequential has no such rule")
        if self.sequential.of_examples < self.data.examples:
            raise ManifestError(
                f"sequential.of_examples must be at least data.examples, which is {self.data.examples}, "
                f"got {self.sequential.of_examples}"
            )
        check_part_of_data(self.sequential, examples=self.data.examples)

    def calibration(self, choice: EntryChoice = ANY_ENTRY, **words: Unpack[EntryWords]) -> Calibration:
        """Returns the one calibration that was run with these settings; any may be left out where one matches the rest.

        With none of them, it is the one that the plan says will be served, if it says so. A group is then served by the
        entry of the same promise that is about it.

        Args:
          choice: Which entry, as one value.
          words: Or word by word, which counts before `choice`:
            consistency: "textual" or "risk".
            metric: Name of the metric.
            loss: What is made of its scores, such as "signed" or "dissimilarity>0.3".
            delta: Risk tolerance, exactly as calibrated.
            epsilon: Allowed probability of breaking it, exactly as calibrated.
            group: Name of the group that it is about; None for the one about all prompts.

        Returns:
          The calibration. Its `threshold` is None where no threshold was found safe: then never exit early.

        Raises:
          ManifestError: If no entry or more than one matches; the message lists those there are.
        """
        choice = replace(choice, **words)
        found = self.matching(choice)
        if len(found) == 1:
            return found[0]
        asked = choice.promise()
        described = ", ".join(
            f"{name}={value if isinstance(value, str) else shown(value)}" for name, value in asked.items()
        )
        if not found:
            raise ManifestError(
                f"no calibration has {described}. The manifest has: {_listed(self.of_group(choice.group))}."
            )
        differing = [
            name for name in PROMISE if name not in asked and len({getattr(entry, name) for entry in found}) > 1
        ]
        remedy = f"Say which {' and '.join(differing)}" if differing else "Choose one from `calibrations`"
        has = f"{len(found)} calibrations have {described}" if asked else f"there are {len(found)} calibrations"
        raise ManifestError(f"{has}. {remedy}: {_listed(found)}.")

    def matching(self, choice: EntryChoice) -> tuple[Calibration, ...]:
        """Returns the entries that a choice leaves: where it names no promise, that which is served, if the plan says.

        Raises:
          ManifestError: If it names a group that the manifest does not know, or what no entry about thresholds has.
        """
        choice.check_for_thresholds()
        group = choice.group
        if group is not None and self.data.units_of(group) is None:
            raise ManifestError(_no_group(group, self.data))
        if self.served is None or choice.promise():
            return choice.among(self.calibrations)
        if group is None:
            return (self.served,)
        return tuple(entry for entry in self.of_same_promise(self.served) if entry.group == group)

    def of_group(self, group: str | None) -> tuple[Calibration, ...]:
        """Returns the entries about a group; of None, those about all prompts."""
        return tuple(entry for entry in self.calibrations if entry.group == group)

    @property
    def served(self) -> Calibration | None:
        """The entry that the plan says will be served; None where it does not say."""
        if self.plan is None or self.plan.serve is None:
            return None
        return self.calibrations[self.plan.serve]

    def of_same_promise(self, entry: Calibration) -> tuple[Calibration, ...]:
        """Returns the entries that differ from one in nothing but their group, itself among them."""
        return tuple(other for other in self.calibrations if _promise(other) == _promise(entry))

    def safest(self, entry: Calibration) -> Calibration:
        """Returns the entry to serve prompts by that belong to no group of the manifest.

        No promise is about such prompts. Of the entries that differ from the given one in nothing but their group, this
        one never exits, or else has the highest threshold.
        """
        return max(self.of_same_promise(entry), key=lambda other: 2 if other.threshold is None else other.threshold)


def _with_variant(decode: DecodeRecord, variant: Variant) -> DecodeRecord:
    return replace(decode, **variant.fields_of_rule())


def check_schema(value: object) -> None:
    """Refuses JSON that is not a manifest of the version this module knows."""
    if not isinstance(value, Mapping):
        raise ManifestError(f"a manifest must be a JSON object, got {shown(value)}")
    if "schema" not in value:
        raise ManifestError(f'schema is missing, so this is not a manifest; expected "{SCHEMA}"')
    schema = value["schema"]
    if schema == SCHEMA:
        return
    family, _, version = SCHEMA.rpartition("/")
    if isinstance(schema, str) and schema.startswith(family + "/"):
        raise ManifestError(
            f"schema is {shown(schema)}, this reader knows {version}. Upgrade calm-beam where you serve."
        )
    raise ManifestError(f'schema is {shown(schema)}, so this is not a calm-beam manifest; expected "{SCHEMA}"')


def check_kind(value: object) -> None:
    """Refuses a manifest that says that it is of another kind than those of `calibrate`."""
    kind = value.get("kind") if isinstance(value, Mapping) else None
    if kind == EXTERNAL:
        raise ManifestError(
            "is of kind external: it proves a setting of a sweep that was made elsewhere, and names no model and no "
            "exit threshold. Only manifests of calibrate can be served. inspect and report show this one, verify with "
            "--losses tests it, and in Python read_external_manifest reads it."
        )


def check_software(software: object) -> dict[str, str]:
    """Returns a copy of the versions by name, refusing anything else."""
    if not isinstance(software, Mapping):
        raise ManifestError(f"software must be a JSON object, got {shown(software)}")
    for name, version in software.items():
        check_text("a name in software", name)
        check_text(f"software[{shown(name)}]", version)
    return dict(software)


def check_digest(content: Mapping[str, object]) -> None:
    """Refuses content that is not what the digest was taken of."""
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
    """Returns what tells an entry from those of other promises, all but its group."""
    return entry.consistency, entry.metric, entry.loss, entry.delta, entry.epsilon, entry.p_value, entry.procedure


def _no_group(name: str, data: DataRecord) -> str:
    """Returns what is said of a group that a manifest does not know."""
    if data.groups is None:
        return f"there is no group {shown(name)}: the manifest was calibrated without --group_key."
    return f"there is no group {shown(name)}. The manifest has: {', '.join(group.name for group in data.groups)}."


def _listed(calibrations: Iterable[Calibration]) -> str:
    return "; ".join(map(_described, calibrations))


def _described(c: Calibration) -> str:
    return (
        f"consistency={c.consistency}, metric={c.metric}, loss={c.known_loss}, delta={shown(c.delta)}, "
        f"epsilon={shown(c.epsilon)}, p_value={c.p_value}"
    )
