"""Pieces of HTML that pages are made of: texts of others, sentences, numbers and tables.

A page stands for itself and is passed on. Ids, prompts, names and messages come from data, models and machines. What
has no shape in them is written out (`calm_beam.text`), and of local paths the last names are kept: so they
turn nothing around, and do not tell where a page was made. Heads of tables sort them, and what does not fit scrolls, by
keyboard too.
"""

import dataclasses
import html
import re
from collections.abc import Iterable, Mapping, Sequence

from calm_beam.storage import is_cloud_path
from calm_beam.text import printable_line

_FIRST_STRONG_ISOLATE, _POP_ISOLATE = "\u2068", "\u2069"
_NAMES_KEPT = 2
# A path from the root with at least one folder, which no word, scheme or other path precedes.
_LOCAL_PATH = re.compile(r"(?<![\w:/.~\\])(?:file://)?/(?:[^\s/'\"`,;:<>|()\[\]{}]+/)+[^\s/'\"`,;:<>|()\[\]{}]*")
_LOUD = ' class="loud"'
_BESIDE_A_SIGN = re.compile(r" (?=[%=≤>±])|(?<=[=≤>±]) |(?<=[δελ]) (?=\d)")


def isolated(text: str) -> str:
    """Returns a name for where there are no elements, such as a title: its direction ends with it.

    >>> isolated("plain")
    'plain'
    """
    name = printable_line(text)
    return name if name.isascii() else f"{_FIRST_STRONG_ISOLATE}{name}{_POP_ISOLATE}"


def short_place(place: str) -> str:
    """Returns where something lies: of a local path from the root the last names, anything else as it is.

    >>> short_place("/home/ada/models/t5/checkpoint_1000"), short_place("gs://bucket/models/t5")
    ('…/t5/checkpoint_1000', 'gs://bucket/models/t5')
    """
    local = place.removeprefix("file://")
    if is_cloud_path(place) or not local.startswith("/"):
        return place
    names = [name for name in local.split("/") if name]
    # Never all of them: the first may be somebody's.
    kept = min(_NAMES_KEPT, max(1, len(names) - 1))
    return "/".join(["…", *names[-kept:]])


def with_short_places(text: str) -> str:
    """Returns a message in which every local path from the root is short.

    >>> with_short_places("checkpoint /home/ada/models/t5: no such folder; see gs://bucket/a/b/c.")
    'checkpoint …/models/t5: no such folder; see gs://bucket/a/b/c.'
    """
    return _LOCAL_PATH.sub(lambda found: short_place(found[0]), text)


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


def threshold_cell(threshold: float | None) -> Cell:
    """Returns a cell with a threshold; None never exits, and is sorted as safer than any."""
    return Cell("never exit", 2.0) if threshold is None else number(threshold, "g")


def software_fact(versions: Mapping[str, str]) -> tuple[str, str]:
    """Returns which software made something, as a name and a value of a page's facts."""
    return "Software", ", ".join(f"{name} {version}" for name, version in sorted(versions.items()))


def together(text: str) -> str:
    r"""Returns a text in which no line ends between a number and its sign.

    >>> together("99.5 % at δ = 0.1").split(" ")
    ['99.5\xa0%', 'at', 'δ\xa0=\xa00.1']
    """
    return _BESIDE_A_SIGN.sub("\u00a0", text)


def prose(text: str) -> str:
    """Returns a text of ours as HTML, without line ends between numbers and their signs."""
    return html.escape(together(text))


def sentence(*parts: str, warns: bool = False) -> str:
    """Returns what was found in a sentence, as HTML: every second part is a number or a word that matters."""
    marked = (
        f"<strong>{shown(together(part))}</strong>" if place % 2 else prose(part) for place, part in enumerate(parts)
    )
    return f'<p class="sentence{" never" if warns else ""}">{"".join(marked)}</p>\n'


def tiles(values: Sequence[tuple[str, str]], *, loud: Sequence[str] = ()) -> str:
    """Returns the numbers that count, as HTML, with what each of them is; those named in `loud` stand out."""
    items = "".join(
        f"<li{_LOUD if name in loud else ''}><strong>{prose(value)}</strong><span>{prose(name)}</span></li>"
        for value, name in values
    )
    return f'<ul class="tiles">{items}</ul>\n'


def paragraphs(texts: Sequence[str]) -> str:
    """Returns what is said about all of it, as HTML."""
    return "".join(f'<p class="condition">{prose(text)}</p>\n' for text in texts)


def cautions(texts: Sequence[str]) -> str:
    """Returns what has to be known, as HTML; empty for nothing."""
    return f'<ul class="cautions">{"".join(f"<li>{prose(text)}</li>" for text in texts)}</ul>\n' if texts else ""


def details(summary: str, content: str) -> str:
    """Returns HTML that is shown on demand."""
    return f"<details><summary>{html.escape(summary)}</summary>{content}</details>"


def _cell(cell: str | Cell, *, head: bool = False) -> str:
    cell = cell if isinstance(cell, Cell) else Cell(cell)
    value = "" if cell.value is None else f' data-value="{cell.value!r}"'
    kind = f' class="{cell.kind}"' if cell.kind else ""
    tag, scope = ("th", ' scope="row"') if head else ("td", "")
    return f"<{tag}{scope}{kind}{value}>{shown(cell.text) if cell.text else ''}</{tag}>"
