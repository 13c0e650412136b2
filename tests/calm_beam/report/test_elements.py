"""Parts of pages: foreign texts are shown as text only; tables sort by their numbers."""

import pytest

from calm_beam.report.document import Cell, isolated, number, short_place, table, with_short_places
from tests.calm_beam.report.pages import ParsedPage


def test_cells_are_texts_and_numbers() -> None:
    """Numbers have a sort key; foreign texts stay texts; the first cell of a row is its head."""
    made = table(("name <b>", "risk"), [("</bdi><i>x", number(-0.5, ".2f")), ("y", number(None))], label='a "b"')
    parsed = ParsedPage(made)
    assert set(parsed.tags) == {"div", "table", "thead", "tbody", "tr", "th", "td", "bdi"}
    assert '<th scope="row"><bdi>&lt;/bdi&gt;&lt;i&gt;x</bdi></th>' in made
    assert '<td data-value="-0.5"><bdi>−0.50</bdi></td>' in made
    assert made.endswith("<td></td></tr></tbody></table></div>")
    assert ("aria-label", 'a "b"') in parsed.attributes
    assert ("tabindex", "0") in parsed.attributes


def test_kinds_are_classes() -> None:
    """A cell's kind is a class without an inline style, which the policy would block."""
    made = table(("a", "b"), [("x", Cell("3", 3, kind="heat h2"))], label="x")
    assert '<td class="heat h2" data-value="3"><bdi>3</bdi></td>' in made
    assert "style=" not in made


@pytest.mark.parametrize("text", ["plain text", "naïve", "שלום", "a\u2069b\u202e"])
def test_isolates_are_closed(text: str) -> None:
    """An isolated text opens and closes at most one isolate, whatever it contains."""
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
    """Absolute local paths keep their last two names only; all others are unchanged."""
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
    """Every absolute local path in a message is shortened, and the marks around it are unchanged."""
    assert with_short_places(text) == shown
