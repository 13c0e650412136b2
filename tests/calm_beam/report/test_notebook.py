"""Manifests and answers in notebooks, with foreign texts as plain text."""

import dataclasses
import html.parser
import pathlib
import pickle
import subprocess
import sys
from typing import Any

import pytest

from calm_beam.manifest import write_manifest
from calm_beam.report.document import layer_colours
from calm_beam.report.notebook import answer_html
from calm_beam.report.promise import sequence_begins
from calm_beam.serving import Answer
from tests.calm_beam.manifest.builders import (
    build_calibration,
    build_each_variant_manifest,
    build_grouped_manifest,
    build_manifest,
    build_never_exit,
    build_plan_record,
    build_planned_manifest,
    build_sequential_manifest,
    build_variants_manifest,
)
from tests.calm_beam.manifest.test_settings import build_setting_manifest
from tests.calm_beam.report.browser import EVIL, needs_browser

_ELEMENTS = {
    *("div", "style", "p", "strong", "bdi", "figure", "figcaption", "svg", "line", "rect", "polyline", "circle"),
    *("path", "text", "title", "details", "summary", "table", "thead", "tbody", "tr", "th", "td", "span"),
}
_ATTRIBUTES_OF_OURS = {"class", "role", "aria-label", "scope", "title"}


class _Seen(html.parser.HTMLParser):
    """HTML as a browser reads it: elements, attributes, and the text of both."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.elements: list[str] = []
        self.attributes: set[str] = set()
        self.values: list[str] = []
        self.text = ""
        self._open: list[str] = []
        self.feed(text)
        self.close()
        assert self._open == []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self._open.append(tag)
        self.elements.append(tag)
        if "svg" not in self._open:
            self.attributes |= {name for name, _ in attrs}
        self.values += [value or "" for _, value in attrs]

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.handle_starttag(tag, attrs)
        self._open.pop()

    def handle_endtag(self, tag: str) -> None:
        assert self._open.pop() == tag

    def handle_data(self, data: str) -> None:
        if "style" not in self._open:
            self.text += data


def _answer(**changes: Any) -> Answer:
    values: dict[str, Any] = {
        "text": "Le chat dort.",
        "tokens": (5, 9, 1),
        "exit_layers": (2, 4, 1),
        "confidences": (0.5, 0.25, 1.0),
        "num_layers": 4,
        "truncated": False,
    }
    return Answer(**{**values, **changes})


def _html(shown: Any) -> str:
    found = shown._repr_html_()
    assert isinstance(found, str)
    return found


@pytest.mark.parametrize(
    "shown",
    [
        build_manifest(),
        build_manifest(calibrations=(build_never_exit(),)),
        build_grouped_manifest(),
        build_sequential_manifest(),
        build_variants_manifest(),
        build_setting_manifest(),
        _answer(),
    ],
    ids=["manifest", "never", "groups", "sequential", "variants", "settings", "answer"],
)
def test_nothing_but_known_elements(shown: Any) -> None:
    """Every element is closed and from our list, and nothing runs or is downloaded."""
    seen = _Seen(_html(shown))
    assert set(seen.elements) <= _ELEMENTS
    assert seen.attributes <= _ATTRIBUTES_OF_OURS
    assert "url(" not in _html(shown)
    assert "http" not in _html(shown)


def test_each_variant_has_a_curve_of_its_own() -> None:
    """Variants that were tested by themselves are not joined by a line; a path of several variants is one line."""
    manifest = build_each_variant_manifest()
    entry = manifest.calibrations[0]
    begins = sequence_begins(entry, [step.variant for step in entry.path])
    assert begins == [
        0,
        *(at for at in range(1, len(entry.path)) if entry.path[at].variant != entry.path[at - 1].variant),
    ]
    assert len(begins) > 1
    seen = _Seen(_html(manifest)).text
    assert f"{len(begins)} variants, each until one could not be proved safe" in seen
    assert "…" not in seen
    assert "variants, each until" not in _Seen(_html(build_variants_manifest())).text


def test_the_served_promise_is_shown() -> None:
    """The promise that the plan names for serving comes first, whatever the order of entries."""
    manifest = build_planned_manifest(plan=build_plan_record(serve=1))
    deltas = [f"at most {entry.delta:g}" for entry in manifest.calibrations]
    assert manifest.served is manifest.calibrations[1]
    assert deltas[0] != deltas[1]
    assert deltas[1] in _Seen(_html(manifest)).text
    assert deltas[0] not in _Seen(_html(manifest)).text


def test_a_manifest_shows_promise_curve_and_entries() -> None:
    """A manifest shows its promise, a mark for each tested threshold, and all entries in a table."""
    manifest = build_manifest(calibrations=(build_never_exit(), build_calibration()))
    seen = _Seen(_html(manifest))
    promise = "at least 95\u00a0% over the draw of the 200 calibration examples, exiting at threshold 0.8"
    assert promise in seen.text
    assert "0.9: risk 0.0125, p = 0.0007" in seen.text
    assert seen.elements.count("circle") == 2
    assert "Risk of the thresholds that were tested, 0.9 to 0.7, until one could not be proved safe (×)." in seen.text
    assert seen.text.count("textual, rouge_l") == 2
    assert "Each of the 2 promises holds alone." in seen.text
    assert "void it" in seen.text


def test_a_manifest_without_exits_says_so() -> None:
    """Without a safe threshold, that is the promise, and the failed test is drawn."""
    seen = _Seen(_html(build_manifest(calibrations=(build_never_exit(),))))
    assert "Never exit: from 200 calibration examples, no threshold could be proved" in seen.text
    assert seen.elements.count("circle") == 0


def test_a_manifest_of_settings_shows_its_setting() -> None:
    """A settings manifest shows the setting that was proved safe, with its cost, and every entry."""
    seen = _Seen(_html(build_setting_manifest()))
    assert "setting 6bit loses in expectation at most 0.1, at cost 6." in seen.text
    assert "8bit: risk" in seen.text


def test_layers_stand_below_their_tokens() -> None:
    """Each cell has the token's text above its layer; an answer sent to another process has layers alone."""
    answer = _answer(text="5 9")
    seen = _Seen(_html(answer))
    assert answer.token_texts == ("5", " 9", "</s>")
    assert seen.text.startswith("5 952 94</s>1The layer")
    assert pickle.loads(pickle.dumps(answer)) == answer
    assert _answer().token_texts is None
    assert "token_texts" not in dataclasses.asdict(answer)
    assert "vocabulary" not in dataclasses.asdict(answer)


