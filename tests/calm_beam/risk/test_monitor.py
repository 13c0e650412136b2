"""Tests of the monitor: its algebra on short streams, its promise on long simulated ones.

Losses of sampled requests count once each, in an order that does not depend on them.
"""

import dataclasses
import itertools
import json
import math
import random
import re
from typing import Any

import numpy as np
import pytest
import scipy.stats
from hypothesis import given
from hypothesis import strategies as st
from scipy import stats

from calm_beam.risk.monitor import (
    RiskMonitor,
    SampledLoss,
    WatchedPromise,
    WatchedRisk,
    capital_of,
    grown_stakes,
    in_fixed_order,
    kept_back,
)
from tests.builders import build_checkpoint
from tests.calm_beam.serving.builders import build_entry, build_served_manifest
from tests.pipelines import CONFIG

_START = RiskMonitor.start(delta=0.1, alpha=0.05)
_LOSSES = st.lists(st.floats(0, 1), max_size=30)
_PROMISE = WatchedPromise(manifest="sha256:0", calibration=1, group="en", delta=0.1, is_signed=False)


def _capital_by_definition(losses: list[float], delta: float, is_signed: bool) -> float:
    """Returns the sum, over bettors and starting times, of the value of money staked before loss s, and the rest."""
    shares = [0.0125, 0.025, 0.05, 0.1, 0.2, 0.4, 0.8]
    kept_back = [1 / (1 + math.log(1 + number)) for number in range(len(losses) + 1)]
    total = kept_back[-1]
    for share in shares:
        bet = share / (1 + delta) if is_signed else share / delta
        for start in range(len(losses)):
            grown = math.prod(1 + bet * (loss - delta) for loss in losses[start:])
            total += (kept_back[start] - kept_back[start + 1]) / len(shares) * grown
    return total


@given(losses=st.lists(st.floats(-1, 1), max_size=12), is_signed=st.booleans(), delta=st.floats(0.01, 0.9))
def test_capital_is_that_of_the_mixture(losses: list[float], is_signed: bool, delta: float) -> None:
    """The capital is the mixture over bets and starting times, written out."""
    taken = losses if is_signed else [abs(loss) for loss in losses]
    monitor = RiskMonitor.start(delta=delta, alpha=0.001, is_signed=is_signed).observe(taken)
    assert monitor.capital == pytest.approx(_capital_by_definition(taken, delta, is_signed), rel=1e-9)


@given(losses=_LOSSES, cuts=st.lists(st.integers(0, 30), max_size=3))
def test_a_stream_may_be_cut_anywhere(losses: list[float], cuts: list[int]) -> None:
    """Parts, with the state written and read in between, give the bits of the whole."""
    whole = _START.observe(losses)
    places = [0, *sorted(min(cut, len(losses)) for cut in cuts), len(losses)]
    monitor = _START
    for start, end in itertools.pairwise(places):
        monitor = RiskMonitor.from_dict(json.loads(json.dumps(monitor.observe(losses[start:end]).to_dict())))
    assert monitor == whole


@given(losses=_LOSSES, place=st.integers(0, 29), raised=st.floats(0, 1))
def test_larger_losses_are_more_evidence(losses: list[float], place: int, raised: float) -> None:
    """Raising a loss never lowers the capital."""
    if place < len(losses):
        higher = [*losses[:place], max(losses[place], raised), *losses[place + 1 :]]
        assert _START.observe(higher).capital >= _START.observe(losses).capital * (1 - 1e-12)


def test_nothing_seen() -> None:
    """At the start the capital is 1, there is no mean, and no alarm."""
    assert _START.capital == 1
    assert _START.mean_loss is None
    assert _START.alarm_at is None
    assert _START.observe([]) == _START


def test_the_mean_is_that_of_the_losses() -> None:
    """Losses are added exactly."""
    assert _START.observe([0.25, 0.5]).observe([0.75, 0.0]).mean_loss == 0.375


def test_an_alarm_stays_and_names_its_loss() -> None:
    """The alarm is raised at the first loss at which the capital reaches 1 / alpha, and good losses do not end it."""
    capitals = [_START.observe([1.0] * number).capital for number in range(8)]
    first = next(number for number, capital in enumerate(capitals) if capital >= 20)
    monitor = _START.observe([1.0] * 8)
    assert monitor.alarm_at == first > 1
    assert monitor.observe([0.0] * 500).alarm_at == first
    assert monitor.observe([0.0] * 500).capital < 1


