"""Several variants: totals, plan and table equal those from plain arrays."""

import dataclasses
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest

from calm_beam.calibration.pareto import CHOOSING, TESTING, pareto_calibration
from calm_beam.calibration.plan import group_of, layout_of, part_of_unit, promise_of
from calm_beam.calibration.result import RiskRow, choose_thresholds, read_risk_table, risk_table_text
from calm_beam.calibration.variants import (
    VariantCosts,
    promising,
    proved_by_variant,
    variant_rows,
    whole_of,
    with_places_of,
)
from calm_beam.decoding.settings import DecodeSettings
from calm_beam.exits.measures import Need
from calm_beam.exits.rule import ExitRule
from calm_beam.exits.token_cost import TokenCost
from calm_beam.manifest import ParetoPlan, Plan, SequentialPlan, Variant
from calm_beam.outputs import Generation, OutputsError
from calm_beam.outputs.totals import CalibrationTotals
from calm_beam.risk.evidence import betting_order
from calm_beam.risk.losses import to_signed_fixed_point
from calm_beam.risk.pvalues import p_values_of
from tests.calm_beam.calibration.builders import build_example, build_output
from tests.plans import all_specs, build_plan

_VARIANTS = (Variant(min_exit_layer=1), Variant(min_exit_layer=2), Variant(min_exit_layer=3))
_SETTINGS = DecodeSettings(
    rule=ExitRule(), thresholds=(0.9, 0.5, 0.1), max_input_length=8, max_decode_length=4, task_prefix=""
)
_PLACES = len(_VARIANTS) * len(_SETTINGS.thresholds)
_N = 300


def _plan(**changes: Any) -> Plan:
    asked: dict[str, Any] = {
        "consistencies": ("textual", "risk"),
        "metrics": ("token_f1",),
        "deltas": (0.1, 0.3),
        "epsilons": (0.1,),
        "procedure": "pareto",
    }
    fields = {name: changes.pop(name) for name in tuple(changes) if name in asked or name in ("p_value", "groups")}
    specs = all_specs(**{**asked, **fields})
    pareto = ParetoPlan(variants=_VARIANTS, choosing_share=0.3)
    return build_plan(specs, _SETTINGS, **{"pareto": pareto, **changes})


