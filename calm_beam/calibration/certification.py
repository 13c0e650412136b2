"""Certification of the settings of a sweep: the plan fixed before any loss is summed, and the proof.

Also tests the promises of a manifest of settings with fresh losses.
"""

import dataclasses
import itertools
from collections.abc import Iterable, Mapping, Sequence
from typing import Self

import numpy as np

from calm_beam.errors import UsageError
from calm_beam.inputs.losses.tables import named
from calm_beam.manifest import (
    SETTINGS,
    EarlierPlan,
    SequentialRecord,
    SettingCalibration,
    SettingDataRecord,
    SettingGroup,
    SettingManifest,
    SettingPlan,
    SettingRecord,
    SettingStep,
    SettingTest,
    elsewhere_in_words,
    guarantee_in_words,
    time_of_now,
)
from calm_beam.outputs.totals import come_again, fingerprint_text, id_sample
from calm_beam.risk.fwer import PROCEDURES
from calm_beam.risk.losses import loss_sum_upper
from calm_beam.risk.pvalues import P_VALUES, why_not_watched
from calm_beam.risk.testing import TESTED_COLUMNS, TestedSetting, grid_tests
from calm_beam.text import counted

from .anytime import AnytimeEvidence
from .guarantee import are_kept, default_p_value
from .loss_table import LossTable
from .verification import Verdict, judged

ORDERS = ("cost", "cost_ascending")
LONGEST_NAME = 1000
"""Characters of a setting's or a group's name: the name is in every line of tables and in every drawing."""
_SHOWN = 40


@dataclasses.dataclass(frozen=True, kw_only=True)
class SettingGuarantees:
    """Guarantees asked of settings: every combination of the lists is a promise of its own.

    Attributes:
      deltas: Risk tolerances.
      epsilons: Allowed probabilities of error; one if joint.
      tails: Bounds t of tail tests: at most a share delta of examples may lose more than t. They add to mean tests.
      loss: Kind of loss: `given`, `signed` or `relu`.
      is_binary: Whether the metric is known beforehand to score 0 or 1.
      p_value: Test of one setting; None takes the default for the losses (`calm_beam.calibration.guarantee`).
      procedure: How several settings are tested.
      joint: Whether all must hold together. Each then gets an equal share of epsilon (Bonferroni).
      clustered: Whether losses are means over clusters.
      watched: Whether the tests are evaluated after every round.
    """

    deltas: Sequence[float]
    epsilons: Sequence[float]
    tails: Sequence[float] = ()
    loss: str = "given"
    is_binary: bool = False
    p_value: str | None = None
    procedure: str = "fixed_sequence"
    joint: bool = False
    clustered: bool = False
    watched: bool = False

    def __post_init__(self) -> None:
        for name, values in (("delta", self.deltas), ("epsilon", self.epsilons), ("tail", self.tails)):
            if not (values or name == "tail") or len(set(values)) != len(values):
                raise UsageError(f"--{name} must list one or more different values, got {list(values)}.")
            for value in values:
                if not (0 <= value < 1 if name == "tail" else 0 < value < 1):
                    interval = "[0, 1)" if name == "tail" else "(0, 1)"
                    raise UsageError(
                        f"--{name} must be in {interval}, got {value:g}. It is a fraction: for 5 % pass 0.05."
                    )
        if self.joint and len(self.epsilons) > 1:
            raise UsageError(f"--joint divides one epsilon among all entries, got {list(self.epsilons)}. Choose one.")
        for name, choice, known in (("p_value", self.p_value, P_VALUES), ("procedure", self.procedure, PROCEDURES)):
            if choice is not None and choice not in known:
                raise UsageError(f"--{name} must be one of {', '.join(known)}; got {choice!r}.")

    def tests(self, *, groups: Sequence[str] = (), losses: int | None = None) -> tuple[SettingTest, ...]:
        """Returns the tests with all defaults filled in: for all examples, then for each group, the mean first.

        Args:
          groups: Groups of examples with tests of their own.
          losses: Number of losses, examples times settings; None if not known yet.

        Raises:
          UsageError: If a combination is not allowed.
        """
        combinations = list(itertools.product((None, *self.tails), (None, *groups), self.deltas, self.epsilons))
        share, is_kept = len(combinations) if self.joint else 1, are_kept(losses, entries=len(combinations))
        tests = []
        for tail, group, delta, epsilon in combinations:
            test = SettingTest(
                group=group,
                loss=self.loss,
                tail=None if tail is None else tail + 0.0,
                delta=delta,
                epsilon=epsilon / share,
                p_value=self.p_value or self._default_p_value(tail, is_kept=is_kept),
                procedure=self.procedure,
            )
            _check(test, clustered=self.clustered)
            if self.watched and (reason := why_not_watched(test.p_value)) is not None:
                raise UsageError(f"{reason}, or leave --sequential out.")
            tests.append(test)
        return tuple(tests)

    def _default_p_value(self, tail: float | None, *, is_kept: bool) -> str:
        if self.watched:
            # The only p-value that may be watched.
            return "signed_mixture"
        is_signed = tail is None and self.loss == "signed"
        return default_p_value(
            is_binary=(tail is not None or (self.is_binary and not is_signed)) and not self.clustered,
            is_signed=is_signed,
            is_kept=is_kept,
        )


