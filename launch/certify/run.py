"""The certification that `calm-beam certify` and `calm_beam.certify` both run.

The command then prints the result and builds the report.
"""

import dataclasses
import itertools
import os
import shlex
from collections.abc import Sequence

from calm_beam.calibration.certification import SettingRow, entries_of, setting_manifest, setting_rows
from calm_beam.calibration.loss_table import LossTable
from calm_beam.calibration.publish import EarlierResult, publish, withdraw
from calm_beam.calibration.rounds import WatchedSettings, watched_settings
from calm_beam.calibration.settings_rounds import LEDGER
from calm_beam.errors import CalmBeamError
from calm_beam.launch.flags.requests import calling
from calm_beam.launch.terminal import give, say, tell
from calm_beam.launch.terminal.summary import print_certification
from calm_beam.manifest import MANIFEST, EarlierPlan, SequentialRecord, SettingManifest, plans_in_words
from calm_beam.manifest.files import REPORT, RISK_TABLE
from calm_beam.manifest.plan_list import AskedPlan, PlanList, home_of
from calm_beam.manifest.versions import certifying_versions, run_versions
from calm_beam.metrics.registry import source_digests
from calm_beam.options import listed
from calm_beam.storage import is_file, joined, remove_file, replacing
from calm_beam.text import counted

from .prepare import NEXT_IDS, Rounds, WholeSweep, prepare, prepare_output
from .request import CertifyRequest


@dataclasses.dataclass(frozen=True, kw_only=True)
class Done:
    """The result of one call.

    Attributes:
      output: The directory of the certification.
      manifest: The result; None if more examples have to be evaluated first, whose ids are in `next_ids.txt`.
      rows: The outcome of every test for every setting; None if there is no result yet, or an earlier call made it.
      baseline: Name of the setting that losses are relative to, and its cost if known; None if there is none.
    """

    output: str
    manifest: SettingManifest | None = None
    rows: Sequence[Sequence[SettingRow]] | None = None
    baseline: tuple[str, float | None] | None = None


def run_certification(request: CertifyRequest) -> Done:
    """Prepares a certification, tests, and writes the result.

    Raises:
      UsageError: If options conflict, or differ from those settled at the first call; nothing has been written.
      LossesError: If ids, losses or scores are invalid; names them.
      DataError: If a pattern matches no file, or a file is damaged.
      ManifestError: If another run has published meanwhile.
    """
    prepared = prepare(request)
    if isinstance(prepared, WholeSweep):
        return _certified(prepared)
    if isinstance(prepared, Rounds):
        return _watched(prepared)
    prepare_output(prepared.output)
    return Done(output=prepared.output, manifest=prepared.manifest)


def _certified(prepared: WholeSweep) -> Done:
    """Tests complete losses."""
    source, sweep, plan = prepared.source, prepared.source.sweep, prepared.plan
    rows = setting_rows(sweep, plan, costs=prepared.costs)
    swept, software = source.swept, certifying_versions()
    if swept is not None:
        metrics = (source.metric or "",)
        software = {**run_versions(swept.job.software, metrics=metrics), **source_digests(metrics)}
    # The list of plans for outputs is next to them, whichever directory a result is written to.
    home = prepared.output if swept is None else home_of(swept.folder)
    data = sweep.fingerprint() if swept is None else swept.finished.digest()
    # Listed before any result is printed.
    asked = AskedPlan.of(plan, data=data, command="certify")
    earlier_plans = PlanList(home).ask(asked, is_answered=True)
    manifest = setting_manifest(
        sweep,
        plan,
        entries=entries_of(plan, rows),
        costs=prepared.costs,
        patterns=source.patterns,
        software=software,
        earlier_plans=earlier_plans,
    )
    prepare_output(prepared.output)
    for name in (LEDGER, NEXT_IDS):
        # A file of a sequential certification that is overwritten.
        remove_file(joined(prepared.output, name))
    done = _published(prepared.output, manifest, rows=rows, earlier=prepared.earlier)
    reference = source.reference
    return done if reference is None else dataclasses.replace(done, baseline=(reference, prepared.costs.get(reference)))


