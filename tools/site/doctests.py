"""A Griffe extension that turns the examples in docstrings into code blocks on the site."""

import re
from typing import Any

import griffe

_EXAMPLES = re.compile(r"^>>> .*?(?=\n\s*\n|\Z)", re.MULTILINE | re.DOTALL)


class Doctests(griffe.Extension):
    """Puts every run of `>>>` lines, with their output, into a block."""

    def on_object(self, *, obj: griffe.Object, **_: Any) -> None:
        """Changes the docstring of a module, class, function or attribute."""
        if obj.docstring is not None:
            obj.docstring.value = with_blocks(obj.docstring.value)


def with_blocks(docstring: str) -> str:
    """Returns a docstring whose examples are fenced as Markdown.

    Args:
      docstring: The docstring without indentation, as Griffe gives it.
    """
    return _EXAMPLES.sub(lambda found: f"```pycon\n{found[0].rstrip()}\n```", docstring)