def test_an_answer_shows_its_layers() -> None:
    """An answer shows its text, and for each token a cell with its exit layer, in that layer's colour."""
    found = _html(_answer())
    seen = _Seen(found)
    assert seen.text.startswith("Le chat dort.241")
    assert "3 tokens, 7 of 12 layers run, 42 % saved." in seen.text
    assert "token 9: layer 4 of 4, confidence 0.250" in seen.values
    assert "Exit layers: 2, 4, 1" in seen.values
    assert [value.split()[1] for value in seen.values if value.startswith("token l")] == ["l2", "l4", "l1"]
    for colour in layer_colours(4):
        assert colour.light in found
        assert colour.dark in found
    assert "The prompt was cut." in _Seen(_html(_answer(truncated=True))).text


def test_an_answer_without_tokens() -> None:
    """An answer without tokens has no cells, and causes no division by zero."""
    seen = _Seen(_html(_answer(text="", tokens=(), exit_layers=(), confidences=())))
    assert "0 tokens, 0 of 0 layers run, nothing saved." in seen.text
    assert "span" not in seen.elements


def test_of_long_answers_the_beginning_is_shown() -> None:
    """A thousand tokens are drawn, and the others counted."""
    found = answer_html(_answer(tokens=(5,) * 1003, exit_layers=(1,) * 1003, confidences=(0.5,) * 1003))
    assert _Seen(found).elements.count("span") == 1000
    assert "3 more tokens are not shown." in found


def _hostile() -> list[Any]:
    entry = build_calibration(metric="rouge_l")
    manifest = build_manifest(calibrations=(entry,))
    object.__setattr__(entry, "metric", EVIL)
    object.__setattr__(entry, "group", EVIL)
    of_settings = build_setting_manifest()
    first = of_settings.calibrations[0]
    object.__setattr__(first, "setting", EVIL)
    object.__setattr__(first.path[0], "setting", EVIL)
    object.__setattr__(of_settings, "guarantee", EVIL)
    return [manifest, of_settings, _answer(text=EVIL)]


