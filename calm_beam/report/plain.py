"""Pages without scripts: what is guaranteed, a chart of the test behind it, the other promises, and all numbers."""

import dataclasses
import html
from collections.abc import Iterable, Sequence

from calm_beam.manifest import Calibration, Manifest
from calm_beam.printable import printable_line

from .foreign import isolated
from .page import LARGEST_PAGE
from .parts import file_text, filled, source_hash
from .promise import promise_in_words
from .setting_chart import Tested, setting_chart
from .stored import ReportError

# Of more, those of the table have to do.
_MOST_PANELS = 24
# There is no slider below such a page.
_STYLE = "body{padding-bottom:48px}\n.wide svg{min-width:720px;height:auto}\n"
_LEGEND = (
    ("mark accepted choice", "chosen"),
    ("mark accepted", "proved"),
    ("mark failed", "not proved: the test ends there"),
    ("mark open", "not tested"),
)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Panel:
    """A promise besides the first.

    Attributes:
      found: What was chosen, in words.
      about: What is promised, in words.
      tested: What was tested, in that order, and what was not.
      chosen: The name of what was chosen; None if nothing is safe.
    """

    found: str
    about: str
    tested: Sequence[Tested]
    chosen: str | None


@dataclasses.dataclass(frozen=True, kw_only=True)
class PlainPage:
    """What a page says; texts are plain, but for those that are said to be HTML.

    Attributes:
      kind: What is reported.
      title: Of the window, after the name of the program.
      made: When.
      promise: The first promise, as HTML.
      cautions: What has to be known.
      condition: On which it holds.
      risks: Heading of the chart.
      lead: What the chart shows.
      costs: What the bars below it are.
      first: The first promise, as a panel.
      proof: A section about what proved it, as HTML; empty for none.
      together: Whether several promises hold together.
      panels: The others.
      entries: Table of all promises, as HTML.
      every: What the table of numbers has.
      numbers: That table, as HTML.
      about: Heading of the facts.
      facts: Names and values.
      fewer: What to do if the page is too large.
    """

    kind: str
    title: str
    made: str
    promise: str
    cautions: Sequence[str] = ()
    condition: str
    risks: str
    lead: str
    costs: str
    first: Panel
    proof: str = ""
    together: str
    panels: Sequence[Panel]
    entries: str
    every: str
    numbers: str
    about: str
    facts: Sequence[tuple[str, str]]
    fewer: str

    def text(self) -> str:
        """Returns the page, of at most `LARGEST_PAGE` bytes.

        Raises:
          ReportError: If it would be larger.
        """
        style = file_text("report.css") + _STYLE
        chart = setting_chart(
            self.first.tested, chosen=self.first.chosen, width=1056, height=300, is_large=True, costs=self.costs
        )
        parts = {
            "policy": f"default-src 'none'; style-src {source_hash(style)}; img-src data:; base-uri 'none'; "
            "form-action 'none'",
            "style": style,
            "kind": html.escape(self.kind),
            "title": html.escape(f"calm-beam: {isolated(self.title)}"),
            "made": html.escape(self.made),
            "promise": self.promise,
            "cautions": "".join(f"<li>{html.escape(caution)}</li>" for caution in self.cautions),
            "condition": html.escape(self.condition),
            "risks": html.escape(self.risks),
            "lead": html.escape(self.lead),
            "chart": chart,
            "legend": "".join(_legend(*each) for each in _LEGEND),
            "proof": self.proof,
            "together": html.escape(self.together),
            "panels": "".join(map(_panel, self.panels[:_MOST_PANELS])),
            "entries": self.entries,
            "every": html.escape(self.every),
            "numbers": self.numbers,
            "about": html.escape(self.about),
            "facts": "".join(f"<dt>{html.escape(name)}</dt><dd>{shown(value)}</dd>" for name, value in self.facts),
        }
        page = filled(file_text("plain.html"), parts)
        if (size := len(page.encode())) > LARGEST_PAGE:
            raise ReportError(f"the report would have {size:,} bytes, and {LARGEST_PAGE:,} are the most. {self.fewer}")
        return page


def table(names: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """Returns a table as HTML, given the names of its columns and the texts of its cells."""
    head = "".join(f'<th scope="col">{html.escape(name)}</th>' for name in names)
    body = "".join(
        f'<tr><th scope="row">{shown(first)}</th>{"".join(f"<td>{shown(cell)}</td>" for cell in rest)}</tr>'
        for first, *rest in rows
    )
    return f"<table><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table>"


def sentence_html(entry: Calibration, manifest: Manifest) -> str:
    """Returns a promise in a sentence, with what matters in bold."""
    parts = (
        f"<strong>{shown(part)}</strong>" if place % 2 else html.escape(part)
        for place, part in enumerate(promise_in_words(entry, manifest))
    )
    kind = "sentence" if entry.threshold is not None else "sentence never"
    return f'<p class="{kind}">{"".join(parts)}</p>'


def shown(text: str) -> str:
    """Returns a text of others as an element in which its direction ends with it."""
    return f"<bdi>{html.escape(printable_line(text))}</bdi>"


def _panel(panel: Panel) -> str:
    chart = setting_chart(panel.tested, chosen=panel.chosen, width=320, height=170, is_large=False)
    return (
        f'<figure class="panel"><figcaption><strong>{html.escape(panel.found)}</strong> '
        f"<span>{html.escape(panel.about)}</span></figcaption>{chart}</figure>"
    )


def _legend(kind: str, words: str) -> str:
    mark = (
        '<path class="mark failed" d="M4 4l8 8m0 -8l-8 8"/>'
        if "failed" in kind
        else f'<circle class="{kind}" cx="8" cy="8" r="5"/>'
    )
    return f'<li><svg width="16" height="16" aria-hidden="true">{mark}</svg>{html.escape(words)}</li>'