def _drawn(seed: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Returns losses of two objectives, layers and tokens; shapes (units, 2, places), (units, places) twice."""
    rng = np.random.default_rng(seed)
    risks = np.linspace(0.01, 0.4, _PLACES)
    textual = rng.uniform(size=(_N, _PLACES)) < risks
    signed = textual.astype(float) - (rng.uniform(size=(_N, _PLACES)) < 0.05)
    tokens = rng.integers(1, 9, size=(_N, _PLACES))
    layers = tokens * rng.integers(1, 9, size=(_N, _PLACES))
    return np.stack([textual, signed], axis=1), layers, tokens


def _totals(plan: Plan, seed: int) -> list[CalibrationTotals]:
    losses, layers, tokens = _drawn(seed)
    size = len(plan.thresholds)
    return [
        _of_variant(plan, *(part[..., place : place + size] for part in (losses, layers, tokens)))
        for place in range(0, _PLACES, size)
    ]


def _of_variant(
    plan: Plan, losses: np.ndarray, layers: np.ndarray, tokens: np.ndarray, *, units: Sequence[int] = range(_N)
) -> CalibrationTotals:
    layout = layout_of(plan)
    generations = [_generation(str(unit), layers[unit], tokens[unit]) for unit in units]
    groups = [group_of(plan, item.example) for item in generations]
    of_examples = CalibrationTotals.of_examples(generations, layout, groups=groups)
    return of_examples.merge(
        CalibrationTotals.of_losses(
            [item.example.id for item in generations],
            to_signed_fixed_point(losses[list(units)]),
            layout=layout,
            salt=plan.salt,
            groups=groups,
        )
    )


def _generation(name: str, layers: Sequence[int], tokens: Sequence[int]) -> Generation:
    full = build_output("cat", exit_layers=(8,))
    outputs = (full, *(build_output("cat", exit_layers=_exits(*pair)) for pair in zip(layers, tokens, strict=True)))
    return Generation(example=build_example(id=name), truncated=False, duplicate=False, failure=None, outputs=outputs)


def _exits(layers: int, tokens: int) -> tuple[int, ...]:
    """Returns exit layers of a number of tokens with a given sum."""
    return (layers - tokens + 1, *(1 for _ in range(tokens - 1)))


@pytest.mark.parametrize("seed", [0, 1])
def test_sums_come_to_what_arrays_come_to(seed: int) -> None:
    """Path, decisions and choice of every entry are those of `pareto_calibration` on single losses, bit for bit."""
    plan = _plan()
    losses, layers, tokens = _drawn(seed)
    rows = variant_rows(_totals(plan, seed), plan, num_layers=8)
    entries = choose_thresholds(rows, plan, num_layers=8)
    for place, (spec, entry) in enumerate(zip(plan.tests, entries, strict=True)):
        of_spec = rows[place * _PLACES : (place + 1) * _PLACES]
        expected = pareto_calibration(
            losses[:, layout_of(plan).objectives.index(spec.objective)],
            layers,
            sizes=tokens,
            keys=[str(unit) for unit in range(_N)],
            delta=spec.delta,
            epsilon=spec.epsilon,
            p_value=spec.p_value,
            salt=plan.salt,
            selection_share=0.3,
        )
        path = sorted((row.place, index) for index, row in enumerate(of_spec) if row.place is not None)
        assert tuple(index for _, index in path) == expected.path
        assert [row.rejected for row in of_spec] == expected.test.rejected.tolist()
        assert [row.tested for row in of_spec] == expected.test.tested.tolist()
        tested = [(of_spec[index].variant, of_spec[index].threshold) for index in expected.path]
        assert [(step.variant, step.threshold) for step in entry.path] == tested[: len(entry.path)]
        chosen = None if expected.chosen is None else of_spec[expected.chosen]
        assert (entry.variant, entry.threshold) == ((chosen.variant, chosen.threshold) if chosen else (None, None))
        assert len(entry.path) > 1


def test_shards_may_come_in_any_order() -> None:
    """Two parts, added in either order, give the same totals, in which every unit selects or tests."""
    plan = _plan()
    drawn = [part[..., :3] for part in _drawn(0)]
    first, second = (_of_variant(plan, *drawn, units=units) for units in (range(100), range(100, _N)))
    whole = _totals(plan, 0)[0]
    assert first.merge(second) == second.merge(first) == whole
    found = {part: whole.of_group(part).risk.n for part in (CHOOSING, TESTING)}
    assert sum(found.values()) == _N
    assert 60 <= found[CHOOSING] <= 120


def test_only_those_who_test_are_counted() -> None:
    """Risks, layers and n of the table are those of the testing units."""
    plan = _plan()
    losses, layers, tokens = _drawn(0)
    tests = np.array([part_of_unit(plan, str(unit)) == TESTING for unit in range(_N)])
    row = variant_rows(_totals(plan, 0), plan, num_layers=8)[4]
    assert (row.variant, row.threshold, row.n) == (_VARIANTS[1], 0.5, tests.sum())
    assert row.risk == pytest.approx(losses[tests, 0, 4].mean())
    assert row.layers == layers[tests, 4].sum() / tokens[tests, 4].sum()
    assert row.choosing_layers == layers[~tests, 4].sum() / tokens[~tests, 4].sum()


@pytest.mark.parametrize("p_value", ["signed_mixture", "star_bets"])
def test_each_variant_may_be_tested_by_itself(p_value: str) -> None:
    """All units test each variant down its grid at a third of epsilon; the cheapest proved one comes last."""
    plan = _plan(
        pareto=ParetoPlan(variants=_VARIANTS),
        procedure="each_variant",
        deltas=(0.3,),
        p_value=p_value,
    )
    losses, layers, tokens = _drawn(0)
    rows = variant_rows(_totals(plan, 0), plan, num_layers=8)[:_PLACES]
    order = betting_order([str(unit) for unit in range(_N)], salt=plan.salt)
    p_values = p_values_of(losses[order, 0], p_value=p_value, delta=0.3, epsilon=0.1 / 3)
    assert [row.p_value for row in rows] == p_values.tolist()
    accepted = np.logical_and.accumulate(p_values.reshape(3, -1) <= 0.1 / 3, axis=1)
    assert [row.rejected for row in rows] == accepted.ravel().tolist()
    costs = layers.sum(axis=0) / tokens.sum(axis=0)
    last = [3 * at + int(held.sum()) - 1 for at, held in enumerate(accepted) if held.any()]
    one = dataclasses.replace(plan, tests=plan.tests[:1])
    (entry,) = choose_thresholds(rows, one, num_layers=8)
    cheapest = min(last, key=lambda place: costs[place])
    assert (entry.variant, entry.threshold) == (rows[cheapest].variant, rows[cheapest].threshold)
    assert (entry.layers, entry.path[0].n) == (costs[cheapest], _N)
    assert {step.variant for step in entry.path} == set(_VARIANTS)
    assert entry.path[-1].variant == entry.variant
    assert risk_table_text(rows).splitlines()[0].endswith("layers,tau,min_exit_layer,place")
    assert "Every variant was tested by itself, each at an equal share of epsilon" in promise_of(plan)


_COSTS = VariantCosts(cost=TokenCost(layers=8, layer=1.0, output=1.0, tests={Need.LOGITS: 2.0}), rule=_SETTINGS.rule)


def _of_cost(share: float | None) -> Plan:
    return _plan(
        pareto=ParetoPlan(variants=_VARIANTS, choosing_share=share, objective="latency"),
        procedure="pareto" if share else "each_variant",
        deltas=(0.3,),
        p_value="signed_mixture",
    )


@pytest.mark.parametrize("share", [None, 0.3])
def test_costs_choose_in_place_of_layers(share: float | None) -> None:
    """The proved candidate with the lowest fixed cost is promised, whatever its layers."""
    plan = _of_cost(share)
    totals, one = _totals(plan, 0), dataclasses.replace(plan, tests=plan.tests[:1])
    rows = variant_rows(totals, plan, num_layers=8, costs=_COSTS)[:_PLACES]
    chosen_by = [row.layers if row.choosing_layers is None else row.choosing_layers for row in rows]
    assert [row.cost for row in rows] == [
        _COSTS.at_mean(used, row.variant) for used, row in zip(chosen_by, rows, strict=True) if row.variant
    ]
    by_layers = variant_rows(totals, plan, num_layers=8)[:_PLACES]
    assert [row.p_value for row in rows] == [row.p_value for row in by_layers]
    (entry,) = choose_thresholds(rows, one, num_layers=8, full_cost=1e9)
    last = max((row for row in rows if row.rejected), key=lambda row: row.place or 0)
    assert (entry.variant, entry.threshold, entry.pays) == (last.variant, last.threshold, None)
    assert risk_table_text(rows).splitlines()[0].endswith(",cost")


@pytest.mark.parametrize("share", [None, 0.3])
def test_what_costs_no_less_than_the_full_model_is_not_promised(share: float | None) -> None:
    """Proved thresholds that cost no less than the full model give never exit, and the entry says so."""
    plan = _of_cost(share)
    rows = variant_rows(_totals(plan, 0), plan, num_layers=8, costs=_COSTS)[:_PLACES]
    one = dataclasses.replace(plan, tests=plan.tests[:1])
    last = max((row for row in rows if row.rejected), key=lambda row: row.place or 0)
    (entry,) = choose_thresholds(rows, one, num_layers=8, full_cost=last.cost)
    assert (entry.threshold, entry.variant, entry.layers, entry.pays) == (None, None, 8, False)
    assert any(step.rejected for step in entry.path)


def test_any_variant_that_was_proved_may_be_promised() -> None:
    """Another variant's last proved threshold is promised by the same tests; the risk table follows the path."""
    plan = _of_cost(None)
    rows = variant_rows(_totals(plan, 0), plan, num_layers=8)[:_PLACES]
    (entry,) = choose_thresholds(rows, dataclasses.replace(plan, tests=plan.tests[:1]), num_layers=8)
    proved = proved_by_variant(entry)
    assert len(proved) == len({step.variant for step in proved}) > 1
    assert proved[-1].tested_as == (entry.threshold, entry.variant)
    for step in proved:
        assert step.variant is not None
        found = promising(entry, step.variant)
        assert (found.threshold, found.variant, found.layers, found.risk) == (*step.tested_as, step.layers, step.risk)
        # Of one variant, thresholds stay in the order in which they were tested.
        assert sorted(found.path, key=entry.path.index) == list(entry.path)
        of_variant = [each for each in found.path if each.variant == step.variant]
        assert found.path[-len(of_variant) :] == tuple(each for each in entry.path if each.variant == step.variant)
        places = {(row.threshold, row.variant): row.place for row in with_places_of(rows, [found]) if row.place}
        assert places == {each.tested_as: place for place, each in enumerate(found.path, start=1)}
        # A threshold is the lowest of its variant that was proved.
        assert step.threshold == min(each.threshold for each in of_variant if each.rejected)
    assert with_places_of(rows, [entry]) == tuple(rows)


def test_only_what_holds_together_may_be_promised_instead() -> None:
    """Where a part of the set chose the path, or a holdout confirmed, the choice stays; what did not pay may return."""
    plan = _of_cost(0.3)
    rows = variant_rows(_totals(plan, 0), plan, num_layers=8)[:_PLACES]
    (chosen_by_part,) = choose_thresholds(rows, dataclasses.replace(plan, tests=plan.tests[:1]), num_layers=8)
    assert chosen_by_part.threshold is not None
    assert proved_by_variant(chosen_by_part) == ()
    plan = _of_cost(None)
    rows = variant_rows(_totals(plan, 0), plan, num_layers=8, costs=_COSTS)[:_PLACES]
    one = dataclasses.replace(plan, tests=plan.tests[:1])
    (unpaid,) = choose_thresholds(rows, one, num_layers=8, full_cost=0.0)
    assert (unpaid.pays, unpaid.threshold) == (False, None)
    again = proved_by_variant(unpaid)[0]
    assert again.variant is not None
    found = promising(unpaid, again.variant)
    assert (found.pays, found.threshold, found.variant) == (None, *again.tested_as)
    (entry,) = choose_thresholds(rows, one, num_layers=8)
    assert proved_by_variant(entry)
    assert entry.chosen is not None
    assert proved_by_variant(dataclasses.replace(entry, confirmation=(entry.chosen,))) == ()


def test_failures_of_all_variants_are_listed() -> None:
    """An example that failed under one variant is listed once, and the others count for all variants."""
    plan = _plan()
    first, second, third = _totals(plan, 0)
    failed = [
        dataclasses.replace(first, failures=(("3", "early"),)),
        dataclasses.replace(second, failures=(("1", "other"), ("3", "late"))),
        third,
    ]
    assert whole_of(failed).failures == (("1", "other"), ("3", "early"))
    assert whole_of([first, second, third]).examples == _N


def test_variants_of_other_examples_are_refused() -> None:
    """Variants whose data were read again with other examples are refused."""
    first, second, third = _totals(_plan(), 0)
    with pytest.raises(OutputsError, match="the variants were decoded from different examples"):
        whole_of([first, dataclasses.replace(second, content_sum=1), third])


def test_empty_parts_are_refused() -> None:
    """There must be units that select, and units that test."""
    plan = _plan()
    assert plan.pareto is not None
    few = dataclasses.replace(plan, pareto=dataclasses.replace(plan.pareto, choosing_share=1e-9))
    with pytest.raises(ValueError, match="of 300 units, 0 were drawn to choose what the other 300 test"):
        variant_rows(_totals(few, 0), few, num_layers=8)


def test_the_table_is_read_again(tmp_path: Any) -> None:
    """Columns of variants read back to the same numbers; a variant without tau leaves it empty."""
    plan = _plan()
    rows = variant_rows(_totals(plan, 0), plan, num_layers=8)
    text = risk_table_text(rows)
    assert text.splitlines()[0].endswith("layers,tau,min_exit_layer,place,choosing_p_value,choosing_layers")
    path = tmp_path / "table.csv"
    path.write_text(text)
    assert read_risk_table(path, RiskRow) == rows


def test_all_that_decides_is_in_the_hash() -> None:
    """Another salt, share, list or order gives another plan; outputs of every variant are named."""
    plan = _plan()
    assert plan.pareto is not None
    assert len(set(plan.outputs.split(","))) == 3
    others = [
        _plan(seed=1),
        dataclasses.replace(plan, pareto=dataclasses.replace(plan.pareto, choosing_share=0.5)),
        dataclasses.replace(plan, pareto=dataclasses.replace(plan.pareto, variants=_VARIANTS[::-1])),
        _plan(pareto=ParetoPlan(variants=_VARIANTS[:2], choosing_share=0.3)),
    ]
    assert len({plan.digest, *(each.digest for each in others)}) == 5


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"procedure": "holm"}, "procedure must be pareto exactly if there are several variants"),
        ({"pareto": None}, "procedure must be pareto exactly if there are several variants"),
        ({"groups": ("en",), "group_key": "language"}, "several variants are neither calibrated for groups nor"),
        (
            {"sequential": SequentialPlan(round_examples=9), "p_value": "signed_mixture"},
            "several variants are neither calibrated for groups nor sequentially",
        ),
        (
            {"p_value": "wsr"},
            "p_value wsr needs every single loss, and those of variants among which a part of the set",
        ),
        (
            {
                "pareto": ParetoPlan(
                    variants=tuple(Variant(tau=t, min_exit_layer=1) for t in (1, 2)), choosing_share=0.3
                )
            },
            "tau must not be given with schedule 'constant', got 1",
        ),
    ],
)
def test_what_does_not_go_together_is_refused(changes: dict[str, Any], message: str) -> None:
    """An inconsistent plan is refused when it is made."""
    with pytest.raises(ValueError, match=message):
        _plan(**changes)
