"""Counted totals are compared with the stored shards."""

import dataclasses
import random
import re

import hypothesis
import numpy as np
import pytest
from hypothesis import strategies as st

from calm_beam.outputs import FinishedSweep, OutputsError, StoredShard
from calm_beam.outputs.totals import CalibrationTotals, Layout
from tests.plans import all_specs

_SPECS = all_specs(consistencies=("textual",), metrics=("token_f1",), deltas=(0.1,), epsilons=(0.1,), p_value="wsr")
_LAYOUT = Layout.of(_SPECS, thresholds=2)


def _shard_totals(shard: int, examples: int) -> CalibrationTotals:
    """Returns the totals of a shard whose examples have no loss, and whose first failed."""
    keys = [f"{shard}-{index}" for index in range(examples)]
    losses = CalibrationTotals.of_losses(keys, np.zeros((examples, 1, 2), np.int64), layout=_LAYOUT, salt="s")
    failures = ((keys[0], "not finite"),)
    return dataclasses.replace(losses, by_shard=((shard, examples),), failures=failures)


def _finished(*sizes: int) -> FinishedSweep:
    shards = [StoredShard(shard=i, examples=size, failed=0, digest="d") for i, size in enumerate(sizes)]
    return FinishedSweep.of(shards, job="j", examples=sum(sizes))


@hypothesis.settings(deadline=None)
@hypothesis.given(sizes=st.lists(st.integers(1, 5), min_size=1, max_size=5), order=st.randoms(use_true_random=False))
def test_every_shard_once_passes_in_any_order(sizes: list[int], order: random.Random) -> None:
    """Totals merge to the same whole in any order, and pass; failures are sorted."""
    parts = [_shard_totals(shard, size) for shard, size in enumerate(sizes)]
    order.shuffle(parts)
    whole = CalibrationTotals.zero(_LAYOUT)
    for part in parts:
        whole = part.merge(whole)
    whole.check(_finished(*sizes))
    assert [name for name, _ in whole.failures] == sorted(f"{shard}-0" for shard in range(len(sizes)))
    assert whole.scored == whole.examples == sum(sizes)
    assert whole.failed == len(sizes)


@pytest.mark.parametrize(
    ("counted", "message"),
    [
        ((0, 1, 1), "shard 1: 6 examples were counted, but it has 3."),
        ((0,), "shard 1: 0 examples were counted, but it has 3."),
        ((0, 1, 2), "shard 2: 4 examples were counted, but it has 0."),
    ],
)
def test_a_shard_that_counts_twice_is_refused(counted: tuple[int, ...], message: str) -> None:
    """A shard that comes twice, is missing, or is unknown is named with both numbers."""
    sizes = (2, 3, 4)
    whole = CalibrationTotals.zero(_LAYOUT)
    for shard in counted:
        whole = whole.merge(_shard_totals(shard, sizes[shard]))
    with pytest.raises(OutputsError, match=re.escape(message)):
        whole.check(_finished(*sizes[:2]))


def test_a_lost_loss_is_refused() -> None:
    """The number of added losses, and of kept single losses, must be that of the examples."""
    totals = _shard_totals(0, 3)
    with pytest.raises(OutputsError, match=r"2 examples were scored, but 3 decoded\."):
        dataclasses.replace(totals, scored=2).check(_finished(3))
    with pytest.raises(OutputsError, match=r"2 single losses were kept, but 3 summed\."):
        dataclasses.replace(totals, table=_shard_totals(0, 2).table).check(_finished(3))
