"""`calm-beam certify --sequential`: looks at what has been evaluated, and says that it is enough, or what comes next.

Every call computes all anew from the losses. The ledger in the output directory only refuses what would void the
result: another plan after losses were seen, or other losses of a round that was counted.
"""

import argparse
import itertools
from collections.abc import Sequence

from calm_beam.calibration.declared import DeclaredExamples, IdReading
from calm_beam.calibration.evaluated import EvaluatedLosses
from calm_beam.calibration.ledger import LEDGER, Ledger
from calm_beam.calibration.loss_table import LossTable
from calm_beam.calibration.publish import EarlierResult, withdraw
from calm_beam.calibration.sequential import WatchedSettings, watched_settings
from calm_beam.calibration.settings import setting_manifest
from calm_beam.calibration.settings_plan import order_of_costs, plan_of_settings
from calm_beam.inputs.losses.tables import read_rows, table_files
from calm_beam.inputs.set_parts import salt_of
from calm_beam.launch.flags import UsageError, as_usage, naming
from calm_beam.launch.terminal import say
from calm_beam.manifest import (
    MANIFEST,
    EarlierEnd,
    EarlierPlan,
    SequentialRecord,
    SettingManifest,
    SettingPlan,
    SettingSequentialPlan,
    plans_in_words,
    read_setting_manifest,
)
from calm_beam.manifest.plan_list import AskedPlan, PlanList
from calm_beam.manifest.versions import certifying_versions
from calm_beam.storage import joined, remove_file, replacing, version
from calm_beam.text import counted

from .asked import groups_of, tests_of
from .published import NEXT_IDS, prepare_output, publish_and_tell, report_if_missing
from .sources import loss_of_losses, rows_of_losses

_SEEN_BEFORE = (
    "caution: --overwrite begins anew where losses have been looked at, which have decided how many there are. For the "
    "same examples, what follows proves nothing."
)


def certify_sequentially(flags: argparse.Namespace, output: str) -> int:
    """Looks at the losses that are there, and returns the exit status of the command.

    Args:
      flags: Those of `certify_parser`, after `fill_in_sequential`.
      output: The directory to write to.

    Raises:
      UsageError: If what is asked for does not go together, or is not what was settled at the first call.
      LossesError: If ids or losses are not as they have to be; names them.
      DataError: If a pattern matches no file, or one is damaged.
    """
    path = joined(output, LEDGER)
    # Before anything is read, so that whoever writes meanwhile is noticed.
    ledger_version, earlier = version(path), EarlierResult.found_in(output)
    settled = None if flags.overwrite else Ledger.read(path)
    if flags.overwrite:
        warn_of_counted(path)
    ended = None if flags.overwrite else _ended(output, settled, earlier)
    declared = _declared(flags)
    with as_usage():
        plan = _plan(flags, declared)
    say(f"plan {plan.digest}")
    if settled is None:
        if flags.resume:
            raise UsageError(f"--resume: {output} holds no sequential certification.")
        ledger = Ledger(plan=plan)
    else:
        ledger = settled.going_on(plan, ended=ended, resumes=flags.resume)
    if ended is not None and ledger is settled:
        prepare_output(output)
        report_if_missing(output)
        say(f"{output} is finished; nothing is left to do. With --resume, another rule to stop takes it further.")
        return 0
    evaluated = _evaluated(flags, declared, plan)
    found = _watched(evaluated, plan, declared, ledger.continues) if evaluated.rounds else None
    rounds = max(0 if found is None else found.rounds, len(ledger.rounds))
    ledger = ledger.with_rounds(evaluated.digests()[:rounds], missing=evaluated.in_words())
    prepare_output(output)
    # Before anything is told of what was found, and before an earlier result is taken away.
    plans = PlanList(output)
    asked = _asked_plan(plan, declared, plans, is_new=settled is None)
    earlier_plans = plans.ask(asked, is_answered=found is not None)
    if words := plans_in_words(earlier_plans, of="losses"):
        say(words)
    if flags.overwrite:
        withdraw(output, earlier)
        earlier = EarlierResult()
    # Before anything is told that could be a reason to ask for something else.
    ledger.write(path, replaces=ledger_version)
    if found is not None:
        say(_in_words(found, evaluated, declared))
    if found is None or found.ended_by is None:
        _name_next(flags, output, evaluated)
        return 0
    remove_file(joined(output, NEXT_IDS))
    manifest = _manifest(flags, found, evaluated, ledger, declared, earlier_plans=earlier_plans)
    publish_and_tell(output, manifest, rows=found.rows, earlier=earlier)
    say(
        f"{manifest.data.examples:,} of {counted(len(declared.ids), 'example')} under "
        f"{counted(len(plan.order), 'setting')} counted: {joined(output, MANIFEST)}"
    )
    return 0


def _asked_plan(plan: SettingPlan, declared: DeclaredExamples, plans: PlanList, *, is_new: bool) -> AskedPlan:
    """Returns a plan as it is asked of the losses that the ledger counts; `is_new` if it has counted none yet."""
    known = plans.data_of_outputs() or declared.fingerprint
    asked = AskedPlan.of(plan, data=known, command="certify --sequential", decodes=True)
    if is_new and plans.is_answered(asked):
        # The same ids, but losses that were evaluated anew, or another look at those that were seen.
        return AskedPlan.of(
            plan,
            data=f"{declared.fingerprint}, anew after {len(plans.plans())}",
            command=asked.command,
            decodes=True,
        )
    return asked


def warn_of_counted(path: str) -> None:
    """Says so if the ledger that is to be taken away has counted a round, or cannot tell."""
    try:
        ledger = Ledger.read(path)
        has_counted = ledger is not None and bool(ledger.rounds)
    except UsageError:
        has_counted = True
    if has_counted:
        say(_SEEN_BEFORE)


