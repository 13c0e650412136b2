"""Examples, generations, plans and totals with known content, for tests of their results."""

import dataclasses
from collections.abc import Sequence
from typing import Any

from numpy.typing import ArrayLike

from calm_beam.calibration.plan import check_specs
from calm_beam.inputs.examples import Example
from calm_beam.manifest import Plan, PlannedTest
from calm_beam.outputs import Generation, Output
from calm_beam.outputs.totals import CalibrationTotals, Layout
from calm_beam.risk.losses import to_signed_fixed_point


def build_example(**changes: Any) -> Example:
    """Returns an example with one reference, with the given fields changed."""
    values: dict[str, Any] = {
        "id": "a",
        "has_own_id": True,
        "input": "the cat",
        "input_ids": None,
        "references": ("cat",),
        "file_index": 0,
        "line": 1,
    }
    return Example(**{**values, **changes})


def build_output(text: str, *, exit_layers: Sequence[int] = (4,)) -> Output:
    """Returns an output whose tokens exited at the given layers."""
    return Output(
        text=text,
        tokens=tuple(range(2, 2 + len(exit_layers))),
        exit_layers=tuple(exit_layers),
        confidences=(0.5,) * len(exit_layers),
    )


def build_generation(texts: Sequence[str] = ("cat", "cat", "dog"), **changes: Any) -> Generation:
    """Returns a generation with these texts, the full model's first, with the given fields changed."""
    values: dict[str, Any] = {
        "example": build_example(),
        "truncated": False,
        "duplicate": False,
        "failure": None,
        "outputs": tuple(build_output(text) for text in texts),
    }
    return Generation(**{**values, **changes})


def build_plan(specs: Sequence[PlannedTest], thresholds: Sequence[float], **changes: Any) -> Plan:
    """Returns the plan of these specs on a grid, with the given fields changed."""
    values: dict[str, Any] = {
        "tests": tuple(specs),
        "thresholds": tuple(thresholds),
        "joint_epsilon": None,
        "cluster_key": None,
        "salt": "salt",
        "on_error": "fail",
        "on_long": "truncate",
        "model": "sha256:aa",
        "outputs": "0123",
    }
    plan = Plan(**{**values, **changes})
    keys = ("cluster_key", "group_key", "sequential", "pareto")
    check_specs(plan.tests, **{key: getattr(plan, key) for key in keys})
    return plan


def build_totals(losses: ArrayLike, layout: Layout, *, salt: str = "salt") -> CalibrationTotals:
    """Returns the totals of losses of shape (units, objectives, thresholds); threshold k takes 4 - k / 2 layers.

    Units have their numbers as names, and count as one example each.
    """
    fixed = to_signed_fixed_point(losses)
    keys = [str(index) for index in range(len(fixed))]
    totals = CalibrationTotals.of_losses(keys, fixed, layout=layout, salt=salt)
    whole = dataclasses.replace(
        totals.whole,
        layer_sums=(40, *(40 - 5 * place for place in range(layout.thresholds))),
        token_counts=(10,) * (layout.thresholds + 1),
    )
    return dataclasses.replace(totals, by_shard=((0, len(fixed)),), whole=whole)
