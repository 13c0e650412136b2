"""What prompts have in common."""

import pytest

from calm_beam.decoding.compilation import common_prefix


def _prompts(shared: int, own: int, *, count: int = 8) -> list[list[int]]:
    """Returns prompts whose first tokens are the same, and the others different from the first on."""
    return [[*range(100, 100 + shared), index, *[7] * (own - 1)] for index in range(count)]


@pytest.mark.parametrize(
    ("shared", "own", "expected"),
    [(64, 1, 64), (95, 5, 64), (96, 5, 96), (31, 90, 0), (0, 90, 0), (70, 30, 64)],
)
def test_a_prefix_is_what_all_share_in_whole_blocks(shared: int, own: int, expected: int) -> None:
    """It has a multiple of 32 tokens."""
    prompts = _prompts(shared, own)
    assert list(common_prefix(prompts, width=128)) == prompts[0][:expected]


def test_every_prompt_goes_on_after_it() -> None:
    """Of prompts that are the same, or the beginning of others, the shortest has a token that is not in it."""
    same = [tuple(range(64))] * 9
    assert list(common_prefix(same, width=64)) == list(range(32))
    longer = [list(range(length)) for length in range(65, 75)]
    assert list(common_prefix(longer, width=128)) == list(range(64))


def test_it_has_to_pay() -> None:
    """A short one, for how wide prompts are, and one of few prompts, are gone through with the rest."""
    assert not common_prefix(_prompts(96, 300), width=512)
    assert common_prefix(_prompts(128, 300), width=512)
    assert not common_prefix(_prompts(64, 10, count=7), width=128)


def test_one_prompt_that_begins_otherwise_leaves_nothing() -> None:
    """All share it, or nobody does."""
    prompts = _prompts(96, 10)
    assert not common_prefix([*prompts, [1] * 100], width=128)
