"""Stored outputs: what every prompt became at every threshold, one Parquet file a shard.

Everything downstream (losses, tests, reports) reads these files, never the decoder's memory: what is tested is what is
stored.
"""

import dataclasses
import json
import os
from collections.abc import Collection, Iterable, Iterator
from typing import Any

import pyarrow
import pyarrow.compute
import pyarrow.parquet

from calm_beam.errors import CalmBeamError
from calm_beam.examples import Example
from calm_beam.storage import open_input, replacing


@dataclasses.dataclass(frozen=True, kw_only=True)
class Output:
    """One output of one prompt.

    Attributes:
      text: The text that metrics see, without eos; where there was no vocabulary, the generated ids joined by spaces.
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
      runner_ups: Of the last output, what a sweep needs to go on below its threshold (`SweepResult.runner_ups`); None
        where none goes on.
    """

    example: Example
    truncated: bool
    duplicate: bool
    failure: str | None
    outputs: tuple[Output, ...]
    runner_ups: tuple[float, ...] | None = None


@dataclasses.dataclass(frozen=True, kw_only=True)
class StoredShard:
    """What a shard's file says about itself.

    Attributes:
      shard: Number of the shard, from 0.
      examples: Number of its examples.
      failed: Examples among them that could not be decoded.
      digest: Of the examples, and of how they were decoded.
    """

    shard: int
    examples: int
    failed: int
    digest: str


class GenerationsError(CalmBeamError, ValueError):
    """Stored generations that cannot be trusted, or are not those that were asked for."""


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
        ("reference_ids", pyarrow.list_(pyarrow.list_(pyarrow.int32()))),
        ("cluster", pyarrow.string()),
        ("file_index", pyarrow.int32()),
        ("line", pyarrow.int64()),
        ("truncated", pyarrow.bool_()),
        ("duplicate", pyarrow.bool_()),
        ("failure", pyarrow.string()),
        ("outputs", pyarrow.list_(_OUTPUT)),
        ("runner_ups", pyarrow.list_(pyarrow.float32())),
    ]
)
_METADATA_KEY = b"calm_beam"


def write_generations(
    path: str | os.PathLike[str], generations: Iterable[Generation], *, shard: int = 0, digest: str = ""
) -> None:
    """Writes one shard as Parquet; the file appears whole or not at all.

    Args:
      path: Where to; an existing file is replaced.
      generations: The shard's generations.
      shard: Number of the shard.
      digest: Of the examples and of how they were decoded: what tells whether a later run may take the file over.
    """
    rows = []
    for generation in generations:
        row = dataclasses.asdict(generation)
        rows.append({**row.pop("example"), **row})
    failed = sum(row["failure"] is not None for row in rows)
    about = {"shard": shard, "examples": len(rows), "failed": failed, "digest": digest}
    schema = _SCHEMA.with_metadata({_METADATA_KEY: json.dumps(about).encode()})
    table = pyarrow.Table.from_pylist(rows, schema=schema)
    with replacing(path) as temporary:
        pyarrow.parquet.write_table(table, temporary, compression="zstd")


def stored_shard(path: str) -> StoredShard:
    """Returns what a shard's file says about itself, reading no generation.

    Raises:
      GenerationsError: If it is no file of `write_generations`.
    """
    try:
        with open_input(path) as raw, pyarrow.parquet.ParquetFile(raw) as file:
            about = json.loads((file.schema_arrow.metadata or {})[_METADATA_KEY])
            shard = StoredShard(**about)
            rows = file.metadata.num_rows
    except (pyarrow.ArrowException, KeyError, TypeError, ValueError) as error:
        raise GenerationsError(
            f"{path}: is no file of generations of this version of calm-beam ({type(error).__name__}: {error}). Remove "
            "it to have the shard decoded again."
        ) from error
    if rows != shard.examples:
        raise GenerationsError(f"{path}: holds {rows} examples, but says that it has {shard.examples}.")
    return shard


def read_generations(path: str | os.PathLike[str], *, only: Collection[str] | None = None) -> Iterator[Generation]:
    """Yields the generations of one shard, in the order in which they were written.

    Args:
      path: A file of `write_generations`.
      only: Ids of those that are wanted; None for all.
    """
    example_fields = [field.name for field in dataclasses.fields(Example)]
    with open_input(path) as raw, pyarrow.parquet.ParquetFile(raw) as file:
        for batch in file.iter_batches():
            if only is not None:
                wanted = pyarrow.array(only, pyarrow.string())
                batch = batch.filter(pyarrow.compute.is_in(batch["id"], value_set=wanted))
            for row in batch.to_pylist():
                example = {name: _as_tuple(row.pop(name)) for name in example_fields}
                outputs = tuple(
                    Output(**{name: _as_tuple(value) for name, value in output.items()})
                    for output in row.pop("outputs")
                )
                runner_ups = _as_tuple(row.pop("runner_ups"))
                yield Generation(example=Example(**example), outputs=outputs, runner_ups=runner_ups, **row)


def stored_failures(path: str) -> list[tuple[str, str]]:
    """Returns id and reason of every example of a shard that could not be decoded.

    Args:
      path: A file of `write_generations`.
    """
    with open_input(path) as raw:
        table = pyarrow.parquet.read_table(raw, columns=["id", "failure"])
    return [(row["id"], row["failure"]) for row in table.to_pylist() if row["failure"] is not None]


def stored_prompts(path: str | os.PathLike[str]) -> set[tuple[str | None, tuple[int, ...] | None]]:
    """Returns the prompts of one shard, as pairs of text and token ids, one of which is None.

    Args:
      path: A file of `write_generations`.
    """
    with open_input(path) as raw:
        table = pyarrow.parquet.read_table(raw, columns=["input", "input_ids"])
    return {(row["input"], _as_tuple(row["input_ids"])) for row in table.to_pylist()}


def stored_examples(path: str | os.PathLike[str]) -> list[Example]:
    """Returns the examples of one shard, without their outputs.

    Args:
      path: A file of `write_generations`.
    """
    names = [field.name for field in dataclasses.fields(Example)]
    with open_input(path) as raw:
        table = pyarrow.parquet.read_table(raw, columns=names)
    return [Example(**{name: _as_tuple(value) for name, value in row.items()}) for row in table.to_pylist()]


def _as_tuple(value: Any) -> Any:
    if not isinstance(value, list):
        return value
    # Of lists within lists alone, since the other lists are long.
    return tuple(map(_as_tuple, value)) if value and isinstance(value[0], list) else tuple(value)
