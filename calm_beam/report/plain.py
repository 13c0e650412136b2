"""Pages of promises: what is guaranteed, a chart of the test behind it, the other promises, and all numbers.

There are two charts of what tests found. The first shows the risk of every setting in testing order, with the
tolerance, what was proved and the costs. The second shows the proof of one setting, round by round: the capital that
was won, and the risk.
"""

import dataclasses
import html
import itertools
import math
import textwrap
from collections.abc import Sequence
from typing import Protocol

from calm_beam.manifest import Calibration, Manifest, SettingCalibration, SettingLook
from calm_beam.risk.testing import TestedSetting
from calm_beam.text import shortened

from .document import Page, Section, cautions, details, isolated, layer_styles, paragraphs, prose, scrolled, sentence
from .line_chart import Frame, grid_lines, level_line, points_text, round_numbers
from .promise import promise_in_words

_MOST_SETTINGS_NAMED = 14
_MOST_SETTINGS_MARKED = 100
# Letters of a line below a chart; longer names take two.
_LONGEST_LINE = 16
_LINE_HEIGHT = 14
# In pixels: of a letter of the widest usual font, and between two names.
_LETTER_WIDTH, _LABEL_GAP = 6.8, 8
_COST_HEIGHT = 46
_PROOF_WIDTH, _TOP, _MIDDLE, _BOTTOM = 1056, 26, 230, 384
_MOST_ROUNDS_NAMED = 12
_MOST_ROUNDS_MARKED = 60
_MOST_POWER = 300


class Tested(Protocol):
    """One setting under a test, as `calm_beam.calibration.certification.SettingRow` has it."""

    @property
    def setting(self) -> str:
        """Its name."""
        ...

    @property
    def delta(self) -> float:
        """Risk tolerance."""
        ...

    @property
    def risk(self) -> float:
        """Mean loss."""
        ...

    @property
    def p_value(self) -> float:
        """Of "the risk exceeds delta"."""
        ...

    @property
    def tested(self) -> bool:
        """Whether the procedure looked at it."""
        ...

    @property
    def rejected(self) -> bool:
        """Whether it was found safe."""
        ...

    @property
    def cost(self) -> float | None:
        """The cost; None if it was not given."""
        ...


def setting_chart(
    rows: Sequence[Tested],
    *,
    chosen: str | None,
    width: int,
    height: int,
    is_large: bool,
    costs: str = "cost",
    begins: Sequence[int] = (0,),
) -> str:
    """Returns an SVG of one test: every setting's risk in testing order, with delta and the decisions.

    Args:
      rows: All settings in testing order.
      chosen: The one that was chosen.
      width: In pixels.
      height: Of the part above the labels.
      is_large: Whether settings have labels and costs bars.
      costs: What costs are called.
      begins: Indices at which a sequence of tests begins, the first one included; no line joins two sequences.
    """
    delta = rows[0].delta
    risks = [row.risk for row in rows]
    frame = Frame(
        left=52,
        right=width - 12,
        top=14,
        bottom=height - 8,
        # Each setting in the middle of its column.
        x_ends=(-0.5, len(rows) - 0.5),
        y_ends=(min(0.0, *risks), max(*risks, delta) * 1.06 or 1.0),
    )
    known = [row.cost for row in rows if row.cost is not None] if is_large else []
    labels = [_label_lines(row.setting) for row in rows] if is_large else []
    below = 30 + _LINE_HEIGHT * (max(map(len, labels)) - 1) if labels else 6
    parts = [
        *grid_lines(frame, round_numbers(*frame.y_ends), written="{:g}".format),
        *_curve(frame, rows, chosen=chosen, begins=begins),
    ]
    if is_large:
        parts += _names(frame, rows, labels, chosen=chosen)
    if known:
        parts += _costs(frame, rows, top=height + below - 6, highest=max(known), name=costs)
        below += _COST_HEIGHT + 12
    title = f"Risk of {len(rows)} settings against delta {delta:g}"
    return (
        f'<svg viewBox="0 0 {width} {height + below}" width="{width}" height="{height + below}" role="img" '
        f'aria-label="{html.escape(title)}">{"".join(parts)}</svg>'
    )


