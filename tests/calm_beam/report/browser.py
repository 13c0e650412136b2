"""The page in the machine's Chromium, headless."""

import contextlib
import pathlib
import shutil
from collections.abc import Iterator
from typing import Any, TypeVar

import pytest

T = TypeVar("T")
CHROMIUM = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
PHONE = {"viewport": {"width": 375, "height": 812}, "has_touch": True, "is_mobile": True}
EVIL = "</script><script>document.title = 'broken out'</script><img src=http://example.invalid/x.png>"

needs_browser = [
    pytest.mark.slow,
    pytest.mark.skipif(CHROMIUM is None, reason="needs a browser: apt-get install chromium"),
    pytest.mark.timeout(240),
]


def in_a_browser(test: T) -> T:
    """Marks a single test as `needs_browser` marks a module."""
    for mark in needs_browser:
        mark(test)
    return test


class SeenPage:
    """A page, with its messages and requests."""

    def __init__(self, page: Any) -> None:
        self.page = page
        self.messages: list[str] = []
        self.requests: list[str] = []
        page.on("console", lambda message: self.messages.append(message.text))
        page.on("pageerror", lambda error: self.messages.append(str(error)))
        page.on("request", lambda request: self.requests.append(request.url))

    def move(self, lane: int) -> None:
        """Moves the slider as a user does, and waits for the result."""
        slider = self.page.locator("#slider")
        slider.focus()
        now = int(slider.input_value())
        for _ in range(abs(lane - now)):
            self.page.keyboard.press("ArrowRight" if lane > now else "ArrowLeft")
        self.settle()

    def settle(self) -> None:
        """Waits until all requested frames have been drawn."""
        self.page.evaluate("() => new Promise((done) => requestAnimationFrame(() => requestAnimationFrame(done)))")

    def text(self, selector: str) -> str:
        """Returns the text of an element."""
        return str(self.page.locator(selector).text_content())

    def tokens(self) -> list[dict[str, Any]]:
        """Returns text, layer and colour of the tokens of the first output."""
        found: list[dict[str, Any]] = (
            self.page.locator(".example")
            .first.locator(".output")
            .first.evaluate(
                """(output) => [...output.querySelectorAll(".token")].map((token) => ({
                text: token.textContent,
                layer: Number([...token.classList].find((name) => /^l\\d+$/.test(name)).slice(1)),
                colour: getComputedStyle(token).backgroundColor,
            }))"""
            )
        )
        return found


@contextlib.contextmanager
def opened(browser: Any, report: pathlib.Path, **options: Any) -> Iterator[SeenPage]:
    """Opens the file without a network; checks at the end for messages, and requests other than for the file."""
    context = browser.new_context(**{"viewport": {"width": 1280, "height": 900}, **options})
    try:
        seen = SeenPage(context.new_page())
        seen.page.goto(report.as_uri())
        seen.settle()
        yield seen
        assert seen.messages == []
        assert seen.requests == [report.as_uri()]
    finally:
        context.close()


@contextlib.contextmanager
def started_browser() -> Iterator[Any]:
    """Starts the browser, and ends it."""
    playwright = pytest.importorskip("playwright.sync_api", reason="needs playwright: pip install 'calm-beam[dev]'")
    with playwright.sync_playwright() as driver:
        # Containers often have no user for a sandbox.
        started = driver.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox"])
        yield started
        started.close()