def _watched(prepared: Rounds) -> Done:
    """Evaluates the existing rounds, and publishes the result or lists the examples to evaluate next."""
    output, evaluated = prepared.output, prepared.evaluated
    found = _look(prepared) if evaluated.rounds else None
    rounds = max(0 if found is None else found.rounds, len(prepared.ledger.rounds))
    ledger = prepared.ledger.with_rounds(evaluated.digests()[:rounds], missing=evaluated.in_words())
    prepare_output(output)
    # Listed before any result is printed, and before an earlier result is removed.
    plans = PlanList(output)
    earlier_plans = plans.ask(_asked_plan(prepared, plans), is_answered=found is not None)
    if words := plans_in_words(earlier_plans, of="losses"):
        say(words)
    earlier = prepared.earlier
    if prepared.request.overwrite:
        withdraw(output, earlier)
        earlier = EarlierResult()
    # Written before anything is printed that could be a reason to change the request.
    ledger.write(joined(output, LEDGER), replaces=prepared.ledger_version)
    if found is not None:
        say(_in_words(found, prepared))
    if found is None or found.ended_by is None:
        _name_next(prepared)
        return Done(output=output)
    remove_file(joined(output, NEXT_IDS))
    manifest = _manifest_of_rounds(found, prepared, earlier_plans=earlier_plans)
    return _published(output, manifest, rows=found.rows, earlier=earlier)


def _published(
    output: str, manifest: SettingManifest, *, rows: Sequence[Sequence[SettingRow]], earlier: EarlierResult
) -> Done:
    """Writes a certification into a directory that exists."""
    publish(output, manifest, rows=[row for of_test in rows for row in of_test], failures=(), earlier=earlier)
    return Done(output=output, manifest=manifest, rows=rows)


def _look(prepared: Rounds) -> WatchedSettings:
    continues = prepared.ledger.continues
    return watched_settings(
        prepared.evaluated,
        prepared.plan,
        of_rounds=prepared.declared.rounds,
        costs=prepared.costs,
        looked_at=continues[-1].rounds if continues else 1,
    )


def _asked_plan(prepared: Rounds, plans: PlanList) -> AskedPlan:
    """Returns the plan for the losses that the ledger counts."""
    plan, fingerprint = prepared.plan, prepared.declared.fingerprint
    known = plans.data_of_outputs() or fingerprint
    asked = AskedPlan.of(plan, data=known, command="certify --sequential", decodes=True)
    if prepared.is_new and plans.is_answered(asked):
        # The ids are the same, but the losses were evaluated again, or are looked at once more.
        return AskedPlan.of(
            plan, data=f"{fingerprint}, again after {len(plans.plans())}", command=asked.command, decodes=True
        )
    return asked


def _in_words(found: WatchedSettings, prepared: Rounds) -> str:
    """Returns how far the entries have come."""
    declared, evaluated = prepared.declared, prepared.evaluated
    chosen = sum(entry.setting is not None for entry in found.calibrations)
    examples = sum(len(each.ids) for each in evaluated.rounds[: found.rounds])
    return (
        f"round {found.rounds} of {declared.rounds}: {examples:,} of {counted(len(declared.ids), 'example')}; {chosen} "
        f"of {counted(len(found.calibrations), 'entry', several='entries')} with a setting"
    )


def _name_next(prepared: Rounds) -> None:
    """Writes the ids of the examples to evaluate next, and prints that."""
    evaluated = prepared.evaluated
    if evaluated.waiting:
        say(evaluated.in_words())
    ids = list(itertools.chain.from_iterable(evaluated.missing[: prepared.request.rounds_named]))
    path = joined(prepared.output, NEXT_IDS)
    with replacing(path) as temporary:
        temporary.write_text("".join(f"{name}\n" for name in ids), encoding="utf-8")
    say(
        f"not enough is proved yet. Evaluate {counted(len(ids), 'example')} under every setting, add the losses, and "
        f"repeat the command: {path}"
    )


