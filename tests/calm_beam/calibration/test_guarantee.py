"""Guarantees: every requested combination, checked."""

import math
import re
from typing import Any

import pytest

from calm_beam.calibration.guarantee import MOST_KEPT_LOSSES, Guarantee, default_p_value, place_of_served
from calm_beam.manifest import PARETO, Objective, PlannedTest
from calm_beam.outputs.totals import objectives_of
from calm_beam.risk.pvalues import P_VALUES
from tests.plans import all_specs


def test_all_combinations_in_order() -> None:
    """Every combination appears once; the last argument varies fastest."""
    specs = all_specs(
        consistencies=("risk", "textual"), metrics=("rouge_l", "token_f1"), deltas=(0.2, 0.1), epsilons=(0.05, 0.01)
    )
    assert len(specs) == 16
    assert specs[0] == PlannedTest(
        consistency="risk",
        metric="rouge_l",
        loss="signed",
        delta=0.2,
        epsilon=0.05,
        p_value="signed_mixture",
        procedure="fixed_sequence",
    )
    assert specs[-1] == PlannedTest(
        consistency="textual",
        metric="token_f1",
        loss="dissimilarity",
        delta=0.1,
        epsilon=0.01,
        p_value="hoeffding_bentkus",
        procedure="fixed_sequence",
    )
    assert [(spec.delta, spec.epsilon) for spec in specs[:4]] == [(0.2, 0.05), (0.2, 0.01), (0.1, 0.05), (0.1, 0.01)]
    assert [spec.objective.metric for spec in specs[::4]] == ["rouge_l", "token_f1"] * 2
    assert [spec.objective.consistency for spec in specs[::8]] == ["risk", "textual"]


def test_objectives_are_distinct_in_order_of_appearance() -> None:
    """Specs that differ in delta and epsilon only share one objective."""
    specs = all_specs(consistencies=("risk", "textual"), metrics=("b", "a"), deltas=(0.1, 0.2), epsilons=(0.1, 0.2))
    assert objectives_of(specs) == (
        Objective("risk", "b", loss="signed"),
        Objective("risk", "a", loss="signed"),
        Objective("textual", "b", loss="dissimilarity"),
        Objective("textual", "a", loss="dissimilarity"),
    )


def _specs(**changes: Any) -> tuple[PlannedTest, ...]:
    values: dict[str, Any] = {
        "consistencies": ("textual", "risk"),
        "metrics": ("rouge_l",),
        "deltas": (0.1, 0.2),
        "epsilons": (0.05,),
    }
    return all_specs(**{**values, **changes})


def test_relu_loss_has_the_papers_p_value() -> None:
    """With the paper's loss both kinds of consistency are tested by Hoeffding-Bentkus."""
    specs = _specs(risk_loss="relu")
    assert [spec.objective.loss for spec in specs] == ["dissimilarity"] * 2 + ["relu"] * 2
    assert {spec.p_value for spec in specs} == {"hoeffding_bentkus"}


def test_losses_of_0_and_1_have_the_exact_test() -> None:
    """Losses known to be 0 or 1, by the metric, get the exact test, except signed losses and means over clusters."""
    asked: dict[str, Any] = {"metrics": ("exact_match", "token_f1"), "deltas": (0.1,)}
    assert [spec.p_value for spec in _specs(**asked)] == [
        "exact_binomial", "hoeffding_bentkus", "signed_mixture", "signed_mixture",
    ]  # fmt: skip
    assert [spec.p_value for spec in _specs(**asked, losses=1000, risk_loss="relu")] == [
        "exact_binomial", "star_bets", "exact_binomial", "star_bets",
    ]  # fmt: skip
    clustered = _specs(**asked, tails=(0.3,), is_clustered=True)
    assert {spec.p_value for spec in clustered} == {"hoeffding_bentkus", "signed_mixture"}
    assert {spec.p_value for spec in _specs(**asked, losses=1000, is_clustered=True)} == {"star_bets"}


