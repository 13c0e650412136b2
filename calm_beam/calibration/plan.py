"""The plan of a run, settled before any loss is seen: the promise of every p-value and procedure rests on that."""

import dataclasses
from collections.abc import Sequence
from typing import Protocol

from calm_beam.decoding.settings import DecodeSettings, settings_of_variant
from calm_beam.inputs.examples import Example
from calm_beam.inputs.set_parts import Split, salt_of
from calm_beam.manifest import (
    COUNT_NEAR_TIES,
    EACH_VARIANT,
    NEAR_TIES,
    OF_VARIANTS,
    PARETO,
    WORST_NEAR_TIES,
    EarlierPlan,
    ParetoPlan,
    Plan,
    PlannedTest,
    SequentialPlan,
    guarantee_in_words,
    joint_procedure,
)
from calm_beam.outputs import DecodeJob
from calm_beam.outputs.totals import Layout
from calm_beam.risk.pvalues import P_VALUES, why_not_watched

from .guarantee import MOST_KEPT_LOSSES, Guarantee, default_p_value, place_of_served, specs_of
from .pareto import PARTS, SELECTION_SHARE, part_of

_BLOCKS = 5


class Counted(Protocol):
    """Examples or outputs that can be counted before any loss is seen."""

    def examples(self, *, at_most: int) -> int | None:
        """Returns the number of examples; None if it exceeds `at_most`."""
        ...


