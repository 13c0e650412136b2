"""The drawings of a page: no label covers another one, whatever the result."""

import itertools
import pathlib
from typing import Any

import pytest

from tests.calm_beam.report.browser import PHONE, needs_browser, opened
from tests.calm_beam.report.builders import GRID
from tests.calm_beam.report.curves import result_of_every_shape
from tests.calm_beam.report.pages import page_about, page_data
from tests.sampling import sampled

pytestmark = needs_browser

# Texts of a drawing that overlap each other or the marks, and those beyond the edge of the window. A box has some room
# above and below its letters.
_COVERED = """(figure) => {
    const boxes = (names, inset) => [...figure.querySelectorAll(names)].map((element) => {
        const { left, right, top, bottom } = element.getBoundingClientRect();
        return { text: element.textContent, left, right, top: top + inset, bottom: bottom - inset };
    });
    const isBeside = (one, other) => one.right - other.left <= 0.5 || other.right - one.left <= 0.5;
    const isAbove = (one, other) => one.bottom - other.top <= 0.5 || other.bottom - one.top <= 0.5;
    const covers = (one, other) => !isBeside(one, other) && !isAbove(one, other);
    const isOutside = ({ left, right }) => left < 0 || right > document.documentElement.clientWidth;
    const texts = boxes("text", 2.5);
    const labels = boxes("text.flag, text.delta-name, text.value", 2.5);
    const marks = boxes(".mark", 1);
    return [
        ...texts.flatMap((one, place) =>
            texts.slice(place + 1).filter((other) => covers(one, other)).map((other) => `${one.text} / ${other.text}`)),
        ...labels.filter((one) => marks.some((mark) => covers(one, mark))).map((one) => `${one.text} / a mark`),
        ...texts.filter(isOutside).map(({ text }) => `${text} / the edge`),
    ];
}"""
_MOVE = """(figure, [x, y]) => figure.querySelectorAll(".flag, .delta-name").forEach((text) => {
    text.setAttribute("x", x);
    text.setAttribute("y", y);
})"""
_PLACE_OF_CHOICE = """(figure) => {
    const mark = figure.querySelector(".mark.choice");
    return [Number(mark.getAttribute("cx")), Number(mark.getAttribute("cy")) + 4];
}"""


@pytest.mark.parametrize(("every", "options"), sampled([(3, {}), (1, PHONE)], keep=(1,)), ids=["desktop", "phone"])
def test_labels_never_collide(
    browser: Any, report: pathlib.Path, tmp_path: pathlib.Path, every: int, options: Any
) -> None:
    """With any choice and any end of the test, no text of a drawing overlaps another one or a mark."""
    content = page_data(report.read_text(encoding="utf-8"))
    covered = {}
    names = set()
    context = browser.new_context(**{"viewport": {"width": 1280, "height": 900}, **options})
    page = context.new_page()
    for name, changed in itertools.islice(result_of_every_shape(content), 0, None, every):
        page.goto(page_about(report, changed, tmp_path).as_uri())
        for drawings in ("#risk-chart, .panel", "#risk-chart"):
            if found := page.evaluate(f"[...document.querySelectorAll('{drawings}')].flatMap({_COVERED})"):
                covered[name, drawings] = found
            names.update(page.evaluate("[...document.querySelectorAll('.flag')].map((text) => text.textContent)"))
            # And once more, over the whole range.
            page.evaluate("document.getElementById('range').click()")
    context.close()
    assert covered == {}
    assert {"chosen", "never exit", "test stops"} <= names


def test_labels_that_collide_are_found(browser: Any, report: pathlib.Path) -> None:
    """The check sees a label that was moved onto another one, and one moved onto a mark."""
    with opened(browser, report) as seen:
        chart = seen.page.locator("#risk-chart")
        assert chart.evaluate(_COVERED) == []
        chart.evaluate(_MOVE, [300, 100])
        assert any("δ" in found for found in chart.evaluate(_COVERED))
        chart.evaluate(_MOVE, chart.evaluate(_PLACE_OF_CHOICE))
        assert "chosen / a mark" in chart.evaluate(_COVERED)


def test_few_tokens_are_faded(browser: Any, report: pathlib.Path, tmp_path: pathlib.Path) -> None:
    """Columns of fewer than thirty tokens are fainter the fewer they are, and the row below has their number."""
    content = page_data(report.read_text(encoding="utf-8"))
    content["exits"] = {
        **content["exits"],
        "width": 1,
        "tokens": [[[0, 0, 0, count] for count in (1200, 30, 29, 1)]] * (len(GRID) + 1),
    }
    with opened(browser, page_about(report, content, tmp_path)) as seen:
        bars = seen.page.locator("#exits-chart .bar").evaluate_all(
            "(bars) => bars.map((bar) => Number(getComputedStyle(bar).opacity))"
        )
        assert bars[:2] == [1, 1]
        assert 1 > bars[2] > bars[3] > 0
        texts = seen.page.locator("#exits-chart text").all_text_contents()
        assert {"n", "1,200", "30", "29"} <= set(texts)
        assert seen.page.locator("#exits-chart").evaluate(_COVERED) == []
        chart = seen.page.locator("#exits-chart")
        chart.focus()
        for _ in range(3):
            seen.page.keyboard.press("ArrowRight")
        assert "1 token: few" in seen.text("#tip")
        assert "Faded: n below 30" in seen.text("#exits-lead")
