"""Tables of pages as HTML."""

from calm_beam.report.tables import Cell, number, table
from tests.calm_beam.report.pages import ParsedPage


def test_cells_are_texts_and_numbers() -> None:
    """Numbers have what they are sorted by; texts of others stay texts; the first cell of a row is its head."""
    made = table(("name <b>", "risk"), [("</bdi><i>x", number(-0.5, ".2f")), ("y", number(None))], label='a "b"')
    parsed = ParsedPage(made)
    assert set(parsed.tags) == {"div", "table", "thead", "tbody", "tr", "th", "td", "bdi"}
    assert '<th scope="row"><bdi>&lt;/bdi&gt;&lt;i&gt;x</bdi></th>' in made
    assert '<td data-value="-0.5"><bdi>−0.50</bdi></td>' in made
    assert made.endswith("<td></td></tr></tbody></table></div>")
    assert ("aria-label", 'a "b"') in parsed.attributes
    assert ("tabindex", "0") in parsed.attributes


def test_kinds_are_classes() -> None:
    """A cell's kind is a class, and no style stands beside it: the policy would not let one through."""
    made = table(("a", "b"), [("x", Cell("3", 3, kind="heat h2"))], label="x")
    assert '<td class="heat h2" data-value="3"><bdi>3</bdi></td>' in made
    assert "style=" not in made
