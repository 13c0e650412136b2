"""Pages that are read from top to bottom: what was found, then charts, tables and what they are about."""

import dataclasses
import html
import re
from collections.abc import Sequence

from .frame import LARGEST_PAGE, framed
from .palette import series_styles
from .stored import ReportError
from .tables import shown

# There is no slider below such a page.
_STYLE = "body{padding-bottom:48px}\n"
_LOUD = ' class="loud"'
_BESIDE_A_SIGN = re.compile(r" (?=[%=≤>±])|(?<=[=≤>±]) |(?<=[δελ]) (?=\d)")


@dataclasses.dataclass(frozen=True, kw_only=True)
class Section:
    """A part of a page.

    Attributes:
      title: Its heading.
      lead: What it shows, in a sentence or two.
      content: That, as HTML.
    """

    title: str
    lead: str = ""
    content: str


@dataclasses.dataclass(frozen=True, kw_only=True)
class Page:
    """What every such page has; texts are plain, but for those that are said to be HTML.

    Attributes:
      kind: What is shown, after the name of the program.
      title: Of the window, after the name of the program.
      made: When, or by what.
      about: Heading of the facts.
      facts: Names and values.
      fewer: What to do if the page is too large.
    """

    kind: str
    title: str
    made: str
    about: str
    facts: Sequence[tuple[str, str]]
    fewer: str

    def written(self, heading: str, opening: str, sections: Sequence[Section]) -> str:
        """Returns the page, of at most `LARGEST_PAGE` bytes.

        Args:
          heading: Of the page.
          opening: What was found, as HTML.
          sections: What follows, before the facts.

        Raises:
          ReportError: If it would be larger.
        """
        facts = "".join(f"<dt>{html.escape(name)}</dt><dd>{shown(value)}</dd>" for name, value in self.facts)
        sections = (*sections, Section(title=self.about, content=f'<dl class="facts">{facts}</dl>'))
        body = (
            '<main>\n<section class="promise" aria-labelledby="part-0">'
            f'<h1 id="part-0">{html.escape(heading)}</h1>\n{opening}</section>\n'
            f"{''.join(_section(section, place) for place, section in enumerate(sections, start=1))}</main>"
        )
        page = framed(
            body,
            kind=self.kind,
            title=self.title,
            made=self.made,
            style=_STYLE + series_styles(),
            scripts=("tables.js",),
        )
        if (size := len(page.encode())) > LARGEST_PAGE:
            raise ReportError(f"the report would have {size:,} bytes, and {LARGEST_PAGE:,} are the most. {self.fewer}")
        return page


@dataclasses.dataclass(frozen=True, kw_only=True)
class Document(Page):
    """A page with whatever was found.

    Attributes:
      heading: Of the page.
      opening: What was found, as HTML.
      sections: What follows.
    """

    heading: str
    opening: str
    sections: Sequence[Section]

    def text(self) -> str:
        """Returns the page; raises as `written` does."""
        return self.written(self.heading, self.opening, self.sections)


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


def _section(section: Section, place: int) -> str:
    lead = f'<p class="lead">{prose(section.lead)}</p>\n' if section.lead else ""
    return (
        f'<section aria-labelledby="part-{place}"><h2 id="part-{place}">{html.escape(section.title)}</h2>\n'
        f"{lead}{section.content}</section>\n"
    )
