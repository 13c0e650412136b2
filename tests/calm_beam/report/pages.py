"""Reading a page back."""

import html.parser
import json
from typing import Any


class ParsedPage(html.parser.HTMLParser):
    """Texts of the elements that matter, and the names of all."""

    def __init__(self, page: str) -> None:
        super().__init__()
        self.tags: list[str] = []
        self.attributes: list[tuple[str, str | None]] = []
        self.texts: dict[str, list[str]] = {}
        self.feed(page)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        """Takes up an element."""
        self.tags.append(tag)
        self.attributes.extend(attrs)

    def handle_data(self, data: str) -> None:
        """Takes up a text as that of the element that began last."""
        if self.tags:
            self.texts.setdefault(self.tags[-1], []).append(data)


def page_data(page: str) -> dict[str, Any]:
    """Returns what the page's script reads: the first of the two scripts."""
    content: dict[str, Any] = json.loads(ParsedPage(page).texts["script"][0])
    return content
