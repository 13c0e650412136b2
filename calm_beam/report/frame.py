"""What all pages share: the head, its policy, the header with the switch of themes, and the scripts at the end."""

import html
from collections.abc import Sequence

from calm_beam.storage import replacing

from .foreign import isolated
from .parts import file_text, filled, source_hash

LARGEST_PAGE = 5_000_000
"""Most bytes of a page."""


def framed(body: str, *, kind: str, title: str, made: str, style: str, scripts: Sequence[str], data: str = "") -> str:
    """Returns a page that asks the network for nothing, and whose policy lets only its own style and script through.

    Args:
      body: What comes after the header, as HTML.
      kind: What is shown, after the name of the program.
      title: Of the window, after the name of the program: a text of others.
      made: What the header says besides: plain text.
      style: What the page adds to the style that all have.
      scripts: Files of the page's script, beside the one that all have.
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
    """Writes a page to a file, which appears whole or not at all."""
    with replacing(path) as temporary:
        temporary.write_text(page, encoding="utf-8", newline="\n")
