"""CSV cells with other people's text: no cell is a formula to a spreadsheet, and none is too long to be read.

A spreadsheet computes a cell that begins with `=`, `+`, `-` or `@`, also after a tab or a line break. A formula can run
programs and send the cells next to it. A leading apostrophe makes it a text. Writing adds the apostrophe and reading
removes it, so that every text is read back unchanged; numbers stay as they are.
"""

import csv
import re
from collections.abc import Iterable

from calm_beam.inputs.examples import LARGEST_ROW

# Some spreadsheets read full-width signs alike. Text that already has apostrophes gets one more, and keeps its own.
_FORMULA = re.compile("'*[=+\\-@\t\r\n＝＋－＠]")
_ESCAPED = re.compile("'+[=+\\-@\t\r\n＝＋－＠]")

_NEEDS_QUOTES = re.compile('[,"\r\n]')


def text_to_cell(text: str) -> str:
    """Returns a text as a cell that no spreadsheet computes.

    >>> text_to_cell("=SUM(1)"), text_to_cell("8bit"), text_to_cell("'-1")
    ("'=SUM(1)", '8bit', "''-1")
    """
    return f"'{text}" if _FORMULA.match(text) else text


def text_of_cell(cell: str) -> str:
    """Returns the text of a cell that `text_to_cell` has made.

    >>> text_of_cell("'=SUM(1)"), text_of_cell("'quoted'")
    ('=SUM(1)', "'quoted'")
    """
    return cell[1:] if _ESCAPED.match(cell) else cell


def csv_line(cells: Iterable[str]) -> str:
    r"""Returns a line of a CSV file. Python's csv writer leaves a carriage return unquoted; readers end the line there.

    >>> csv_line(["a", 'b"c', "d\re"])
    'a,"b""c","d\re"\n'
    """
    quoted = ('"{}"'.format(cell.replace('"', '""')) if _NEEDS_QUOTES.search(cell) else cell for cell in cells)
    return f"{','.join(quoted)}\n"


def allow_long_cells() -> None:
    """Raises the csv module's limit on cells, 131,072 characters by default, to the longest row for this process."""
    csv.field_size_limit(max(csv.field_size_limit(), LARGEST_ROW))