def proof_chart(entry: SettingCalibration) -> str:
    """Returns an SVG of an entry's looks: capital above, risk below, over the units counted by then.

    Args:
      entry: With looks.
    """
    looks = entry.looks or ()
    capitals = [look.log_capital / math.log(10) for look in looks]
    risks = [look.risk for look in looks]
    goal = -math.log10(entry.epsilon)
    low, high = min(0.0, *capitals), max(goal, *capitals)
    room = 0.08 * (high - low)
    above = _proof_frame(_TOP, _MIDDLE, low - room, high + room, looks)
    below = _proof_frame(_MIDDLE + 54, _BOTTOM, min(0.0, *risks), max(entry.delta, *risks) * 1.1, looks)
    parts = [
        *grid_lines(above, [power for power in round_numbers(*above.y_ends) if power == int(power)], written=_power),
        *grid_lines(below, round_numbers(*below.y_ends), written="{:g}".format),
        *level_line(above, goal, name=f"proved: capital × {1 / entry.epsilon:.4g}", is_at_end=False),
        *level_line(below, entry.delta, name=f"δ = {entry.delta:g}", is_at_end=True),
        *_proof_line(above, looks, capitals, entry),
        *_proof_line(below, looks, risks, entry),
        f'<text class="axis-name" x="{above.left}" y="{_TOP - 10}">capital against “not safe”</text>',
        f'<text class="axis-name" x="{above.left}" y="{_MIDDLE + 30}">risk</text>',
        *_round_counts(below, looks),
    ]
    label = html.escape(f"Capital and risk after each of {len(looks)} rounds")
    return (
        f'<svg viewBox="0 0 {_PROOF_WIDTH} {_BOTTOM + 48}" width="{_PROOF_WIDTH}" height="{_BOTTOM + 48}" role="img" '
        f'aria-label="{label}">{"".join(parts)}</svg>'
    )


def capital_text(look: SettingLook) -> str:
    """Returns the capital at a look in few digits; one that no float can hold, as a power of ten."""
    power = look.log_capital / math.log(10)
    return f"{10**power:.3g}" if abs(power) < _MOST_POWER else f"1e{power:.0f}"


