"""Tables of pages: their heads sort them, and what does not fit scrolls, by keyboard too."""

import dataclasses
import html
from collections.abc import Iterable, Sequence

from calm_beam.text.printable import printable_line


@dataclasses.dataclass(frozen=True)
class Cell:
    """A cell that is sorted by a number.

    Attributes:
      text: What it shows.
      value: What it is sorted by; None if it is sorted by its text.
      kind: A class of its style; empty for none.
    """

    text: str
    value: float | None = None
    _: dataclasses.KW_ONLY
    kind: str = ""


def number(value: float | None, form: str = ".4g") -> Cell:
    """Returns a cell with a number, written as `format` does; an empty one for None.

    >>> number(0.07134, ".4f"), number(None)
    (Cell(text='0.0713', value=0.07134, kind=''), Cell(text='', value=None, kind=''))
    """
    return Cell("") if value is None else Cell(signed(format(value, form)), value)


def signed(text: str) -> str:
    """Returns a number with a minus sign that is not broken off or misread.

    >>> signed("-0.01")
    '−0.01'
    """
    return text.replace("-", "−")


def shown(text: str) -> str:
    """Returns a text of others as an element in which its direction ends with it."""
    return f"<bdi>{html.escape(printable_line(text))}</bdi>"


def table(names: Sequence[str], rows: Iterable[Sequence[str | Cell]], *, label: str) -> str:
    """Returns a table as HTML, in a frame that scrolls.

    Args:
      names: Of its columns.
      rows: Its cells; the first of each row is the row's head.
      label: What screen readers call it; another one for each table of a page.
    """
    head = "".join(f'<th scope="col">{html.escape(name)}</th>' for name in names)
    body = "".join(f"<tr>{_cell(first, head=True)}{''.join(map(_cell, rest))}</tr>" for first, *rest in rows)
    return scrolled(
        f'<table class="sortable"><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table>',
        label=label,
    )


def scrolled(content: str, *, label: str, kind: str = "") -> str:
    """Returns HTML in a frame that scrolls where it is too wide or too high.

    Args:
      content: As HTML.
      label: What screen readers call it.
      kind: A further class of the frame.
    """
    kinds = f"scroll {kind}".strip()
    return f'<div class="{kinds}" role="region" aria-label="{html.escape(label)}" tabindex="0">{content}</div>'


def _cell(cell: str | Cell, *, head: bool = False) -> str:
    cell = cell if isinstance(cell, Cell) else Cell(cell)
    value = "" if cell.value is None else f' data-value="{cell.value!r}"'
    kind = f' class="{cell.kind}"' if cell.kind else ""
    tag, scope = ("th", ' scope="row"') if head else ("td", "")
    return f"<{tag}{scope}{kind}{value}>{shown(cell.text) if cell.text else ''}</{tag}>"
