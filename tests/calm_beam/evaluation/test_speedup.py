"""The speedup by a clock with known times."""

from collections.abc import Iterator, Sequence

import pytest

from calm_beam.evaluation.serving_speed import measure_speedups


class _Clock:
    """Advances by each decoder's given time, and records which ran."""

    def __init__(self) -> None:
        self.now = 0.0
        self.ran: list[tuple[str, int]] = []

    def __call__(self) -> float:
        return self.now


class _Decoder:
    """Takes a given time for each token of the prompt, and longer the first time at each width."""

    def __init__(self, name: str, seconds: float, clock: _Clock) -> None:
        self._name, self._seconds, self._clock = name, seconds, clock
        self._compiled: set[int] = set()

    def decode(self, prompts: Sequence[Sequence[int]]) -> Iterator[int]:
        (prompt,) = prompts
        width = 32 if len(prompt) <= 32 else 64
        if width not in self._compiled:
            self._compiled.add(width)
            self._clock.now += 1000
        # Only once the output is requested, since decoders are lazy.
        self._clock.now += self._seconds * len(prompt)
        self._clock.ran.append((self._name, len(prompt)))
        yield 0


def test_the_factor_is_the_ratio_of_times_without_compilation() -> None:
    """Decoders are twice and four times as fast; the first run at each of two widths, which compiles, is left out."""
    clock = _Clock()
    prompts = [[5] * length for length in (3, 7, 40, 10)]
    decoders = {"half": _Decoder("half", 0.5, clock), "quarter": _Decoder("quarter", 0.25, clock)}
    found = measure_speedups(_Decoder("full", 1.0, clock), decoders, prompts=prompts, max_input_length=64, clock=clock)
    assert {name: speedup.factor.mean for name, speedup in found.items()} == {"half": 2, "quarter": 4}
    # As all ratios are equal, nothing is uncertain.
    assert found["half"].factor.standard_error == pytest.approx(0, abs=1e-9)
    assert (found["quarter"].seconds, found["quarter"].full_seconds) == (0.25 * 15, 15)


def test_decoders_take_turns() -> None:
    """Every prompt is decoded by all before the next one, each time starting with another."""
    clock = _Clock()
    measure_speedups(
        _Decoder("full", 1, clock),
        {"a": _Decoder("a", 1, clock)},
        prompts=[[1], [1, 1], [1, 1, 1]],
        max_input_length=64,
    )
    assert clock.ran[:2] == [("full", 1), ("a", 1)]
    assert clock.ran[2:] == [("full", 1), ("a", 1), ("a", 2), ("full", 2), ("full", 3), ("a", 3)]


class _Batches:
    """Takes a given time for each prompt of a batch, and records the sizes."""

    def __init__(self, seconds: float, clock: _Clock) -> None:
        self._seconds, self._clock = seconds, clock
        self.sizes: list[int] = []

    def decode(self, prompts: Sequence[Sequence[int]]) -> Iterator[int]:
        self._clock.now += self._seconds * len(prompts)
        self.sizes.append(len(prompts))
        yield 0


@pytest.mark.parametrize(("most_seconds", "turns"), [(0, 1), (4, 3), (7, 4), (25, 5), (1000, 10)])
def test_batches_are_decoded_together_as_long_as_there_is_time(most_seconds: float, turns: int) -> None:
    """The first batch is not timed. No turn begins after the time limit, or for the first four, three times that."""
    clock = _Clock()
    full, early = _Batches(2.0, clock), _Batches(1.0, clock)
    found = measure_speedups(
        full,
        {"early": early},
        prompts=[[5]] * 20,
        max_input_length=64,
        together=2,
        most_seconds=most_seconds,
        clock=clock,
    )
    # A turn takes six seconds.
    assert full.sizes == early.sizes == [2] * (1 + turns)
    assert (found["early"].factor.mean, found["early"].prompts) == (2, 2 * turns)


@pytest.mark.parametrize("most_seconds", [0, 7, 1000])
def test_it_tells_how_far_it_is(most_seconds: float) -> None:
    """Prompts are told as they are decoded, and all of them where time ends the measurement."""
    clock, told = _Clock(), list[tuple[int, int]]()
    measure_speedups(
        _Batches(2.0, clock),
        {"early": _Batches(1.0, clock)},
        prompts=[[5]] * 5,
        max_input_length=64,
        together=2,
        most_seconds=most_seconds,
        clock=clock,
        on_decoded=lambda newly, in_all: told.append((newly, in_all)),
    )
    # Two decoders: a batch of 2 that is not timed, and 5 prompts.
    assert {in_all for _, in_all in told} == {14}
    assert sum(newly for newly, _ in told) == 14


def test_no_prompts() -> None:
    """Without prompts there is no speedup."""
    with pytest.raises(ValueError, match="a speedup needs at least one prompt, got none"):
        measure_speedups(_Decoder("full", 1, _Clock()), {}, prompts=[], max_input_length=64)