def _check(test: SettingTest, *, clustered: bool) -> None:
    method = P_VALUES[test.p_value]
    if test.is_signed and not method.takes_signed:
        valid = " or ".join(name for name, each in P_VALUES.items() if each.takes_signed)
        raise UsageError(
            f"--p_value={test.p_value} is for losses in [0, 1], and signed losses lie in [-1, 1]. Take {valid}, or "
            "another --loss."
        )
    if clustered and not method.takes_fractions:
        raise UsageError(
            f"losses of clusters are means over their examples, and p_value {test.p_value} is for losses of 0 and 1. "
            "Take --p_value=hoeffding_bentkus."
        )


def settled_order(
    sweep: LossTable, *, order: Sequence[str] | None, order_by: str | None, costs: dict[str, float]
) -> tuple[str, ...]:
    """Returns the settings in testing order, which depends on no loss.

    Args:
      sweep: The sweep's losses.
      order: The order as declared; None where costs decide it.
      order_by: One of `ORDERS` where costs decide: the dearest first, or the cheapest.
      costs: Declared cost of each setting; empty where the rows give it.

    Raises:
      UsageError: If the order does not name every setting once, or a cost is missing, or a cost differs between
        examples, so that its mean depends on the data.
    """
    if order is not None:
        missing = [name for name in sweep.settings if name not in order]
        extra = [name for name in order if name not in sweep.settings]
        if missing or extra or len(set(order)) != len(order):
            parts = [f"lacks {named(missing, 'setting')} that there are losses of"] if missing else []
            parts += [f"names {named(extra, 'setting')} without losses"] if extra else []
            parts += ["names a setting twice"] if len(set(order)) != len(order) else []
            raise UsageError(f"--order must name every setting once: it {' and '.join(parts)}.")
        return tuple(order)
    known = costs or sweep.costs
    if missing := [name for name in sweep.settings if name not in known]:
        raise UsageError(
            f"--order_by={order_by}: {named(missing, 'setting')} without a cost. Add the column cost, declare them "
            "(--costs), or give the order itself (--order)."
        )
    varying = [name for name in sweep.settings if not costs and name not in sweep.constant_costs]
    if varying:
        raise UsageError(
            f"--order_by={order_by}: the cost of {named(varying, 'setting')} differs between examples, so that its "
            "mean depends on the data, and an order by it too. Give the order itself (--order), or declare costs "
            "(--costs)."
        )
    return order_of_costs({name: known[name] for name in sweep.settings}, order_by=order_by)


def order_of_costs(costs: Mapping[str, float], *, order_by: str | None) -> tuple[str, ...]:
    """Returns settings in the order of their costs.

    Args:
      costs: Cost of every setting; no loss enters it.
      order_by: One of `ORDERS`.

    Raises:
      UsageError: If two cost the same.
    """
    twice = sorted({name for name in costs if list(costs.values()).count(costs[name]) > 1})
    if twice:
        raise UsageError(
            f"--order_by={order_by}: {named(twice, 'setting')} cost the same, which leaves their order open. Give the "
            "order itself (--order)."
        )
    return tuple(sorted(costs, key=lambda name: costs[name], reverse=order_by == "cost"))


def check_names(plan: SettingPlan) -> None:
    """Refuses names of settings and groups that are too long for a table.

    Raises:
      UsageError: If a name is too long; the message begins with it.
    """
    groups = [test.group for test in plan.tests if test.group is not None]
    for kind, names in (("setting", plan.order), ("group", groups)):
        if longest := next((name for name in names if len(name) > LONGEST_NAME), None):
            raise UsageError(
                f"{kind} {longest[:_SHOWN]!r}…: its name has {len(longest):,} characters, more than {LONGEST_NAME:,}. "
                "Shorten it."
            )


@dataclasses.dataclass(frozen=True, kw_only=True)
class SettingRow(TestedSetting):
    """One line of the risk table: one setting under one test.

    Attributes:
      group: Group of examples; empty for all.
      loss: Kind of loss.
      tail: Bound that a loss must exceed to count; None for tests of the mean.
      delta: Risk tolerance.
      epsilon: Allowed probability of error.
      setting: Name of the setting.
      cost: Cost of the setting; None if not given.
    """

    group: str
    loss: str
    tail: float | None
    delta: float
    epsilon: float
    setting: str
    cost: float | None

    @classmethod
    def columns(cls, rows: Sequence[Self]) -> tuple[str, ...]:
        """Returns the columns of a table in their order."""
        return ("group", "loss", "tail", "delta", "epsilon", "setting", *TESTED_COLUMNS, "cost")


