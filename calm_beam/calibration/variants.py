"""Calibration of several variants: from their totals to a proof along a path that a selection part chose, or of each.

The cheapest variant is chosen by declared costs per token. No promise rests on these numbers. They are fixed with
the plan, before any loss is seen, so wrong costs lead to a bad choice but to a valid proof.
"""

import dataclasses
import itertools
import math
from collections.abc import Sequence
from typing import Any, Self

from calm_beam.decoding.settings import DecodeSettings, settings_of_variant
from calm_beam.exits.measures import Need
from calm_beam.exits.rule import ExitRule
from calm_beam.exits.token_cost import TokenCost
from calm_beam.manifest import EACH_VARIANT, Calibration, CostRecord, PathEntry, Plan, PlannedTest, Variant
from calm_beam.outputs import OutputsError
from calm_beam.outputs.metric_checks import Contrast, largest_unseen
from calm_beam.outputs.totals import CalibrationTotals
from calm_beam.risk.evidence import Evidence
from calm_beam.risk.testing import GridTest, TestedSetting, outcomes_of, p_values_for

from .pareto import CHOOSING, TESTING, check_parts, pareto_choice
from .plan import has_parts
from .result import RiskRow, asked_of

_TESTS = {"logits_test": Need.LOGITS, "states_test": Need.STATES, "classifier_test": Need.CLASSIFIER}


@dataclasses.dataclass(frozen=True, kw_only=True)
class VariantCosts:
    """The cost of a token, by variant and mean layer.

    Attributes:
      cost: The parts of the cost.
      rule: The parts of the exit rule that all variants share.
    """

    cost: TokenCost
    rule: ExitRule

    @classmethod
    def of_record(cls, record: CostRecord, *, rule: ExitRule, layers: int) -> Self:
        """Returns the costs that a manifest records.

        Args:
          record: The manifest's record.
          rule: The exit rule of any variant.
          layers: Decoder depth.
        """
        tests = {need: getattr(record, name) for name, need in _TESTS.items()}
        cost = TokenCost(
            layers=layers,
            layer=record.layer,
            skipped=record.skipped,
            output=record.output,
            tests={need: test for need, test in tests.items() if test is not None},
        )
        return cls(cost=cost, rule=rule)

    def full(self) -> float:
        """Returns the cost of a token of the full model."""
        return self.cost.full()

    def at_mean(self, layers: float, variant: Variant) -> float:
        """Returns the mean cost of a variant's tokens that use this many layers on average."""
        return self.cost.at_mean(layers, dataclasses.replace(self.rule, **variant.fields_of_rule()))


def tests_by_name(cost: TokenCost) -> dict[str, float]:
    """Returns the tests of a cost, by their names in a manifest."""
    return {name: float(cost.tests[need]) for name, need in _TESTS.items() if need in cost.tests}


def whole_of(variants: Sequence[CalibrationTotals]) -> CalibrationTotals:
    """Returns the totals over all variants: sums of the first, and failures and contrast of all.

    An example that failed under one variant counts there with loss 1 at every threshold, and is listed with the reason
    of the first variant where it did.

    Raises:
      OutputsError: If the variants were decoded from different examples.
    """
    first, *others = variants
    for other in others:
        if (other.content_sum, other.by_shard) != (first.content_sum, first.by_shard):
            raise OutputsError(
                "the variants were decoded from different examples: the data changed between them. Restore the data "
                "and begin again with --overwrite."
            )
    failures = {name: reason for each in reversed(variants) for name, reason in each.failures}
    contrast = Contrast.merged(each.contrast for each in variants)
    return dataclasses.replace(
        first,
        failures=tuple(sorted(failures.items())),
        # All variants have the same examples.
        contrast=dataclasses.replace(
            contrast,
            examples=max(each.contrast.examples for each in variants),
            unseen=largest_unseen(each.contrast.unseen for each in variants),
        ),
    )


