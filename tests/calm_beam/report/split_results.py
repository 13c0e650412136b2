"""Made-up results of repeated splits."""

import dataclasses
from collections.abc import Sequence
from typing import Any

from calm_beam.evaluation.outcomes import GridRow, SplitResults, Summary, TrialOutcome, summaries
from calm_beam.manifest import PlannedTest
from tests.plans import all_specs

SPECS = all_specs(consistencies=("textual", "risk"), metrics=("token_f1",), deltas=(0.1, 0.2), epsilons=(0.1,))
MEASURES = ("softmax", "softmax_max", "state", "classifier", "static", "softmax, schedule decay")
PROVENANCE: dict[str, Any] = {
    "experiment": "splits",
    "measures": [
        {"name": name, "rule": {"confidence": name, "tau": None, "schedule": "constant"}} for name in MEASURES
    ],
    "splits": {"trials": 3, "calibration_share": 0.8, "seed": 0},
    "model": {"uri": "/home/ada/models/tiny", "fingerprint": "sha256:6d", "layers": 8},
    "data": ["/home/ada/secret/rows.jsonl"],
    "cluster_key": None,
    "max_decode_length": 9,
    "on_error": "fail",
    "software": {"calm-beam": "0", "python": "3"},
}


def trial_outcomes(
    *, trials: int = 3, measures: Sequence[str] = MEASURES, specs: Sequence[PlannedTest] = SPECS
) -> list[TrialOutcome]:
    """Returns the choices of trials: each another threshold, and the last of them none."""
    return [
        TrialOutcome(
            measure=measure,
            spec=spec,
            trial=trial,
            threshold=None if trial == trials - 1 else 0.9 - 0.1 * trial,
            n_calibration=8,
            n_test=2,
            test_risk=0.0 if trial == trials - 1 else 0.05 + 0.06 * trial,
            excess_p_value=0.5,
            layers=8.0 if trial == trials - 1 else 4.0 + 0.1 * place,
            flops_appendix_b=1.5,
            flops_calm_table=1.2,
            bleu=None,
            full_bleu=None,
        )
        for place, measure in enumerate(measures)
        for spec in specs
        for trial in range(trials)
    ]


def split_summaries(**changes: Any) -> list[Summary]:
    """Returns the same as summaries."""
    return summaries(trial_outcomes(**changes))


def split_results(**changes: Any) -> SplitResults:
    """Returns all results, with some changed."""
    summaries_of_all = split_summaries()
    results = SplitResults(
        trials=trial_outcomes(), curves=summaries_of_all, table=summaries_of_all, grid=grid_rows(), num_layers=8
    )
    return dataclasses.replace(results, **changes)


def grid_rows(measures: Sequence[str] = (*MEASURES, "oracle")) -> list[GridRow]:
    """Returns the whole set at two thresholds."""
    return [
        GridRow(
            measure=measure,
            threshold=threshold,
            consistency=spec.objective.consistency,
            metric="token_f1",
            loss=spec.objective.loss,
            n=10,
            risk=0.0 if threshold is None else 0.1,
            layers=8.0 if threshold is None else 3.0 + threshold,
            flops_appendix_b=None,
            flops_calm_table=None,
            bleu=None,
            cut=0,
            examples=10,
            repeated=0,
            failed=0,
        )
        for measure in measures
        for threshold in (None, 0.5, 0.0)
        for spec in SPECS[::2]
    ]
