"""Specs: every combination of what is asked for, checked."""

import math

import pytest

from calm_beam.calibration.specs import Objective, Spec, all_specs, objectives_of


def test_all_combinations_in_order() -> None:
    """Every combination appears once; the last argument varies fastest."""
    specs = all_specs(
        consistencies=("risk", "textual"), metrics=("rouge_l", "token_f1"), deltas=(0.2, 0.1), epsilons=(0.05, 0.01)
    )
    assert len(specs) == 16
    assert specs[0] == Spec(objective=Objective("risk", "rouge_l"), delta=0.2, epsilon=0.05)
    assert [(spec.delta, spec.epsilon) for spec in specs[:4]] == [(0.2, 0.05), (0.2, 0.01), (0.1, 0.05), (0.1, 0.01)]
    assert [spec.objective.metric for spec in specs[::4]] == ["rouge_l", "token_f1"] * 2
    assert [spec.objective.consistency for spec in specs[::8]] == ["risk", "textual"]


def test_objectives_are_distinct_in_order_of_appearance() -> None:
    """Specs that differ in delta and epsilon only share one objective."""
    specs = all_specs(consistencies=("risk", "textual"), metrics=("b", "a"), deltas=(0.1, 0.2), epsilons=(0.1, 0.2))
    assert objectives_of(specs) == (
        Objective("risk", "b"),
        Objective("risk", "a"),
        Objective("textual", "b"),
        Objective("textual", "a"),
    )


@pytest.mark.parametrize("value", [0, 1, -0.1, 5, math.nan, math.inf])
@pytest.mark.parametrize("name", ["delta", "epsilon"])
def test_tolerances_are_fractions(name: str, value: float) -> None:
    """Delta and epsilon outside (0, 1) are refused with the value and an example."""
    values = {"delta": 0.1, "epsilon": 0.05, name: value}
    with pytest.raises(ValueError, match=rf"{name} must be in \(0, 1\), got {value}\..*pass {name}=0.05"):
        Spec(objective=Objective("textual", "rouge_l"), **values)


def test_unknown_consistency() -> None:
    """An unknown kind of consistency is refused, and the known ones are listed."""
    with pytest.raises(ValueError, match="consistency must be one of textual, risk; got 'lexical'"):
        Objective("lexical", "rouge_l")


@pytest.mark.parametrize(
    ("name", "values"), [("consistency", ()), ("metric", ("a", "a")), ("delta", (0.1, 0.1)), ("epsilon", ())]
)
def test_lists_hold_different_values(name: str, values: tuple[object, ...]) -> None:
    """An empty list, or one with a value twice, is refused by name."""
    keys = {"consistency": "consistencies", "metric": "metrics", "delta": "deltas", "epsilon": "epsilons"}
    lists: dict[str, tuple[object, ...]] = {
        "consistencies": ("textual",),
        "metrics": ("rouge_l",),
        "deltas": (0.1,),
        "epsilons": (0.05,),
        keys[name]: values,
    }
    with pytest.raises(ValueError, match=f"{name} must list one or more different values, got"):
        all_specs(**lists)  # type: ignore[arg-type]