def variant_rows(
    variants: Sequence[CalibrationTotals], plan: Plan, *, num_layers: int, costs: VariantCosts | None = None
) -> tuple[RiskRow, ...]:
    """Returns the risk of every variant and threshold under every spec, with the result of its test.

    Rows are by spec, variant and threshold, the last varying fastest; their `place` is the position on the path. Where
    a part of the set has chosen the path, counts, risks and p-values are of the part that tests.

    Without a part that chooses, every variant's grid is tested from the safest threshold down at epsilon divided by the
    number of variants. So the chance of any wrong rejection is at most epsilon, however the variants depend on each
    other, and the cheapest of everything found safe may be taken after the fact. Its variant comes last on the path,
    after the others by the cost they reached, so the last rejected threshold is the one taken.

    Args:
      variants: For each variant of the plan, totals over the whole calibration set; their groups are its parts if it
        has any.
      plan: The plan, fixed before any loss was seen.
      num_layers: Decoder depth.
      costs: Costs of variants, settled before any loss was seen; None where cost is measured in layers.

    Raises:
      ValueError: If a part is empty.
      EvidenceError: If the losses do not allow a p-value that was planned.

    Source: as in `pareto_choice`, or Bonferroni's inequality over fixed sequences. Where each variant is tested by
      itself, everything found safe holds together, so its costs may be of any tokens; where a part chooses, costs are
      of its tokens alone.
    """
    if not has_parts(plan):
        rows = (_each_rows(variants, plan, spec=spec, num_layers=num_layers, costs=costs) for spec in plan.tests)
    else:
        check_parts(*(variants[0].of_group(part).risk.n for part in (CHOOSING, TESTING)), verb="test")
        rows = (_rows(variants, plan, spec=spec, num_layers=num_layers, costs=costs) for spec in plan.tests)
    return tuple(itertools.chain.from_iterable(rows))


def _rows(
    variants: Sequence[CalibrationTotals],
    plan: Plan,
    *,
    spec: PlannedTest,
    num_layers: int,
    costs: VariantCosts | None,
) -> list[RiskRow]:
    assert plan.pareto is not None
    # [variants * thresholds], for each of the two parts
    choosing, testing = (
        Evidence.side_by_side([each.evidence(dataclasses.replace(spec, group=part)) for each in variants])
        for part in (CHOOSING, TESTING)
    )
    choosing_layers, layers = (
        [used for each in variants for used in each.of_group(part).mean_layers(num_layers)[1:]]
        for part in (CHOOSING, TESTING)
    )
    chosen_by, p_values = p_values_for(spec, choosing), p_values_for(spec, testing)
    grid = [(variant, threshold) for variant in plan.pareto.variants for threshold in plan.thresholds]
    choosing_costs = _costs(choosing_layers, [variant for variant, _ in grid], costs)
    choice = pareto_choice(chosen_by, p_values, costs=choosing_costs or choosing_layers, epsilon=spec.epsilon)
    tested = outcomes_of(testing, p_values=p_values, decided=choice.test)
    places = {index: place for place, index in enumerate(choice.path, start=1)}
    return [
        _row(
            spec,
            found,
            variant=variant,
            threshold=threshold,
            layers=layers[index],
            place=places.get(index),
            choosing_p_value=float(chosen_by[index]),
            choosing_layers=choosing_layers[index],
            cost=choosing_costs[index] if choosing_costs else None,
        )
        for index, ((variant, threshold), found) in enumerate(zip(grid, tested, strict=True))
    ]


def _each_rows(
    variants: Sequence[CalibrationTotals],
    plan: Plan,
    *,
    spec: PlannedTest,
    num_layers: int,
    costs: VariantCosts | None,
) -> list[RiskRow]:
    assert plan.pareto is not None
    at_share = dataclasses.replace(spec, epsilon=plan.pareto.share_of(spec.epsilon), procedure="fixed_sequence")
    rows, cheapest = [], []
    for variant, totals in zip(plan.pareto.variants, variants, strict=True):
        layers = totals.whole.mean_layers(num_layers)[1:]
        priced = _costs(layers, [variant] * len(layers), costs)
        tested = GridTest.of(at_share, [totals.evidence(spec)]).after(1)
        rows.append(
            [
                _row(
                    spec,
                    found,
                    variant=variant,
                    threshold=threshold,
                    layers=layers[index],
                    cost=priced[index] if priced else None,
                )
                for index, (threshold, found) in enumerate(zip(plan.thresholds, tested, strict=True))
            ]
        )
        last = next((row for row in reversed(rows[-1]) if row.rejected), None)
        cheapest.append(math.inf if last is None else last.layers if last.cost is None else last.cost)
    place, by_cost = 0, sorted(range(len(rows)), key=lambda index: -cheapest[index])
    for index in by_cost:
        of_variant = rows[index]
        for at, row in enumerate(of_variant):
            if row.tested:
                place += 1
                of_variant[at] = dataclasses.replace(row, place=place)
    return [row for of_variant in rows for row in of_variant]