def _manifest_of_rounds(
    found: WatchedSettings, prepared: Rounds, *, earlier_plans: Sequence[EarlierPlan]
) -> SettingManifest:
    assert found.ended_by is not None
    declared, evaluated, costs = prepared.declared, prepared.evaluated, prepared.costs
    return setting_manifest(
        LossTable.joined(evaluated.rounds[: found.rounds]),
        prepared.plan,
        entries=found.calibrations,
        costs=evaluated.costs[found.rounds - 1] if costs is None else costs,
        patterns=listed(prepared.request.losses),
        software=certifying_versions(),
        sequential=SequentialRecord(
            rounds=found.rounds,
            of_rounds=declared.rounds,
            of_examples=len(declared.ids),
            ended_by=found.ended_by,
            continues=prepared.ledger.continues,
        ),
        earlier_plans=earlier_plans,
    )


def tell_certification(request: CertifyRequest) -> int:
    """Certifies, prints the result, and returns the exit status of the command."""
    done = run_certification(request)
    if done.manifest is None:
        return 0
    proved = any(entry.setting is not None for entry in done.manifest.calibrations)
    files = [joined(done.output, name) for name in (MANIFEST, RISK_TABLE, REPORT)]
    give({"output": done.output, "manifest": done.manifest.to_dict()}, is_proved=proved, files=files)
    if done.rows is None:
        if not is_file(joined(done.output, REPORT)):
            # The earlier call was killed between its result and its report.
            _report(done.output)
        say(f"{done.output} is finished; nothing is left to do. With --resume, another rule to stop takes it further.")
        return 0
    try:
        print_certification(done.manifest, done.rows, output=os.fspath(request.output), baseline=done.baseline)
    finally:
        # Also where standard output is closed: the result is complete without it.
        _report(done.output)
    say(_counted(done.manifest))
    # The folder as it was given, which is shorter than its absolute path.
    tell(f"Next:\n  calm-beam inspect {shlex.quote(os.fspath(request.output))}")
    return 0


def _counted(manifest: SettingManifest) -> str:
    """Returns the number of counted examples, as text."""
    settings = counted(len(manifest.plan.order), "setting")
    if manifest.sequential is None:
        return f"{counted(manifest.data.examples, 'example')} under {settings}"
    return (
        f"{manifest.data.examples:,} of {counted(manifest.sequential.of_examples, 'example')} under {settings} counted"
    )


def _report(output: str) -> None:
    """Builds the report; a failure is only printed, since the result is complete without it."""
    # Imported here, since it also loads the code for the other kind of report.
    from calm_beam.launch.report.command import write_external_report

    path = joined(output, REPORT)
    try:
        write_external_report(output, path)
    except (CalmBeamError, OSError) as error:
        again = f"calm-beam report --calibration={output}"
        say(f"caution: no report ({error}). The result in {output} is whole; try: {again}")
    else:
        tell(f"Report: {path}")


@calling(CertifyRequest)
def certify(request: CertifyRequest) -> SettingManifest | None:
    """Proves which settings of a sweep made elsewhere lose at most delta, writes the result and returns its manifest.

        manifest = calm.certify(losses="losses-*.parquet", order=("8bit", "6bit", "4bit"), delta=0.05)

    `calm-beam certify` runs this function, whose arguments have the names of the command's options: `--order=8bit,6bit`
    is `order=("8bit", "6bit")`, `--costs=8bit=8,6bit=6` is `costs={"8bit": 8, "6bit": 6}`. The command also builds the
    report; `calm-beam report` builds it from the written files.

    With `sequential=True`, it returns None until enough is proved. Then `next_ids.txt` in `output` names the examples
    to evaluate next: add their losses, and call it again.

    Raises:
      UsageError: If anything in the request is wrong, or differs from what was settled at the first call; nothing has
        been written.
      LossesError: If losses or scores are incomplete; names them.
      DataError: If a pattern matches no file, or one is damaged.
    """
    return run_certification(request).manifest
