"""Common prefixes of prompts."""

import pytest

from calm_beam.decoding.compilation import common_prefix


def _prompts(shared: int, own: int, *, count: int = 8) -> list[list[int]]:
    """Returns prompts with equal first tokens, which differ from the first token after those."""
    return [[*range(100, 100 + shared), index, *[7] * (own - 1)] for index in range(count)]


@pytest.mark.parametrize(
    ("shared", "own", "expected"),
    [(64, 1, 64), (95, 5, 64), (96, 5, 96), (31, 90, 0), (0, 90, 0), (70, 30, 64)],
)
def test_a_prefix_is_what_all_share_in_whole_blocks(shared: int, own: int, expected: int) -> None:
    """A prefix is the common beginning in whole blocks of 32 tokens."""
    prompts = _prompts(shared, own)
    assert list(common_prefix(prompts, width=128)) == prompts[0][:expected]


def test_every_prompt_goes_on_after_it() -> None:
    """The shortest of equal or nested prompts has a token after the prefix."""
    same = [tuple(range(64))] * 9
    assert list(common_prefix(same, width=64)) == list(range(32))
    longer = [list(range(length)) for length in range(65, 75)]
    assert list(common_prefix(longer, width=128)) == list(range(64))


def test_it_has_to_pay() -> None:
    """A prefix that is short for the width, or that few prompts have, is not shared."""
    assert not common_prefix(_prompts(96, 300), width=512)
    assert common_prefix(_prompts(128, 300), width=512)
    assert not common_prefix(_prompts(64, 10, count=7), width=128)


def test_one_prompt_that_begins_otherwise_leaves_nothing() -> None:
    """One prompt with another beginning prevents a common prefix."""
    prompts = _prompts(96, 10)
    assert not common_prefix([*prompts, [1] * 100], width=128)
