"""Losses of sampled requests count once each, in an order that knows nothing of them."""

import dataclasses
import random

import numpy as np
import pytest
import scipy.stats

from calm_beam.risk.monitor import RiskMonitor
from calm_beam.risk.sampled_loss import SampledLoss, WatchedPromise, in_fixed_order
from calm_beam.risk.watched_risk import WatchedRisk
from tests.builders import build_checkpoint
from tests.calm_beam.serving.builders import build_entry, build_served_manifest
from tests.pipelines import CONFIG

_PROMISE = WatchedPromise(manifest="sha256:0", calibration=1, group="en", delta=0.1, is_signed=False)


def _losses(values: list[float], *, seed: int = 0) -> list[SampledLoss]:
    return [
        SampledLoss(id=f"{seed}/{place}", value=value, failure=None, promise=_PROMISE)
        for place, value in enumerate(values)
    ]


def test_the_order_is_that_of_the_ids() -> None:
    """However losses come, and whatever they are, their ids have the same order."""
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
    """A row names manifest and entry, and is a loss again only with them."""
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
    """Parts that follow one another give the state of one stream, and the part that raised the alarm says so."""
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


@pytest.mark.slow
def test_arrival_by_loss_raises_no_false_alarms() -> None:
    """Losses at the tolerance that arrive largest first alarm no more often than alpha; in their own order they do."""
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
