"""Tables on the terminal."""

from typing import Any

from rich import box
from rich.table import Table


class PlainTable(Table):
    """A table with its title at the left, and no line but one below its head."""

    def __init__(self, title: str, **settings: Any) -> None:
        """Prepares a table without columns; `settings` as of `rich.table.Table`."""
        super().__init__(title=title, title_justify="left", box=box.SIMPLE_HEAD, pad_edge=False, **settings)

    def add_numbers(self, *names: str) -> None:
        """Adds columns whose cells stand at the right, and are never broken: numbers that are cut would be others."""
        for name in names:
            self.add_column(name, justify="right", no_wrap=True)