_SOME_MISSING = st.lists(st.none() | st.floats(-1, 1), max_size=30)


@given(losses=_SOME_MISSING, is_signed=st.booleans())
def test_missing_losses_count_as_the_lowest_and_as_1(losses: list[float | None], is_signed: bool) -> None:
    """Each capital and its alarm are, bit for bit, those of a stream with these numbers for missing losses."""
    taken = losses if is_signed else [None if loss is None else abs(loss) for loss in losses]
    start = RiskMonitor.start(delta=0.1, alpha=0.3, is_signed=is_signed)
    found = start.observe(taken)
    lowest, worst = (
        start.observe([number if loss is None else loss for loss in taken])
        for number in (-1.0 if is_signed else 0.0, 1.0)
    )
    assert (found.stakes, found.capital, found.alarm_at) == (lowest.stakes, lowest.capital, lowest.alarm_at)
    assert (found.worst_stakes, found.worst_capital) == (worst.stakes, worst.capital)
    assert found.missing_alarm_at == worst.alarm_at
    assert (found.n, found.missing) == (len(losses), losses.count(None))
    assert RiskMonitor.from_dict(json.loads(json.dumps(found.to_dict()))) == found


def test_without_missing_losses_both_alarms_are_one() -> None:
    """Without missing losses both alarms are equal."""
    monitor = _START.observe([0.0] * 50 + [1.0] * 10)
    assert monitor.stakes == monitor.worst_stakes
    assert monitor.alarm_at == monitor.missing_alarm_at == 56
    assert monitor.missing == 0


def test_labels_that_never_come_prove_nothing() -> None:
    """With risk 0 and every tenth label missing, no alarm says that the risk exceeds delta."""
    stream = ([0.0] * 9 + [None]) * 200
    monitor = RiskMonitor.start(delta=0.05, alpha=0.05).observe(stream)
    assert monitor.alarm_at is None
    assert monitor.capital < 1
    assert monitor.mean_loss == 0
    assert monitor.missing == 200
    # The other alarm is right: the risk exceeds delta, or labels are missing.
    assert monitor.missing_alarm_at is not None
    # A true excess among the labels that arrive is still proved.
    assert monitor.observe(([1.0] * 9 + [None]) * 10).alarm_at is not None


def test_a_state_of_the_first_version_goes_on() -> None:
    """A state of the first version, which counted missing losses as 1, has no proof; later losses can still prove."""
    old = {
        "delta": 0.1,
        "alpha": 0.05,
        "is_signed": False,
        "n": 60,
        "loss_sum": 10 * 2**32,
        "stakes": list(_START.observe([0.0] * 50 + [1.0] * 10).stakes),
        "alarm_at": 56,
    }
    monitor = RiskMonitor.from_first_version(old)
    assert (monitor.alarm_at, monitor.missing_alarm_at, monitor.missing) == (None, 56, 0)
    assert monitor.worst_capital == _START.observe([0.0] * 50 + [1.0] * 10).capital
    assert monitor.capital == kept_back(np.array(60))
    assert monitor.observe([1.0] * 60).alarm_at is not None
    with pytest.raises(ValueError, match=r"missing: \['alarm_at'\], unknown: \['bets'\]"):
        RiskMonitor.from_first_version({**{name: old[name] for name in old if name != "alarm_at"}, "bets": 3})


def test_capital_has_an_upper_end() -> None:
    """A long stream of the worst losses does not overflow, and good losses after it reduce the capital."""
    monitor = RiskMonitor.start(delta=0.01, alpha=0.05).observe([1.0] * 2000)
    assert monitor.stakes[-1] == 2.0**1000
    assert monitor.stakes[-1] / 7 < monitor.capital < math.inf
    assert RiskMonitor.from_dict(json.loads(json.dumps(monitor.to_dict()))) == monitor
    assert monitor.observe([0.0] * 80_000).capital < 1