def _declared(flags: argparse.Namespace) -> DeclaredExamples:
    reading = IdReading(group_key=flags.group_key, cluster_key=flags.cluster_key)
    with naming("--ids"):
        files = table_files(flags.ids, reading)
        rows = itertools.chain.from_iterable(read_rows(path, reading) for path in files)
        return DeclaredExamples.of(rows, salt=salt_of(flags.seed), round_examples=flags.round_examples)


def _plan(flags: argparse.Namespace, declared: DeclaredExamples) -> SettingPlan:
    order = flags.order or order_of_costs(flags.costs, order_by=flags.order_by)
    if len(set(order)) != len(order):
        raise UsageError("--order must name every setting once: it names a setting twice.")
    if flags.costs is not None and set(flags.costs) != set(order):
        raise UsageError(
            f"--costs must name every setting once: the settings are {', '.join(order)}, it names "
            f"{', '.join(flags.costs)}."
        )
    if flags.stop_at_setting is not None and flags.stop_at_setting not in order:
        raise UsageError(f"--stop_at_setting={flags.stop_at_setting}: is none of the settings {', '.join(order)}.")
    return plan_of_settings(
        tests_of(flags, loss=loss_of_losses(flags.loss), groups=groups_of(flags, declared.groups), losses=None),
        order,
        joint_epsilon=flags.epsilon[0] if flags.joint else None,
        group_key=flags.group_key,
        cluster_key=flags.cluster_key,
        seed=flags.seed,
        sequential=SettingSequentialPlan(
            ids=declared.fingerprint,
            examples=len(declared.ids),
            round_examples=flags.round_examples,
            costs=None if flags.costs is None else tuple(flags.costs[name] for name in order),
            stop_at_setting=flags.stop_at_setting,
            stop_at_cost=flags.stop_at_cost,
            stop_gain=flags.stop_gain,
        ),
    )


def _ended(output: str, settled: Ledger | None, earlier: EarlierResult) -> SettingManifest | None:
    """Returns the manifest in which the settled plan has ended; None if it has not."""
    if not earlier.manifest:
        return None
    if settled is None:
        raise UsageError(f"--output {output}: holds a manifest already. Choose another directory, or pass --overwrite.")
    manifest = read_setting_manifest(joined(output, MANIFEST))
    return manifest if manifest.plan.digest == settled.plan.digest else None


def _evaluated(flags: argparse.Namespace, declared: DeclaredExamples, plan: SettingPlan) -> EvaluatedLosses:
    rows = () if flags.losses is None else rows_of_losses(flags.losses, loss=loss_of_losses(flags.loss))
    evaluated = EvaluatedLosses.of(rows, declared, settings=plan.order)
    if flags.costs is not None and any(evaluated.costs):
        raise UsageError("--costs and the column cost both say what settings cost: leave one of them out.")
    return evaluated


def _watched(
    evaluated: EvaluatedLosses, plan: SettingPlan, declared: DeclaredExamples, continues: Sequence[EarlierEnd]
) -> WatchedSettings:
    assert plan.sequential is not None
    costs = plan.sequential.costs
    return watched_settings(
        evaluated,
        plan,
        of_rounds=declared.rounds,
        costs=None if costs is None else dict(zip(plan.order, costs, strict=True)),
        looked_at=continues[-1].rounds if continues else 1,
    )


def _in_words(found: WatchedSettings, evaluated: EvaluatedLosses, declared: DeclaredExamples) -> str:
    """Returns how far the entries have come."""
    chosen = sum(entry.setting is not None for entry in found.calibrations)
    examples = sum(len(each.ids) for each in evaluated.rounds[: found.rounds])
    return (
        f"round {found.rounds} of {declared.rounds}: {examples:,} of {counted(len(declared.ids), 'example')}; {chosen} "
        f"of {counted(len(found.calibrations), 'entry', several='entries')} with a setting"
    )


def _name_next(flags: argparse.Namespace, output: str, evaluated: EvaluatedLosses) -> None:
    """Writes which examples to evaluate next, and says so."""
    if evaluated.waiting:
        say(evaluated.in_words())
    ids = list(itertools.chain.from_iterable(evaluated.missing[: flags.next_rounds]))
    path = joined(output, NEXT_IDS)
    with replacing(path) as temporary:
        temporary.write_text("".join(f"{name}\n" for name in ids), encoding="utf-8")
    say(
        f"not enough is proved yet. Evaluate {counted(len(ids), 'example')} under every setting, add the losses, and "
        f"repeat the command: {path}"
    )


def _manifest(
    flags: argparse.Namespace,
    found: WatchedSettings,
    evaluated: EvaluatedLosses,
    ledger: Ledger,
    declared: DeclaredExamples,
    *,
    earlier_plans: Sequence[EarlierPlan],
) -> SettingManifest:
    assert found.ended_by is not None
    plan = ledger.plan
    assert plan.sequential is not None
    costs = evaluated.costs[found.rounds - 1]
    if plan.sequential.costs is not None:
        costs = dict(zip(plan.order, plan.sequential.costs, strict=True))
    return setting_manifest(
        LossTable.joined(evaluated.rounds[: found.rounds]),
        plan,
        entries=found.calibrations,
        costs=costs,
        patterns=flags.losses,
        software=certifying_versions(),
        sequential=SequentialRecord(
            rounds=found.rounds,
            of_rounds=declared.rounds,
            of_examples=len(declared.ids),
            ended_by=found.ended_by,
            continues=ledger.continues,
        ),
        earlier_plans=earlier_plans,
    )
