"""Texts of others on the page."""

import pytest

from calm_beam.report.foreign import isolated, short_place, with_short_places


@pytest.mark.parametrize("text", ["plain text", "naïve", "שלום", "a\u2069b\u202e"])
def test_isolates_are_closed(text: str) -> None:
    """An isolated text opens and closes one isolate at most, whatever is in it."""
    assert isolated(text).count("\u2068") == isolated(text).count("\u2069") <= 1


@pytest.mark.parametrize(
    ("place", "shown"),
    [
        ("/home/ada/models/t5/checkpoint_1000/", "…/t5/checkpoint_1000"),
        ("/home/ada", "…/ada"),
        ("/tmp", "…/tmp"),
        ("file:///home/ada/data/a b.jsonl", "…/data/a b.jsonl"),
        ("gs://bucket/models/t5/checkpoint_1000", "gs://bucket/models/t5/checkpoint_1000"),
        ("hf://org/model/x/y", "hf://org/model/x/y"),
        ("data/*.jsonl", "data/*.jsonl"),
        ("seqio:task/train", "seqio:task/train"),
    ],
)
def test_places(place: str, shown: str) -> None:
    """Local paths from the root lose what comes before their last two names; all others stay."""
    assert short_place(place) == shown


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("'/home/ada/x/model.json' is missing", "'…/x/model.json' is missing"),
        ("see /home/ada/a/b, /home/ada/c/d; or (/home/ada/e/f).", "see …/a/b, …/c/d; or (…/e/f)."),
        (
            "gs://bucket/a/b/c and http://host/a/b/c stay, 1/2/3 too",
            "gs://bucket/a/b/c and http://host/a/b/c stay, 1/2/3 too",
        ),
        ("either/or, / and //", "either/or, / and //"),
    ],
)
def test_places_in_messages(text: str, shown: str) -> None:
    """Every local path from the root in a message is short, with the marks around it as they were."""
    assert with_short_places(text) == shown