def _streams(
    draw: Any, *, length: int, replications: int, delta: float, alpha: float, is_signed: bool = False
) -> np.ndarray:
    """Returns the number of the loss at which each of many streams raised the alarm; 0 for none."""
    stakes = np.zeros((replications, len(_START.stakes)))
    alarm_at = np.zeros(replications, int)
    kept = kept_back(np.arange(length + 1))
    for number in range(1, length + 1):
        losses = draw(number, replications)
        fresh = kept[number - 1] - kept[number]
        stakes = grown_stakes(stakes, losses, fresh=fresh, delta=delta, is_signed=is_signed)
        is_alarm = capital_of(stakes, kept=kept[number]) >= 1 / alpha
        alarm_at = np.where(is_alarm & (alarm_at == 0), number, alarm_at)
    return alarm_at


def _coins(rng: np.random.Generator, risk: float | np.ndarray, size: int) -> np.ndarray:
    return np.asarray(rng.uniform(size=size) < risk, dtype=np.float64)


def test_simulated_streams_are_those_of_the_monitor() -> None:
    """The vectorised streams below raise the alarm where the monitor does."""
    losses = np.random.default_rng(8).uniform(size=(60, 20)) ** 2
    found = _streams(lambda number, _: losses[number - 1], length=60, replications=20, delta=0.2, alpha=0.2)
    alone = [RiskMonitor.start(delta=0.2, alpha=0.2).observe(column).alarm_at or 0 for column in losses.T]
    assert found.tolist() == alone
    assert 0 < np.count_nonzero(found) < 20


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["coin", "beta", "signed"])
def test_false_alarms_stay_within_alpha(kind: str) -> None:
    """With the risk exactly at delta, at most a share alpha of long streams ever raises the alarm."""
    rng, delta, alpha = np.random.default_rng(21), 0.1, 0.1
    draws = {
        "coin": lambda _, size: _coins(rng, delta, size),
        "beta": lambda _, size: rng.uniform(size=size) ** (1 / delta - 1),
        "signed": lambda _, size: rng.choice([-1.0, 0.0, 1.0], p=[0.1, 0.7, 0.2], size=size),
    }
    alarms = _streams(
        draws[kind], length=10_000, replications=1000, delta=delta, alpha=alpha, is_signed=kind == "signed"
    )
    false_alarms = np.count_nonzero(alarms)
    assert false_alarms <= stats.binom.ppf(0.9995, 1000, alpha)
    # The alarm is still raised at times.
    assert false_alarms > 10


@pytest.mark.slow
def test_dependent_losses_are_allowed() -> None:
    """Losses may depend on earlier ones, if none is expected to exceed delta given those."""
    rng, before = np.random.default_rng(22), np.zeros(1000)

    def draw(_: int, size: int) -> np.ndarray:
        # After a loss the next ones are safe; otherwise they are at delta.
        before[:] = _coins(rng, np.where(before > 0, 0.02, 0.1), size)
        return before.copy()

    alarms = _streams(draw, length=5000, replications=1000, delta=0.1, alpha=0.1)
    assert np.count_nonzero(alarms) <= stats.binom.ppf(0.9995, 1000, 0.1)


@pytest.mark.slow
def test_a_test_that_was_not_made_for_peeking_raises_false_alarms() -> None:
    """A one-sided z-test after every loss raises false alarms in most streams (the twin)."""
    rng, delta, replications = np.random.default_rng(23), 0.1, 500
    sums, has_alarm = np.zeros(replications), np.zeros(replications, bool)
    for number in range(1, 5001):
        sums += rng.uniform(size=replications) < delta
        deviation = math.sqrt(number * delta * (1 - delta))
        has_alarm |= (number >= 30) & (sums - number * delta > stats.norm.ppf(0.9) * deviation)
    assert has_alarm.mean() > 0.5


