"""One prompt a line: no ids, and no references."""

import codecs
from collections.abc import Iterator

from calm_beam.inputs.examples import DEFAULT_KEYS, DataError, Example, example_of_row, numbered_lines
from calm_beam.storage import open_input

from .parts import FilePart, WholeFiles
from .reading import Reading


class PlainText(WholeFiles):
    """Plain text in UTF-8, read as gzip where the name ends in `.gz`; a prompt is its line without the line's end."""

    row = "line"
    has_fields = False

    def examples(self, part: FilePart, reading: Reading) -> Iterator[Example]:
        """Yields the examples; `DataError` names the line that is none."""
        keys = reading.keys(inputs=DEFAULT_KEYS.inputs, targets=DEFAULT_KEYS.targets)
        with open_input(part.path) as raw:
            for number, line in numbered_lines(raw, path=part.path):
                where = f"{part.path}, line {number}"
                if number == 1:
                    # No part of the prompt, though it would decode as a character.
                    line = line.removeprefix(codecs.BOM_UTF8)
                if not line.strip():
                    raise DataError(f"{where}: is blank. Every line must be one prompt.")
                try:
                    text = line.removesuffix(b"\n").removesuffix(b"\r").decode()
                except UnicodeDecodeError as error:
                    raise DataError(f"{where}: is not UTF-8 ({error}).") from error
                yield example_of_row(
                    {keys.inputs: text}, where=where, position=number, file_index=part.file_index, keys=keys
                )
