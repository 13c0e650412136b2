"""Calibrations of several variants, from single losses to chosen thresholds, where wrong choices are likeliest.

`suite` simulates Pareto testing with halves of equal size and costs that are known. Here everything is as in a run: a
hash draws the parts, costs are counted on the part that chooses and depend on the losses, and the plan's own functions
choose.
"""

import dataclasses

import numpy as np
import pytest

from calm_beam.calibration.guarantee import all_specs
from calm_beam.calibration.pareto import TESTING
from calm_beam.calibration.plan import layout_of, part_of_unit, plan_of
from calm_beam.calibration.result import choose_thresholds
from calm_beam.calibration.totals import CalibrationTotals, Sums
from calm_beam.calibration.variants import pareto_rows
from calm_beam.decoding.settings import DecodeSettings
from calm_beam.exits.rule import ExitRule
from calm_beam.manifest import ParetoPlan, Plan, Variant
from calm_beam.risk.fixed_point import to_fixed_point

from .suite import most_misses
from .worlds import WORLDS, World

pytestmark = pytest.mark.slow

_REPLICATIONS = 2000
_EPSILON = 0.05
_MOST = most_misses(_REPLICATIONS, _EPSILON)
_BY_NAME = {world.name: world for world in WORLDS}
_ALL_AT_DELTA = _BY_NAME["coin, all at delta"]
_LAYERS = 8


def _plan(world: World, *, variants: int) -> Plan:
    thresholds = tuple(0.9 - 0.1 * place for place in range(len(world.shares) // variants))
    specs = all_specs(
        consistencies=("textual",),
        metrics=("exact_match",),
        deltas=(world.delta,),
        epsilons=(_EPSILON,),
        p_value="exact_binomial",
        procedure="pareto",
    )
    settings = DecodeSettings(rule=ExitRule(), thresholds=thresholds, max_input_length=8, max_decode_length=8)
    pareto = ParetoPlan(
        variants=tuple(Variant(min_exit_layer=layer) for layer in range(1, variants + 1)), choosing_share=0.3
    )
    return plan_of(specs, settings, model="m", vocabulary=None, pareto=pareto)


def _totals(
    plan: Plan, losses: np.ndarray, layers: np.ndarray, parts: np.ndarray, *, chooser: np.ndarray
) -> CalibrationTotals:
    """Returns the totals of one variant: losses of shape (units, thresholds), layers of one token each."""
    layout = layout_of(plan)
    keys = [str(unit) for unit in range(len(losses))]
    totals = CalibrationTotals.of_losses(
        keys, to_fixed_point(losses)[:, None], layout=layout, salt=plan.salt, groups=parts.tolist()
    )
    ones = (len(losses), *(len(losses) for _ in plan.thresholds))

    def with_layers(name: str, part: Sums) -> Sums:
        of_part = layers[parts == name] if name == TESTING else layers[chooser]
        sums = (
            len(losses) * _LAYERS,
            *(int(used) * len(losses) // max(1, len(of_part)) for used in of_part.sum(axis=0)),
        )
        return dataclasses.replace(part, layer_sums=sums, token_counts=ones)

    return dataclasses.replace(totals, groups=tuple((name, with_layers(name, part)) for name, part in totals.groups))


def _wrong(world: World, *, variants: int, same_part: bool = False) -> int:
    """Returns in how many calibrations the choice has a risk that is not below delta.

    Args:
      world: Its thresholds are divided among the variants.
      variants: How many there are.
      same_part: Whether, wrongly, the part that tests chooses its path too.
    """
    plan = _plan(world, variants=variants)
    parts = np.array([part_of_unit(plan, str(unit)) for unit in range(world.n)])
    size = len(plan.thresholds)
    rng = np.random.default_rng(7)
    wrong = 0
    for _ in range(_REPLICATIONS):
        losses = world.draw(rng, 1)[:, 0]
        # Outputs that lose exit early, so that costs favour what is wrong.
        layers = np.clip(6 - 4 * losses.astype(int) + rng.integers(-1, 2, losses.shape), 1, _LAYERS)
        chooser = parts == TESTING if same_part else parts != TESTING
        totals = [
            _totals(plan, losses[:, at : at + size], layers[:, at : at + size], parts, chooser=chooser)
            for at in range(0, len(world.shares), size)
        ]
        if same_part:
            totals = [_tested_twice(each) for each in totals]
        (entry,) = choose_thresholds(pareto_rows(totals, plan, num_layers=_LAYERS), plan, num_layers=_LAYERS)
        if entry.variant is not None and entry.threshold is not None:
            assert plan.pareto is not None
            place = plan.pareto.variants.index(entry.variant) * size + plan.thresholds.index(entry.threshold)
            wrong += bool(world.is_null[place])
    return wrong


def _tested_twice(totals: CalibrationTotals) -> CalibrationTotals:
    """Returns totals whose part that chooses has the losses of the other."""
    tested = totals.of_group(TESTING)
    return dataclasses.replace(
        totals,
        groups=tuple((name, dataclasses.replace(part, risk=tested.risk)) for name, part in totals.groups),
    )


@pytest.mark.parametrize(
    ("world", "variants"),
    [
        (_ALL_AT_DELTA, 2),
        (_BY_NAME["coin, all at delta, correlated"], 4),
        (_BY_NAME["coin, not monotone"], 4),
        (_BY_NAME["coin, not monotone, common"], 2),
        (dataclasses.replace(_ALL_AT_DELTA, n=85), 4),
    ],
    ids=lambda value: value.name if isinstance(value, World) else str(value),
)
def test_a_bad_variant_is_seldom_chosen(world: World, variants: int) -> None:
    """Among thresholds at delta, and safe ones between them, a wrong one is chosen at most as often as epsilon says."""
    assert _wrong(world, variants=variants) <= _MOST


def test_a_path_from_the_part_that_tests_it_is_caught() -> None:
    """If those who test had chosen the path as well, wrong choices would be too many."""
    assert _wrong(dataclasses.replace(_ALL_AT_DELTA, n=85), variants=4, same_part=True) > 1.5 * _MOST
