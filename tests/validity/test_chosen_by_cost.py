"""Calibrations whose cheapest variant is chosen by a fixed cost are valid for any such cost.

Sixty candidates, as `--exits=auto` may try: twelve variants at five thresholds. Costs are adversarial: wrong candidates
are the cheapest. At most a share epsilon of promises may be wrong, whether a part of the set selects, or each variant
is tested by itself. If the examples that selected the path test it too, or each variant is tested at all of epsilon,
the same simulation shows too many wrong promises.
"""

import dataclasses

import numpy as np
import pytest

from calm_beam.calibration.pareto import CHOOSING, TESTING
from calm_beam.calibration.plan import layout_of, part_of_unit
from calm_beam.calibration.result import choose_thresholds
from calm_beam.calibration.variants import VariantCosts, variant_rows
from calm_beam.decoding.settings import DecodeSettings
from calm_beam.exits.rule import ExitRule
from calm_beam.exits.token_cost import TokenCost
from calm_beam.manifest import ParetoPlan, Plan, Variant
from calm_beam.outputs.totals import CalibrationTotals, Sums
from calm_beam.risk.losses import to_fixed_point
from tests.plans import all_specs, build_plan

from .suite import most_misses

pytestmark = pytest.mark.slow

_REPLICATIONS = 1000
_EPSILON, _DELTA, _N = 0.05, 0.1, 200
_VARIANTS, _THRESHOLDS, _LAYERS = 12, (0.9, 0.7, 0.5, 0.3, 0.1), 16
_MOST = most_misses(_REPLICATIONS, _EPSILON)


@dataclasses.dataclass(frozen=True)
class _AgainstLayers(VariantCosts):
    """A fixed cost that is as wrong as can be: candidates that exit less cost less, or all cost the same."""

    draws: bool = False

    def at_mean(self, layers: float, variant: Variant) -> float:
        drawn = np.random.default_rng([variant.min_exit_layer, int(1000 * layers)])
        return float(drawn.uniform()) if self.draws else 1 / layers


_COSTS = VariantCosts(cost=TokenCost.of_layers(_LAYERS), rule=ExitRule())
_BY_COSTS = {
    "layers": _COSTS,
    "against layers": _AgainstLayers(cost=_COSTS.cost, rule=_COSTS.rule),
    "drawn": _AgainstLayers(cost=_COSTS.cost, rule=_COSTS.rule, draws=True),
}


def _plan(share: float | None, *, epsilon: float = _EPSILON) -> Plan:
    specs = all_specs(
        consistencies=("textual",),
        metrics=("exact_match",),
        deltas=(_DELTA,),
        epsilons=(epsilon,),
        p_value="exact_binomial",
        procedure="pareto" if share else "each_variant",
    )
    settings = DecodeSettings(rule=ExitRule(), thresholds=_THRESHOLDS, max_input_length=8, max_decode_length=8)
    variants = tuple(Variant(min_exit_layer=layer) for layer in range(1, _VARIANTS + 1))
    pareto = ParetoPlan(variants=variants, choosing_share=share, objective="latency")
    return build_plan(specs, settings, pareto=pareto)


def _risks(world: str) -> np.ndarray:
    """Returns the true risk of every variant and threshold."""
    if world == "all at delta":
        return np.full((_VARIANTS, len(_THRESHOLDS)), _DELTA)
    # Most variants are safe at their first thresholds and wrong below, each at a different one.
    rising = np.linspace(0.01, 0.2, len(_THRESHOLDS))
    return np.clip(rising[None] * np.linspace(0.5, 1.5, _VARIANTS)[:, None], 0, 1)


def _totals(plan: Plan, losses: np.ndarray, layers: np.ndarray, *, same_part: bool) -> list[CalibrationTotals]:
    """Returns the totals of every variant, given losses of shape (units, variants, thresholds) and their layers."""
    layout, keys = layout_of(plan), [str(unit) for unit in range(_N)]
    parts = [part_of_unit(plan, key) for key in keys]
    found = []
    for variant in range(_VARIANTS):
        fixed = to_fixed_point(losses[:, variant])[:, None]
        totals = CalibrationTotals.of_losses(keys, fixed, layout=layout, salt=plan.salt, groups=parts)
        ones = (_N,) * (1 + len(_THRESHOLDS))
        sums = (_N * _LAYERS, *(round(float(each) * _N) for each in layers[variant]))

        def used(part: Sums, sums: tuple[int, ...] = sums, ones: tuple[int, ...] = ones) -> Sums:
            return dataclasses.replace(part, layer_sums=sums, token_counts=ones)

        groups = dict(totals.groups)
        if same_part:
            # The error under test: the examples that test have also selected.
            groups[CHOOSING] = dataclasses.replace(groups[CHOOSING], risk=groups[TESTING].risk)
        found.append(
            dataclasses.replace(
                totals,
                whole=used(totals.whole),
                groups=tuple((name, used(part)) for name, part in sorted(groups.items())),
            )
        )
    return found


def _wrong(world: str, costs: str, *, share: float | None, same_part: bool = False, whole_epsilon: bool = False) -> int:
    """Returns the number of calibrations that promise a candidate whose risk is not below delta."""
    plan = _plan(share, epsilon=_EPSILON * _VARIANTS if whole_epsilon else _EPSILON)
    risks = _risks(world)
    # Riskier candidates exit earlier.
    layers = _LAYERS - np.argsort(np.argsort(risks.ravel())).reshape(risks.shape) / risks.size * (_LAYERS - 2)
    rng, wrong = np.random.default_rng(11), 0
    for _ in range(_REPLICATIONS):
        # Outputs are hard or easy under all variants alike, as outputs of one model are.
        hard = rng.uniform(size=(_N, 1, 1))
        own = rng.uniform(size=(_N, *risks.shape))
        drawn = np.where(rng.uniform(size=own.shape) < 0.5, hard, own)
        totals = _totals(plan, (drawn < risks).astype(float), layers, same_part=same_part)
        rows = variant_rows(totals, plan, num_layers=_LAYERS, costs=_BY_COSTS[costs])
        (entry,) = choose_thresholds(rows, plan, num_layers=_LAYERS, full_cost=_LAYERS)
        if entry.variant is not None and entry.threshold is not None:
            place = entry.variant.min_exit_layer - 1, _THRESHOLDS.index(entry.threshold)
            wrong += bool(risks[place] >= _DELTA)
    return wrong


@pytest.mark.parametrize("share", [0.3, None], ids=["a part chooses", "each by itself"])
@pytest.mark.parametrize("costs", _BY_COSTS)
@pytest.mark.parametrize("world", ["all at delta", "rising"])
def test_whatever_costs_choose_is_seldom_wrong(world: str, costs: str, share: float | None) -> None:
    """Costs that favour wrong candidates choose one of sixty as seldom as epsilon requires."""
    assert _wrong(world, costs, share=share) <= _MOST


def test_a_path_chosen_by_those_who_test_it_is_caught() -> None:
    """If the examples that test had also selected the path, too many promises would be wrong."""
    assert _wrong("all at delta", "layers", share=0.3, same_part=True) > 1.5 * _MOST


def test_variants_at_the_whole_epsilon_are_caught() -> None:
    """If each of twelve variants were tested at all of epsilon, too many promises would be wrong."""
    assert _wrong("all at delta", "layers", share=None, whole_epsilon=True) > 1.5 * _MOST
