"""The stopping rules of sequential calibrations."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from calm_beam.risk.rules import ROUNDS_WITHOUT_GAIN, Proved, StopRule

_NOTHING = Proved(-1, 8.0)


def test_without_a_rule_only_the_end_of_the_grid_stops() -> None:
    """Without a rule the next round is decoded as long as one guarantee has a setting left to prove."""
    rule = StopRule()
    assert rule.reason([[Proved(4, 1.0), Proved(3, 1.0)]], settings=5) is None
    assert rule.reason([[Proved(4, 1.0), Proved(4, 1.0)]], settings=5) == "all_proved"


def test_every_guarantee_has_to_reach_the_place() -> None:
    """The slowest guarantee decides, and proving beyond the place counts."""
    rule = StopRule(place=2)
    assert rule.reason([[Proved(1, 3.0), Proved(4, 1.0)]], settings=6) is None
    assert rule.reason([[Proved(2, 3.0), Proved(4, 1.0)]], settings=6) == "place"


def test_every_guarantee_has_to_reach_the_cost() -> None:
    """A cheap enough model without exits has proved nothing, so every guarantee must reach the cost."""
    rule = StopRule(cost=8.0)
    assert rule.reason([[Proved(0, 8.0), _NOTHING]], settings=6) is None
    assert rule.reason([[Proved(0, 8.0), Proved(0, 7.0)]], settings=6) == "cost"


def test_rounds_without_gain_count_from_the_first_choice() -> None:
    """Rounds before a guarantee's first choice do not count; after that, so many without gain end the run."""
    rule = StopRule(gain=0.02)
    looks = [[_NOTHING]] * 20 + [[Proved(3, 5.0)]]
    for _ in range(ROUNDS_WITHOUT_GAIN):
        assert rule.reason(looks, settings=20) is None
        looks.append([Proved(4, 4.95)])
    assert rule.reason(looks, settings=20) == "gain"


@pytest.mark.parametrize("when", range(1, ROUNDS_WITHOUT_GAIN + 1))
def test_one_gain_of_one_guarantee_goes_on(when: int) -> None:
    """A single gain in any of the last rounds is enough, by exactly the requested share too."""
    costs = [4.0 if index < when else 3.0 for index in range(ROUNDS_WITHOUT_GAIN + 1)]
    looks = [[Proved(1, 2.0), Proved(1, cost)] for cost in costs]
    assert StopRule(gain=0.25).reason(looks, settings=20) is None
    assert StopRule(gain=0.26).reason(looks, settings=20) == "gain"


@given(
    places=st.lists(st.integers(-1, 9), min_size=1, max_size=4),
    place=st.integers(0, 9),
)
def test_what_is_reached_stays_reached(places: list[int], place: int) -> None:
    """Proving more never removes a reason to stop."""
    rule = StopRule(place=place, cost=5.0)
    before = rule.reason([[Proved(each, 5.0 if each >= 0 else 9.0) for each in places]], settings=10)
    after = rule.reason([[Proved(min(each + 1, 9), 4.0) for each in places]], settings=10)
    assert before is None or after is not None