@pytest.mark.slow
def test_drift_is_found_soon(capsys: pytest.CaptureFixture[str]) -> None:
    """After a drift from 0.06 to 0.2 at delta 0.1 some hundred losses raise the alarm, even after 5,000 good ones."""
    delays = {}
    for good in (0, 500, 5000):
        rng = np.random.default_rng(24)
        alarms = _streams(
            lambda number, size, good=good, rng=rng: _coins(rng, 0.06 if number <= good else 0.2, size),
            length=good + 1500,
            replications=200,
            delta=0.1,
            alpha=0.05,
        )
        assert np.count_nonzero((alarms > 0) & (alarms <= good)) <= stats.binom.ppf(0.9995, 200, 0.05)
        assert (alarms > 0).all()
        delays[good] = float(np.median(alarms[alarms > good] - good))
    with capsys.disabled():
        print(f"\nmedian detection delay by losses before the drift: {delays}")
    assert delays[0] < 120
    assert delays[5000] < 400


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"delta": 5}, "delta must be in (0, 1), got 5. It is a fraction: for 5 % pass 0.05."),
        ({"alpha": 0.0}, "alpha must be in (0, 1), got 0.0."),
        ({"alpha": math.nan}, "alpha must be in (0, 1), got nan."),
        ({"alpha": "0.1"}, "alpha must be in (0, 1), got '0.1'."),
        ({"is_signed": 1}, "is_signed must be true or false, got 1."),
        ({"n": -1}, "n must be a whole number of at least 0, got -1."),
        ({"n": 10**400}, "n must be at most 1000000000000, which no stream has; got 10000000000000000000"),
        ({"n": 10**12 + 1}, "n must be at most 1000000000000, which no stream has; got 1000000000001."),
        ({"n": 1.5}, "n must be a whole number of at least 0, got 1.5."),
        ({"loss_sum": 2**33}, "loss_sum must be in [0, 4294967296] for n = 1, got 8589934592."),
        ({"loss_sum": -1}, "loss_sum must be a whole number of at least 0, got -1."),
        ({"stakes": [0.0]}, "stakes must be 7 numbers from 0 to 1.07151e+301, got (0.0,)."),
        ({"stakes": ["0"] * 7}, "stakes must be 7 numbers from 0 to 1.07151e+301, got ('0',"),
        ({"stakes": [-1.0] * 7}, "stakes must be 7 numbers from 0 to 1.07151e+301, got (-1.0,"),
        ({"stakes": [math.nan] * 7}, "stakes must be 7 numbers from 0 to 1.07151e+301, got (nan,"),
        ({"stakes": [math.inf] * 7}, "stakes must be 7 numbers from 0 to 1.07151e+301, got (inf,"),
        ({"stakes": "none"}, "stakes must be a list, got 'none'."),
        ({"missing": 2}, "missing must be in [0, 1] for n = 1, got 2."),
        ({"missing": 1}, "loss_sum must be in [0, 0] for n = 1 and missing = 1, got 2147483648."),
        ({"missing": True}, "missing must be a whole number of at least 0, got True."),
        ({"worst_stakes": [0.0]}, "worst_stakes must be 7 numbers from 0 to 1.07151e+301, got (0.0,)."),
        ({"worst_stakes": None}, "worst_stakes must be a list, got None."),
        ({"alarm_at": 2}, "alarm_at must be in [1, 1] for n = 1, got 2."),
        ({"missing_alarm_at": 0}, "missing_alarm_at must be a whole number of at least 1, got 0."),
        ({"alarm_at": 1}, "missing_alarm_at must be in [1, 1] for alarm_at = 1, got None."),
        ({"bets": 3}, "missing: [], unknown: ['bets']."),
    ],
)
def test_a_state_that_cannot_be_is_refused(changes: dict[str, object], message: str) -> None:
    """Every value of a stored state is checked, and unknown keys are refused."""
    state = _START.observe([0.5]).to_dict()
    assert RiskMonitor.from_dict(state) == _START.observe([0.5])
    with pytest.raises(ValueError, match=re.escape(message)):
        RiskMonitor.from_dict({**state, **changes})


def test_a_missing_key_is_refused() -> None:
    """A state without one of its keys is refused by name."""
    state = _START.to_dict()
    del state["n"]
    with pytest.raises(ValueError, match=re.escape("missing: ['n'], unknown: [].")):
        RiskMonitor.from_dict(state)


@pytest.mark.parametrize(("is_signed", "loss", "low"), [(False, -0.5, 0), (True, -1.5, -1), (False, math.nan, 0)])
def test_losses_outside_are_refused(is_signed: bool, loss: float, low: int) -> None:
    """A loss that is NaN or out of range is an error, and the state does not change."""
    monitor = RiskMonitor.start(delta=0.1, alpha=0.05, is_signed=is_signed)
    with pytest.raises(ValueError, match=re.escape(f"losses[1] must be in [{low}, 1], got {loss}.")):
        monitor.observe([0.5, loss])


def _losses(values: list[float], *, seed: int = 0) -> list[SampledLoss]:
    return [
        SampledLoss(id=f"{seed}/{place}", value=value, failure=None, promise=_PROMISE)
        for place, value in enumerate(values)
    ]