def test_bets_are_taken_where_all_losses_can_be_kept() -> None:
    """Bets are the default for up to two million losses over all entries, without groups or variants."""
    most = MOST_KEPT_LOSSES // 4
    assert {spec.p_value for spec in _specs(losses=most)} == {"star_bets"}
    sums = {"hoeffding_bentkus", "signed_mixture"}
    for changes in ({"losses": most + 1}, {"losses": None}, {"losses": 10, "groups": ("a", "b")}):
        assert {spec.p_value for spec in _specs(**changes)} == sums
    assert {spec.p_value for spec in _specs(losses=10, procedure=PARETO)} == sums
    assert {spec.p_value for spec in _specs(losses=10, p_value="wsr")} == {"wsr"}


@pytest.mark.parametrize("is_binary", [False, True])
@pytest.mark.parametrize("is_signed", [False, True])
@pytest.mark.parametrize("is_kept", [False, True])
def test_the_default_is_valid_wherever_it_is_taken(is_binary: bool, is_signed: bool, is_kept: bool) -> None:
    """The default test accepts losses of its kind, and needs no more of them than there are."""
    if is_binary and is_signed:
        pytest.skip("losses of 0 and 1 are not signed")
    method = P_VALUES[default_p_value(is_binary=is_binary, is_signed=is_signed, is_kept=is_kept)]
    assert method.takes_signed or not is_signed
    assert method.takes_fractions or is_binary
    assert is_kept or not method.needs_table


def test_tails_come_besides_the_mean() -> None:
    """Every combination appears once for the mean and once for each tail, with the binomial test; epsilon is shared."""
    specs = _specs(tails=(0.3, 0.5), joint=True)
    assert [spec.objective.loss for spec in specs[::2]] == [
        "dissimilarity", "signed", "dissimilarity>0.3", "relu>0.3", "dissimilarity>0.5", "relu>0.5",
    ]  # fmt: skip
    assert [spec.p_value for spec in specs[4:]] == ["exact_binomial"] * 8
    assert {spec.epsilon for spec in specs} == {0.05 / 12}
    assert {spec.p_value for spec in _specs(tails=(0.3,), p_value="signed_mixture")} == {"signed_mixture"}


@pytest.mark.parametrize("tail", [-0.1, 1.0, float("nan")])
def test_a_tail_is_a_loss_that_can_be_exceeded(tail: float) -> None:
    """A tail must be below 1, the largest loss."""
    with pytest.raises(ValueError, match=r"tail must be in \[0, 1\), got"):
        _specs(tails=(tail,))


def test_a_tail_of_a_signed_loss_is_that_of_its_positive_part() -> None:
    """A tail of a signed loss is refused, since that of its positive part is the same."""
    with pytest.raises(ValueError, match="a tail must be of the loss dissimilarity or relu, got 'signed'"):
        Guarantee("risk", "rouge_l", delta=0.1, loss="signed", tail=0.3)


def test_p_value_and_procedure_are_taken_as_given() -> None:
    """A named p-value or procedure is in every spec."""
    specs = _specs(p_value="wsr", procedure="holm")
    assert {(spec.p_value, spec.procedure) for spec in specs} == {("wsr", "holm")}
    with pytest.raises(ValueError, match=r"p_value must be one of hoeffding, .*; got 'clt'"):
        _specs(p_value="clt")
    with pytest.raises(ValueError, match=r"procedure must be one of fixed_sequence, .*; got 'none'"):
        _specs(procedure="none")


@pytest.mark.parametrize("p_value", ["hoeffding", "hoeffding_bentkus", "exact_binomial", "empirical_bernstein"])
def test_signed_losses_need_a_p_value_that_takes_them(p_value: str) -> None:
    """p-values for losses in [0, 1] are refused with the signed loss and accepted with the relu loss, their default."""
    message = (
        f"p_value {p_value} is for losses in [0, 1], but the signed loss of risk consistency lies in [-1, 1]. Take "
        "signed_mixture or wsr or star_bets, or risk_loss=relu."
    )
    with pytest.raises(ValueError, match=re.escape(message)):
        _specs(p_value=p_value, risk_loss="signed")
    # Naming such a p-value alone selects its loss.
    for specs in (_specs(p_value=p_value, risk_loss="relu"), _specs(p_value=p_value)):
        assert {spec.p_value for spec in specs} == {p_value}
        assert {spec.objective.loss for spec in specs} == {"dissimilarity", "relu"}


