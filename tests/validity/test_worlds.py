"""The closed forms on which the suite rests."""

import numpy as np
import pytest

from .worlds import WORLDS, World

_IDS = [world.name for world in WORLDS]


@pytest.mark.parametrize("world", WORLDS, ids=_IDS)
def test_the_risk_is_the_mean_loss(world: World) -> None:
    """The mean of many drawn losses is the stated risk, within what chance explains, and no loss leaves its range."""
    losses = world.draw(np.random.default_rng(3), max(2, 200_000 // (world.n * len(world.shares))))
    assert losses.shape[0] == world.n
    assert losses.shape[2] == world.risks.size
    assert losses.max() <= 1
    assert losses.min() >= (-1 if world.is_signed else 0)
    by_threshold = losses.reshape(-1, world.risks.size)
    spread = by_threshold.std(axis=0) / np.sqrt(len(by_threshold))
    assert (np.abs(by_threshold.mean(axis=0) - world.risks) <= 5 * spread + 1e-12).all()


@pytest.mark.parametrize("world", WORLDS, ids=_IDS)
def test_something_can_go_wrong(world: World) -> None:
    """Every world has a threshold that must not be accepted."""
    assert world.is_null.any()


def test_there_are_worlds_of_every_kind() -> None:
    """At least 20, with different names; some signed, some not monotone, some with correlated thresholds."""
    assert len(set(_IDS)) == len(WORLDS) >= 20
    assert sum(world.is_signed for world in WORLDS) >= 3
    assert sum((np.diff(world.shares) < 0).any() for world in WORLDS) >= 3
    assert sum(0 < world.correlation < 1 for world in WORLDS) >= 3
    assert min(world.n for world in WORLDS) == 1
