"""Losses from any source, summed exactly by setting and tested."""

import itertools
import random
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from calm_beam.risk.evidence import EvidenceError
from calm_beam.risk.pvalues import p_values_of
from calm_beam.risk.testing import LossesError, LossSums, RiskTest, control_risk

_TESTS = (
    RiskTest(delta=0.3, epsilon=0.05),
    RiskTest(delta=0.3, epsilon=0.2, p_value="hoeffding", procedure="bonferroni"),
    RiskTest(delta=0.4, epsilon=0.1, p_value="empirical_bernstein"),
    RiskTest(delta=0.4, epsilon=0.1, p_value="signed_mixture", procedure="holm"),
)
_ORDER = ("safe", "middle", "bold")


def _losses(n: int, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).random((n, len(_ORDER))) ** np.array([9, 4, 1])


def _rows(losses: np.ndarray) -> list[tuple[str, str, float]]:
    return [
        (f"example {index}", setting, float(loss))
        for index, row in enumerate(losses)
        for setting, loss in zip(_ORDER, row, strict=True)
    ]


def _sums(rows: list[tuple[str, str, float]], tests: tuple[RiskTest, ...] = _TESTS) -> LossSums:
    sums = LossSums(tests)
    for example_id, setting, loss in rows:
        sums.add(example_id, setting, loss=loss)
    return sums


@pytest.mark.parametrize("n", [1, 100, 1500])
def test_p_values_are_those_of_a_calibration(n: int) -> None:
    """Risks and p-values are, to the bit, those of the same losses in memory, for each procedure."""
    losses = _losses(n)
    results = control_risk(_sums(_rows(losses)), _TESTS, order=_ORDER)
    assert [(row.test, row.setting) for row in results] == list(itertools.product(_TESTS, _ORDER))
    for test, found in itertools.groupby(results, key=lambda row: row.test):
        expected = p_values_of(losses, p_value=test.p_value, delta=test.delta).tolist()
        rows = list(found)
        assert [row.p_value for row in rows] == expected
        assert {row.n for row in rows} == {n}
        np.testing.assert_allclose([row.risk for row in rows], losses.mean(axis=0), rtol=1e-6)
    if n > 100:
        assert [row.accepted for row in results[:3]] == [True, True, False]


@settings(deadline=None)
@given(seed=st.integers(0, 10**6), cuts=st.lists(st.integers(0, 60), max_size=3))
def test_order_and_grouping_change_nothing(seed: int, cuts: list[int]) -> None:
    """Sums of shuffled parts, merged in any order, are those of the whole."""
    rows = _rows(_losses(20))
    expected = _sums(rows).by_setting()
    generator = random.Random(seed)
    generator.shuffle(rows)
    bounds = [0, *sorted(cuts), len(rows)]
    parts = [_sums(rows[start:end]) for start, end in itertools.pairwise(bounds)]
    generator.shuffle(parts)
    merged = LossSums(_TESTS)
    for part in parts:
        merged.merge(part)
    assert merged.by_setting() == expected


def _without(rows: list[Any], place: int) -> list[Any]:
    return [*rows[:place], *rows[place + 1 :]]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda rows: _without(rows, 4), "'safe' has 9 losses|'middle' has 9"),
        (lambda rows: [*rows, rows[2]], "setting 'safe' has 9 losses, 'bold' has 10|'bold' has 10"),
        (lambda rows: [*_without(rows, 4), rows[1]], "different examples, or of one twice"),
        (lambda rows: [*rows, ("example 0", "wild", 0.1)], r"not named are \['wild'\]"),
        (lambda rows: [row for row in rows if row[1] != "bold"], r"without losses are \['bold'\]"),
        (lambda rows: [], r"without losses are \['safe', 'middle', 'bold'\]"),
    ],
)
def test_every_example_needs_a_loss_under_every_setting(change: Any, message: str) -> None:
    """Missing, repeated and foreign losses are an error: they are never dropped by a join."""
    rows = change(_rows(_losses(9)) if "10" in message else _rows(_losses(10)))
    with pytest.raises(LossesError, match=message):
        control_risk(_sums(rows), _TESTS, order=_ORDER)


def _other_losses(rows: list[tuple[str, str, float]]) -> list[tuple[str, str, float]]:
    return [(example_id, setting, 1 - loss) for example_id, setting, loss in rows]


