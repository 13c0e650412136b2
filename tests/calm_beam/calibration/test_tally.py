"""What was counted is compared with what is stored."""

import dataclasses
import random
import re

import hypothesis
import numpy as np
import pytest
from hypothesis import strategies as st

from calm_beam.calibration import CalibrationTotals, Layout, Tally, all_specs
from calm_beam.generations import GenerationsError, StoredShard
from calm_beam.generations.folder import FinishedSweep

_SPECS = all_specs(consistencies=("textual",), metrics=("token_f1",), deltas=(0.1,), epsilons=(0.1,), p_value="wsr")
_LAYOUT = Layout.of(_SPECS, thresholds=2)


def _shard_tally(shard: int, examples: int) -> Tally:
    """Returns the tally of a shard whose examples have no loss."""
    zero = CalibrationTotals.zero(_LAYOUT)
    keys = [f"{shard}-{index}" for index in range(examples)]
    losses = CalibrationTotals.of_losses(keys, np.zeros((examples, 1, 2), np.int64), _LAYOUT, salt="s")
    totals = dataclasses.replace(zero, examples=examples).merge(losses)
    failures = ((f"{shard}-0", "not finite"),)
    return Tally(totals=totals, scored=examples, by_shard=((shard, examples),), failures=failures)


def _finished(*sizes: int) -> FinishedSweep:
    shards = [StoredShard(shard=i, examples=size, failed=0, digest="d") for i, size in enumerate(sizes)]
    return FinishedSweep.of(shards, job="j", examples=sum(sizes))


@hypothesis.settings(deadline=None)
@hypothesis.given(sizes=st.lists(st.integers(1, 5), min_size=1, max_size=5), order=st.randoms(use_true_random=False))
def test_every_shard_once_passes_in_any_order(sizes: list[int], order: random.Random) -> None:
    """Tallies merge to the same whole in any order, and it passes; failures come sorted."""
    parts = [_shard_tally(shard, size) for shard, size in enumerate(sizes)]
    order.shuffle(parts)
    whole = Tally.zero(_LAYOUT)
    for part in parts:
        whole = part.merge(whole)
    whole.check(_finished(*sizes))
    assert [name for name, _ in whole.failures] == sorted(f"{shard}-0" for shard in range(len(sizes)))
    assert whole.scored == sum(sizes)


@pytest.mark.parametrize(
    ("counted", "message"),
    [
        ((0, 1, 1), "shard 1: 6 examples were counted, but it has 3."),
        ((0,), "shard 1: 0 examples were counted, but it has 3."),
        ((0, 1, 2), "shard 2: 4 examples were counted, but it has 0."),
    ],
)
def test_a_shard_that_counts_twice_is_refused(counted: tuple[int, ...], message: str) -> None:
    """A shard that comes twice, not at all, or from elsewhere is named with both numbers."""
    sizes = (2, 3, 4)
    whole = Tally.zero(_LAYOUT)
    for shard in counted:
        whole = whole.merge(_shard_tally(shard, sizes[shard]))
    with pytest.raises(GenerationsError, match=re.escape(message)):
        whole.check(_finished(*sizes[:2]))


def test_a_lost_loss_is_refused() -> None:
    """As many losses as examples must have been added, and kept where single losses are."""
    tally = _shard_tally(0, 3)
    with pytest.raises(GenerationsError, match=r"2 examples were scored, but 3 decoded\."):
        dataclasses.replace(tally, scored=2).check(_finished(3))
    totals = dataclasses.replace(tally.totals, table=_shard_tally(0, 2).totals.table)
    with pytest.raises(GenerationsError, match=r"2 single losses were kept, but 3 summed\."):
        dataclasses.replace(tally, totals=totals).check(_finished(3))
    totals = dataclasses.replace(tally.totals, examples=4)
    with pytest.raises(GenerationsError, match=r"4 examples were described, but 3 decoded\."):
        dataclasses.replace(tally, totals=totals).check(_finished(3))