def test_a_joint_guarantee_divides_epsilon() -> None:
    """Four entries get a quarter of epsilon each; several epsilons, or one outside (0, 1), are refused as given."""
    specs = _specs(joint=True)
    assert [spec.epsilon for spec in specs] == [0.0125] * 4
    with pytest.raises(ValueError, match=re.escape("divides one epsilon among all entries, got [0.05, 0.1]. Choose")):
        _specs(joint=True, epsilons=(0.05, 0.1))
    with pytest.raises(ValueError, match=re.escape("epsilon must be in (0, 1), got 2.")):
        _specs(joint=True, epsilons=(2,))


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
        all_specs(**lists)


def _all_asked(**changes: Any) -> tuple[PlannedTest, ...]:
    asked: dict[str, Any] = {
        "consistencies": ("textual", "risk"),
        "metrics": ("rouge_l", "token_f1"),
        "deltas": (0.05, 0.1),
        "epsilons": (0.05,),
    }
    return all_specs(**{**asked, **changes})


@pytest.mark.parametrize(
    ("asked", "changes", "place"),
    [
        ("textual,0.05,rouge_l", {}, 0),
        ("0.1, token_f1, risk", {}, 7),
        ("consistency=risk,metric=rouge_l,delta=0.10", {}, 5),
        ("risk,0.1", {"metrics": ("a:b",)}, 3),
        ("a:b,textual,0.1", {"metrics": ("a:b", "a:c")}, 1),
        ("textual,bleurt,0.1", {"metrics": ("rouge_l", "bleurt@0123")}, 3),
        ("dissimilarity>0.3,0.1,rouge_l", {"tails": (0.3,)}, 9),
        ("textual,rouge_l,0.1,epsilon=0.01", {"epsilons": (0.05, 0.01)}, 3),
        ("textual,rouge_l,0.1,group=fr", {"groups": ("en", "fr")}, 17),
        ("textual,rouge_l,0.1", {"groups": ("en", "fr")}, 1),
        ("0.1", {"consistencies": ("risk",), "metrics": ("rouge_l",), "joint": True}, 1),
    ],
)
def test_the_served_guarantee_is_found(asked: str, changes: dict[str, Any], place: int) -> None:
    """Values with or without names find the served guarantee, in any order, if they identify it."""
    assert place_of_served(asked, _all_asked(**changes)) == place


@pytest.mark.parametrize(
    ("asked", "message"),
    [
        ("textual,0.05", "serve must name one entry, and textual,0.05 fits 2 of those that are asked for: textual,"),
        ("textual,0.2,rouge_l", "fits none of those that are asked for"),
        ("textual,0.05,bleurt", "fits none of those"),
        ("textual,0.05,rouge_l,group=fr", "fits none of those"),
        ("", "serve takes consistency, delta, metric, loss, epsilon, group, as NAME=VALUE"),
        ("textual,,0.05", "got ''"),
        ("p_value=wsr,textual", "got 'p_value=wsr'"),
        ("delta=", "got 'delta='"),
        ("delta=five", "serve: delta must be a number, got 'five'."),
        ("0.05,delta=0.1", "serve names delta twice: 0.05,delta=0.1."),
    ],
)
def test_what_names_no_guarantee_is_refused(asked: str, message: str) -> None:
    """Values that match several guarantees or none, unknown names, and invalid numbers are refused."""
    with pytest.raises(ValueError, match=re.escape(message)):
        place_of_served(asked, _all_asked())


@pytest.mark.parametrize("value", [0, 1, -0.1, 5, math.nan, math.inf])
@pytest.mark.parametrize("name", ["delta", "epsilon"])
def test_tolerances_are_fractions(name: str, value: float) -> None:
    """Delta and epsilon outside (0, 1) are refused with the value and an example."""
    values: dict[str, Any] = {"delta": 0.1, "epsilon": 0.05, name: value}
    with pytest.raises(ValueError, match=rf"{name} must be in \(0, 1\), got {value}\..*pass {name}=0.05"):
        Guarantee("textual", "rouge_l", p_value="hoeffding", **values)
