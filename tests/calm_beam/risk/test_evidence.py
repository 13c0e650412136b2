"""Summed statistics of losses that can be checked by hand, and one order of single losses."""

import hashlib
import pickle
import random
import re

import numpy as np
import pytest

from calm_beam.risk import evidence
from calm_beam.risk.elementary import log_capital
from calm_beam.risk.evidence import BettingTable, EvidenceError, IsFraction, LogCapital, Loss, SquaredLoss
from calm_beam.risk.losses import LOSS_SCALE

_FEW_LOSSES = np.array([[0, LOSS_SCALE], [LOSS_SCALE // 2, 1]])
_LOSSES = np.arange(20 * 2 * 3).reshape(20, 2, 3)
_KEYS = [f"example-{index}" for index in range(20)]


def test_statistics() -> None:
    """Statistics are losses, squares rounded up, and marks of values other than 0 and 1; shapes are kept."""
    assert Loss().values(_FEW_LOSSES).tolist() == _FEW_LOSSES.tolist()
    assert SquaredLoss().values(_FEW_LOSSES).tolist() == [[0, LOSS_SCALE], [LOSS_SCALE // 4, 1]]
    assert IsFraction().values(_FEW_LOSSES).tolist() == [[0, 0], [1, 1]]
    assert IsFraction().values(-_FEW_LOSSES).tolist() == [[0, 1], [1, 1]]
    bet = LogCapital(delta=0.1, share=0.3)
    assert bet.values(_FEW_LOSSES).tolist() == log_capital(_FEW_LOSSES, delta=0.1, share=0.3).tolist()


def test_equal_statistics_are_one_key() -> None:
    """A statistic that two specs need is summed once."""
    assert len({Loss(), Loss(), SquaredLoss(), LogCapital(delta=0.1, share=0.3), LogCapital(delta=0.1, share=0.3)}) == 3
    assert LogCapital(delta=0.1, share=0.3) != LogCapital(delta=0.2, share=0.3)


def _table(places: list[int], *, salt: str = "salt") -> BettingTable:
    return BettingTable.of([_KEYS[place] for place in places], _LOSSES[places], salt=salt)


@pytest.mark.parametrize("seed", range(5))
def test_order_is_that_of_salted_hashes(seed: int) -> None:
    """Any chunks, merged in any order, give the losses sorted by the SHA-256 of salt and key."""
    rng = random.Random(seed)
    places = rng.sample(range(20), 20)
    cuts = sorted(rng.sample(range(1, 20), 3))
    tables = [_table(places[start:end]) for start, end in zip([0, *cuts], [*cuts, 20], strict=True)]
    rng.shuffle(tables)
    merged = BettingTable()
    for table in tables:
        merged = merged.merge(table)
    order = sorted(range(20), key=lambda place: hashlib.sha256(f"salt\n{_KEYS[place]}".encode()).hexdigest())
    assert merged.in_order().tolist() == _LOSSES[order].tolist()
    assert merged == _table(list(range(20)))
    assert hash(merged) == hash(_table(list(range(20))))


def test_many_small_tables_make_few_chunks() -> None:
    """Merging one by one neither accumulates chunks nor loses a loss."""
    merged = BettingTable()
    for index in range(300):
        merged = merged.merge(BettingTable.of([f"{index}"], np.full((1, 1, 1), index), salt="salt"))
    assert len(merged.chunks) < 10
    assert sorted(merged.in_order().reshape(-1).tolist()) == list(range(300))


def test_salt_decides_the_order() -> None:
    """Another salt gives another order of the same losses."""
    one, other = _table(list(range(20))).in_order(), _table(list(range(20)), salt="pepper").in_order()
    assert one.tolist() != other.tolist()
    assert sorted(one.tolist()) == sorted(other.tolist())


def test_equality_is_by_content() -> None:
    """Other losses, fewer of them, none, and other types are unequal."""
    table = _table([0, 1])
    assert table == _table([1, 0])
    assert table != _table([0, 2])
    assert table != _table([0])
    assert table != BettingTable()
    assert BettingTable() == BettingTable()
    assert table != 3
    assert pickle.loads(pickle.dumps(table)) == table


def test_more_than_fits_is_refused_in_words(monkeypatch: pytest.MonkeyPatch) -> None:
    """Too many losses end the run with their size, the limit and the way out, before they fill the memory."""
    monkeypatch.setattr(evidence, "MOST_BYTES", 10 * 2 * 3 * 8)
    half = _table(list(range(10)))
    message = (
        "the losses of 20 examples take 0.0 GiB, and p-value wsr keeps up to 4.47035e-07 GiB of them in memory. Take "
        "signed_mixture, which keeps sums only, or fewer thresholds."
    )
    with pytest.raises(EvidenceError, match=re.escape(message)):
        half.merge(_table(list(range(10, 20))))
