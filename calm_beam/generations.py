"""Stored outputs: what every prompt became at every threshold, one Parquet file a shard.

Everything downstream (losses, tests, reports) reads these files, never the decoder's memory: what is tested is what is
stored.
"""

import dataclasses
import os
from collections.abc import Iterable, Iterator
from typing import Any

import pyarrow
import pyarrow.parquet

from calm_beam.examples import Example
from calm_beam.storage import open_input, replacing


@dataclasses.dataclass(frozen=True, kw_only=True)
class Output:
    """One output of one prompt.

    Attributes:
      text: The text that metrics see; for prompts given as token ids, the generated ids joined by spaces. Without eos.
      tokens: Generated ids, with the final eos if it was generated.
      exit_layers: Layers used for each token, from 1.
      confidences: Confidence at each token's exit layer.
    """

    text: str
    tokens: tuple[int, ...]
    exit_layers: tuple[int, ...]
    confidences: tuple[float, ...]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Generation:
    """All outputs of one prompt.

    Attributes:
      example: The example.
      truncated: Whether its prompt was cut.
      duplicate: Whether another example with the same prompt counts before it.
      failure: Why it could not be decoded; None if it was.
      outputs: The full model's output, then one per threshold in descending order; empty after a failure.
    """

    example: Example
    truncated: bool
    duplicate: bool
    failure: str | None
    outputs: tuple[Output, ...]


_OUTPUT = pyarrow.struct(
    [
        ("text", pyarrow.string()),
        ("tokens", pyarrow.list_(pyarrow.int32())),
        ("exit_layers", pyarrow.list_(pyarrow.int32())),
        ("confidences", pyarrow.list_(pyarrow.float32())),
    ]
)
_SCHEMA = pyarrow.schema(
    [
        ("id", pyarrow.string()),
        ("has_own_id", pyarrow.bool_()),
        ("input", pyarrow.string()),
        ("input_ids", pyarrow.list_(pyarrow.int32())),
        ("references", pyarrow.list_(pyarrow.string())),
        ("cluster", pyarrow.string()),
        ("file_index", pyarrow.int32()),
        ("line", pyarrow.int64()),
        ("truncated", pyarrow.bool_()),
        ("duplicate", pyarrow.bool_()),
        ("failure", pyarrow.string()),
        ("outputs", pyarrow.list_(_OUTPUT)),
    ]
)


def write_generations(path: str | os.PathLike[str], generations: Iterable[Generation]) -> None:
    """Writes one shard as Parquet; the file appears whole or not at all.

    Args:
      path: Where to; an existing file is replaced.
      generations: The shard's generations.
    """
    rows = []
    for generation in generations:
        row = dataclasses.asdict(generation)
        rows.append({**row.pop("example"), **row})
    table = pyarrow.Table.from_pylist(rows, schema=_SCHEMA)
    with replacing(path) as temporary:
        pyarrow.parquet.write_table(table, temporary, compression="zstd")


def read_generations(path: str | os.PathLike[str]) -> Iterator[Generation]:
    """Yields the generations of one shard, in the order in which they were written.

    Args:
      path: A file of `write_generations`.
    """
    example_fields = [field.name for field in dataclasses.fields(Example)]
    with open_input(path) as raw, pyarrow.parquet.ParquetFile(raw) as file:
        for batch in file.iter_batches():
            for row in batch.to_pylist():
                example = {name: _as_tuple(row.pop(name)) for name in example_fields}
                outputs = tuple(
                    Output(**{name: _as_tuple(value) for name, value in output.items()})
                    for output in row.pop("outputs")
                )
                yield Generation(example=Example(**example), outputs=outputs, **row)


def stored_prompts(path: str | os.PathLike[str]) -> set[tuple[str | None, tuple[int, ...] | None]]:
    """Returns the prompts of one shard, as pairs of text and token ids, one of which is None.

    Args:
      path: A file of `write_generations`.
    """
    with open_input(path) as raw:
        table = pyarrow.parquet.read_table(raw, columns=["input", "input_ids"])
    return {(row["input"], _as_tuple(row["input_ids"])) for row in table.to_pylist()}


def _as_tuple(value: Any) -> Any:
    return tuple(value) if isinstance(value, list) else value
