"""Pages as files: the frame that all share, and pages that are read from top to bottom.

The frame has the head, a policy that lets only the page's own style and script through, the header with the switch of
themes, and the scripts at the end. A `Document` says what was found, then has charts, tables and what they are about.
"""

import base64
import dataclasses
import hashlib
import html
import importlib.resources
import re
from collections.abc import Mapping, Sequence

from calm_beam.storage import replacing

from .elements import isolated, prose, shown
from .palette import series_styles
from .stored import ReportError

LARGEST_PAGE = 5_000_000
"""Most bytes of a page."""
# There is no slider below such a page.
_STYLE = "body{padding-bottom:48px}\n"
_MARK = re.compile(r"\{\{(\w+)\}\}")


def framed(body: str, *, kind: str, title: str, made: str, style: str, scripts: Sequence[str], data: str = "") -> str:
    """Returns a page that asks the network for nothing, and whose policy lets only its own style and script through.

    Args:
      body: What comes after the header, as HTML.
      kind: What is shown, after the name of the program.
      title: Of the window, after the name of the program: a text of others.
      made: What the header says besides: plain text.
      style: What the page adds to the style that all have.
      scripts: Files of the page's script, beside the one that all have.
      data: What scripts read, as an element; empty for none.
    """
    whole_style = file_text("report.css") + style
    script = '"use strict";\n(() => {\n' + "\n".join(map(file_text, (*scripts, "theme.js"))) + "\n})();\n"
    parts = {
        "policy": (
            f"default-src 'none'; style-src {source_hash(whole_style)}; script-src {source_hash(script)}; "
            "img-src data:; base-uri 'none'; form-action 'none'"
        ),
        "style": whole_style,
        "script": script,
        "data": data,
        "kind": html.escape(kind),
        "title": html.escape(f"calm-beam: {isolated(title)}"),
        "made": html.escape(made),
        "body": body,
    }
    return filled(file_text("frame.html"), parts)


def write_page(page: str, path: str) -> None:
    """Writes a page to a file, which appears whole or not at all."""
    with replacing(path) as temporary:
        temporary.write_text(page, encoding="utf-8", newline="\n")


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


def file_text(name: str) -> str:
    """Returns the content of a file of this package."""
    return importlib.resources.files(__package__).joinpath(name).read_text(encoding="utf-8")


def source_hash(text: str) -> str:
    """Returns the source expression that lets an inline element with just this text through."""
    return f"'sha256-{base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()}'"


def filled(template: str, parts: Mapping[str, str]) -> str:
    """Returns a template with its marks `{{name}}` replaced by parts."""
    # In one go: what is put in is not looked at again.
    return _MARK.sub(lambda mark: parts[mark.group(1)], template)


def _section(section: Section, place: int) -> str:
    lead = f'<p class="lead">{prose(section.lead)}</p>\n' if section.lead else ""
    return (
        f'<section aria-labelledby="part-{place}"><h2 id="part-{place}">{html.escape(section.title)}</h2>\n'
        f"{lead}{section.content}</section>\n"
    )
