"""Publishing a result: provenance of the run and its data, the manifest, and the files of the result.

Files are written in such an order that a manifest never lies next to files of another run.
"""

import dataclasses
import json
from collections.abc import Sequence
from typing import Any, Self

from calm_beam.decoding.settings import DecodeSettings, settings_of_variant
from calm_beam.errors import UsageError
from calm_beam.exits.thresholds import scheduled_thresholds
from calm_beam.manifest import (
    MANIFEST,
    MOST_FAILED_IDS,
    Calibration,
    CostRecord,
    DataRecord,
    DecodeRecord,
    EarlierPlan,
    ExitRuleRecord,
    GroupRecord,
    Manifest,
    ManifestError,
    ModelRecord,
    Plan,
    PlannedTest,
    SequentialRecord,
    SettingManifest,
    VocabularyRecord,
    lost_race,
    manifest_text,
    time_of_now,
    write_manifest,
)
from calm_beam.manifest.files import FAILURES, REPORT, RISK_TABLE
from calm_beam.manifest.versions import run_versions
from calm_beam.metrics.registry import source_digests
from calm_beam.outputs import DecodeJob
from calm_beam.outputs.totals import CalibrationTotals
from calm_beam.storage import is_file, joined, open_input, remove_file, replacing, strict_json, version

from .pareto import CHOOSING
from .plan import has_parts, promise_of
from .result import write_risk_table
from .variants import VariantCosts


@dataclasses.dataclass(frozen=True, kw_only=True)
class RunProvenance:
    """The parts of a manifest that do not depend on the data's losses.

    Attributes:
      created: When the run was started, ISO 8601 in UTC.
      model: The model.
      vocabulary: Its vocabulary; None if there is none.
      settings: Decoding settings; with several variants, those of the first.
      patterns: Data patterns as the user gave them.
      software: Versions by name.
      earlier_plans: Earlier plans asked of the same outputs.
      cost: The declared cost of a token, where variants are chosen by it; None elsewhere.
    """

    created: str
    model: ModelRecord
    vocabulary: VocabularyRecord | None
    settings: DecodeSettings
    patterns: tuple[str, ...]
    software: dict[str, str]
    earlier_plans: tuple[EarlierPlan, ...] = ()
    cost: CostRecord | None = None

    @property
    def costs(self) -> VariantCosts | None:
        """The costs of variants; None where cost is measured in layers."""
        if self.cost is None:
            return None
        return VariantCosts.of_record(self.cost, rule=self.settings.rule, layers=self.model.layers)

    @classmethod
    def of_job(
        cls,
        job: DecodeJob,
        specs: Sequence[PlannedTest],
        *,
        settings: DecodeSettings | None = None,
        created: str | None = None,
    ) -> Self:
        """Returns the provenance of calibrating generations.

        Args:
          job: The job of the generations.
          specs: The tests.
          settings: The job's, with the part of its grid that is tested; all of it if omitted.
          created: When the run was started; now if omitted.
        """
        metrics = {spec.objective.metric for spec in specs}
        return cls(
            created=created or time_of_now(),
            model=job.model,
            vocabulary=job.vocabulary,
            settings=settings or job.settings,
            patterns=job.patterns,
            # The version of a user's own metric is a digest of its file.
            software={**run_versions(job.software, metrics=metrics), **source_digests(metrics)},
        )

    def manifest(
        self,
        totals: CalibrationTotals,
        calibrations: tuple[Calibration, ...],
        *,
        plan: Plan,
        digest: str,
        sequential: SequentialRecord | None = None,
    ) -> Manifest:
        """Returns the manifest of a run.

        Args:
          totals: Over the whole calibration set.
          calibrations: From `choose_thresholds`.
          plan: The plan.
          digest: Digest of the plan before any loss was seen.
          sequential: How the run ended, if it was watched round by round.

        Raises:
          ManifestError: If the calibrations are not those that were planned.
        """
        planned = plan
        if planned.digest != digest:
            raise ManifestError(f"the plan is {planned.digest}, but the run was started with {digest}.")
        token_from = self.settings.rule.token_from
        if token_from != "exit_layer":
            raise ManifestError(f"token_from must be exit_layer, got {token_from}: nothing can be served by that.")
        return Manifest(
            created=self.created,
            model=self.model,
            vocabulary=self.vocabulary,
            decode=decode_record(self.settings),
            data=data_record(totals, plan, patterns=self.patterns),
            plan=planned,
            earlier_plans=self.earlier_plans or None,
            sequential=sequential,
            cost=self.cost,
            calibrations=tuple(self._with_positions(entry) for entry in calibrations),
            guarantee=promise_of(plan),
            software=self.software,
        )

    def _with_positions(self, entry: Calibration) -> Calibration:
        settings = self.settings if entry.variant is None else settings_of_variant(self.settings, entry.variant)
        return with_positions(entry, settings)


