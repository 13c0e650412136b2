"""Cells of CSV files that hold texts of others: none is a formula to a spreadsheet, and none is too long to be read.

A spreadsheet computes a cell that begins with `=`, `+`, `-` or `@`, also behind a tab or a line break. A formula can
run programs and send what stands beside it. An apostrophe before it makes it a text. It is put there when a text is
written and taken away when it is read, so that every text comes back as it was; numbers are left alone.
"""

import csv
import re
from collections.abc import Iterable

from calm_beam.inputs.examples import LARGEST_ROW

# Full-width forms are the same to some spreadsheets. Apostrophes before them too: one that was there stays one.
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
    """Returns the text that `text_to_cell` has made a cell of.

    >>> text_of_cell("'=SUM(1)"), text_of_cell("'quoted'")
    ('=SUM(1)', "'quoted'")
    """
    return cell[1:] if _ESCAPED.match(cell) else cell


def csv_line(cells: Iterable[str]) -> str:
    r"""Returns a line of a CSV file. Python's own writer leaves a carriage return bare, at which readers end the line.

    >>> csv_line(["a", 'b"c', "d\re"])
    'a,"b""c","d\re"\n'
    """
    quoted = ('"{}"'.format(cell.replace('"', '""')) if _NEEDS_QUOTES.search(cell) else cell for cell in cells)
    return f"{','.join(quoted)}\n"


def allow_long_cells() -> None:
    """Lets Python's reader, from now on, take cells as long as rows may be; by itself it takes 131,072 characters."""
    csv.field_size_limit(max(csv.field_size_limit(), LARGEST_ROW))