def single_losses(source: Counted, *, thresholds: int, entries: int) -> int | None:
    """Returns the number of single losses per entry; None if all entries have too many to keep by default.

    Args:
      source: Counts the examples, up to the number that may be kept.
      thresholds: Size of the grid, or of the grids of all variants together.
      entries: Number of entries.
    """
    examples = source.examples(at_most=MOST_KEPT_LOSSES // (thresholds * entries))
    return None if examples is None else examples * thresholds


@dataclasses.dataclass(frozen=True, kw_only=True)
class PlanTerms:
    """The terms of a plan other than the tests and the identity of the outputs.

    Attributes:
      joint_epsilon: Joint epsilon of all entries, as in `Plan`.
      seed: Decides the salt.
      on_error: Treatment of examples that fail, as in `Plan`.
      sequential: Rounds and the rule that stops them, as in `Plan`.
      pareto: How variants are tested, as in `Plan`.
      holdout_share: Share of the set that confirms, as in `Plan`.
      near_ties: Treatment of outputs that depended on a decision within rounding: `count`, or `worst_case` for loss 1.
      serve: Index of the spec that will be served, settled with the rest; None if left open.
    """

    joint_epsilon: float | None = None
    seed: int = 0
    on_error: str = "fail"
    sequential: SequentialPlan | None = None
    pareto: ParetoPlan | None = None
    holdout_share: float | None = None
    near_ties: str = COUNT_NEAR_TIES
    serve: int | None = None


NOTHING_MORE = PlanTerms()
"""The default terms: every example counts as it is, and each guarantee holds alone."""


def plan_of(
    specs: Sequence[PlannedTest],
    settings: DecodeSettings,
    *,
    model: str,
    vocabulary: str | None,
    terms: PlanTerms = NOTHING_MORE,
    cluster_key: str | None = None,
    group_key: str | None = None,
    on_long: str = "truncate",
) -> Plan:
    """Returns the plan of a run; arguments not described here are as in `calm_beam.manifest.Plan`.

    Args:
      specs: From `specs_of`.
      settings: How outputs are decoded; their grid is the testing order, or the grid of every variant.
      model: Fingerprint of the model.
      vocabulary: Fingerprint of the vocabulary, or None for token ids.
      terms: The other terms of the plan.
      cluster_key: Field that names an example's cluster, as in `Plan`.
      group_key: Field that names an example's group, as in `Plan`.
      on_long: Treatment of prompts that are too long, as in `Plan`.

    Raises:
      ValueError: If near ties count as the worst and the measure does not see them, tails of clusters are tested by the
        binomial test, a p-value is to be watched that does not allow it, or groups or parts are combined with clusters
        or with a p-value that needs single losses.
    """
    near_ties, holdout_share = terms.near_ties, terms.holdout_share
    if near_ties not in NEAR_TIES:
        raise ValueError(f"near_ties must be one of {', '.join(NEAR_TIES)}, got {near_ties!r:.40}.")
    if near_ties == WORST_NEAR_TIES and not settings.rule.measure().sees_near_ties:
        raise ValueError(
            f"near_ties is {near_ties}, but near ties of confidence {settings.rule.confidence} are not seen: it is "
            "made of tokens, or of none. Take near_ties=count, or another measure."
        )
    if cluster_key is not None and any(
        spec.objective.tail is not None and not P_VALUES[spec.p_value].takes_fractions for spec in specs
    ):
        raise ValueError(
            "a tail of clusters is a share of each cluster's outputs, and p_value exact_binomial is for losses of "
            "0 and 1. Take hoeffding_bentkus."
        )
    if holdout_share is not None and not 0 < holdout_share < 1:
        raise ValueError(f"holdout_share must be in (0, 1), got {holdout_share}. For 30 % pass 0.3.")
    sequential, pareto = terms.sequential, terms.pareto
    check_specs(specs, cluster_key=cluster_key, group_key=group_key, sequential=sequential, pareto=pareto)
    return Plan(
        tests=tuple(specs),
        thresholds=settings.thresholds,
        joint_epsilon=terms.joint_epsilon,
        joint_procedure=joint_procedure(terms.joint_epsilon, is_sequential=sequential is not None),
        cluster_key=cluster_key,
        salt=salt_of(terms.seed),
        on_error=terms.on_error,
        on_long=on_long,
        model=model,
        outputs=",".join(
            each.fingerprint(model=model, vocabulary=vocabulary) for each in settings_of_all(settings, pareto)
        ),
        sequential=sequential,
        group_key=group_key,
        pareto=pareto,
        near_ties=None if near_ties == COUNT_NEAR_TIES else near_ties,
        serve=terms.serve,
    ).confirmed_by(holdout_share)


def plan_of_job(
    specs: Sequence[PlannedTest],
    job: DecodeJob,
    *,
    terms: PlanTerms = NOTHING_MORE,
    settings: DecodeSettings | None = None,
) -> Plan:
    """Returns the plan of calibrating generations.

    Args:
      specs: From `specs_of`.
      job: The job of the generations; with several variants, the job of one of them.
      terms: The other terms of the plan.
      settings: The job's, with the part of its grid that is tested; all of it if omitted.
    """
    return plan_of(
        specs,
        settings or job.settings,
        model=job.model.fingerprint,
        vocabulary=job.vocabulary_identity(),
        terms=terms,
        cluster_key=job.cluster_key,
        # Generations may have groups that no guarantee is about.
        group_key=job.group_key if any(spec.group is not None for spec in specs) else None,
        on_long=job.on_long,
    )


def settled_plan(
    guarantees: Sequence[Guarantee],
    job: DecodeJob,
    data: Counted,
    *,
    groups: Sequence[str] = (),
    joint: bool = False,
    serve: str | None = None,
    terms: PlanTerms = NOTHING_MORE,
    settings: DecodeSettings | None = None,
) -> Plan:
    """Returns the settled plan of calibrating generations; both `calibrate` and `Calibrate` call this.

    Args:
      guarantees: The guarantees, by the full names of metrics.
      job: The job of the generations; with several variants, the job of one of them.
      data: Counts the examples, if no p-value is named.
      groups: Names of groups, each of which is given every guarantee too.
      joint: Whether they must all hold together with probability 1 - epsilon.
      serve: The entry that will be served, as `place_of_served` takes it; None leaves that open.
      terms: The other terms of the plan.
      settings: The job's, with the part of its grid that is tested; all of it if omitted.

    Raises:
      ValueError: If `specs_of`, `place_of_served` or `plan_of` refuses the arguments.
    """
    losses = None
    if not groups and any(guarantee.p_value is None for guarantee in guarantees):
        variants = 1 if terms.pareto is None else len(terms.pareto.variants)
        thresholds = len((settings or job.settings).thresholds) * variants
        losses = single_losses(data, thresholds=thresholds, entries=len(guarantees))
    is_clustered = job.cluster_key is not None
    specs = specs_of(guarantees, groups=groups, joint=joint, is_clustered=is_clustered, losses=losses)
    terms = dataclasses.replace(
        terms,
        joint_epsilon=guarantees[0].epsilon if joint else None,
        serve=None if serve is None else place_of_served(serve, specs),
    )
    return plan_of_job(specs, job, terms=terms, settings=settings)


def check_specs(
    specs: Sequence[PlannedTest],
    *,
    cluster_key: str | None = None,
    group_key: str | None = None,
    sequential: SequentialPlan | None = None,
    pareto: ParetoPlan | None = None,
) -> None:
    """Refuses specs that cannot be calibrated in this way; arguments as in `plan_of`.

    Raises:
      ValueError: If `plan_of` would refuse them.
    """
    _check_groups(specs, cluster_key=cluster_key, group_key=group_key)
    expected = None if pareto is None else pareto.procedure
    if any((spec.procedure if spec.procedure in OF_VARIANTS else None) != expected for spec in specs):
        raise ValueError(
            f"procedure must be {PARETO} exactly if there are several variants, whose path it chooses, and "
            f"{EACH_VARIANT} exactly if there are some and each is tested by itself."
        )
    if pareto is not None and (group_key is not None or sequential is not None):
        raise ValueError("several variants are neither calibrated for groups nor sequentially. Leave one out.")
    for spec in specs:
        if expected == PARETO and P_VALUES[spec.p_value].needs_table:
            raise ValueError(
                f"p_value {spec.p_value} needs every single loss, and those of variants among which a part of the set "
                "chooses are only summed. Take another one, or one variant."
            )
        if sequential is not None and (reason := why_not_watched(spec.p_value)) is not None:
            raise ValueError(f"{reason}, or calibrate on all examples.")


def as_settled_before(plan: Plan) -> Plan:
    """Returns a plan without named p-values as earlier versions settled it, when every p-value was computed from sums.

    Runs that an earlier version began or finished thereby continue as they were asked. With several variants, a part of
    the set chose then, and every promise kept its epsilon.
    """
    pareto = plan.pareto
    if pareto is not None and not has_parts(plan):
        pareto = dataclasses.replace(pareto, choosing_share=SELECTION_SHARE)
    tests = [
        dataclasses.replace(
            test,
            procedure=test.procedure if pareto is None else pareto.procedure,
            p_value=default_p_value(is_binary=test.objective.tail is not None, is_signed=test.is_signed, is_kept=False),
        )
        for test in plan.tests
    ]
    return dataclasses.replace(plan, tests=tuple(tests), pareto=pareto, joint_procedure=None)


def earlier_forms(plan: Plan, *, is_open: bool) -> tuple[Plan, ...]:
    """Returns the forms that earlier versions gave the same plan; `is_open` if no p-value was named."""
    forms = [dataclasses.replace(plan, joint_procedure=None), *([as_settled_before(plan)] if is_open else [])]
    return tuple(form for form in dict.fromkeys(forms) if form != plan)


def gone_on_with(plan: Plan, listed: Sequence[EarlierPlan], *, is_open: bool) -> Plan:
    """Returns the plan of a resumed run: this plan, or the form in which an earlier version listed it.

    Args:
      plan: The plan of this run.
      listed: The plans that were asked of the outputs.
      is_open: Whether no p-value was named.
    """
    digests = {each.plan for each in listed}
    return next((form for form in (plan, *earlier_forms(plan, is_open=is_open)) if form.digest in digests), plan)


def set_part(plan: Plan, name: str) -> Split | None:
    """Returns a part of the set, as `calm_beam.inputs.set_parts` names it; None if all examples choose."""
    if plan.confirm_share is None:
        return None
    return Split(name=name, confirm_share=plan.confirm_share, salt=plan.salt)


def layout_of(plan: Plan) -> Layout:
    """Returns the layout of the totals that the planned tests need."""
    parts = PARTS if has_parts(plan) else ()
    return Layout.of(plan.tests, thresholds=len(plan.thresholds), parts=parts)


def group_of(plan: Plan, example: Example) -> str | None:
    """Returns the group of the layout in which an example counts: its own, or its part of the set."""
    if not has_parts(plan):
        return example.group
    return part_of_unit(plan, example.id if example.cluster is None else example.cluster)


def part_of_unit(plan: Plan, unit: str) -> str | None:
    """Returns the part of the set that a unit's name assigns it to; None if there are no parts."""
    if plan.pareto is None or plan.pareto.choosing_share is None:
        return None
    return part_of(unit, salt=plan.salt, selection_share=plan.pareto.choosing_share)


def has_parts(plan: Plan) -> bool:
    """Returns whether one part of the set chooses among several variants and the other part tests."""
    return plan.pareto is not None and plan.pareto.choosing_share is not None


def promise_of(plan: Plan, *, most_confirmed: int = 0) -> str:
    """Returns the joint promise of the planned tests as text; `most_confirmed` as in `guarantee_in_words`."""
    return guarantee_in_words(
        joint_epsilon=plan.joint_epsilon,
        hands_on=plan.hands_on,
        cluster_key=plan.cluster_key,
        group_key=plan.group_key,
        is_sequential=plan.sequential is not None,
        variants=None if plan.pareto is None else plan.pareto.procedure,
        most_confirmed=most_confirmed,
    )


def _check_groups(specs: Sequence[PlannedTest], *, cluster_key: str | None, group_key: str | None) -> None:
    groups = {spec.group for spec in specs} - {None}
    if bool(groups) != (group_key is not None):
        raise ValueError(
            f"group_key is {group_key!r}, but the specs are about {len(groups)} groups: name it exactly if there are "
            "some."
        )
    if not groups:
        return
    if cluster_key is not None:
        raise ValueError(
            "group_key and cluster_key cannot be given together: a cluster may hold prompts of several groups. Leave "
            "one of them out."
        )
    for spec in specs:
        if P_VALUES[spec.p_value].needs_table:
            raise ValueError(
                f"p_value {spec.p_value} needs every single loss, and those of groups are only summed. Take another "
                "one, or leave group_key out."
            )


def settings_of_all(settings: DecodeSettings, pareto: ParetoPlan | None) -> tuple[DecodeSettings, ...]:
    """Returns the settings of every variant, in the plan's order; without variants, the given settings.

    Raises:
      ValueError: If the settings of a variant are not allowed.
    """
    if pareto is None:
        return (settings,)
    return tuple(settings_of_variant(settings, variant) for variant in pareto.variants)


def block_ends(thresholds: int) -> tuple[int, ...]:
    """Returns the ends of the blocks of a grid, which are decoded and tested one after the other.

    Each block is a fifth of the grid: at tolerances as in the paper, tests mostly fail in the first or second.

    >>> block_ends(20), block_ends(7), block_ends(1)
    ((4, 8, 12, 16, 20), (2, 4, 6, 7), (1,))
    """
    size = -(-thresholds // _BLOCKS)
    return tuple(min(end, thresholds) for end in range(size, thresholds + size, size))