def with_positions(entry: Calibration, settings: DecodeSettings) -> Calibration:
    """Returns an entry with its exit rule and its threshold at every position, as decoders compare it.

    Args:
      entry: Returned unchanged if it has no threshold.
      settings: Decoding settings of the entry; with several variants, those of its variant.
    """
    if entry.threshold is None:
        return entry
    positions = scheduled_thresholds(settings.rule, (entry.threshold,), max_decode_length=settings.max_decode_length)
    return dataclasses.replace(
        entry, threshold_by_position=tuple(positions[:, 0].tolist()), rule=decode_record(settings).rule()
    )


def data_record(totals: CalibrationTotals, plan: Plan, *, patterns: tuple[str, ...]) -> DataRecord:
    """Returns the manifest's record of the data behind totals.

    Args:
      totals: Totals over all examples.
      plan: The plan under which they were counted.
      patterns: Data patterns as the user gave them.
    """
    return DataRecord(
        patterns=patterns,
        examples=totals.examples,
        clusters=None if plan.cluster_key is None else totals.risk.n,
        choosing=totals.of_group(CHOOSING).risk.n if has_parts(plan) else None,
        groups=None
        if plan.group_key is None
        else tuple(
            GroupRecord(name=group, examples=totals.of_group(group).risk.n) for group in sorted(totals.layout.groups)
        ),
        duplicates=totals.duplicates,
        failed=totals.failed,
        failed_ids=tuple(name for name, _ in totals.failures[:MOST_FAILED_IDS]) or None,
        truncated=totals.truncated,
        several_turns=totals.several_turns or None,
        unseen=tuple(found.record() for found in totals.contrast.unseen) or None,
        fingerprint=totals.data_fingerprint(),
    )


def decode_record(settings: DecodeSettings) -> DecodeRecord:
    """Returns the manifest's record of decoding settings; the grid is recorded elsewhere."""
    rule = settings.rule
    return DecodeRecord(
        **{name: getattr(rule, name) for name in ExitRuleRecord.file_keys()},
        state_propagation=rule.state_propagation,
        max_input_length=settings.max_input_length,
        max_decode_length=settings.max_decode_length,
        task_prefix=settings.task_prefix,
        dtype=settings.precision.dtype,
        matmul_precision=settings.precision.recorded_matmul_precision(),
        engine=settings.engine,
    )


@dataclasses.dataclass(frozen=True, kw_only=True)
class EarlierResult:
    """The result that a run found when it began, by the versions of its files; empty for missing files.

    The run may replace these versions; anything that appeared later belongs to another run.
    """

    manifest: str = ""
    risk_table: str = ""
    failures: str = ""

    @classmethod
    def found_in(cls, output: str) -> Self:
        """Returns the versions now in an output directory."""
        names = (MANIFEST, RISK_TABLE, FAILURES)
        manifest, risk_table, failures = (version(joined(output, name)) for name in names)
        return cls(manifest=manifest, risk_table=risk_table, failures=failures)

    def check_may_go(self, output: str, *, overwrite: bool) -> None:
        """Refuses an output directory with a manifest, unless it may be overwritten.

        Raises:
          UsageError: If there is a manifest and `overwrite` is False.
        """
        if self.manifest and not overwrite:
            raise UsageError(
                f"--output {output}: holds a manifest already. Choose another directory, or pass --overwrite."
            )


