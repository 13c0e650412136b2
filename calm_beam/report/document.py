"""Pages as files, and what they are made of: the frame that all share, pieces of HTML, and the colours of layers.

The frame has the head, a policy that lets only the page's own style and script through, the header with the switch
of themes, and the scripts at the end. A `Document` says what was found, then has charts, tables and what they are
about.

A page is self-contained and may be shared. Ids, prompts, names and messages come from data, models and machines.
Characters without a shape are written out (`calm_beam.text`), and local paths are cut to their last names: so texts
cannot reverse the line, and do not say where a page was made. Heads of tables sort them, and what does not fit scrolls,
by keyboard too.

Each decoder layer has one colour: a sequential scale that differs by lightness alone, for a light and for a dark page,
from yellow over green to blue on either. Early layers are close to the page and late ones far from it, so that what
catches the eye is what costs. Colours are mixed in OKLab, where equal steps look equal (Ottosson, "A perceptual
color space for image processing", 2020).
"""

import base64
import dataclasses
import hashlib
import html
import importlib.resources
import re
from collections.abc import Iterable, Mapping, Sequence

from calm_beam.storage import is_cloud_path, replacing
from calm_beam.text import printable_line

from .stored import ReportError

_FIRST_STRONG_ISOLATE, _POP_ISOLATE = "\u2068", "\u2069"
_NAMES_KEPT = 2
_MOST_IN_SIGHT = 48
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


def time_in_words(created: str) -> str:
    """Returns the time of a manifest for a header, as the scripts of pages write it.

    >>> time_in_words("2026-01-31T12:00:00Z")
    '2026-01-31 12:00 UTC'
    """
    return f"{created[:16].replace('T', ' ')} UTC"


