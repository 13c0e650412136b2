"""One JSON object a line."""

from collections.abc import Iterator

from calm_beam.inputs.examples import DEFAULT_KEYS, Example, parse_examples
from calm_beam.storage import open_input

from .parts import FilePart, WholeFiles
from .reading import Reading


class Jsonl(WholeFiles):
    """JSONL, read as gzip where the name ends in `.gz`; a file is one part, since lines have no index."""

    row = "line"
    has_fields = True

    def examples(self, part: FilePart, reading: Reading) -> Iterator[Example]:
        """Yields the examples; `DataError` names the line that is none."""
        keys = reading.keys(inputs=DEFAULT_KEYS.inputs, targets=DEFAULT_KEYS.targets)
        with open_input(part.path) as raw:
            yield from parse_examples(raw, path=part.path, file_index=part.file_index, keys=keys)
