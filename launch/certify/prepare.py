"""Checks of a certification and of its output directory, before it prints anything.

All losses are read, and the plan is settled and printed, so that a log shows what was settled by then. Errors in the
files of the output directory, and missing permission to write it, are found here too.

With `--sequential`, another program evaluates the examples, and every call recomputes everything from the losses that
exist. The ledger in the output directory only refuses changes that would void the result: another plan after losses
were seen, or other losses of a round that was counted.
"""

import dataclasses
import itertools
from collections.abc import Mapping, Sequence

from calm_beam.calibration.asked_data import MOST_GROUPS
from calm_beam.calibration.certification import check_names, settled_order
from calm_beam.calibration.guarantee import default_tests_in_words
from calm_beam.calibration.publish import EarlierResult
from calm_beam.calibration.settings_rounds import LEDGER, DeclaredExamples, EvaluatedLosses, IdReading, Ledger
from calm_beam.inputs.losses.tables import read_rows, table_files
from calm_beam.inputs.set_parts import salt_of
from calm_beam.launch.flags import UsageError, as_usage, naming
from calm_beam.launch.flags.shared_options import find_folder
from calm_beam.launch.terminal import say, say_detail
from calm_beam.manifest import (
    MANIFEST,
    SettingManifest,
    SettingPlan,
    SettingSequentialPlan,
    joint_procedure,
    read_setting_manifest,
    too_few_in_words,
)
from calm_beam.manifest.files import FAILURES, REPORT, RISK_TABLE
from calm_beam.options import listed
from calm_beam.storage import check_writable, is_cloud_path, is_file, joined, make_folder, remove_unfinished, version

from .request import CertifyRequest
from .sources import Source, read_losses, read_outputs, read_scores, rows_of_losses

NEXT_IDS = "next_ids.txt"
"""The file that names which examples to evaluate next."""
_SEEN_BEFORE = (
    "caution: --overwrite begins again where losses have been looked at, which have decided how many there are. For "
    "the same examples, what follows proves nothing."
)


def checked_output(request: CertifyRequest) -> str:
    """Returns the output directory, after checking that it is writable.

    Raises:
      UsageError: If it cannot.
    """
    output = find_folder(request.output)
    with naming("--output"):
        # In a bucket, no folder can block a file name.
        for path in (joined(output, MANIFEST),) if is_cloud_path(output) else _files_of(output):
            check_writable(path)
    return output


def check_empty(output: str, earlier: EarlierResult) -> None:
    """Refuses a directory with an earlier result, or with an unfinished certification.

    Raises:
      UsageError: If there is one.
    """
    if is_file(joined(output, LEDGER)):
        raise UsageError(
            f"--output {output}: holds a sequential certification. Its losses have been looked at, so that a test "
            "for all examples at once proves nothing of them. Go on with --sequential, or choose another directory "
            "for other examples."
        )
    earlier.check_may_go(output, overwrite=False)


def warn_of_counted(output: str) -> None:
    """Warns if the ledger that is to be removed has counted a round, or cannot be read."""
    try:
        ledger = Ledger.read(joined(output, LEDGER))
        has_counted = ledger is not None and bool(ledger.rounds)
    except UsageError:
        has_counted = True
    if has_counted:
        say(_SEEN_BEFORE)


def prepare_output(output: str) -> None:
    """Makes the directory, and removes temporary files of calls that were killed."""
    make_folder(output)
    for path in _files_of(output):
        remove_unfinished(path)


def _files_of(output: str) -> tuple[str, ...]:
    """Returns the names of all files that a certification may write into a directory."""
    return tuple(joined(output, name) for name in (MANIFEST, RISK_TABLE, FAILURES, REPORT, LEDGER, NEXT_IDS))


