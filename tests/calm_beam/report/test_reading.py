"""Readability of the page: on narrow screens, of differences, and of foreign texts."""

import pathlib
from typing import Any

import pytest

from calm_beam.report import read_calibrated
from tests.calm_beam.report.browser import PHONE, needs_browser, opened
from tests.calm_beam.report.builders import GRID
from tests.calm_beam.report.pages import page_about, page_data

pytestmark = needs_browser

# Occurrences of a mark outside of every isolate, and all its occurrences.
_NOT_ISOLATED = """(mark) => {
    const open = [];
    let count = 0;
    const isApart = (text) => text.split(/[\\u2068\\u2069]/).every((part, place) => place % 2 || !part.includes(mark));
    const walker = document.createTreeWalker(document.body, NodeFilter.SHOW_ELEMENT | NodeFilter.SHOW_TEXT);
    while (walker.nextNode()) {
        const node = walker.currentNode;
        // Data, and what is read aloud.
        if (node.parentElement.closest("script, #said")) continue;
        const texts = node.attributes ? [...node.attributes].map(({ value }) => value) : [node.data];
        for (const text of texts.filter((text) => text.includes(mark))) {
            count += 1;
            const holder = node.attributes ? null : node.parentElement.closest("bdi, [dir=auto]");
            const isAlone = holder !== null && getComputedStyle(holder).unicodeBidi.includes("isolate");
            if (!isAlone && !isApart(text)) open.push(`${node.parentElement.outerHTML}`);
        }
    }
    return [open, count];
}"""


def test_phones_show_whole_tables(browser: Any, report: pathlib.Path) -> None:
    """At 375 pixels every value of the savings is within the screen, under the name of its column."""
    with opened(browser, report, **PHONE) as seen:
        cells = seen.page.locator("#saved-table td").evaluate_all(
            """(cells) => cells.map((cell) => {
                const { left, right, width } = cell.getBoundingClientRect();
                return [left >= 0 && right <= window.innerWidth && width > 0 && cell.scrollWidth <= cell.clientWidth,
                        getComputedStyle(cell, "::before").content];
            })"""
        )
        assert len(cells) >= 6 * 6
        assert {is_seen for is_seen, _ in cells} == {True}
        assert {'"δ"', '"threshold"', '"layers saved"', '"risk"'} <= {name for _, name in cells}


def test_the_threshold_of_a_promise_comes_first(browser: Any, report: pathlib.Path) -> None:
    """In the list of promises, a narrow screen never cuts off the threshold, and all promises are distinguishable."""
    entries = read_calibrated(str(report.parent)).manifest.calibrations
    with opened(browser, report, **PHONE) as seen:
        names = seen.page.locator("#entry option").all_text_contents()
        assert len(set(names)) == len(entries)
        for name, entry in zip(names, entries, strict=True):
            start = "never exit" if entry.threshold is None else f"λ {entry.threshold:g}"
            assert name.startswith(f"{start} · δ {entry.delta:g} · ")


@pytest.mark.parametrize(
    ("early", "full", "note", "marked"),
    [
        # One word, of many tokens.
        (["▁ein", "▁H", "u", "n", "d", ""], ["▁ein", "▁K", "a", "t", "er", ""], "1 word differs", ["H", "u", "n", "d"]),
        # Three words for two.
        (["▁a", "▁b", "▁c", "▁d", ""], ["▁x", "▁y", "▁d", ""], "3 words differ", ["a", "b", "c"]),
        (["▁a", "▁c", ""], ["▁a", "▁b", "▁c", ""], "1 word differs", []),
        # Its end is a word.
        (["▁a"], ["▁a", ""], "1 word differs", []),
        (["▁a", "b", ""], ["▁ab", ""], "same words, other tokens", []),
        (["▁ab", ""], ["▁ab", ""], "as the full model", []),
        (["▁a", "▁", "b", ""], ["▁a", "b", ""], "2 words differ", ["a", "b"]),
        (["▁我", "喜", "欢", "猫", ""], ["▁我", "喜", "欢", "狗", ""], "1 word differs", ["猫"]),
        (["▁", "▁a", ""], ["▁a", ""], "same words, other tokens", []),
    ],
)
def test_differences_are_words(
    browser: Any,
    report: pathlib.Path,
    tmp_path: pathlib.Path,
    early: list[str],
    full: list[str],
    note: str,
    marked: list[str],
) -> None:
    """Marked differences are whole words, whatever number of tokens they consist of."""
    content = page_data(report.read_text(encoding="utf-8"))
    content["pieces"] = pieces = list(dict.fromkeys([*full, *early]))
    content["sample"] = {**content["sample"], "hasPieces": True}
    outputs = [[pieces.index(piece) for piece in output] for output in (full, early)]
    exits = [[0, 0, "1FF" * len(output)] for output in outputs]
    splices = [[[0, 0, outputs[0]], exits[0]], [[0, 0, outputs[1]], exits[1]]]
    example = {"id": "a", "prompt": "p", "references": [], "outputs": [*splices, *[0] * (len(GRID) - 1)]}
    content["examples"] = [example]
    with opened(browser, page_about(report, content, tmp_path)) as seen:
        seen.move(1)
        assert seen.text(".label span").endswith(f" · {note}")
        output = seen.page.locator(".output").first
        assert output.locator(".token.different:not(.eos)").all_text_contents() == marked
        is_seen = "differ" in note
        assert ("1 of these outputs differs" in seen.text("#examples-lead")) is is_seen


def test_foreign_texts_are_isolated(browser: Any, report: pathlib.Path, tmp_path: pathlib.Path) -> None:
    """Right-to-left texts are isolated everywhere, and the report's own words keep their order."""
    mark = "א"
    name = f"{mark}בג 12"
    content = page_data(report.read_text(encoding="utf-8"))
    content |= {
        "model": name,
        "remarks": [name],
        "failures": [[name, name]],
        "pieces": [f"▁{name}"] * len(content["pieces"]),
    }
    content["sample"] = {**content["sample"], "hasPieces": True}
    content["facts"] = [[fact, name] for fact, _ in content["facts"]]
    content["cautions"] = [["void", "a caution"]]
    for objective, other in zip(content["objectives"], (name, f"{name} 2"), strict=False):
        objective["metric"] = other
    for entry in content["entries"]:
        entry["sentence"] = [name if place % 2 else part for place, part in enumerate(entry["sentence"])]
    for example in content["examples"]:
        example |= {"id": name, "prompt": name, "references": [name], "marks": ["repeated"]}
        if "failure" in example:
            example["failure"] = name
    with opened(browser, page_about(report, content, tmp_path)) as seen:
        seen.page.locator("#more").click()
        seen.page.locator(".output .token").first.hover()
        found = seen.page.evaluate(_NOT_ISOLATED, mark)
        assert found[0] == []
        assert found[1] > 100
        card = seen.page.locator(".example .id").first
        boxes = [card.locator(part).bounding_box() for part in ("bdi", ".badge")]
        assert boxes[0]["x"] + boxes[0]["width"] <= boxes[1]["x"]
