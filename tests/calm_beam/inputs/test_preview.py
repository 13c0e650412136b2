"""The preview of data before work starts."""

import json
import pathlib

from calm_beam.inputs import DataFiles
from calm_beam.inputs.preview import count_examples


def test_examples_are_counted(tmp_path: pathlib.Path) -> None:
    """Examples are counted over all files, up to a limit; in a file with a malformed row, those before it."""
    row = json.dumps({"input": "a"})
    (tmp_path / "a.jsonl").write_text(f"{row}\n" * 3)
    (tmp_path / "b.jsonl").write_text(f"{row}\n{row}\nnot json\n{row}\n")
    data = DataFiles.found(str(tmp_path / "*.jsonl"))
    assert [count_examples(data, at_most=most) for most in (6, 5, 4)] == [5, 5, None]
