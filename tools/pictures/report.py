"""The report as a picture: outputs in the colours of their exit layers, and the slider below them."""

import io
import pathlib
import shutil

# About as wide as a README is shown.
_WIDTH = 900
_EXAMPLES = 2
_FRAME = """(examples) => {
    const from = (selector) => [...document.querySelectorAll(selector)].map((each) => each.getBoundingClientRect());
    const last = from(".example")[examples - 1];
    return Math.round(last.bottom - from("#examples-scale")[0].top + 8 + from(".player")[0].height);
}"""


def find_browser() -> str:
    """Returns the path of the machine's Chromium.

    Raises:
      RuntimeError: If there is none.
    """
    found = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
    if found is None:
        raise RuntimeError("a browser has to show the report, and there is none: apt-get install chromium")
    return found


def photographed(report: pathlib.Path, *, consistency: str, delta: float, browser: str) -> bytes:
    """Returns the part of a report that shows outputs token by token, as WebP.

    Args:
      report: The report, with one entry for the promise below.
      consistency: Kind of consistency of the promise whose threshold the slider is set to.
      delta: Its tolerance.
      browser: Path of a Chromium.
    """
    # Here, since both come with what developers install.
    from PIL import Image
    from playwright.sync_api import sync_playwright

    with sync_playwright() as driver:
        # Containers often have no user that a sandbox could be given to.
        started = driver.chromium.launch(executable_path=browser, args=["--no-sandbox"])
        try:
            # Sharp on screens of high resolution, too.
            context = started.new_context(
                viewport={"width": _WIDTH, "height": _WIDTH}, device_scale_factor=2, color_scheme="light"
            )
            page = context.new_page()
            page.goto(report.as_uri())
            names = page.locator("#entry option").all_text_contents()
            (name,) = [name for name in names if f"δ {delta:g} " in name and consistency in name]
            page.locator("#entry").select_option(label=name)
            # From the scale of colours to the last example's end, which the slider follows.
            height = page.evaluate(_FRAME, _EXAMPLES)
            page.set_viewport_size({"width": _WIDTH, "height": height})
            page.locator("#examples-scale").evaluate("(scale) => scrollTo(0, scale.offsetTop - 8)")
            page.evaluate("() => new Promise((done) => requestAnimationFrame(() => requestAnimationFrame(done)))")
            png = page.screenshot()
        finally:
            started.close()
    picture = io.BytesIO()
    Image.open(io.BytesIO(png)).save(picture, "WEBP", quality=80, method=6)
    return picture.getvalue()
