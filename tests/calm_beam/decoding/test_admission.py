"""Admission of prompts into slots, with an engine that records its input."""

import collections
from typing import Any

import hypothesis
import hypothesis.strategies as st
import numpy as np
import pytest

from calm_beam.decoding.batch import AHEAD_SHARE, Admission, Prepared
from calm_beam.decoding.branches import Request
from calm_beam.decoding.compilation import encoded_width

_WIDTHS = (32, 64)


class _Engine:
    """Records the prompts that were prefilled, and their places."""

    def __init__(self) -> None:
        self.places: dict[tuple[int, int], tuple[int, ...]] = {}
        self.calls = 0

    def prefill(self, width: int, source_tokens: np.ndarray, *, lengths: np.ndarray, places: np.ndarray) -> None:
        self.calls += 1
        for tokens, length, place in zip(source_tokens, lengths.tolist(), places.tolist(), strict=True):
            if not length:
                continue
            assert len(tokens) == encoded_width(length, width)
            assert not tokens[length:].any()
            self.places[width, place] = tuple(tokens[:length].tolist())


def _requests(lengths: list[int]) -> dict[int, collections.deque[Request]]:
    queues: dict[int, collections.deque[Request]] = {width: collections.deque() for width in _WIDTHS}
    for index, length in enumerate(lengths):
        queues[32 if length <= 32 else 64].append(Request([index + 1] * length))
    return queues


def _number(request: Request) -> int:
    return request.ids[0] - 1


def _admission(engine: Any, *, slots: int, places: int, admits_few: bool = False) -> Admission:
    return Admission(engine, places=dict.fromkeys(_WIDTHS, places), slots=slots, admits_few=admits_few)


@hypothesis.settings(max_examples=80, deadline=None, derandomize=True)
@hypothesis.given(
    seed=st.integers(0, 2**32),
    slots=st.integers(1, 12),
    prompts=st.integers(1, 40),
    has_room_ahead=st.booleans(),
    admits_few=st.booleans(),
)
def test_every_prompt_comes_once_in_order_and_at_a_place_of_its_own(
    seed: int, slots: int, prompts: int, has_room_ahead: bool, admits_few: bool
) -> None:
    """Every prompt comes once, in order and at a place of its own, in any order of ends, with more or less room."""
    generator = np.random.default_rng(seed)
    places = slots + int(AHEAD_SHARE * slots) if has_room_ahead else max(1, slots // 2)
    engine = _Engine()
    admission = _admission(engine, slots=slots, places=places, admits_few=admits_few)
    lengths = generator.integers(1, 65, prompts).tolist()
    waiting = _requests(lengths)
    expected = {width: [_number(request) for request in queue] for width, queue in waiting.items()}
    held: list[Prepared] = []
    came: dict[int, list[int]] = {width: [] for width in _WIDTHS}
    for _ in range(10 * prompts):
        taken = admission.take(waiting, room=slots - len(held))
        held += taken
        assert len(held) <= slots
        assert len({(each.width, each.place) for each in held}) == len(held)
        for each in taken:
            came[each.width].append(_number(each.request))
        for each in held:
            # No prompt was put in an occupied place.
            assert engine.places[each.width, each.place] == tuple(each.request.ids)
        if admits_few:
            assert not admission.has_prepared()
        rest = [each for each in held if generator.random() < 0.6]
        for each in held:
            if each not in rest:
                admission.give_back(each.width, each.place)
        held = rest
        if not any(waiting.values()) and not admission.has_prepared():
            break
    else:
        raise AssertionError("some prompts never came")
    assert came == expected


def test_others_are_gone_through_before_there_is_a_slot() -> None:
    """Prompts are prefilled a chunk ahead of the slots, so that a finished one is replaced at once."""
    engine = _Engine()
    admission = _admission(engine, slots=64, places=96)
    waiting = _requests([20] * 200)
    taken = admission.take(waiting, room=64)
    assert [_number(each.request) for each in taken] == list(range(64))
    assert len(engine.places) == 80
    assert admission.has_prepared()
    # The sixteen that are ready become fewer, and there are places for the next.
    before = engine.calls
    assert [_number(each.request) for each in admission.take(waiting, room=3)] == [64, 65, 66]
    assert engine.calls == before + 1
    assert len(engine.places) == 96
    # No places are left for another chunk.
    assert [_number(each.request) for each in admission.take(waiting, room=1)] == [67]
    assert engine.calls == before + 1


@pytest.mark.parametrize("slots", [1, 3, 40])
def test_chunks_are_of_the_slots(slots: int) -> None:
    """Extra places for prefilling ahead make no chunk larger, and a single place is one chunk."""
    engine: Any = _Engine()
    assert _admission(engine, slots=slots, places=2 * slots).chunk(32) == max(1, slots // 4)
    assert _admission(engine, slots=slots, places=1).chunk(64) == 1
