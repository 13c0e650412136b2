"""Tests of promises on fresh losses."""

from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
from scipy import stats

from calm_beam.calibration.verification import FreshLosses, promised_thresholds, verify
from calm_beam.inputs.examples import DataError
from calm_beam.manifest import Calibration
from calm_beam.metrics.registry import METRICS, MetricError
from calm_beam.risk.evidence import EvidenceError
from tests.calm_beam.calibration.builders import build_example, build_generation
from tests.calm_beam.manifest.builders import (
    build_calibration,
    build_never_exit,
    build_path_entry,
    build_signed_calibration,
)


def _entry(**changes: Any) -> Calibration:
    return build_calibration(metric="exact_match", **changes)


def _fresh(columns: Sequence[np.ndarray], entries: Sequence[Calibration]) -> FreshLosses:
    """Returns losses in which entry k has column k; entries differ in their thresholds or objectives."""
    objectives = tuple(dict.fromkeys(entry.objective for entry in entries))
    thresholds = promised_thresholds(entries)
    table = np.zeros((len(columns[0]), len(objectives), len(thresholds)))
    for column, entry in zip(columns, entries, strict=True):
        assert entry.threshold is not None
        table[:, objectives.index(entry.objective), thresholds.index(entry.threshold)] = column
    return FreshLosses(
        objectives=objectives,
        thresholds=thresholds,
        table=table,
        lenient_table=table,
        examples=len(columns[0]),
        failed=0,
    )


def _coins(heads: int, n: int = 100) -> np.ndarray:
    return np.repeat([1.0, 0.0], [heads, n - heads])


@pytest.mark.parametrize(
    ("heads", "is_broken", "is_proved_again"),
    [(0, False, True), (3, False, True), (10, False, False), (14, False, False), (25, True, False), (100, True, False)],
)
def test_verdicts(heads: int, is_broken: bool, is_proved_again: bool) -> None:
    """At delta 0.1, few losses in 100 prove the promise again, many break it, and about ten decide nothing."""
    entry = _entry()
    (verdict,) = verify(_fresh([_coins(heads)], [entry]), [entry], alpha=0.05)
    assert (verdict.is_broken, verdict.is_proved_again) == (is_broken, is_proved_again)
    assert verdict.risk == heads / 100
    assert verdict.entry == entry


def test_p_values_are_the_binomial_tails() -> None:
    """With the exact p-value, both questions are answered by the tails of the binomial distribution."""
    entry = _entry(p_value="exact_binomial")
    (verdict,) = verify(_fresh([_coins(12)], [entry]), [entry], alpha=0.05)
    assert verdict.p_value == pytest.approx(stats.binom.cdf(12, 100, 0.1), rel=1e-12)
    assert verdict.excess_p_value == pytest.approx(stats.binom.sf(11, 100, 0.1), rel=1e-12)


def test_fractions_for_a_binomial_promise_are_refused() -> None:
    """An entry whose p-value is for losses of 0 and 1 cannot be verified with others."""
    entry = _entry(p_value="exact_binomial")
    with pytest.raises(EvidenceError, match="exact_binomial is for losses of 0 and 1 only"):
        verify(_fresh([np.full(10, 0.5)], [entry]), [entry], alpha=0.05)


def test_several_entries_share_alpha() -> None:
    """Evidence that breaks a single promise may not break it among many; the kept ones stay."""
    path = (build_path_entry(threshold=0.5, risk=0.03, p_value=0.01, layers=4.25),)
    entries = [_entry(p_value="exact_binomial")]
    entries += [_entry(p_value="exact_binomial", threshold=0.5, path=path, delta=0.1 + k / 100) for k in range(9)]
    columns = [_coins(16), *[_coins(2)] * 9]
    alone = verify(_fresh(columns[:1], entries[:1]), entries[:1], alpha=0.05)
    together = verify(_fresh(columns, entries), entries, alpha=0.05)
    assert alone[0].is_broken
    assert alone[0].excess_p_value == together[0].excess_p_value > 0.005
    assert not any(verdict.is_broken for verdict in together)


