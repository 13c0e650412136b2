"""Numbers with what they count."""

import pytest

from calm_beam.text.counted import counted


@pytest.mark.parametrize(
    ("number", "words"), [(0, "0 losses"), (1, "1 loss"), (2, "2 losses"), (1000, "1,000 losses"), (-1, "-1 losses")]
)
def test_only_one_is_one(number: int, words: str) -> None:
    """One thing is named in the singular, any other number of them in the plural."""
    assert counted(number, "loss", several="losses") == words


def test_the_plural_of_most_words_is_known() -> None:
    """Without a plural, words take an s."""
    assert (counted(1, "measure"), counted(3, "measure")) == ("1 measure", "3 measures")
