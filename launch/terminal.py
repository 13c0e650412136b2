"""What is said on standard output and standard error, where text of others does nothing but be read."""

import sys
from typing import Any

from rich.console import Console
from rich.text import Text

from calm_beam.printable import printable


def say(text: object) -> None:
    """Prints progress, a warning or an error, to standard error."""
    print(printable(str(text)), file=sys.stderr)


def tell(text: object) -> None:
    """Prints a result, to standard output."""
    print(printable(str(text)))


class PlainConsole(Console):
    """Prints tables and texts of which neither control characters nor brackets mean anything."""

    def __init__(self, *, stderr: bool = False, **settings: Any) -> None:
        """Prepares to print on standard output or standard error."""
        super().__init__(stderr=stderr, markup=False, emoji=False, **settings)

    def render_str(self, text: str, **settings: Any) -> Text:
        """Returns what every text that is printed, and every cell of a table, becomes on its way."""
        return super().render_str(printable(text), **settings)