def test_the_order_is_that_of_the_ids() -> None:
    """The order of losses depends on ids alone, not on arrival or values."""
    losses = _losses([place / 50 for place in range(50)])
    names = [loss.id for loss in in_fixed_order(losses)]
    assert sorted(names) == sorted(loss.id for loss in losses)
    assert names != [loss.id for loss in losses]
    changed = [dataclasses.replace(loss, value=1 - loss.value) for loss in reversed(losses)]
    assert [loss.id for loss in in_fixed_order(changed)] == names


def test_a_request_counts_once_with_its_smaller_loss() -> None:
    """Copies of a loss change nothing, and a larger one of the same request is left out."""
    losses = _losses([0.2, 0.5, 0.0])
    larger = dataclasses.replace(losses[1], value=1.0, failure="OutputError")
    for more in ([larger, *losses], [*losses, larger], [*losses, *losses]):
        assert in_fixed_order(more) == in_fixed_order(losses)


def test_rows_read_back() -> None:
    """A row names manifest and entry, and reads back as a loss only with them."""
    manifest = build_served_manifest(build_checkpoint(CONFIG), (build_entry(0.2), build_entry(0.5, delta=0.2)))
    promises = [WatchedPromise.of(manifest, entry) for entry in manifest.calibrations]
    loss = SampledLoss(id="a", value=0.5, failure=None, promise=promises[1])
    assert loss.promise.delta == 0.2
    row = loss.to_row()
    assert row == {"id": "a", "loss": 0.5, "failure": None, "manifest": manifest.digest, "calibration": 1}
    assert SampledLoss.from_row(row, promises) == loss
    with pytest.raises(ValueError, match="request 'a' was measured for another manifest or entry"):
        SampledLoss.from_row(row, promises[:1])
    with pytest.raises(ValueError, match=r"has the keys id, loss, failure, manifest, calibration; got \['loss'\]"):
        SampledLoss.from_row({"loss": 1}, promises)


def test_parts_add_up() -> None:
    """Consecutive parts give the state of one stream, and the part that raised the alarm says so."""
    parts = [_losses([float(place % 10 < share) for place in range(40)], seed=share) for share in (0, 9, 9)]
    monitor = RiskMonitor.start(delta=0.1, alpha=0.05)
    state, alarms = None, []
    for part in parts:
        state = WatchedRisk.after(part, before=None if state is None else state.monitor, alpha=0.05)
        monitor = monitor.observe(loss.value for loss in in_fixed_order(part))
        assert state.monitor == monitor
        assert state.part == 40
        alarms.append(state.is_new_alarm)
    assert alarms == [False, True, False]


def test_a_state_is_a_line_for_a_log() -> None:
    """A log line has the number of losses, their mean, the capital, and an alarm if there is one."""
    few = WatchedRisk.after(_losses([0.0, 1.0], seed=0), before=None, alpha=0.05)
    assert str(few).startswith(f"group en, delta {_PROMISE.delta:g}, 2 losses, mean 0.5000; capital ")
    assert str(few).endswith(", and 20 raises an alarm")
    many = WatchedRisk.after(_losses([1.0] * 60, seed=0), before=None, alpha=0.05)
    assert str(many).startswith(
        f"ALARM at loss {many.monitor.alarm_at}: group en, delta {_PROMISE.delta:g}, 60 losses, "
    )
    assert "raises" not in str(many)


@pytest.mark.slow
def test_arrival_by_loss_raises_no_false_alarms() -> None:
    """Losses at delta that arrive largest first alarm at most at alpha; a test in order of arrival does more often."""
    draw, alpha, trials = np.random.default_rng(7), 0.2, 300
    found = broken = 0
    for trial in range(trials):
        values = sorted((draw.random(120) < _PROMISE.delta).astype(float).tolist(), reverse=True)
        losses = _losses(values, seed=trial)
        random.Random(trial).shuffle(losses)
        found += WatchedRisk.after(losses, before=None, alpha=alpha).is_new_alarm
        broken += RiskMonitor.start(delta=_PROMISE.delta, alpha=alpha).observe(values).alarm_at is not None
    assert scipy.stats.binomtest(found, trials, alpha, alternative="greater").pvalue > 0.01
    assert scipy.stats.binomtest(broken, trials, alpha, alternative="greater").pvalue < 1e-9