def _curve(frame: Frame, rows: Sequence[Tested], *, chosen: str | None, begins: Sequence[int]) -> list[str]:
    delta, y = rows[0].delta, frame.y(rows[0].delta)
    parts = [
        f'<rect class="within" x="{frame.left}" y="{y:.1f}" width="{frame.right - frame.left:.1f}" '
        f'height="{max(frame.bottom - y, 0):.1f}"/>'
    ]
    for begin, end in itertools.pairwise((*begins, len(rows))):
        last = max((index for index in range(begin, end) if rows[index].tested), default=begin)
        for name, indices in (("path after", range(last, end)), ("path", range(begin, last + 1))):
            points = points_text([(frame.x(index), frame.y(rows[index].risk)) for index in indices])
            parts.append(f'<polyline class="{name}" points="{points}"/>')
    # At the end where no risk comes near.
    to_begin, to_end = (min(abs(row.risk - delta) for row in end) for end in (rows[: len(rows) // 3 + 1], rows[-2:]))
    parts += level_line(frame, delta, name=f"δ = {delta:g}", is_at_end=to_end > to_begin)
    if len(rows) <= _MOST_SETTINGS_MARKED:
        parts += [_mark(frame, index, row, is_chosen=row.setting == chosen) for index, row in enumerate(rows)]
    return parts


def _mark(frame: Frame, index: int, row: Tested, *, is_chosen: bool) -> str:
    x, y = frame.x(index), frame.y(row.risk)
    words = f"{isolated(row.setting)}: risk {row.risk:.4f}, p = {row.p_value:.2g}"
    title = f"<title>{html.escape(words)}</title>"
    if row.tested and not row.rejected:
        return f'<path class="mark failed" d="M{x - 5:.1f} {y - 5:.1f}l10 10m0 -10l-10 10">{title}</path>'
    kind = "open" if not row.tested else "accepted choice" if is_chosen else "accepted"
    return f'<circle class="mark {kind}" cx="{x:.1f}" cy="{y:.1f}" r="{6 if is_chosen else 4.5}">{title}</circle>'


def _label_lines(name: str) -> tuple[str, ...]:
    """Returns the label of a setting: its name, in two lines of about the same length if one is too long.

    >>> _label_lines("0.95"), _label_lines("0.98 softmax ≥2 /2")
    (('0.95',), ('0.98 softmax', '≥2 /2'))
    """
    if len(name) <= _LONGEST_LINE:
        return (name,)
    for width in range(-(-len(name) // 2), _LONGEST_LINE + 1):
        lines = textwrap.wrap(name, width, break_long_words=False, break_on_hyphens=False)
        if len(lines) == 2 and max(map(len, lines)) <= _LONGEST_LINE:
            return (lines[0], lines[1])
    return (shortened(name, _LONGEST_LINE),)


def _names(frame: Frame, rows: Sequence[Tested], labels: Sequence[tuple[str, ...]], *, chosen: str | None) -> list[str]:
    """Returns the names of settings; of many, some, and none so near the chosen one that it would cover that."""
    longest = max(len(line) for lines in labels for line in lines)
    room = (frame.right - frame.left) / (longest * _LETTER_WIDTH + _LABEL_GAP)
    step = -(-len(rows) // max(1, min(_MOST_SETTINGS_NAMED, int(room))))
    place = next((index for index, row in enumerate(rows) if row.setting == chosen), -step)
    parts = []
    for index, row in enumerate(rows):
        if index != place and (index % step or abs(index - place) < step):
            continue
        now = " now" if row.setting == chosen else ""
        parts += [
            f'<text class="tick{now}" x="{frame.x(index):.1f}" y="{frame.bottom + 22 + _LINE_HEIGHT * number:.1f}" '
            f'text-anchor="middle">{html.escape(isolated(line))}</text>'
            for number, line in enumerate(labels[index])
        ]
    return parts


def _costs(frame: Frame, rows: Sequence[Tested], *, top: float, highest: float, name: str) -> list[str]:
    """Returns bars of what settings cost, below their names."""
    width = min(28.0, (frame.right - frame.left) / len(rows) * 0.6)
    parts = [f'<text class="tick" x="{frame.left - 8}" y="{top + _COST_HEIGHT:.1f}" text-anchor="end">{name}</text>']
    step = -(-len(rows) // _MOST_SETTINGS_NAMED)
    for index, row in enumerate(rows):
        if row.cost is None:
            continue
        height = (_COST_HEIGHT - 14) * (row.cost / highest if highest else 0)
        x, y = frame.x(index), top + _COST_HEIGHT - height
        parts.append(
            f'<rect class="strip" x="{x - width / 2:.1f}" y="{y:.1f}" width="{width:.1f}" height="{height:.1f}"/>'
        )
        if index % step == 0:
            parts.append(f'<text class="value" x="{x:.1f}" y="{y - 4:.1f}" text-anchor="middle">{row.cost:.4g}</text>')
    return parts


def _proof_frame(top: float, bottom: float, low: float, high: float, looks: Sequence[SettingLook]) -> Frame:
    return Frame(
        left=64,
        right=_PROOF_WIDTH - 32,
        top=top,
        bottom=bottom,
        # Rounds of a group may all be without an example of it.
        x_ends=(0, max(1, looks[-1].n)),
        y_ends=(low, high or 1.0),
    )


def _power(value: float) -> str:
    """Returns a power of ten, given its exponent, in few letters.

    >>> _power(-2), _power(4), _power(30)
    ('×0.01', '×10,000', '×1e30')
    """
    exponent = int(value)
    if 0 <= exponent <= 5:
        return f"×{10**exponent:,}"
    return f"×{10.0**exponent:g}" if -4 <= exponent < 0 else f"×1e{exponent}"


def _proof_line(
    frame: Frame, looks: Sequence[SettingLook], values: Sequence[float], entry: SettingCalibration
) -> list[str]:
    points = [(frame.x(look.n), frame.y(value)) for look, value in zip(looks, values, strict=True)]
    parts = [f'<polyline class="path" points="{points_text(points)}"/>']
    if len(looks) > _MOST_ROUNDS_MARKED:
        return parts
    for number, (look, (x, y)) in enumerate(zip(looks, points, strict=True), start=1):
        is_proved = entry.setting is not None and look.setting == entry.setting
        words = f"round {number}: {look.n:,} counted, capital × {capital_text(look)}, risk {look.risk:.4f}"
        parts.append(
            f'<circle class="mark {"accepted" if is_proved else "open"}" cx="{x:.1f}" cy="{y:.1f}" r="4">'
            f"<title>{html.escape(words)}</title></circle>"
        )
    return parts


def _round_counts(frame: Frame, looks: Sequence[SettingLook]) -> list[str]:
    """Returns the numbers of units counted after rounds; of many rounds, after some, the last among them."""
    step = -(-len(looks) // _MOST_ROUNDS_NAMED)
    parts = [f'<line class="axis" x1="{frame.left}" x2="{frame.right}" y1="{frame.bottom}" y2="{frame.bottom}"/>']
    for look in looks[::-1][::step]:
        place = f'x="{frame.x(look.n):.1f}" y="{frame.bottom + 18}"'
        parts.append(f'<text class="tick" {place} text-anchor="middle">{look.n:,}</text>')
    parts.append(
        f'<text class="axis-name" x="{frame.right}" y="{frame.bottom + 40}" text-anchor="end">counted by then →</text>'
    )
    return parts


# Of more, those of the table have to do.
_MOST_PANELS = 24
_LEGEND = (
    ("mark accepted choice", "chosen"),
    ("mark accepted", "proved"),
    ("mark failed", "not proved: the test ends there"),
    ("mark open", "not tested"),
)


def verdict(row: TestedSetting) -> str:
    """Returns the result of a line of the risk table, in the words of the table of numbers."""
    return "proved" if row.rejected else "not proved" if row.tested else "not tested"


@dataclasses.dataclass(frozen=True, kw_only=True)
class Panel:
    """A promise after the first.

    Attributes:
      found: Text about the chosen threshold.
      about: Text about the promise.
      why: Text on the reason why no more was proved; empty for none.
      tested: What was tested, in that order, and what was not.
      chosen: The name of what was chosen; None if nothing is safe.
      begins: Indices at which a sequence of tests begins.
    """

    found: str
    about: str
    why: str = ""
    tested: Sequence[Tested]
    chosen: str | None
    begins: Sequence[int] = (0,)


@dataclasses.dataclass(frozen=True, kw_only=True)
class PlainPage(Page):
    """A page of promises; texts are plain unless described as HTML.

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
      outputs: A section with outputs under the first promise; None for none.
      num_layers: Depth of the decoder, whose layers are coloured in outputs.
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
    outputs: Section | None = None
    num_layers: int = 0
    every: str
    numbers: str

    def text(self) -> str:
        """Returns the page; raises as `written` does."""
        chart = setting_chart(
            self.first.tested,
            chosen=self.first.chosen,
            width=1056,
            height=300,
            is_large=True,
            costs=self.costs,
            begins=self.first.begins,
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
            *([] if self.outputs is None else [self.outputs]),
            Section(title="All numbers", content=details(self.every, self.numbers)),
        ]
        opening = self.promise + cautions(self.cautions) + paragraphs([self.condition])
        return self.written("What is guaranteed", opening, sections, style=layer_styles(self.num_layers))


def sentence_html(entry: Calibration, manifest: Manifest) -> str:
    """Returns a promise in a sentence, with what matters in bold."""
    return sentence(*promise_in_words(entry, manifest), warns=entry.threshold is None)


def _panel(panel: Panel) -> str:
    chart = setting_chart(panel.tested, chosen=panel.chosen, width=320, height=170, is_large=False, begins=panel.begins)
    why = f"<span>{prose(panel.why)}</span>" if panel.why else ""
    return (
        f'<figure class="panel"><figcaption><strong>{html.escape(panel.found)}</strong> '
        f"<span>{prose(panel.about)}</span>{why}</figcaption>{chart}</figure>"
    )


def _legend(kind: str, words: str) -> str:
    mark = (
        '<path class="mark failed" d="M4 4l8 8m0 -8l-8 8"/>'
        if "failed" in kind
        else f'<circle class="{kind}" cx="8" cy="8" r="5"/>'
    )
    return f'<li><svg width="16" height="16" aria-hidden="true">{mark}</svg>{html.escape(words)}</li>'