def test_signed_losses_are_verified_as_they_are() -> None:
    """Examples on which the early exit does better compensate the others."""
    entry = build_signed_calibration(metric="exact_match", delta=0.1)
    better = np.tile([0.5, -0.5], 150)
    worse = np.tile([0.5, 0.3], 150)
    assert verify(_fresh([better], [entry]), [entry], alpha=0.05)[0].is_proved_again
    assert verify(_fresh([worse], [entry]), [entry], alpha=0.05)[0].is_broken


def test_losses_of_generations() -> None:
    """Losses are in the place of their entry, in an order decided by the salt, whatever order they come in."""
    entries = [_entry(), build_signed_calibration(metric="exact_match"), build_never_exit()]
    assert promised_thresholds(entries) == (0.8, 0.7)
    texts = {"a": ("x", "x", "x"), "b": ("x", "x", "y"), "c": ("y", "x", "x"), "d": ("y", "y", "x")}
    generations = [
        build_generation(outputs, example=build_example(id=name, references=("x",))) for name, outputs in texts.items()
    ]
    textual = {"a": 0.0, "b": 0.0, "c": 1.0, "d": 0.0}
    signed = {"a": 0.0, "b": 1.0, "c": -1.0, "d": -1.0}

    def fresh(items: Sequence[Any], salt: str) -> FreshLosses:
        return FreshLosses.of(items, entries[:2], metrics=METRICS, salt=salt, on_error="fail")

    losses = fresh(generations, "salt")
    assert (losses.examples, losses.failed) == (4, 0)
    pairs = list(zip(losses.at(entries[0]).tolist(), losses.at(entries[1]).tolist(), strict=True))
    assert sorted(pairs) == sorted((textual[name], signed[name]) for name in texts)
    shuffled = fresh(generations[::-1], "salt")
    assert np.array_equal(shuffled.table, losses.table)
    orders = {tuple(fresh(generations, str(number)).table.ravel()) for number in range(20)}
    assert len(orders) > 1


def test_clusters_are_averaged() -> None:
    """With clusters as units, each has the mean loss of its examples."""
    entry = _entry()
    generations = [
        build_generation(("x", early), example=build_example(id=str(number), cluster=cluster))
        for number, (early, cluster) in enumerate((("x", "p"), ("y", "p"), ("y", "q")))
    ]
    losses = FreshLosses.of(generations, [entry], metrics=METRICS, salt="s", on_error="fail")
    assert sorted(losses.at(entry).tolist()) == [0.5, 1.0]
    assert losses.examples == 3


def test_a_group_is_verified_on_its_own_examples() -> None:
    """A group's promise is broken by its own examples only; examples of no group decide nothing about it."""
    whole, bad, absent = (_entry(group=group, p_value="exact_binomial") for group in (None, "fr", "it"))
    generations = [
        build_generation(
            ("x", "y" if index < 20 else "x"),
            example=build_example(id=str(index), group="fr" if index < 20 else "en"),
        )
        for index in range(400)
    ]
    losses = FreshLosses.of(generations, [whole, bad, absent], metrics=METRICS, salt="s", on_error="fail")
    assert [losses.has_any(entry) for entry in (whole, bad, absent)] == [True, True, False]
    assert losses.at(bad).tolist() == [1.0] * 20
    verdicts = verify(losses, [whole, bad], alpha=0.05)
    assert [verdict.risk for verdict in verdicts] == [0.05, 1.0]
    assert [verdict.is_broken for verdict in verdicts] == [False, True]
    assert verdicts[0].is_proved_again