def short_place(place: str) -> str:
    """Returns where something lies: of a local path from the root the last names, anything else as it is.

    >>> short_place("/home/ada/models/t5/checkpoint_1000"), short_place("gs://bucket/models/t5")
    ('…/t5/checkpoint_1000', 'gs://bucket/models/t5')
    """
    local = place.removeprefix("file://")
    if is_cloud_path(place) or not local.startswith("/"):
        return place
    names = [name for name in local.split("/") if name]
    # Never the whole path: its first parts may name a user.
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
    lines = [f"<tr>{_cell(first, head=True)}{''.join(map(_cell, rest))}</tr>" for first, *rest in rows]
    return scrolled(
        f'<table class="sortable"><thead><tr>{head}</tr></thead><tbody>{"".join(lines)}</tbody></table>',
        label=label,
        # A short table with lines out of sight seems to have no more.
        kind="whole" if len(lines) <= _MOST_IN_SIGHT else "",
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


def words(text: str) -> Cell:
    """Returns a cell of words, which may be broken into lines."""
    return Cell(text, kind="words")


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
    """Returns one of our texts as HTML, without line ends between numbers and their signs."""
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
    """Returns the remarks about the whole page, as HTML."""
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


Colour = tuple[float, float, float]

# From few layers to many, by the same order of hues; lightness is monotone along each.
_ON_LIGHT = ("#fdf1c2", "#a5d7b8", "#4ba3b3", "#2f6ba8", "#2a2f72")
_ON_DARK = ("#4d431c", "#34684a", "#3a8d99", "#6fafe3", "#d3dcff")
# Colours of lines drawn together, on a light page and on a dark one, that colour-blind readers can distinguish (after
# Okabe and Ito, "Color universal design", 2008); the last two are for what the others are compared with.
SERIES: tuple[tuple[str, str], ...] = (
    ("#0072b2", "#56b4e9"),
    ("#c04e00", "#f0803c"),
    ("#00805d", "#2fc297"),
    ("#a8477d", "#e09ac0"),
    ("#946300", "#e6ab2e"),
    ("#5a51c8", "#aaa2f5"),
    ("#6b6f78", "#9ea3ad"),
    ("#1c1e23", "#e4e6ea"),
)
_BLACK, _WHITE = "#000000", "#ffffff"


@dataclasses.dataclass(frozen=True)
class LayerColour:
    """The colours of one layer, as #rrggbb: background and text, on a light page and on a dark one."""

    light: str
    light_ink: str
    _: dataclasses.KW_ONLY
    dark: str
    dark_ink: str


def layer_colours(num_layers: int) -> tuple[LayerColour, ...]:
    """Returns the colours of layers 1 to `num_layers`."""
    positions = [index / max(num_layers - 1, 1) for index in range(num_layers)]
    pairs = [(_mixed(_ON_LIGHT, position), _mixed(_ON_DARK, position)) for position in positions]
    return tuple(
        LayerColour(light=light, light_ink=_ink(light), dark=dark, dark_ink=_ink(dark)) for light, dark in pairs
    )


def layer_styles(num_layers: int) -> str:
    """Returns a style sheet with the colours: classes `l1`, `l2`, ... for texts and for parts of drawings."""
    return "\n".join(
        f".l{layer}{{--layer:light-dark({colour.light},{colour.dark});"
        f"--ink:light-dark({colour.light_ink},{colour.dark_ink})}}"
        for layer, colour in enumerate(layer_colours(num_layers), start=1)
    )


def series_styles() -> str:
    """Returns a style sheet with the colours of lines that are drawn together: classes `s0`, `s1`, ..."""
    return "\n".join(f".s{place}{{--series:light-dark({light},{dark})}}" for place, (light, dark) in enumerate(SERIES))


def contrast(one: str, other: str) -> float:
    """Returns the contrast of two colours, from 1 to 21 (WCAG 2.2, "contrast ratio")."""
    low, high = sorted((_luminance(one), _luminance(other)))
    return (high + 0.05) / (low + 0.05)


def _ink(background: str) -> str:
    return max((_BLACK, _WHITE), key=lambda ink: contrast(ink, background))


def _mixed(stops: tuple[str, ...], position: float) -> str:
    scaled = position * (len(stops) - 1)
    index = min(int(scaled), len(stops) - 2)
    share = scaled - index
    low, high = (_oklab(_linear(stop)) for stop in stops[index : index + 2])
    red, green, blue = (a + (b - a) * share for a, b in zip(low, high, strict=True))
    return _hexadecimal(_from_oklab((red, green, blue)))


def _luminance(colour: str) -> float:
    red, green, blue = _linear(colour)
    return 0.2126 * red + 0.7152 * green + 0.0722 * blue


def _linear(colour: str) -> Colour:
    """Returns the light of a colour, each part in [0, 1], without the curve of sRGB."""
    parts = [int(colour[index : index + 2], 16) / 255 for index in (1, 3, 5)]
    red, green, blue = (part / 12.92 if part <= 0.04045 else ((part + 0.055) / 1.055) ** 2.4 for part in parts)
    return red, green, blue


def _hexadecimal(light: Colour) -> str:
    curved = (part * 12.92 if part <= 0.0031308 else 1.055 * part ** (1 / 2.4) - 0.055 for part in light)
    return "#" + "".join(f"{round(255 * min(max(part, 0), 1)):02x}" for part in curved)


def _oklab(light: Colour) -> Colour:
    red, green, blue = light
    long = (0.4122214708 * red + 0.5363325363 * green + 0.0514459929 * blue) ** (1 / 3)
    medium = (0.2119034982 * red + 0.6806995451 * green + 0.1073969566 * blue) ** (1 / 3)
    short = (0.0883024619 * red + 0.2817188376 * green + 0.6299787005 * blue) ** (1 / 3)
    return (
        0.2104542553 * long + 0.7936177850 * medium - 0.0040720468 * short,
        1.9779984951 * long - 2.4285922050 * medium + 0.4505937099 * short,
        0.0259040371 * long + 0.7827717662 * medium - 0.8086757660 * short,
    )


def _from_oklab(lab: Colour) -> Colour:
    lightness, a, b = lab
    long = (lightness + 0.3963377774 * a + 0.2158037573 * b) ** 3
    medium = (lightness - 0.1055613458 * a - 0.0638541728 * b) ** 3
    short = (lightness - 0.0894841775 * a - 1.2914855480 * b) ** 3
    return (
        4.0767416621 * long - 3.3077115913 * medium + 0.2309699292 * short,
        -1.2684380046 * long + 2.6097574011 * medium - 0.3413193965 * short,
        -0.0041960863 * long - 0.7034186147 * medium + 1.7076147010 * short,
    )


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
      scripts: Files of the page's script, in addition to the one that all have.
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
    """Writes a page to a file atomically."""
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
    """The parts of every such page; texts are plain unless described as HTML.

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

    def written(self, heading: str, opening: str, sections: Sequence[Section], *, style: str = "") -> str:
        """Returns the page, of at most `LARGEST_PAGE` bytes.

        Args:
          heading: Of the page.
          opening: What was found, as HTML.
          sections: What follows, before the facts.
          style: What the page adds to the style that all such pages have.

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
            style=_STYLE + series_styles() + style,
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
