"""The page in a browser: motion, search, and no network requests."""

import pathlib
from typing import Any

from calm_beam.evaluation.flops import DecoderSizes
from calm_beam.outputs import Generation
from calm_beam.report import build_page, read_calibrated
from calm_beam.report.document import layer_colours
from tests.calm_beam.report.browser import EVIL, PHONE, SeenPage, needs_browser, opened
from tests.calm_beam.report.builders import GRID, NUM_LAYERS
from tests.calm_beam.report.pages import page_about, page_data

pytestmark = needs_browser


def _rgb(colour: str) -> str:
    red, green, blue = (int(colour[place : place + 2], 16) for place in (1, 3, 5))
    return f"rgb({red}, {green}, {blue})"


def test_the_slider_moves_everything(browser: Any, report: pathlib.Path, generations: list[Generation]) -> None:
    """At every threshold the first output has the stored tokens, in the colours of their exit layers."""
    colours = layer_colours(NUM_LAYERS)
    with opened(browser, report, color_scheme="light") as seen:
        name = seen.page.locator(".example").first.locator(".id").text_content()
        (item,) = (item for item in generations if item.example.id == name)
        charts = set()
        for lane in range(len(GRID) + 1):
            seen.move(lane)
            output = item.outputs[lane]
            assert seen.tokens() == [
                {
                    "text": "end" if token == 1 else str(token),
                    "layer": layer,
                    "colour": _rgb(colours[layer - 1].light),
                }
                for token, layer in zip(output.tokens, output.exit_layers, strict=True)
            ]
            assert seen.text("#lambda") == (f"λ {GRID[lane - 1]:g}" if lane else "never exit")
            charts.add(seen.page.locator("#exits-chart").inner_html())
            charts.add(seen.page.locator("#risk-chart").inner_html())
        assert len(charts) == 2 * (len(GRID) + 1)


def test_all_outputs_are_unpacked(browser: Any, report: pathlib.Path, generations: list[Generation]) -> None:
    """Outputs that the page counts as different from the full model differ in the stored outputs."""
    decoded = [item for item in generations if item.outputs]
    with opened(browser, report) as seen:
        seen.page.locator("#changed").check()
        for lane in range(1, len(GRID) + 1):
            seen.move(lane)
            changed = sum(item.outputs[lane].tokens != item.outputs[0].tokens for item in decoded)
            assert f", {changed} of these outputs differ" in seen.text("#examples-lead")
            assert seen.text("#found") == f"{changed} found"
            assert changed > 0


def test_differences_are_marked(browser: Any, report: pathlib.Path) -> None:
    """Without the marked tokens, the two outputs of an example are equal; equal ones have no marks."""
    with opened(browser, report) as seen:
        seen.move(len(GRID))
        pairs = seen.page.locator(".pair").evaluate_all(
            """(pairs) => pairs.map((pair) => [...pair.querySelectorAll(".output")].map((output) =>
                [...output.querySelectorAll(".token")].map((token) =>
                    [token.textContent, token.classList.contains("different")])))"""
        )
        assert len(pairs) > 10
        for pair in pairs:
            early, full = ([text for text, is_different in output if not is_different] for output in pair)
            assert early == full
            whole = [[text for text, _ in output] for output in pair]
            assert (whole[0] == whole[1]) is not any(is_different for output in pair for _, is_different in output)


def test_search(browser: Any, report: pathlib.Path) -> None:
    """Examples are found by words of id, prompt or outputs, all of which must match; an empty field shows all."""
    with opened(browser, report) as seen:
        count = seen.page.locator(".example").count()
        search = seen.page.get_by_label("Search examples")
        for query, expected in (("row-12", ["row-12"]), ("PROMPT number 17", ["row-17"]), ("row-12 17", [])):
            search.fill(query)
            seen.settle()
            ids = seen.page.locator(".example .id").all_text_contents()
            if expected:
                assert expected[0] in ids
                assert len(ids) < count
            else:
                assert ids == []
        search.fill("")
        seen.settle()
        assert seen.page.locator(".example").count() == count