def test_failures_count_with_loss_one() -> None:
    """An example that could not be decoded or scored counts with loss 1; by default a failing metric ends the run."""

    def refuses(candidate: str, references: Sequence[str]) -> float:
        raise RuntimeError("no score")

    entry = _entry()
    failed = build_generation(failure="too long", outputs=())
    losses = FreshLosses.of([failed], [entry], metrics=METRICS, salt="s", on_error="fail")
    assert (losses.at(entry).tolist(), losses.failed) == ([1.0], 1)
    scored = build_generation(("x", "x"))
    metrics = {"exact_match": refuses}
    losses = FreshLosses.of([scored], [entry], metrics=metrics, salt="s", on_error="worst_case")
    assert (losses.at(entry).tolist(), losses.failed) == ([1.0], 1)
    with pytest.raises(MetricError, match="no score"):
        FreshLosses.of([scored], [entry], metrics=metrics, salt="s", on_error="fail")


@pytest.mark.parametrize("is_signed", [False, True])
def test_failures_prove_no_excess(is_signed: bool) -> None:
    """Failed examples neither break a promise, however many there are, nor prove it again."""
    entry = build_signed_calibration() if is_signed else _entry()
    failures = [
        build_generation(failure="too long", outputs=(), example=build_example(id=str(number))) for number in range(200)
    ]
    metrics = {entry.metric: METRICS["exact_match"]}
    losses = FreshLosses.of(failures, [entry], metrics=metrics, salt="s", on_error="fail")
    assert set(losses.at(entry, lenient=True).tolist()) == {-1.0 if is_signed else 0.0}
    (verdict,) = verify(losses, [entry], alpha=0.5)
    assert not verdict.is_broken
    assert not verdict.is_proved_again
    assert verdict.risk == 1


def test_no_examples_are_an_error() -> None:
    """Without examples there is an error."""
    with pytest.raises(DataError, match="there are no fresh examples"):
        FreshLosses.of([], [_entry()], metrics=METRICS, salt="s", on_error="fail")


def test_manifests_that_do_not_say_mean_the_loss_of_the_paper() -> None:
    """Early manifests had one loss for each consistency, which is the default."""
    assert build_calibration(consistency="risk").objective.loss == "relu"
    assert build_calibration().objective.loss == "dissimilarity"
    assert build_signed_calibration().objective.loss == "signed"


@pytest.mark.slow
@pytest.mark.parametrize("p_value", ["hoeffding_bentkus", "exact_binomial", "signed_mixture", "wsr"])
def test_kept_promises_are_seldom_called_broken(p_value: str) -> None:
    """With the risk of three promises at delta, any is called broken in at most a share alpha of fresh sets."""
    path = (build_path_entry(threshold=0.5, risk=0.03, p_value=0.01, layers=4.25),)
    lower = (build_path_entry(threshold=0.4, risk=0.03, p_value=0.01, layers=4.25),)
    entries = [
        _entry(p_value=p_value),
        _entry(p_value=p_value, threshold=0.5, path=path),
        _entry(p_value=p_value, threshold=0.4, path=lower),
    ]
    rng, sets, wrong = np.random.default_rng(14), 600, 0
    for _ in range(sets):
        columns = [np.asarray(rng.uniform(size=120) < 0.1, dtype=np.float64) for _ in entries]
        wrong += any(verdict.is_broken for verdict in verify(_fresh(columns, entries), entries, alpha=0.1))
    assert wrong <= stats.binom.ppf(0.9995, sets, 0.1)


@pytest.mark.slow
def test_not_proved_again_is_not_broken() -> None:
    """Calling an unproved promise broken would be wrong nearly always (the twin)."""
    entry = _entry(p_value="exact_binomial")
    rng, not_proved, broken = np.random.default_rng(15), 0, 0
    for _ in range(300):
        # The promise holds with a small margin.
        column = np.asarray(rng.uniform(size=200) < 0.095, dtype=np.float64)
        (verdict,) = verify(_fresh([column], [entry]), [entry], alpha=0.05)
        not_proved += not verdict.is_proved_again
        broken += verdict.is_broken
    assert not_proved > 0.8 * 300
    assert broken <= stats.binom.ppf(0.9995, 300, 0.05)


def test_alpha_outside_is_refused() -> None:
    """Alpha outside (0, 1) is refused."""
    entry = _entry()
    losses = _fresh([_coins(1)], [entry])
    with pytest.raises(ValueError, match="must be in"):
        verify(losses, [entry], alpha=5)
