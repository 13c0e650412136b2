"""Pictures of pages: outputs in the colours of their exit layers with the slider below, or a section of any page."""

import contextlib
import io
import pathlib
import shutil
from collections.abc import Iterator
from typing import Any, Literal

Scheme = Literal["light", "dark"]

# About the width at which a README is shown.
_WIDTH = 900
_EXAMPLES = 2
_FRAME = """(examples) => {
    const from = (selector) => [...document.querySelectorAll(selector)].map((each) => each.getBoundingClientRect());
    const last = from(".example")[examples - 1];
    return Math.round(last.bottom - from("#examples-scale")[0].top + 8 + from(".player")[0].height);
}"""
_DRAWN = "() => new Promise((done) => requestAnimationFrame(() => requestAnimationFrame(done)))"


def find_browser() -> str:
    """Returns the path of the machine's Chromium.

    Raises:
      RuntimeError: If there is none.
    """
    found = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
    if found is None:
        raise RuntimeError("a browser has to show the report, and there is none: apt-get install chromium")
    return found


def photographed(
    report: pathlib.Path, *, consistency: str, delta: float, browser: str, scheme: Scheme = "light"
) -> bytes:
    """Returns a WebP picture of the part of a report that shows outputs token by token.

    Args:
      report: The report, with one entry for the guarantee below.
      consistency: Kind of consistency of the guarantee whose threshold the slider shows.
      delta: Its tolerance.
      browser: Path of a Chromium.
      scheme: Colours of the page: light or dark.
    """
    with _opened(report, browser=browser, scheme=scheme) as page:
        _choose(page, consistency=consistency, delta=delta)
        # From the colour scale to the end of the last example, where the slider is.
        height = page.evaluate(_FRAME, _EXAMPLES)
        page.set_viewport_size({"width": _WIDTH, "height": height})
        page.locator("#examples-scale").evaluate("(scale) => scrollTo(0, scale.offsetTop - 8)")
        page.evaluate(_DRAWN)
        return _webp(page.screenshot())


def photographed_section(
    report: pathlib.Path, *, heading: str, browser: str, promise: tuple[str, float] | None = None
) -> bytes:
    """Returns a WebP picture of a section of a page.

    Args:
      report: The page.
      heading: The section's heading.
      browser: Path of a Chromium.
      promise: Kind of consistency and tolerance of the guarantee to select on a calibration's report; None for the one
        that the page shows first.
    """
    with _opened(report, browser=browser, scheme="light") as page:
        if promise is not None:
            _choose(page, consistency=promise[0], delta=promise[1])
        # The slider covers whatever is below it.
        page.add_style_tag(content=".player{visibility:hidden}section{padding:20px 16px 16px !important}")
        page.evaluate(_DRAWN)
        return _webp(page.get_by_role("region", name=heading, exact=True).screenshot())


def _choose(page: Any, *, consistency: str, delta: float) -> None:
    names = page.locator("#entry option").all_text_contents()
    (name,) = [name for name in names if f"δ {delta:g} " in name and consistency in name]
    page.locator("#entry").select_option(label=name)


@contextlib.contextmanager
def _opened(report: pathlib.Path, *, browser: str, scheme: Scheme) -> Iterator[Any]:
    # Imported here: playwright is a developers' package.
    from playwright.sync_api import sync_playwright

    with sync_playwright() as driver:
        # Containers often have no user for a sandbox.
        started = driver.chromium.launch(executable_path=browser, args=["--no-sandbox"])
        try:
            # Sharp also on screens of high resolution. The page's policy would refuse a style that is added.
            context = started.new_context(
                viewport={"width": _WIDTH, "height": _WIDTH},
                device_scale_factor=2,
                color_scheme=scheme,
                bypass_csp=True,
            )
            page = context.new_page()
            page.goto(report.as_uri())
            yield page
        finally:
            started.close()


def _webp(png: bytes) -> bytes:
    # Imported here, since Pillow is a developers' package.
    from PIL import Image

    picture = io.BytesIO()
    Image.open(io.BytesIO(png)).save(picture, "WEBP", quality=80, method=6)
    return picture.getvalue()