@dataclasses.dataclass(frozen=True, kw_only=True)
class WholeSweep:
    """A certification whose losses are complete.

    Attributes:
      output: The output directory.
      earlier: The result that it holds now.
      source: The losses.
      plan: The hypotheses to test.
      costs: Costs of settings and of the baseline, if known.
    """

    output: str
    earlier: EarlierResult
    source: Source
    plan: SettingPlan
    costs: Mapping[str, float]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Rounds:
    """A certification that is evaluated after every round of examples.

    Attributes:
      request: The certification request.
      output: The output directory.
      earlier: The result that it holds now.
      declared: All examples that may be evaluated.
      ledger: The settled plan, and the rounds counted up to now.
      ledger_version: Version of its file when the call began; empty if there was none.
      is_new: Whether nothing was settled before.
      evaluated: The losses that exist.
    """

    request: CertifyRequest
    output: str
    earlier: EarlierResult
    declared: DeclaredExamples
    ledger: Ledger
    ledger_version: str
    is_new: bool
    evaluated: EvaluatedLosses

    @property
    def plan(self) -> SettingPlan:
        """The hypotheses to test."""
        return self.ledger.plan

    @property
    def costs(self) -> Mapping[str, float] | None:
        """Costs of settings, from the plan; None if rows of losses have them."""
        assert self.plan.sequential is not None
        costs = self.plan.sequential.costs
        return None if costs is None else dict(zip(self.plan.order, costs, strict=True))


@dataclasses.dataclass(frozen=True, kw_only=True)
class Ended:
    """A certification that ended in an earlier call, so that nothing is left to do.

    Attributes:
      output: Its directory.
      manifest: The result.
    """

    output: str
    manifest: SettingManifest


def prepare(request: CertifyRequest) -> WholeSweep | Rounds | Ended:
    """Returns the checked certification, after settling and printing its plan.

    Raises:
      UsageError: If options conflict, or differ from those settled at the first call.
      LossesError: If ids, losses or scores are invalid; names them.
      DataError: If a pattern matches no file, or one is damaged.
    """
    output = checked_output(request)
    return _rounds(request, output) if request.sequential else _whole_sweep(request, output)


def _whole_sweep(request: CertifyRequest, output: str) -> WholeSweep:
    earlier = EarlierResult.found_in(output)
    if request.overwrite:
        warn_of_counted(output)
    else:
        check_empty(output, earlier)
    source = _source(request)
    sweep = source.sweep
    declared = _declared_costs(request, source)
    plan = SettingPlan(
        tests=request.tests(groups=_groups(request, sweep.groups), losses=sweep.losses.size, metric=source.metric),
        order=settled_order(
            sweep,
            order=listed(request.order) or (None if request.order_by else source.listed),
            order_by=request.order_by,
            costs=declared,
        ),
        joint_epsilon=request.joint_epsilon,
        joint_procedure=joint_procedure(request.joint_epsilon, is_sequential=False),
        group_key=request.group_key,
        cluster_key=request.cluster_key,
        salt=salt_of(request.seed),
        baseline=source.baseline,
        task=source.task,
        metric=source.metric,
        direction=source.direction,
        consistency=source.consistency,
    )
    check_names(plan)
    say_detail(f"plan {plan.digest}")
    if request.p_value is None:
        say_detail(default_tests_in_words(plan.tests))
    if words := too_few_in_words(plan.tests, len(sweep.ids)):
        say(f"caution: {words}")
    return WholeSweep(output=output, earlier=earlier, source=source, plan=plan, costs=declared or dict(sweep.costs))


def _source(request: CertifyRequest) -> Source:
    loss, cluster_key = request.kind_of_losses, request.cluster_key
    if request.outputs is not None:
        return read_outputs(
            request,
            loss=loss,
            consistency=request.consistency,
            metric=request.metric,
            group_key=request.group_key,
            cluster_key=cluster_key,
        )
    if request.baseline is None:
        return read_losses(request, loss=loss, group_key=request.group_key, cluster_key=cluster_key)
    return read_scores(
        request,
        loss=loss,
        task=request.task,
        metric=request.metric,
        direction=request.direction,
        cluster_key=cluster_key,
    )


def _declared_costs(request: CertifyRequest, source: Source) -> dict[str, float]:
    """Returns the costs that `--costs` declares; empty without it."""
    declared = request.declared_costs
    if not declared:
        return {}
    if source.sweep.costs:
        raise UsageError("--costs and the column cost both say what settings cost: leave one of them out.")
    if set(declared) - {source.reference} != set(source.sweep.settings):
        hint = "" if source.reference is None else f" The baseline, {source.reference}, may be added to them."
        raise UsageError(
            f"--costs must name every setting once: the settings are {', '.join(source.sweep.settings)}, it names "
            f"{', '.join(declared)}.{hint}"
        )
    return declared


