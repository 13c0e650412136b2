"""All losses of a sweep are complete, or the missing ones are named; results do not depend on order."""

import dataclasses
import random

import hypothesis
import numpy as np
import pytest
from hypothesis import strategies

from calm_beam.calibration.loss_table import LossTable
from calm_beam.inputs.losses.tables import LossRow
from calm_beam.risk.evidence import RiskTotals
from calm_beam.risk.losses import to_signed_fixed_point
from calm_beam.risk.testing import LossesError
from tests.calm_beam.inputs.losses.builders import ORDER, coin_rows


@hypothesis.given(strategies.integers(0, 2**32))
def test_order_of_rows_does_not_matter(seed: int) -> None:
    """For any order of rows, units, costs and fingerprints are the same."""
    rows = coin_rows(13)
    shuffled = random.Random(seed).sample(rows, len(rows))
    one, other = LossTable.of(rows), LossTable.of(shuffled)
    assert (one.costs, one.fingerprint(), one.fingerprints) == (other.costs, other.fingerprint(), other.fingerprints)
    for group in (None, "b"):
        names, fixed = one.units(order=ORDER, group=group)
        theirs, their_fixed = other.units(order=ORDER, group=group)
        assert names == theirs
        assert np.array_equal(fixed, their_fixed)


def test_units_are_examples_or_clusters() -> None:
    """Without clusters units are examples in the given order; with them, exact means that are rounded up."""
    rows = [dataclasses.replace(row, loss=row.loss / 3) for row in coin_rows(30)]
    plain = LossTable.of(dataclasses.replace(row, cluster=None) for row in rows)
    names, fixed = plain.units(order=("3bit", "8bit"))
    by_key = {(row.id, row.setting): row.loss for row in rows}
    assert sorted(names) == sorted({row.id for row in rows})
    expected = [[by_key[name, "3bit"], by_key[name, "8bit"]] for name in names]
    assert np.array_equal(fixed, to_signed_fixed_point(expected))

    clusters, means = LossTable.of(rows).units(order=ORDER, group="b")
    for name, mean in zip(clusters, means, strict=True):
        ids = sorted({row.id for row in rows if row.cluster == name and row.group == "b"})
        of_cluster = to_signed_fixed_point([[by_key[each, setting] for setting in ORDER] for each in ids])
        assert np.array_equal(mean, RiskTotals(n=len(ids), sums=of_cluster.sum(axis=0)[None]).mean_up()[0])
    assert LossTable.of(rows).clusters_of("b") == len(clusters)


def test_tails_are_of_losses_as_given() -> None:
    """A loss equal to the tail does not exceed it, though it is rounded up when it is summed."""
    sweep = LossTable.of([LossRow("a", "x", 0.3), LossRow("b", "x", 0.30000000000000004)])
    assert sweep.units(order=["x"], tail=0.3)[1].tolist() == [[0], [2**32]]


def test_fingerprints_tell_losses_apart() -> None:
    """Another loss or id under a setting changes that setting's fingerprint alone."""
    rows = coin_rows(5)
    found = LossTable.of(rows).fingerprints
    for changes in ({"loss": 0.5}, {"id": "other"}):
        changed = [dataclasses.replace(row, **changes) if row.id == "e0" else row for row in rows]
        other = LossTable.of(changed).fingerprints
        assert all(other[name] != found[name] for name in ORDER)
    one = [dataclasses.replace(row, loss=0.5) if row == rows[0] else row for row in rows]
    assert {name for name, value in LossTable.of(one).fingerprints.items() if value != found[name]} == {ORDER[0]}


@pytest.mark.parametrize(
    ("rows", "message"),
    [
        ([], "there are no losses"),
        ([LossRow("a", "x", 0), LossRow("a", "x", 0)], r"setting 'x' has several losses for 1 id \('a'\)"),
        ([LossRow("a", "x", 0), LossRow("b", "y", 0)], r"setting 'x' has no loss for 1 id \('b'\)"),
        (
            [LossRow("a", "x", 0, None, "g"), LossRow("a", "y", 0, None, "h")],
            "example 'a' belongs to group 'g' and to 'h'",
        ),
        (
            [LossRow("a", "x", 0, None, None, "g"), LossRow("a", "y", 0, None, None, "h")],
            "example 'a' belongs to cluster 'g' and to 'h'",
        ),
        ([LossRow("a", "x", 0, 1.0), LossRow("b", "x", 0)], "setting 'x': 1 of 2 rows say a cost"),
    ],
)
def test_what_is_amiss(rows: list[LossRow], message: str) -> None:
    """Examples without exactly one loss per setting, one group and one cluster are named with the setting."""
    with pytest.raises(LossesError, match=message):
        LossTable.of(rows)


def test_many_missing_examples_are_counted() -> None:
    """The first few missing examples are named, and all are counted."""
    rows = [row for row in coin_rows(2000) if row.setting != "4bit" or int(row.id[1:]) >= 1500]
    with pytest.raises(LossesError, match=r"'4bit' has no loss for 1,500 ids \('e0', 'e1', 'e2', 'e3', 'e4', \.\.\.\)"):
        LossTable.of(rows)


def test_costs() -> None:
    """The cost of a setting is that of all its rows, or their mean, in any order."""
    rows = [LossRow(str(index), "x", 0, 0.1 * index) for index in range(11)]
    rows += [LossRow(str(index), "y", 0, 0.1) for index in range(11)] + [
        LossRow(str(index), "z", 0) for index in range(11)
    ]
    sweep = LossTable.of(rows)
    assert sweep.costs == {"x": 0.5, "y": 0.1}
    assert sweep.constant_costs == {"y"}
    assert LossTable.of(rows[::-1]).costs == sweep.costs