def test_more_examples_are_shown_on_demand(browser: Any, report: pathlib.Path) -> None:
    """Twenty are shown at first, and the button adds the others, until it is gone."""
    with opened(browser, report) as seen:
        assert seen.page.locator(".example").count() == 20
        seen.page.locator("#more").click()
        assert seen.page.locator(".example").count() == 30
        assert not seen.page.locator("#more").is_visible()
        assert "failed, counts with loss 1: lost" in " ".join(seen.page.locator(".failure").all_text_contents())


def test_themes(browser: Any, report: pathlib.Path) -> None:
    """The page follows the system's theme until the button is pressed, and the colours of layers follow the page."""
    background = "getComputedStyle(document.body).backgroundColor"
    first = layer_colours(NUM_LAYERS)
    seen_colours = {}
    for scheme in ("light", "dark"):
        with opened(browser, report, color_scheme=scheme) as seen:
            seen_colours[scheme] = seen.page.evaluate(background)
            for theme in (scheme, "dark" if scheme == "light" else "light"):
                token = seen.tokens()[0]
                colour = getattr(first[token["layer"] - 1], theme)
                assert token["colour"] == _rgb(colour)
                before = seen.page.evaluate(background)
                seen.page.locator("#theme").click()
                assert seen.page.evaluate(background) != before
    assert seen_colours["light"] != seen_colours["dark"]


def test_promises_are_chosen(browser: Any, report: pathlib.Path) -> None:
    """A chosen entry shows its sentence, its threshold and its end; never exit is named as such."""
    entries = read_calibrated(str(report.parent)).manifest.calibrations
    with opened(browser, report) as seen:
        for index, entry in enumerate(entries):
            seen.page.locator("#entry").select_option(str(index))
            seen.settle()
            sentence = seen.text("#sentence")
            assert f"at most {entry.delta:g} token_f1" in sentence
            assert f"({entry.consistency} consistency)" in sentence
            assert sentence.startswith("Never exit") is (entry.threshold is None)
            assert seen.text("#lambda") == ("never exit" if entry.threshold is None else f"λ {entry.threshold:g}")
            seen.move(len(GRID))
            if entry.threshold != GRID[-1]:
                seen.page.locator("#chosen").click()
                seen.settle()
                assert seen.page.locator("#chosen").is_disabled()
    assert len({entry.threshold for entry in entries}) > 1
    assert None in {entry.threshold for entry in entries}


def test_one_tolerance_gets_a_curve(browser: Any, report: pathlib.Path, tmp_path: pathlib.Path) -> None:
    """For a single tolerance, layers are drawn over the risks of all thresholds, not as single points."""
    content = page_data(report.read_text(encoding="utf-8"))
    content["entries"] = [content["entries"][0] | {"delta": 0.5}]
    with opened(browser, page_about(report, content, tmp_path)) as seen:
        panel = seen.page.locator("#saved-panels .panel")
        assert panel.count() == 1
        assert "at every threshold" in panel.inner_text()
        assert panel.locator(".mark").count() > 2
        assert seen.messages == []


def test_values_are_told_where_one_points(browser: Any, report: pathlib.Path) -> None:
    """Pointing at a threshold shows its risk, p-value and verdict; at a token, its layer and confidence."""
    calibrated = read_calibrated(str(report.parent))
    with opened(browser, report) as seen:
        seen.page.locator("#entry").select_option("0")
        chart = seen.page.locator("#risk-chart")
        chart.scroll_into_view_if_needed()
        chart.focus()
        seen.page.keyboard.press("ArrowRight")
        row = calibrated.table[0][0]
        told = seen.text("#tip")
        assert f"measured risk {row.risk:.4f}" in told
        assert "proved safe" in told or "not proved safe" in told
        box = chart.bounding_box()
        seen.page.mouse.move(box["x"] + box["width"] - 30, box["y"] + 100)
        assert seen.text("#tip").startswith("λ 0")
        token = seen.page.locator(".example").first.locator(".output .token").first
        token.scroll_into_view_if_needed()
        token.hover()
        assert seen.text("#tip").startswith(f"layer {seen.tokens()[0]['layer']} of {NUM_LAYERS}")
        assert "confidence 0." in seen.text("#tip")


