"""Calibrations of several variants, from single losses to chosen thresholds, in the hardest worlds.

`suite` simulates Pareto testing with halves of equal size and costs that are known. Here everything is as in a run: a
hash draws the parts, costs are counted on the part that selects and depend on the losses, and the plan's own functions
choose. If every variant is tested by itself, the cheapest accepted one is taken, by costs that favour wrong ones.
"""

import dataclasses

import numpy as np
import pytest

from calm_beam.calibration.pareto import TESTING
from calm_beam.calibration.plan import layout_of, part_of_unit
from calm_beam.calibration.result import choose_thresholds
from calm_beam.calibration.variants import variant_rows
from calm_beam.decoding.settings import DecodeSettings
from calm_beam.exits.rule import ExitRule
from calm_beam.manifest import ParetoPlan, Plan, Variant
from calm_beam.outputs.totals import CalibrationTotals, Sums
from calm_beam.risk.losses import to_fixed_point
from tests.plans import all_specs, build_plan

from .suite import most_misses
from .worlds import WORLDS, World

pytestmark = pytest.mark.slow

_REPLICATIONS = 2000
_EPSILON = 0.05
_MOST = most_misses(_REPLICATIONS, _EPSILON)
_BY_NAME = {world.name: world for world in WORLDS}
_ALL_AT_DELTA = _BY_NAME["coin, all at delta"]
_LAYERS = 8


def _plan(
    world: World,
    *,
    variants: int,
    share: float | None = 0.3,
    p_value: str = "exact_binomial",
    epsilon: float = _EPSILON,
) -> Plan:
    thresholds = tuple(0.9 - 0.1 * place for place in range(len(world.shares) // variants))
    specs = all_specs(
        consistencies=("textual",),
        metrics=("exact_match",),
        deltas=(world.delta,),
        epsilons=(epsilon,),
        p_value=p_value,
        procedure="pareto" if share else "each_variant",
    )
    settings = DecodeSettings(rule=ExitRule(), thresholds=thresholds, max_input_length=8, max_decode_length=8)
    pareto = ParetoPlan(
        variants=tuple(Variant(min_exit_layer=layer) for layer in range(1, variants + 1)), choosing_share=share
    )
    return build_plan(specs, settings, pareto=pareto)


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
    """Returns the number of calibrations whose choice has a risk that is not below delta.

    Args:
      world: Its thresholds are divided among the variants.
      variants: How many there are.
      same_part: Whether, wrongly, the part that tests also selects the path.
    """
    plan = _plan(world, variants=variants)
    parts = np.array([part_of_unit(plan, str(unit)) for unit in range(world.n)])
    size = len(plan.thresholds)
    rng = np.random.default_rng(7)
    wrong = 0
    for _ in range(_REPLICATIONS):
        losses = world.draw(rng, 1)[:, 0]
        # Outputs with a loss exit early, so that costs favour wrong choices.
        layers = np.clip(6 - 4 * losses.astype(int) + rng.integers(-1, 2, losses.shape), 1, _LAYERS)
        chooser = parts == TESTING if same_part else parts != TESTING
        totals = [
            _totals(plan, losses[:, at : at + size], layers[:, at : at + size], parts, chooser=chooser)
            for at in range(0, len(world.shares), size)
        ]
        if same_part:
            totals = [_tested_twice(each) for each in totals]
        (entry,) = choose_thresholds(variant_rows(totals, plan, num_layers=_LAYERS), plan, num_layers=_LAYERS)
        if entry.variant is not None and entry.threshold is not None:
            assert plan.pareto is not None
            place = plan.pareto.variants.index(entry.variant) * size + plan.thresholds.index(entry.threshold)
            wrong += bool(world.is_null[place])
    return wrong


def _wrong_by_themselves(world: World, *, variants: int, p_value: str, at_full_epsilon: bool = False) -> int:
    """Returns the number of calibrations in which the cheapest of all accepted thresholds is wrong.

    Args:
      world: Its thresholds are divided among the variants.
      variants: How many there are.
      p_value: Name of the p-value.
      at_full_epsilon: Whether, wrongly, each of them is tested at epsilon.
    """
    epsilon = _EPSILON * variants if at_full_epsilon else _EPSILON
    plan = _plan(world, variants=variants, share=None, p_value=p_value, epsilon=epsilon)
    size, keys, layout = len(plan.thresholds), [str(unit) for unit in range(world.n)], layout_of(plan)
    rng = np.random.default_rng(7)
    wrong = 0
    for _ in range(_REPLICATIONS):
        fixed = to_fixed_point(world.draw(rng, 1)[:, 0])
        totals = []
        for variant in range(variants):
            part = fixed[:, None, variant * size : (variant + 1) * size]
            found = CalibrationTotals.of_losses(keys, part, layout=layout, salt=plan.salt)
            # Later variants and thresholds are cheaper; wrong ones mostly come last.
            layers = [(world.n * (_LAYERS - 1) * (variants - variant)) // variants - place for place in range(size)]
            counts = (world.n,) * (1 + size)
            whole = dataclasses.replace(found.whole, layer_sums=(world.n * _LAYERS, *layers), token_counts=counts)
            totals.append(dataclasses.replace(found, whole=whole))
        (entry,) = choose_thresholds(variant_rows(totals, plan, num_layers=_LAYERS), plan, num_layers=_LAYERS)
        if entry.variant is not None and entry.threshold is not None:
            assert plan.pareto is not None
            place = plan.pareto.variants.index(entry.variant) * size + plan.thresholds.index(entry.threshold)
            wrong += bool(world.is_null[place])
    return wrong


@pytest.mark.parametrize(
    ("world", "variants", "p_value"),
    [
        # So many that the binomial test errs nearly as often as allowed at a quarter of epsilon.
        (dataclasses.replace(_ALL_AT_DELTA, n=132), 4, "exact_binomial"),
        (_ALL_AT_DELTA, 4, "star_bets"),
        (_BY_NAME["coin, not monotone"], 4, "exact_binomial"),
        (_BY_NAME["bimodal, all at delta"], 4, "star_bets"),
        (_BY_NAME["ROUGE-like, not monotone"], 2, "star_bets"),
    ],
    ids=lambda value: value.name if isinstance(value, World) else str(value),
)
def test_variants_by_themselves_are_seldom_wrong(world: World, variants: int, p_value: str) -> None:
    """At an equal share of epsilon each, the cheapest accepted threshold is wrong as seldom as epsilon requires."""
    assert _wrong_by_themselves(world, variants=variants, p_value=p_value) <= _MOST


def test_variants_at_the_whole_epsilon_are_caught() -> None:
    """If each variant were tested at epsilon, the cheapest accepted threshold would be wrong too often."""
    world = dataclasses.replace(_ALL_AT_DELTA, n=59)
    found = _wrong_by_themselves(world, variants=4, p_value="exact_binomial", at_full_epsilon=True)
    assert found > 1.5 * _MOST


def _tested_twice(totals: CalibrationTotals) -> CalibrationTotals:
    """Returns totals whose selection has the losses of the other part."""
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
    """If the examples that test had also selected the path, too many choices would be wrong."""
    assert _wrong(dataclasses.replace(_ALL_AT_DELTA, n=85), variants=4, same_part=True) > 1.5 * _MOST