@settings(deadline=None)
@given(seed=st.integers(0, 10**6), again=st.sets(st.integers(0, 29), min_size=1), parts=st.integers(1, 6))
@pytest.mark.parametrize("change", [list, _other_losses])
def test_examples_that_come_again_are_counted(change: Any, seed: int, again: set[int], parts: int) -> None:
    """Examples that come again, with equal losses or others, in any parts, are counted as excess."""
    rows = _rows(_losses(30))
    rows += change([row for row in rows if int(row[0].split()[1]) in again])
    generator = random.Random(seed)
    generator.shuffle(rows)
    merged = LossSums(_TESTS)
    for number in range(parts):
        merged.merge(_sums(rows[number::parts]))
    message = f"{len(again)} of {30 + len(again)} losses under setting 'bold' are of examples that were counted before"
    for sums in (_sums(rows), merged):
        with pytest.raises(LossesError, match=message):
            control_risk(sums, _TESTS, order=_ORDER)


def test_reading_four_times_makes_no_proof() -> None:
    """Three losses in a hundred examples prove nothing; read four times they would seem to, and are refused."""
    test = RiskTest(delta=0.05, epsilon=0.1)
    rows = [(f"example {index}", "8 bits", float(index < 3)) for index in range(100)]
    (once,) = control_risk(_sums(rows, (test,)), (test,), order=("8 bits",))
    assert once.p_value == pytest.approx(0.61, abs=0.01)
    four_times = [
        (f"{example_id}, time {time}", setting, loss) for time in range(4) for example_id, setting, loss in rows
    ]
    (as_if_drawn,) = control_risk(_sums(four_times, (test,)), (test,), order=("8 bits",))
    assert as_if_drawn.accepted
    with pytest.raises(LossesError, match="300 of 400 losses"):
        control_risk(_sums(rows * 4, (test,)), (test,), order=("8 bits",))


def test_too_many_examples_to_compare_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """The memory for ids is limited, however the losses were divided."""
    monkeypatch.setattr("calm_beam.risk.testing.MOST_EXAMPLES", 40)
    assert _sums(_rows(_losses(40))).by_setting()["bold"].n == 40
    merged = _sums(_rows(_losses(30)))
    with pytest.raises(LossesError, match="more than 40 losses under setting 'bold', too many to tell"):
        merged.merge(_sums(_rows(_losses(30))))


@pytest.mark.parametrize("loss", [-0.1, 1.5, float("nan"), float("inf"), "0.5", None, True])
def test_losses_that_are_none(loss: Any) -> None:
    """A value that is not a number in [0, 1] is refused with its example and setting."""
    with pytest.raises(LossesError, match=r"example 'a' under setting 's': the loss must be a number in \[0, 1\]"):
        LossSums(_TESTS).add("a", "s", loss=loss)


def test_signed_losses_need_tests_that_take_them() -> None:
    """Losses in [-1, 1] are summed if every test takes such losses."""
    signed = RiskTest(delta=0.1, epsilon=0.05, p_value="signed_mixture")
    rows = [(str(index), "s", -0.5 if index % 2 else 0.1) for index in range(400)]
    (result,) = control_risk(_sums(rows, (signed,)), (signed,), order=("s",))
    assert result.accepted
    assert result.risk == pytest.approx(-0.2)


def test_fractions_are_no_ones_and_zeros() -> None:
    """The exact binomial test refuses losses between 0 and 1."""
    test = RiskTest(delta=0.1, epsilon=0.05, p_value="exact_binomial")
    with pytest.raises(EvidenceError, match="lie in between"):
        control_risk(_sums([("a", "s", 0.5)], (test,)), (test,), order=("s",))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"delta": 5}, r"delta must be in \(0, 1\), got 5"),
        ({"epsilon": 0}, r"epsilon must be in \(0, 1\), got 0"),
        ({"p_value": "clt"}, "p_value must be one of .*; got 'clt'"),
        ({"p_value": "wsr"}, "p_value wsr needs every single loss in a fixed order"),
        ({"procedure": "luck"}, "procedure must be one of .*; got 'luck'"),
    ],
)
def test_bad_tests_are_refused(changes: dict[str, Any], message: str) -> None:
    """Every wrong field is named, with its value."""
    with pytest.raises(ValueError, match=message):
        RiskTest(**{"delta": 0.1, "epsilon": 0.05, **changes})


def test_sums_of_other_tests_do_not_mix() -> None:
    """Sums merge only with sums of the same statistics; without a test there is nothing to sum."""
    with pytest.raises(ValueError, match="same tests"):
        LossSums(_TESTS[:1]).merge(LossSums(_TESTS[2:3]))
    with pytest.raises(ValueError, match="at least one RiskTest"):
        LossSums([])
