"""The suite with few replications, so that it is part of every test run; `make test-validity` runs it in full."""

import dataclasses

import pytest

from calm_beam.risk.fwer import PROCEDURES
from calm_beam.risk.pvalues import P_VALUES

from .__main__ import main
from .suite import PARETO, Outcome, most_misses, run_world, summary, table
from .worlds import WORLDS, World

_REPLICATIONS = 400


@pytest.mark.slow
@pytest.mark.parametrize("world", WORLDS, ids=[world.name for world in WORLDS])
def test_no_combination_breaks_its_promise(world: World) -> None:
    """At most a share epsilon of calibrations accepts a threshold whose risk is not below delta."""
    outcomes = run_world(world, replications=_REPLICATIONS)
    assert [outcome for outcome in outcomes if not outcome.is_valid] == []
    procedures = {*PROCEDURES, *([PARETO] if world.n > 1 else [])}
    assert {outcome.procedure for outcome in outcomes} == procedures
    assert {outcome.p_value for outcome in outcomes} | {"exact_binomial"} == set(P_VALUES)
    assert all(outcome.misses <= outcome.false_rejections for outcome in outcomes)


def test_coins_get_the_binomial_p_value() -> None:
    """If all losses are 0 or 1 every registered p-value is tried, else all but the binomial one."""
    by_name = {world.name: world for world in WORLDS}
    coin = run_world(by_name["coin, 10 examples"], replications=5)
    assert {outcome.p_value for outcome in coin} == set(P_VALUES)
    other = run_world(by_name["bimodal"], replications=5)
    assert {outcome.p_value for outcome in other} == set(P_VALUES) - {"exact_binomial"}


def test_hardest_worlds_come_close_to_epsilon() -> None:
    """For every procedure there is a world where a valid test errs nearly as often as allowed."""
    by_name = {world.name: world for world in WORLDS}
    hardest = {
        "fixed_sequence": "coin",
        "multi_start": "coin, not monotone",
        "fallback": "coin, last at delta",
        "holm": "coin, last at delta",
        "bonferroni": "coin, all at delta",
        PARETO: "coin, all at delta, in halves",
    }
    assert hardest.keys() == {*PROCEDURES, PARETO}
    for procedure, name in hardest.items():
        outcomes = run_world(by_name[name], replications=1000)
        errors = max(outcome.false_rejections for outcome in outcomes if outcome.procedure == procedure)
        assert 35 <= errors <= most_misses(1000, 0.05)


_OUTCOME = Outcome(
    world="coin", p_value="wsr", procedure="holm", epsilon=0.05, replications=1000, misses=30, false_rejections=40
)


def test_table_marks_what_is_broken() -> None:
    """Shares are in per cent, one column per procedure, or the largest of them; too large a share is bold."""
    broken = dataclasses.replace(_OUTCOME, procedure="fallback", false_rejections=120)
    assert _OUTCOME.is_valid
    assert not broken.is_valid
    assert table([_OUTCOME, broken]).splitlines() == [
        "| world | ε, % | p-value | holm | fallback |",
        "|---|---:|---|---:|---:|",
        "| coin | 5 | wsr | 4.00 | **12.00** |",
    ]
    other = dataclasses.replace(_OUTCOME, world="beta", p_value="hoeffding", epsilon=0.2)
    assert summary([_OUTCOME, broken, other]).splitlines() == [
        "| world | ε, % | wsr | hoeffding |",
        "|---|---:|---:|---:|",
        "| coin | 5 | **12.00** |  |",
        "| beta | 20 |  | 4.00 |",
    ]


def test_most_misses_is_the_upper_end() -> None:
    """Of 10,000 calibrations at level 0.05, up to 573 may be wrong by chance."""
    assert most_misses(10_000, 0.05) == 573


def test_full_run_writes_a_table(
    tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The command behind `make test-validity` writes its table, and ends with status 1 if a combination is broken."""
    output = tmp_path_factory.mktemp("validity") / "deep" / "table.md"
    by_name = {world.name: world for world in WORLDS}
    easy = by_name["coin, 10 examples"]
    monkeypatch.setattr("tests.validity.__main__.WORLDS", (easy,))
    monkeypatch.setattr("tests.validity.__main__.WATCHED_WORLDS", (dataclasses.replace(easy, n=50),))
    monkeypatch.setattr("tests.validity.__main__.CONFIRMED_WORLDS", (dataclasses.replace(easy, n=20),))
    assert main([f"--output={output}", "--replications=50"]) == 0
    text = output.read_text(encoding="utf-8")
    assert "| coin, 10 examples | 5 | exact_binomial |" in text
    assert "| world | ε, % | chosen wrongly | confirmed by others | confirmed by those who chose |" in text
    assert "| world | ε, % | signed_mixture, every example | signed_mixture, n / 50 |" in text
    printed = capsys.readouterr()
    assert "watched: 20 combinations, 0 broken" in printed.out
    assert "confirmed: 42 combinations, 0 broken" in printed.out
    assert "the same worlds, looked at once: 15 combinations, 0 broken" in printed.out
    assert "not made to be watched, hoeffding_bentkus: up to " in printed.out
    # A world that misstates its risks makes every p-value look wrong.
    monkeypatch.setattr("tests.validity.__main__.WORLDS", (dataclasses.replace(easy, marginal=lambda u, risk: 0 * u),))
    assert main([f"--output={output}", "--replications=50"]) == 1
    assert "broken: coin, 10 examples, exact_binomial, fixed_sequence: 50 of 50" in capsys.readouterr().err
    monkeypatch.setattr("tests.validity.__main__.WORLDS", (easy,))
    wrong = dataclasses.replace(easy, n=50, marginal=lambda u, risk: 0 * u)
    monkeypatch.setattr("tests.validity.__main__.WATCHED_WORLDS", (wrong,))
    assert main([f"--output={output}", "--replications=50"]) == 1
    broken = "broken when watched: coin, 10 examples, signed_mixture, every example, fixed_sequence: 50 of 50"
    assert broken in capsys.readouterr().err
    monkeypatch.setattr("tests.validity.__main__.WATCHED_WORLDS", (dataclasses.replace(easy, n=50),))
    wrong = dataclasses.replace(wrong, n=20)
    monkeypatch.setattr("tests.validity.__main__.CONFIRMED_WORLDS", (wrong,))
    assert main([f"--output={output}", "--replications=50"]) == 1
    assert (
        "broken when confirmed: coin, 10 examples, exact_binomial, fixed_sequence: 50 of 50" in capsys.readouterr().err
    )