def _groups(request: CertifyRequest, names: Sequence[str] | None) -> tuple[str, ...]:
    """Returns the groups that have their own tests, ascending, from the group of every example; none without groups.

    Raises:
      UsageError: If there are too many groups.
    """
    groups = tuple(sorted(set(names or ())))
    if len(groups) > MOST_GROUPS:
        raise UsageError(
            f"--group_key={request.group_key}: there are {len(groups)} groups, more than {MOST_GROUPS}. Each of them "
            "needs hundreds of examples to prove anything: name a column with few values."
        )
    return groups


def _rounds(request: CertifyRequest, output: str) -> Rounds | Ended:
    path = joined(output, LEDGER)
    # Taken before anything is read, so that a concurrent write is noticed.
    ledger_version, earlier = version(path), EarlierResult.found_in(output)
    settled = None if request.overwrite else Ledger.read(path)
    if request.overwrite:
        warn_of_counted(output)
    ended = None if request.overwrite else _ended(output, settled, earlier)
    declared = _declared(request)
    with as_usage():
        plan = _plan_of_rounds(request, declared)
    say_detail(f"plan {plan.digest}")
    if settled is None:
        if request.resume:
            raise UsageError(f"--resume: {output} holds no sequential certification.")
        ledger = Ledger(plan=plan)
    else:
        ledger = settled.going_on(plan, ended=ended, resumes=request.resume)
    if ended is not None and ledger is settled:
        return Ended(output=output, manifest=ended)
    return Rounds(
        request=request,
        output=output,
        earlier=earlier,
        declared=declared,
        ledger=ledger,
        ledger_version=ledger_version,
        is_new=settled is None,
        evaluated=_evaluated(request, declared, plan),
    )


def _declared(request: CertifyRequest) -> DeclaredExamples:
    reading = IdReading(group_key=request.group_key, cluster_key=request.cluster_key)
    with naming("--ids"):
        files = table_files(listed(request.ids), reading)
        rows = itertools.chain.from_iterable(read_rows(path, reading) for path in files)
        return DeclaredExamples.of(rows, salt=salt_of(request.seed), round_examples=request.examples_of_a_round)


def _plan_of_rounds(request: CertifyRequest, declared: DeclaredExamples) -> SettingPlan:
    order, costs = request.order_of_rounds, request.declared_costs
    plan = SettingPlan(
        tests=request.tests(groups=_groups(request, declared.groups)),
        order=order,
        joint_epsilon=request.joint_epsilon,
        group_key=request.group_key,
        cluster_key=request.cluster_key,
        salt=salt_of(request.seed),
        baseline=None,
        task=None,
        metric=None,
        sequential=SettingSequentialPlan(
            ids=declared.fingerprint,
            examples=len(declared.ids),
            round_examples=request.examples_of_a_round,
            costs=tuple(costs[name] for name in order) if costs else None,
            stop_at_setting=request.stop_at_setting,
            stop_at_cost=request.stop_at_cost,
            stop_gain=request.stop_gain,
        ),
    )
    check_names(plan)
    return plan


def _ended(output: str, settled: Ledger | None, earlier: EarlierResult) -> SettingManifest | None:
    """Returns the manifest of the settled plan; None if the plan has not ended."""
    if not earlier.manifest:
        return None
    if settled is None:
        earlier.check_may_go(output, overwrite=False)
        return None
    manifest = read_setting_manifest(joined(output, MANIFEST))
    return manifest if manifest.plan.digest == settled.plan.digest else None


def _evaluated(request: CertifyRequest, declared: DeclaredExamples, plan: SettingPlan) -> EvaluatedLosses:
    rows = rows_of_losses(listed(request.losses), loss=request.kind_of_losses) if request.losses else ()
    evaluated = EvaluatedLosses.of(rows, declared, settings=plan.order)
    if request.costs is not None and any(evaluated.costs):
        raise UsageError("--costs and the column cost both say what settings cost: leave one of them out.")
    return evaluated
