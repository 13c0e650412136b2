"""From the totals of several variants to the path that one part of the set chooses, and what the other part proves."""

import dataclasses
from collections.abc import Sequence

from calm_beam.manifest import Plan, PlannedTest
from calm_beam.outputs import OutputsError
from calm_beam.risk.evidence import Evidence
from calm_beam.risk.testing import outcomes_of, p_values_for

from .contrast import Contrast
from .pareto import CHOOSING, TESTING, pareto_choice
from .result import RiskRow, asked_of
from .split import check_parts
from .totals import CalibrationTotals
from .unseen import largest_unseen


def whole_of(variants: Sequence[CalibrationTotals]) -> CalibrationTotals:
    """Returns what all variants say of the examples: sums of the first, and failures and contrast of all.

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
                "and begin anew with --overwrite."
            )
    failures = {name: reason for each in reversed(variants) for name, reason in each.failures}
    contrast = Contrast.merged(each.contrast for each in variants)
    return dataclasses.replace(
        first,
        failures=tuple(sorted(failures.items())),
        # They are the same examples.
        contrast=dataclasses.replace(
            contrast,
            examples=max(each.contrast.examples for each in variants),
            unseen=largest_unseen(each.contrast.unseen for each in variants),
        ),
    )


def pareto_rows(variants: Sequence[CalibrationTotals], plan: Plan, *, num_layers: int) -> tuple[RiskRow, ...]:
    """Returns the risk of every variant and threshold under every spec, and what its test says of it.

    Counts, risks and p-values are of the part that tests. Rows are by spec, variant and threshold, the last varying
    fastest; their `place` is that on the path.

    Args:
      variants: For each variant of the plan, totals over the whole calibration set, whose groups are its parts.
      plan: What is asked for, fixed before any loss was seen.
      num_layers: Decoder depth.

    Raises:
      ValueError: If a part is empty.
      EvidenceError: If the losses do not allow a p-value that was planned.

    Source: as `pareto_choice`. Costs are mean decoder layers per token.
    """
    assert plan.pareto is not None
    check_parts(*(variants[0].of_group(part).risk.n for part in (CHOOSING, TESTING)), verb="test")
    return tuple(row for spec in plan.tests for row in _rows(variants, plan, spec=spec, num_layers=num_layers))


def _rows(variants: Sequence[CalibrationTotals], plan: Plan, *, spec: PlannedTest, num_layers: int) -> list[RiskRow]:
    assert plan.pareto is not None
    # [variants * thresholds], of either part
    choosing, testing = (
        Evidence.side_by_side([each.evidence(dataclasses.replace(spec, group=part)) for each in variants])
        for part in (CHOOSING, TESTING)
    )
    choosing_layers, layers = (
        [used for each in variants for used in each.of_group(part).mean_layers(num_layers)[1:]]
        for part in (CHOOSING, TESTING)
    )
    chosen_by, p_values = p_values_for(spec, choosing), p_values_for(spec, testing)
    choice = pareto_choice(chosen_by, p_values, costs=choosing_layers, epsilon=spec.epsilon)
    tested = outcomes_of(spec, testing, p_values=p_values, decided=choice.test)
    places = {index: place for place, index in enumerate(choice.path, start=1)}
    grid = [(variant, threshold) for variant in plan.pareto.variants for threshold in plan.thresholds]
    return [
        RiskRow(
            **vars(found),
            **asked_of(spec),
            threshold=threshold,
            layers=layers[index],
            tau=variant.tau,
            min_exit_layer=variant.min_exit_layer,
            confidence=variant.confidence,
            exit_interval=variant.exit_interval,
            place=places.get(index),
            choosing_p_value=float(chosen_by[index]),
            choosing_layers=choosing_layers[index],
        )
        for index, ((variant, threshold), found) in enumerate(zip(grid, tested, strict=True))
    ]