def setting_rows(
    sweep: LossTable, plan: SettingPlan, *, costs: Mapping[str, float]
) -> tuple[tuple[SettingRow, ...], ...]:
    """Returns for every test the risk of every setting and the result of its test.

    Args:
      sweep: All losses.
      plan: The plan, fixed before any loss was summed.
      costs: Known costs by setting.

    Raises:
      EvidenceError: If the losses do not allow a p-value that was planned.

    Source: Angelopoulos et al. (2021), "Learn then Test"; CALM Algorithm 1 for thresholds.
    """
    tests = grid_tests([sweep.ordered(plan.order, salt=plan.salt)], plan.tests, hands_on=plan.hands_on)
    return tuple(
        rows_of(test, found.after(1), order=plan.order, costs=costs)
        for test, found in zip(plan.tests, tests, strict=True)
    )


def rows_of(
    test: SettingTest, tested: Sequence[TestedSetting], *, order: Sequence[str], costs: Mapping[str, float]
) -> tuple[SettingRow, ...]:
    """Returns the lines of the risk table about one test.

    Args:
      test: The test.
      tested: Its result for every setting.
      order: The settings in testing order.
      costs: Known costs by setting.
    """
    return tuple(
        SettingRow(
            **vars(found),
            group=test.group or "",
            loss=test.loss,
            tail=test.tail,
            delta=test.delta,
            epsilon=test.epsilon,
            setting=setting,
            cost=costs.get(setting),
        )
        for setting, found in zip(order, tested, strict=True)
    )


def setting_manifest(
    sweep: LossTable,
    plan: SettingPlan,
    *,
    entries: Sequence[SettingCalibration],
    costs: Mapping[str, float],
    patterns: Sequence[str],
    software: Mapping[str, str],
    sequential: SequentialRecord | None = None,
    earlier_plans: Sequence[EarlierPlan] = (),
) -> SettingManifest:
    """Returns the manifest of a certification.

    Args:
      sweep: All losses that were counted.
      plan: What was asked for.
      entries: The results, from `entries_of` or `calm_beam.calibration.rounds`.
      costs: Known costs by setting.
      patterns: Patterns of the files with the losses.
      software: Versions of the software that computed the manifest.
      sequential: How the run ended, if it was watched round by round.
      earlier_plans: Earlier plans in the same output directory.
    """
    groups = sorted({test.group for test in plan.tests if test.group is not None})
    guarantee = guarantee_in_words(
        kind=SETTINGS,
        joint_epsilon=plan.joint_epsilon,
        hands_on=plan.hands_on,
        cluster_key=plan.cluster_key,
        group_key=plan.group_key,
        is_sequential=sequential is not None,
    )
    if sweep.decoder is not None:
        guarantee += f" {elsewhere_in_words(sweep.decoder.name)}"
    return SettingManifest(
        created=time_of_now(),
        settings=tuple(
            SettingRecord(name=name, cost=costs.get(name), fingerprint=fingerprint_text(sweep.fingerprints[name]))
            for name in plan.order
        ),
        data=SettingDataRecord(
            patterns=tuple(patterns),
            examples=len(sweep.ids),
            clusters=sweep.clusters_of(None),
            groups=tuple(
                SettingGroup(name=name, examples=len(sweep.rows_of(name)), clusters=sweep.clusters_of(name))
                for name in groups
            ),
            fingerprint=sweep.fingerprint(),
            id_sample=id_sample(sweep.ids),
        ),
        decoder=sweep.decoder,
        plan=plan,
        earlier_plans=tuple(earlier_plans) or None,
        sequential=sequential,
        calibrations=tuple(_with_example_risk(entry, sweep) for entry in entries),
        guarantee=guarantee,
        software=software,
    )


def _with_example_risk(entry: SettingCalibration, sweep: LossTable) -> SettingCalibration:
    """Returns an entry with the mean loss over examples added, where clusters are the units."""
    if sweep.clusters is None or entry.setting is None:
        return entry
    single = dataclasses.replace(sweep, clusters=None)
    ids, fixed = single.units(order=(entry.setting,), group=entry.group, tail=entry.tail)
    return dataclasses.replace(entry, example_risk=float(loss_sum_upper(fixed.sum()) / len(ids)))