def withdraw(output: str, earlier: EarlierResult) -> None:
    """Deletes an earlier result, its manifest first.

    Raises:
      FileExistsError: If another run has written a file since.
    """
    remove_file(joined(output, MANIFEST), removes=earlier.manifest)
    # The report goes whatever its version: it shows the deleted result.
    remove_file(joined(output, REPORT))
    remove_file(joined(output, RISK_TABLE), removes=earlier.risk_table)
    remove_file(joined(output, FAILURES), removes=earlier.failures)


def publish(
    output: str,
    manifest: Manifest | SettingManifest,
    *,
    rows: Sequence[Any],
    failures: Sequence[tuple[str, str]],
    earlier: EarlierResult,
) -> str:
    """Writes the risk table, the list of failures and the manifest, in this order; returns the manifest's path.

    Each file is written atomically. Without a manifest there is no result, even if other files exist. If several
    runs publish at once, the one that writes its table first succeeds, and the others write nothing more. A step that
    runs again publishes the same result again and succeeds. An earlier result's report is deleted; it has to be made
    again from the published files.

    Args:
      output: A directory that exists.
      manifest: The result.
      rows: The risk table, as `write_risk_table` takes it.
      failures: Id and reason of examples that count as failed; if there are none, the file is not written.
      earlier: The result that may be replaced.

    Raises:
      ManifestError: If another run has published meanwhile.
    """
    path = joined(output, MANIFEST)
    content = manifest_text(manifest).encode("utf-8")
    if _holds(path, content):
        return path
    try:
        remove_file(path, removes=earlier.manifest)
        remove_file(joined(output, REPORT))
        write_risk_table(joined(output, RISK_TABLE), rows, replaces=earlier.risk_table)
        _write_failures(joined(output, FAILURES), failures, replaces=earlier.failures)
    except FileExistsError:
        if _holds(path, content):
            return path
        raise lost_race(path) from None
    write_manifest(manifest, path)
    return path


def read_failures(output: str) -> tuple[tuple[str, str], ...]:
    """Returns id and reason of failed examples from the list in an output directory; none without a list.

    Raises:
      ValueError: If the list is damaged; says where.
    """
    path = joined(output, FAILURES)
    if not is_file(path):
        return ()
    failures = []
    with open_input(path) as file:
        for number, line in enumerate(file, start=1):
            try:
                row = strict_json.loads(line)
                failure = (row["id"], row["reason"])
            except (KeyError, TypeError, ValueError) as error:
                raise ValueError(
                    f"{path}, line {number}: is not as calm-beam writes it ({type(error).__name__}: {error})."
                ) from error
            if not all(isinstance(text, str) for text in failure):
                raise ValueError(f"{path}, line {number}: is not as calm-beam writes it: id and reason must be texts.")
            failures.append(failure)
    return tuple(failures)


def _write_failures(path: str, failures: Sequence[tuple[str, str]], *, replaces: str) -> None:
    if not failures:
        remove_file(path, removes=replaces)
        return
    lines = [json.dumps({"id": name, "reason": reason}, ensure_ascii=False) for name, reason in failures]
    with replacing(path, replaces=replaces) as temporary:
        temporary.write_text("".join(f"{line}\n" for line in lines), encoding="utf-8")


def _holds(path: str, content: bytes) -> bool:
    """Returns whether a file exists with exactly this content."""
    if not is_file(path):
        return False
    with open_input(path) as file:
        return file.read() == content
