"""Reading a page back."""

import html.parser
import json
import pathlib
from typing import Any

_DATA = '<script type="application/json" id="data">'


class ParsedPage(html.parser.HTMLParser):
    """Texts of the relevant elements, and the names of all."""

    def __init__(self, page: str) -> None:
        super().__init__()
        self.tags: list[str] = []
        self.attributes: list[tuple[str, str | None]] = []
        self.texts: dict[str, list[str]] = {}
        self._open: str | None = None
        self.feed(page)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        """Records an element."""
        self.tags.append(tag)
        self.attributes.extend(attrs)
        self.texts.setdefault(tag, []).append("")
        self._open = tag

    def handle_endtag(self, tag: str) -> None:
        """Ends an element."""
        self._open = None

    def handle_data(self, data: str) -> None:
        """Records a text of the element that began last, up to its end."""
        if self._open:
            self.texts[self._open][-1] += data


def page_data(page: str) -> dict[str, Any]:
    """Returns the data that the page's script reads: the first of the two scripts."""
    content: dict[str, Any] = json.loads(ParsedPage(page).texts["script"][0])
    return content


def with_data(page: str, content: dict[str, Any]) -> str:
    """Returns the page with other data in place of its own."""
    data = json.dumps(content).replace("<", "\\u003c")
    begin = page.index(_DATA) + len(_DATA)
    return page[:begin] + data + page[page.index("</script>", begin) :]


def page_about(report: pathlib.Path, content: dict[str, Any], folder: pathlib.Path) -> pathlib.Path:
    """Writes a report with other data into a folder, and returns its path."""
    path = folder / "changed.html"
    path.write_text(with_data(report.read_text(encoding="utf-8"), content), encoding="utf-8")
    return path