def entries_of(plan: SettingPlan, rows: Sequence[Sequence[SettingRow]]) -> tuple[SettingCalibration, ...]:
    """Returns the manifest entry of every test from its rows, in testing order."""
    paths = [[SettingStep.of(row) for row in of_test if row.tested] for of_test in rows]
    levels = plan.tested_epsilons([[step.p_value for step in path] for path in paths])
    return tuple(
        SettingCalibration.of_tests(test, path, level=level, setting=None, cost=None, risk=None)
        for test, path, level in zip(plan.tests, paths, levels, strict=True)
    )


def promised(manifest: SettingManifest) -> tuple[SettingCalibration, ...]:
    """Returns the entries that promise something about a setting."""
    return tuple(entry for entry in manifest.calibrations if entry.setting is not None)


def check_fresh(sweep: LossTable, manifest: SettingManifest) -> None:
    """Refuses losses that cannot test a manifest.

    Raises:
      UsageError: If a promised setting or a group has no losses, there are losses of a setting that was not swept, or
        all losses are those that were certified.
    """
    entries = promised(manifest)
    wanted = sorted({str(entry.setting) for entry in entries})
    if missing := [name for name in wanted if name not in sweep.settings]:
        raise UsageError(f"there are no fresh losses of {named(missing, 'promised setting')}.")
    if extra := [name for name in sweep.settings if name not in manifest.plan.order]:
        raise UsageError(
            f"there are fresh losses of {named(extra, 'setting')} that the manifest is not about. Name settings as it "
            "does, and leave out the others."
        )
    groups = {entry.group for entry in entries if entry.group is not None}
    if lacking := sorted(groups - set(sweep.groups or ())):
        raise UsageError(f"there are no fresh losses of {named(lacking, 'group')}.")
    certified = {setting.name: setting.fingerprint for setting in manifest.settings}
    if all(fingerprint_text(sweep.fingerprints[name]) == certified[name] for name in wanted):
        raise UsageError(
            "these are the very losses that were certified. What chose the setting cannot test it: take examples that "
            "were newly drawn."
        )


def why_not_fresh(sweep: LossTable, manifest: SettingManifest) -> str | None:
    """Returns a warning if certified examples seem to be among the fresh ones; None otherwise.

    The check compares ids. Ids that merely number the rows of a file are the same in every file, so this is not an
    error.
    """
    sample = manifest.data.id_sample
    if sample is None or not (again := come_again(sample, sweep.ids)):
        return None
    return (
        f"of {counted(len(sample), 'certified id')} that the manifest remembers, {again} "
        f"{'is' if again == 1 else 'are'} among the fresh ones. If these are the same examples, leave them out: what "
        "chose the setting cannot test it."
    )


def verify_settings(
    sweep: LossTable, manifest: SettingManifest, *, alpha: float
) -> tuple[Verdict[SettingCalibration], ...]:
    """Returns a verdict on each entry that promises something.

    Args:
      sweep: Losses of examples drawn independently of those that were certified; they passed `check_fresh`.
      manifest: The promises.
      alpha: Chance of reporting a kept promise as broken, in (0, 1).

    Raises:
      EvidenceError: If an entry's p-value is for losses of 0 and 1, and there are others.

    Source: ours; see `calm_beam.calibration.verification`.
    """
    return judged(promised(manifest), _losses(sweep, manifest), alpha=alpha)


def unit_names(sweep: LossTable) -> tuple[frozenset[str], str]:
    """Returns the names of the independent units of a sweep, and the noun for one: example or cluster."""
    if sweep.clusters is None:
        return frozenset(sweep.ids), "example"
    return frozenset(sweep.clusters), "cluster"


def with_settings(
    evidence: AnytimeEvidence, names: Iterable[str], *, sweep: LossTable, manifest: SettingManifest
) -> AnytimeEvidence:
    """Returns the evidence of earlier runs updated with one more run.

    Args:
      evidence: Evidence of the earlier runs.
      names: Names of this run's units, none of which has counted before.
      sweep: Losses of this run, as `verify_settings` takes them.
      manifest: The promises.
    """
    return evidence.after_run(names, _losses(sweep, manifest), entries=promised(manifest))


def _losses(sweep: LossTable, manifest: SettingManifest) -> list[tuple[np.ndarray, np.ndarray]]:
    """Returns the losses of every promise, strict and lenient; they are equal, as failed outputs are not marked."""
    in_order = [_in_order(sweep, entry, salt=manifest.plan.salt) for entry in promised(manifest)]
    return [(of_entry, of_entry) for of_entry in in_order]


def _in_order(sweep: LossTable, entry: SettingCalibration, *, salt: str) -> np.ndarray:
    """Returns the losses for an entry in betting order, shape (units,)."""
    assert entry.setting is not None
    return sweep.in_betting_order(salt=salt, order=(entry.setting,), group=entry.group, tail=entry.tail)[:, 0]
