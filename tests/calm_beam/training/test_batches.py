"""Padded batches: every pair once, in few shapes."""

import itertools

import numpy as np
import pytest

from calm_beam.model.interface import Taught
from calm_beam.training.batches import (
    BatchShape,
    Pair,
    choose_shapes,
    count_batches,
    end_pairs,
    make_batches,
    numbered_batches,
    pad_batch,
)
from tests.builders import build_config

_MODEL = build_config()


def _pairs(count: int = 103) -> list[Pair]:
    generator = np.random.default_rng(3)
    side = lambda: generator.integers(3, 50, size=generator.integers(0, 12)).tolist()  # noqa: E731
    pairs = [([*side()[:9], 1], side()) for _ in range(count)]
    return end_pairs(pairs, _MODEL, max_input_length=10, max_target_length=10)


def _unpad(batch: Taught) -> list[Pair]:
    rows = zip(*map(np.asarray, batch), strict=True)
    return [
        (source[:source_length].tolist(), target[:target_length].tolist())
        for source, source_length, target, target_length in rows
        if source_length
    ]


@pytest.mark.parametrize("seed", [None, 0, 1])
def test_an_epoch_holds_every_pair_once(seed: int | None) -> None:
    """The rows of an epoch are the pairs, each exactly once, each side ended by eos."""
    pairs = _pairs()
    shapes = choose_shapes(pairs, batch_tokens=60, num_shapes=3)
    generator = None if seed is None else np.random.default_rng(seed)
    found = [pair for batch in make_batches(pairs, shapes, generator=generator) for pair in _unpad(batch)]
    assert sorted(found) == sorted(([*source], [*target]) for source, target in pairs)
    assert all(source[-1] == target[-1] == 1 for source, target in found)


def test_batches_have_the_chosen_shapes_and_are_full() -> None:
    """Only the chosen shapes occur, and at most one batch has empty rows."""
    pairs = _pairs()
    shapes = choose_shapes(pairs, batch_tokens=60, num_shapes=3)
    batches = list(make_batches(pairs, shapes, generator=np.random.default_rng(0)))
    assert {(*batch.source_tokens.shape, batch.targets.shape[1]) for batch in batches} == {
        (shape.rows, shape.source, shape.target) for shape in shapes
    }
    assert sum(not batch.source_tokens.any(axis=1).all() for batch in batches) <= 1


def test_shuffling_is_decided_by_the_generator() -> None:
    """The same seed gives the same epoch; the next epoch, and another seed, give others."""
    pairs = _pairs()
    shapes = choose_shapes(pairs, batch_tokens=60, num_shapes=3)
    epoch = lambda generator: [_unpad(batch) for batch in make_batches(pairs, shapes, generator=generator)]  # noqa: E731
    generator = np.random.default_rng(7)
    first, second = epoch(generator), epoch(generator)
    assert first == epoch(np.random.default_rng(7))
    assert first != second
    assert first != epoch(np.random.default_rng(8))


def test_a_batch_is_a_function_of_seed_and_step() -> None:
    """Resumed after any step of an epoch, a run gets the batches it would have had; another seed gives others."""
    pairs = _pairs()
    shapes = choose_shapes(pairs, batch_tokens=60, num_shapes=3)
    count = count_batches(pairs, shapes)
    take = lambda after, seed=5: [  # noqa: E731
        (step, _unpad(batch))
        for step, batch in itertools.islice(numbered_batches(pairs, shapes, seed=seed, after=after), 2 * count)
    ]
    whole = take(0)
    assert [step for step, _ in whole] == list(range(1, 2 * count + 1))
    for after in (1, count - 1, count, count + 1):
        assert take(after)[: 2 * count - after] == whole[after:]
    assert take(0, seed=6) != whole


def test_numbered_batches_are_epochs() -> None:
    """Each run of as many batches as an epoch has contains every pair once, in an order of its own."""
    pairs = _pairs()
    shapes = choose_shapes(pairs, batch_tokens=60, num_shapes=3)
    count = count_batches(pairs, shapes)
    batches = [_unpad(batch) for _, batch in itertools.islice(numbered_batches(pairs, shapes, seed=0), 2 * count)]
    first, second = batches[:count], batches[count:]
    for epoch in (first, second):
        assert sorted(pair for batch in epoch for pair in batch) == sorted(([*one], [*two]) for one, two in pairs)
    assert first != second


def test_lengths_say_what_is_padding() -> None:
    """Id 0 within a source or a target is an ordinary token; empty rows are all padding."""
    batch = pad_batch([([0, 5, 0], [6, 0, 1])], BatchShape(rows=2, source=4, target=4))
    np.testing.assert_array_equal(batch.source_tokens, [[0, 5, 0, 0], [0, 0, 0, 0]])
    np.testing.assert_array_equal(batch.targets, [[6, 0, 1, 0], [0, 0, 0, 0]])
    np.testing.assert_array_equal(batch.source_lengths, [3, 0])
    np.testing.assert_array_equal(batch.is_target, [[True, True, True, False], [False] * 4])
    assert batch.num_target_tokens == 3


def test_long_targets_are_cut_before_their_end() -> None:
    """A target that is too long keeps its beginning and still ends; prompts are as in decoding."""
    pairs: list[Pair] = [([4, 1], [7]), ([1], [7, 8, 9])]
    ended: list[Pair] = [([4, 1], [7, 1]), ([1], [7, 1])]
    assert end_pairs(pairs, _MODEL, max_input_length=2, max_target_length=2) == ended


@pytest.mark.parametrize(("prompt", "message"), [([4, 5, 1], "has 3 ids, expected 1 to"), ([], "has 0 ids")])
def test_prompts_that_decoding_would_not_see_are_refused(prompt: list[int], message: str) -> None:
    """Prompts that are too long or empty are refused, since the caller cuts them."""
    with pytest.raises(ValueError, match=rf"pairs\[1\]: its prompt {message}"):
        end_pairs([([4, 1], [7]), (prompt, [7])], _MODEL, max_input_length=2, max_target_length=2)


@pytest.mark.parametrize("num_shapes", [1, 2, 3])
def test_shapes_pad_least(num_shapes: int) -> None:
    """By trying all choices, no other widths pad the pairs less."""
    lengths = [2, 2, 2, 3, 5, 5, 9, 10]
    pairs: list[Pair] = [([1] * length, [1]) for length in lengths]
    shapes = choose_shapes(pairs, batch_tokens=100, num_shapes=num_shapes)
    cost = lambda widths: sum(min(width for width in widths if width >= length) for length in lengths)  # noqa: E731
    best = min(
        cost((*widths, 10)) for widths in itertools.combinations_with_replacement(sorted(set(lengths)), num_shapes - 1)
    )
    assert cost([shape.source for shape in shapes]) == best
    assert len(shapes) == num_shapes


def test_a_batch_holds_at_least_one_pair() -> None:
    """A pair wider than a batch's tokens still gets a row."""
    assert choose_shapes([([1] * 9, [1])], batch_tokens=4, num_shapes=6) == (BatchShape(rows=1, source=9, target=1),)