@pytest.mark.parametrize("index", range(3), ids=["manifest", "settings", "answer"])
def test_texts_of_others_are_only_read(index: int) -> None:
    """HTML in a metric, a group, a setting or an answer is shown as text, and makes no element."""
    seen = _Seen(_html(_hostile()[index]))
    assert set(seen.elements) <= _ELEMENTS
    assert seen.attributes <= _ATTRIBUTES_OF_OURS
    assert "<script>" in seen.text


def test_directions_and_controls_do_not_leak() -> None:
    """Characters that change the direction of text, or control a terminal, are shown as escapes."""
    seen = _Seen(_html(_answer(text="a\u202eb\x1b[31mc")))
    assert "\u202e" not in seen.text
    assert "\x1b" not in seen.text


def test_a_manifest_shows_itself_without_a_model(tmp_path: pathlib.Path) -> None:
    """Reading a manifest loads no report module; showing it loads that, and neither JAX nor Beam."""
    write_manifest(build_manifest(), tmp_path / "manifest.json")
    code = (
        "import sys; from calm_beam.manifest import read_manifest; manifest = read_manifest(sys.argv[1])\n"
        "assert 'calm_beam.report' not in sys.modules and 'numpy' not in sys.modules\n"
        "assert manifest._repr_html_().startswith('<div')\n"
        "assert not {'jax', 'apache_beam', 'pyarrow'} & set(sys.modules)\n"
    )
    subprocess.run([sys.executable, "-c", code, str(tmp_path / "manifest.json")], check=True, timeout=120)


@pytest.mark.parametrize("shown", [build_manifest(), build_setting_manifest(), _answer()])
def test_without_reports_there_is_only_text(shown: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """In calm-beam-serving a notebook shows the printed text; any other missing module is an error."""
    for name in ("calm_beam.report", "calm_beam.report.notebook"):
        monkeypatch.delitem(sys.modules, name, raising=False)

    class Missing:
        missing = "calm_beam.report"

        def find_spec(self, name: str, path: Any = None, target: Any = None) -> None:
            if name == "calm_beam.report":
                raise ModuleNotFoundError(f"No module named {self.missing!r}", name=self.missing)

    missing = Missing()
    monkeypatch.setattr(sys, "meta_path", [missing, *sys.meta_path])
    assert shown._repr_html_() is None
    missing.missing = "numpy"
    with pytest.raises(ModuleNotFoundError, match="numpy"):
        shown._repr_html_()


def test_an_answer_is_printed_as_its_text() -> None:
    """`print` of an answer shows what the model says, without its tokens and layers."""
    assert str(_answer()) == _answer().text


class TestInABrowser:
    """In the machine's Chromium."""

    pytestmark = needs_browser

    @pytest.mark.parametrize(("is_light", "ink"), [("true", "rgb(28, 30, 35)"), ("false", "rgb(228, 230, 234)")])
    def test_it_has_the_notebooks_theme(self, is_light: str, ink: str, browser: Any, tmp_path: pathlib.Path) -> None:
        """Text and layers have the colours of a light or a dark notebook; elements around them are not styled."""
        page = tmp_path / "notebook.html"
        fragment = _html(build_manifest()) + _html(_answer())
        page.write_text(
            f"<!doctype html><meta charset=utf-8><body data-jp-theme-light={is_light}><p id=other>Other.</p>{fragment}",
            encoding="utf-8",
        )
        context = browser.new_context()
        try:
            seen = context.new_page()
            seen.goto(page.as_uri())
            colour = "(element) => getComputedStyle(element).color"
            assert seen.locator("p.sentence").evaluate(colour) == ink
            assert seen.locator("#other").evaluate(colour) == "rgb(0, 0, 0)"
            chosen = layer_colours(4)[1]
            expected = chosen.light if is_light == "true" else chosen.dark
            background = "(element) => getComputedStyle(element).backgroundColor"
            assert seen.locator(".token.l2").evaluate(background) == (
                f"rgb({', '.join(str(int(expected[place : place + 2], 16)) for place in (1, 3, 5))})"
            )
        finally:
            context.close()
