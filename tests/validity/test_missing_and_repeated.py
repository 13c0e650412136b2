"""The effect of missing labels, repeated rows and repeated tests on a promise: before (the twin), and now."""

import numpy as np
import pytest

from calm_beam.calibration.anytime import PromiseEvidence
from calm_beam.risk.monitor import capital_of, grown_stakes, kept_back
from calm_beam.risk.pvalues import excess_p_values, hoeffding_bentkus_p_value
from calm_beam.risk.testing import LossesError, LossSums, RiskTest, control_risk

from .suite import SEED, most_misses
from .worlds import beta_steep, coin, ternary

pytestmark = pytest.mark.slow

_ALPHA = 0.05
_BETTORS = 7


def _alarms(losses: np.ndarray, *, delta: float) -> np.ndarray:
    """Returns which streams ever raise a monitor's alarm; losses have the shape (length, streams)."""
    stakes, raised = np.zeros((losses.shape[1], _BETTORS)), np.zeros(losses.shape[1], bool)
    kept = kept_back(np.arange(len(losses) + 1))
    for number, now in enumerate(losses):
        fresh = kept[number] - kept[number + 1]
        stakes = grown_stakes(stakes, now, fresh=fresh, delta=delta, is_signed=False)
        raised |= capital_of(stakes, kept=kept[number + 1]) >= 1 / _ALPHA
    return raised


def test_missing_labels_raise_no_false_alarm() -> None:
    """With risk 0 and every tenth label missing, counting them as 1 always raises a false alarm, as 0 never."""
    missing = np.random.default_rng(SEED).random((2000, 500)) < 0.1
    true_losses = np.zeros(missing.shape)
    assert _alarms(np.where(missing, 1.0, true_losses), delta=0.05).mean() == 1
    assert _alarms(np.where(missing, 0.0, true_losses), delta=0.05).sum() == 0


@pytest.mark.parametrize("which", ["any", "bad", "good"])
def test_the_proof_errs_at_most_alpha_whichever_labels_are_missing(which: str) -> None:
    """With the risk at delta, at most a share alpha of streams ever reports "the risk exceeds delta"."""
    draw = np.random.default_rng(SEED + 1)
    losses = (draw.random((3000, 1000)) < 0.1).astype(float)
    shares = {"any": np.full(losses.shape, 0.1), "bad": 0.3 * losses, "good": 0.1 * (1 - losses)}
    missing = draw.random(losses.shape) < shares[which]
    raised = _alarms(np.where(missing, 0.0, losses), delta=0.1)
    assert raised.sum() <= most_misses(1000, _ALPHA)
    # Counted as 1, missing labels of good outputs alone raise an alarm in nearly all.
    if which == "good":
        assert _alarms(np.where(missing, 1.0, losses), delta=0.1).mean() > 0.95


def test_rows_that_are_read_four_times_prove_nothing() -> None:
    """At the boundary four copies of every row err more than twice as often as epsilon allows; sums now refuse them."""
    draw, n, replications = np.random.default_rng(SEED + 2), 100, 4000
    sums = draw.binomial(n, 0.1, replications).astype(float)
    once, four_times = (
        hoeffding_bentkus_p_value(sums * copies, n=n * copies, delta=0.1) <= _ALPHA for copies in (1, 4)
    )
    assert once.sum() <= most_misses(replications, _ALPHA)
    assert four_times.mean() > 2 * _ALPHA
    test = RiskTest(delta=0.1, epsilon=_ALPHA)
    for _ in range(20):
        counted = LossSums([test])
        losses = (draw.random(n) < 0.1).astype(float)
        for copy in range(4):
            part = LossSums([test])
            for place, loss in enumerate(losses):
                part.add(f"e{place}", "8 bits", loss=float(loss))
            counted.merge(part)
            if copy == 0:
                assert control_risk(counted, [test], order=["8 bits"])[0].n == n
        with pytest.raises(LossesError, match="300 of 400 losses"):
            control_risk(counted, [test], order=["8 bits"])


_RUNS, _UNITS, _REPLICATIONS, _DELTA = 60, 100, 120, 0.1
_KINDS = {
    "coin": lambda uniforms: coin(uniforms, _DELTA),
    "beta": lambda uniforms: beta_steep(uniforms, _DELTA),
    "signed": lambda uniforms: ternary(0.1)(uniforms, _DELTA),
}


@pytest.mark.parametrize("kind", _KINDS)
def test_sixty_anytime_runs_err_at_most_alpha(kind: str) -> None:
    """With the risk at delta, at most a share alpha of histories of 60 runs ever gives either verdict."""
    draw = np.random.default_rng(SEED + 3)
    broken = proved = 0
    for _ in range(_REPLICATIONS):
        evidence = PromiseEvidence()
        for losses in _KINDS[kind](draw.random((_RUNS, _UNITS))):
            evidence = evidence.after(losses, losses, delta=_DELTA, is_signed=kind == "signed")
        broken += evidence.excess_p_value <= _ALPHA
        proved += evidence.p_value <= _ALPHA
    assert broken <= most_misses(_REPLICATIONS, _ALPHA)
    assert proved <= most_misses(_REPLICATIONS, _ALPHA)
    # The verdicts are still given.
    assert broken + proved > 0


def test_sixty_runs_with_an_alpha_each_do_not() -> None:
    """With a p-value for each run alone, most histories call a promise broken whose risk is at delta (the twin)."""
    draw = np.random.default_rng(SEED + 4)
    losses = coin(draw.random((500, _RUNS * 200)), _DELTA)
    p_values = excess_p_values(losses, p_value="exact_binomial", delta=_DELTA).reshape(_RUNS, 200)
    assert (p_values <= _ALPHA).any(axis=0).mean() > 0.7
    assert (p_values <= _ALPHA).sum() <= most_misses(p_values.size, _ALPHA)


def test_anytime_runs_find_what_is_broken() -> None:
    """A risk of one and a half delta is called broken within a few runs of 500 examples."""
    draw, first = np.random.default_rng(SEED + 5), []
    for _ in range(100):
        evidence, number = PromiseEvidence(), 0
        while evidence.excess_p_value > _ALPHA:
            losses = coin(draw.random(500), 1.5 * _DELTA)
            evidence, number = evidence.after(losses, losses, delta=_DELTA, is_signed=False), number + 1
        first.append(number)
    assert np.median(first) <= 3
    assert max(first) <= 10