def proved_by_variant(entry: Calibration) -> tuple[PathEntry, ...]:
    """Returns the last threshold proved safe of every variant, in the order of the path; the chosen one is last.

    Any of them may be promised in place of the chosen one, whatever decides: where each variant was tested by itself,
    all that was found safe holds together. Empty where nothing was proved, where a part of the set chose the path, and
    where a holdout has confirmed the choice.
    """
    if entry.procedure != EACH_VARIANT or entry.confirmation is not None:
        return ()
    last = {step.variant: step for step in entry.path if step.rejected}
    return tuple(last.values())


def promising(entry: Calibration, variant: Variant) -> Calibration:
    """Returns an entry that promises another variant, at the last threshold proved safe of it.

    The tests are the same; those of the variant come last. Thresholds by position are left out, since they depend on
    decoding settings (`publish.with_positions`), and so is the mean loss over examples where clusters are units.

    Args:
      entry: The entry.
      variant: A variant of `proved_by_variant`.
    """
    path = sorted(entry.path, key=lambda step: step.variant == variant)
    last = next(step for step in reversed(path) if step.rejected)
    return dataclasses.replace(
        entry,
        path=tuple(path),
        threshold=last.threshold,
        variant=last.variant,
        layers=last.layers,
        risk=last.risk,
        pays=None,
        threshold_by_position=None,
        rule=None,
        example_risk=None,
    )


def with_places_of(rows: Sequence[RiskRow], entries: Sequence[Calibration]) -> tuple[RiskRow, ...]:
    """Returns the rows of a risk table with the places that thresholds have on the paths of entries."""
    places = {
        (*asked_of(entry).values(), *step.tested_as): place
        for entry in entries
        for place, step in enumerate(entry.path, start=1)
    }
    return tuple(
        dataclasses.replace(row, place=places.get((*asked_of(row).values(), row.threshold, row.variant)))
        for row in rows
    )


def _costs(layers: Sequence[float], variants: Sequence[Variant], costs: VariantCosts | None) -> list[float]:
    """Returns the costs of points with these variants and mean layers; empty where cost is measured in layers."""
    if costs is None:
        return []
    return [costs.at_mean(used, variant) for used, variant in zip(layers, variants, strict=True)]


def _row(
    spec: PlannedTest, found: TestedSetting, *, variant: Variant, threshold: float, layers: float, **chosen: Any
) -> RiskRow:
    """Returns the row of a variant and threshold; `chosen` has the columns about the path and its choice."""
    return RiskRow(
        **vars(found),
        **asked_of(spec),
        threshold=threshold,
        layers=layers,
        tau=variant.tau,
        min_exit_layer=variant.min_exit_layer,
        confidence=variant.confidence,
        exit_interval=variant.exit_interval,
        **chosen,
    )


def variants_together(variants: Sequence[Variant], settings: DecodeSettings) -> list[list[int]]:
    """Returns the indices of variants that are swept together: all, except those that can share no sweep.

    A certified head proves intervals of one measure of logits, so with such a head, variants of several measures share
    none.
    """
    by_share: dict[object, list[int]] = {}
    is_certified = settings.engine is not None and settings.engine.head != "exact"
    for place, variant in enumerate(variants):
        rule = settings_of_variant(settings, variant).rule
        by_logits = rule.confidence if is_certified and rule.measure().needs is Need.LOGITS else None
        by_share.setdefault((rule.shares_sweep_by(), by_logits), []).append(place)
    return list(by_share.values())
