"""Texts of others on the page."""

import unicodedata

import pytest

from calm_beam.report.foreign import isolated, short_place, visible_name, visible_text, with_short_places


def test_no_character_of_a_name_is_unseen() -> None:
    """Of all of Unicode's controls, formats, separators of lines and surrogates, none is left in a name."""
    unseen = {
        chr(code) for code in range(0x110000) if unicodedata.category(chr(code)) in ("Cc", "Cf", "Cs", "Zl", "Zp")
    }
    shown = visible_name("".join(sorted(unseen)))
    assert not unseen & set(shown)
    assert shown.isascii()


def test_texts_keep_what_scripts_need() -> None:
    """Lines, tabs, joiners and marks stay in texts; overrides, isolates and controls do not."""
    assert visible_text("می\u200cخواهم\t\u200f1\r\n") == "می\u200cخواهم\t\u200f1\n"
    for code in (*range(0x202A, 0x202F), *range(0x2066, 0x206A), 0x00, 0x0B, 0x1B, 0x7F, 0x9B, 0x2028, 0x2029, 0xD800):
        assert visible_text(f"a{chr(code)}b").isascii()


@pytest.mark.parametrize("text", ["plain text", "naïve", "שלום", "a\u2069b\u202e"])
def test_what_is_seen_stays_as_it_is(text: str) -> None:
    """Shown twice, a text is as it was shown once, and an isolated one opens and closes one isolate at most."""
    assert visible_name(visible_name(text)) == visible_name(text)
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