def test_everything_is_reached_by_keys(browser: Any, report: pathlib.Path) -> None:
    """Tab reaches the theme, the promise, charts, search, outputs and slider; arrows move through tokens."""
    with opened(browser, report) as seen:
        reached = []
        for _ in range(60):
            seen.page.keyboard.press("Tab")
            reached.append(seen.page.evaluate("document.activeElement.id || document.activeElement.className"))
        expected = ["theme", "entry", "range", "risk-chart", "exits-chart", "search", "changed", "output"]
        assert [name for name in reached if name in expected][: len(expected)] == expected
        output = seen.page.locator(".example").first.locator(".output").first
        output.focus()
        layers = [token["layer"] for token in seen.tokens()]
        for layer in layers[:2]:
            seen.page.keyboard.press("ArrowRight")
            assert seen.text("#said").startswith(f"layer {layer} of {NUM_LAYERS}, confidence")
        seen.page.keyboard.press("Escape")
        assert not seen.page.locator("#tip").is_visible()


def test_phones(browser: Any, report: pathlib.Path) -> None:
    """At 375 pixels nothing is wider than the screen, and a tap does what pointing does."""
    with opened(browser, report, **PHONE) as seen:
        sizes = seen.page.evaluate("[document.documentElement.scrollWidth, window.innerWidth]")
        assert sizes == [375, 375]
        token = seen.page.locator(".example").first.locator(".output .token").nth(1)
        token.scroll_into_view_if_needed()
        token.tap()
        assert seen.page.locator("#tip").is_visible()
        box = seen.page.locator("#tip").bounding_box()
        assert box["x"] >= 0
        assert box["x"] + box["width"] <= 375


def test_markup_in_texts_stays_text(browser: Any, report: pathlib.Path) -> None:
    """A prompt with a script in it is shown as text, and does nothing."""
    with opened(browser, report) as seen:
        seen.page.get_by_label("Search examples").fill("evil")
        seen.settle()
        card = seen.page.locator(".example").first
        assert card.locator(".prompt").text_content() == EVIL
        assert card.locator(".reference").text_content() == EVIL
        assert seen.page.title() == "calm-beam: tiny"


def test_foreign_scripts_do_not_run(browser: Any, report: pathlib.Path, tmp_path: pathlib.Path) -> None:
    """The policy blocks a foreign script in the file, and the check for messages sees it."""
    changed = tmp_path / "changed.html"
    foreign = "<script>document.title = 'foreign'</script><img src='http://example.invalid/x.png'></main>"
    changed.write_text(report.read_text(encoding="utf-8").replace("</main>", foreign), encoding="utf-8")
    context = browser.new_context()
    seen = SeenPage(context.new_page())
    failures: list[str] = []
    seen.page.on("requestfailed", lambda request: failures.append(f"{request.failure} {request.url}"))
    seen.page.goto(changed.as_uri())
    seen.settle()
    assert seen.page.title() == "calm-beam: tiny"
    assert [("Content Security Policy" in message) for message in seen.messages] == [True, True]
    assert failures == ["csp http://example.invalid/x.png"]
    context.close()


def test_a_page_without_outputs(browser: Any, report: pathlib.Path, tmp_path: pathlib.Path) -> None:
    """Without generations the promises and the chart of risks are shown, and empty parts are not."""
    page = build_page(
        read_calibrated(str(report.parent)),
        None,
        vocabulary=None,
        sizes=DecoderSizes(
            num_layers=NUM_LAYERS, width=8, attention_width=8, mlp_width=8, encoder_width=8, vocab_size=8
        ),
        most_examples=500,
        seed=0,
        remarks=["why there are none"],
    )
    bare = tmp_path / "bare.html"
    bare.write_text(page, encoding="utf-8")
    with opened(browser, bare) as seen:
        assert seen.page.locator("#risk-chart svg").is_visible()
        assert not seen.page.locator("#examples").is_visible()
        assert not seen.page.locator("#exits").is_visible()
        assert "why there are none" in seen.text("#notes")
        seen.move(2)
