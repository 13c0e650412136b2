"""Pages of promises: what is guaranteed, a chart of the test behind it, the other promises, and all numbers."""

import dataclasses
import html
from collections.abc import Sequence

from calm_beam.manifest import Calibration, Manifest
from calm_beam.risk.testing import TestedSetting

from .document import Page, Section
from .elements import cautions, details, paragraphs, prose, scrolled, sentence
from .promise import promise_in_words
from .proof_charts import Tested, setting_chart

# Of more, those of the table have to do.
_MOST_PANELS = 24
_LEGEND = (
    ("mark accepted choice", "chosen"),
    ("mark accepted", "proved"),
    ("mark failed", "not proved: the test ends there"),
    ("mark open", "not tested"),
)


def verdict(row: TestedSetting) -> str:
    """Returns what became of a line of the risk table, in the words of the table of numbers."""
    return "proved" if row.rejected else "not proved" if row.tested else "not tested"


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
class PlainPage(Page):
    """A page of promises; texts are plain, but for those that are said to be HTML.

    Attributes:
      promise: The first promise, as HTML.
      cautions: What has to be known.
      condition: On which it holds.
      risks: Heading of the chart.
      lead: What the chart shows.
      costs: What the bars below it are.
      first: The first promise, as a panel.
      proof: A section about what proved it; None for none.
      together: Whether several promises hold together.
      panels: The others.
      entries: Table of all promises, as HTML.
      every: What the table of numbers has.
      numbers: That table, as HTML.
    """

    promise: str
    cautions: Sequence[str] = ()
    condition: str
    risks: str
    lead: str
    costs: str
    first: Panel
    proof: Section | None = None
    together: str
    panels: Sequence[Panel]
    entries: str
    every: str
    numbers: str

    def text(self) -> str:
        """Returns the page; raises as `written` does."""
        chart = setting_chart(
            self.first.tested, chosen=self.first.chosen, width=1056, height=300, is_large=True, costs=self.costs
        )
        legend = f'<ul class="legend">{"".join(_legend(*each) for each in _LEGEND)}</ul>'
        panels = "".join(map(_panel, self.panels[:_MOST_PANELS]))
        sections = [
            Section(
                title=self.risks,
                lead=self.lead,
                content=scrolled(chart, label="Drawing of the risks", kind="wide") + legend,
            ),
            *([] if self.proof is None else [self.proof]),
            Section(
                title="All promises",
                lead=self.together,
                content=f'<div class="panels">{panels}</div>{self.entries}',
            ),
            Section(title="All numbers", content=details(self.every, self.numbers)),
        ]
        opening = self.promise + cautions(self.cautions) + paragraphs([self.condition])
        return self.written("What is guaranteed", opening, sections)


def sentence_html(entry: Calibration, manifest: Manifest) -> str:
    """Returns a promise in a sentence, with what matters in bold."""
    return sentence(*promise_in_words(entry, manifest), warns=entry.threshold is None)


def _panel(panel: Panel) -> str:
    chart = setting_chart(panel.tested, chosen=panel.chosen, width=320, height=170, is_large=False)
    return (
        f'<figure class="panel"><figcaption><strong>{html.escape(panel.found)}</strong> '
        f"<span>{prose(panel.about)}</span></figcaption>{chart}</figure>"
    )


def _legend(kind: str, words: str) -> str:
    mark = (
        '<path class="mark failed" d="M4 4l8 8m0 -8l-8 8"/>'
        if "failed" in kind
        else f'<circle class="{kind}" cx="8" cy="8" r="5"/>'
    )
    return f'<li><svg width="16" height="16" aria-hidden="true">{mark}</svg>{html.escape(words)}</li>'
