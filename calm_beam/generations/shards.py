"""Stored outputs: what every prompt became at every threshold, one Parquet file a shard.

Everything downstream (losses, tests, reports) reads these files, never the decoder's memory: what is tested is what is
stored.
"""

import contextlib
import dataclasses
import functools
import os
from collections.abc import Collection, Iterable, Iterator
from typing import TYPE_CHECKING, Any

from calm_beam.errors import CalmBeamError
from calm_beam.inputs.examples import Example
from calm_beam.storage.parquet_shards import (
    about_shard,
    check_content,
    check_row_count,
    opened_shard,
    shard_rows,
    write_shard,
)
from calm_beam.text.counted import check_count

if TYPE_CHECKING:
    import pyarrow.parquet


@dataclasses.dataclass(frozen=True, kw_only=True)
class Output:
    """One output of one prompt.

    Attributes:
      text: The text that metrics see, without eos; where there was no vocabulary, the generated ids joined by spaces.
      tokens: Generated ids, with the final eos if it was generated.
      exit_layers: Layers used for each token, from 1.
      confidences: Confidence at each token's exit layer; the middle of its interval where a certified head decided.
      near_tie: Whether a decision on its way was within rounding, as in `calm_beam.decoding.near_ties`; None where that
        is not known, as in files of earlier versions.
    """

    text: str
    tokens: tuple[int, ...]
    exit_layers: tuple[int, ...]
    confidences: tuple[float, ...]
    near_tie: bool | None = None


@dataclasses.dataclass(frozen=True, kw_only=True)
class Generation:
    """All outputs of one prompt.

    Attributes:
      example: The example.
      truncated: Whether its prompt was cut.
      duplicate: Whether another example with the same prompt counts before it.
      failure: Why it could not be decoded; None if it was.
      outputs: The full model's output, then one per threshold in descending order; empty after a failure.
      runner_ups: Of the last output, what a sweep needs to go on below its threshold (`PromptResult.runner_ups`); None
        where none goes on.
    """

    example: Example
    truncated: bool
    duplicate: bool
    failure: str | None
    outputs: tuple[Output, ...]
    runner_ups: tuple[float, ...] | None = None

    def near_ties(self) -> tuple[bool, ...]:
        """Returns, for each threshold, whether its output or the full model's is known to have hung on a near tie."""
        full, *others = self.outputs
        return tuple(bool(full.near_tie or output.near_tie) for output in others)


@dataclasses.dataclass(frozen=True, kw_only=True)
class StoredShard:
    """What a shard's file says about itself.

    Attributes:
      shard: Number of the shard, from 0.
      examples: Number of its examples.
      failed: Examples among them that could not be decoded.
      digest: Of the examples, and of how they were decoded.
      engine: What decoded it, in words, where the run could not know its workers' instructions; else None.
    """

    shard: int
    examples: int
    failed: int
    digest: str
    engine: str | None = None

    def to_dict(self) -> dict[str, Any]:
        """Returns plain values, without an engine where there is none."""
        return {
            name: value for name, value in dataclasses.asdict(self).items() if name != "engine" or value is not None
        }

    def __post_init__(self) -> None:
        for name in ("shard", "examples", "failed"):
            check_count(name, getattr(self, name))
        if not isinstance(self.digest, str):
            raise TypeError(f"digest must be a text, got {type(self.digest).__name__}")


class GenerationsError(CalmBeamError, ValueError):
    """Stored generations that cannot be trusted, or are not those that were asked for."""


# All that are stored: which others have its prompt is said by the generation.
_EXAMPLE_FIELDS = tuple(field.name for field in dataclasses.fields(Example) if field.name != "repeats_prompt")
# The only one of them that a file may lack: where no example has a group.
_GROUP = "group"
_DECODE_AGAIN = "Remove it, and repeat the run that made it with --resume: the shard is then decoded again."


def write_generations(
    path: str | os.PathLike[str],
    generations: Iterable[Generation],
    *,
    shard: int = 0,
    digest: str = "",
    engine: str | None = None,
) -> None:
    """Writes one shard as Parquet; the file appears whole or not at all.

    Args:
      path: Where to; an existing file is replaced.
      generations: The shard's generations.
      shard: Number of the shard.
      digest: Of the examples and of how they were decoded: what tells whether a later run may take the file over.
      engine: As in `StoredShard`.
    """
    rows = []
    for generation in generations:
        row = dataclasses.asdict(generation)
        rows.append({**row.pop("example"), **row})
    has_groups = any(row[_GROUP] is not None for row in rows)
    has_near_ties = any(output["near_tie"] is not None for row in rows for output in row["outputs"])
    failed = sum(row["failure"] is not None for row in rows)
    about = StoredShard(shard=shard, examples=len(rows), failed=failed, digest=digest, engine=engine).to_dict()
    write_shard(path, rows, schema=_schema(has_groups=has_groups, has_near_ties=has_near_ties), about=about)


@functools.cache
def _schema(*, has_groups: bool, has_near_ties: bool) -> "pyarrow.Schema":
    """Returns the schema of a shard; without groups and near ties, it is that of earlier versions."""
    import pyarrow

    output = pyarrow.struct(
        [
            ("text", pyarrow.string()),
            ("tokens", pyarrow.list_(pyarrow.int32())),
            ("exit_layers", pyarrow.list_(pyarrow.int32())),
            ("confidences", pyarrow.list_(pyarrow.float32())),
            *([("near_tie", pyarrow.bool_())] if has_near_ties else []),
        ]
    )
    return pyarrow.schema(
        [
            ("id", pyarrow.string()),
            ("has_own_id", pyarrow.bool_()),
            ("input", pyarrow.string()),
            ("input_ids", pyarrow.list_(pyarrow.int32())),
            ("references", pyarrow.list_(pyarrow.string())),
            ("reference_ids", pyarrow.list_(pyarrow.list_(pyarrow.int32()))),
            ("cluster", pyarrow.string()),
            *([(_GROUP, pyarrow.string())] if has_groups else []),
            ("file_index", pyarrow.int32()),
            ("line", pyarrow.int64()),
            ("truncated", pyarrow.bool_()),
            ("duplicate", pyarrow.bool_()),
            ("failure", pyarrow.string()),
            ("outputs", pyarrow.list_(output)),
            ("runner_ups", pyarrow.list_(pyarrow.float32())),
        ]
    )


def open_shard(
    path: str | os.PathLike[str],
) -> contextlib.AbstractContextManager["pyarrow.parquet.ParquetFile"]:
    """Opens a shard, as `opened_shard` does.

    Args:
      path: A file of `write_generations`.

    Raises:
      GenerationsError: If what is read is not what was written.
      OSError: If there is no such file, or it may not be read.
    """
    return opened_shard(path, kind=GenerationsError, again=_DECODE_AGAIN)


def stored_shard(path: str) -> StoredShard:
    """Returns what a shard's file says about itself, reading no generation.

    Raises:
      GenerationsError: If it is no file of `write_generations`.
    """
    with open_shard(path) as file:
        try:
            shard = StoredShard(**about_shard(file))
        except (KeyError, TypeError, ValueError) as error:
            raise GenerationsError(
                f"{path}: is not a generations file of this version of calm-beam ({type(error).__name__}: {error}). "
                "Remove it to have the shard decoded again."
            ) from error
        rows = file.metadata.num_rows
    check_row_count(path, rows, said=shard.examples, kind=GenerationsError)
    return shard


def whole_shard(path: str) -> StoredShard:
    """Returns what a shard's file says about itself, having read all of it: what a mark of success may rest on.

    Raises:
      GenerationsError: If it is no file of `write_generations`, or damaged anywhere.
    """
    shard = stored_shard(path)
    check_content(path, kind=GenerationsError, again=_DECODE_AGAIN)
    return shard


def read_generations(path: str | os.PathLike[str], *, only: Collection[str] | None = None) -> Iterator[Generation]:
    """Yields the generations of one shard, in the order in which they were written.

    Args:
      path: A file of `write_generations`.
      only: Ids of those that are wanted; None for all.

    Raises:
      GenerationsError: If it is damaged; where its parts alone do not show that, and all generations are wanted, after
        the last of them.
    """
    with open_shard(path) as file:
        for row in shard_rows(file, only=only):
            example = {name: _as_tuple(row.pop(name)) for name in _EXAMPLE_FIELDS if name in row}
            outputs = tuple(
                Output(**{name: _as_tuple(value) for name, value in output.items()}) for output in row.pop("outputs")
            )
            runner_ups = _as_tuple(row.pop("runner_ups"))
            yield Generation(example=Example(**example), outputs=outputs, runner_ups=runner_ups, **row)


def stored_failures(path: str) -> list[tuple[str, str]]:
    """Returns id and reason of every example of a shard that could not be decoded.

    Args:
      path: A file of `write_generations`.
    """
    return [(row["id"], row["failure"]) for row in _columns(path, "id", "failure") if row["failure"] is not None]


def stored_prompts(path: str | os.PathLike[str]) -> set[tuple[str | None, tuple[int, ...] | None]]:
    """Returns the prompts of one shard, as pairs of text and token ids, one of which is None.

    Args:
      path: A file of `write_generations`.
    """
    return {(row["input"], _as_tuple(row["input_ids"])) for row in _columns(path, "input", "input_ids")}


def stored_examples(path: str | os.PathLike[str]) -> list[Example]:
    """Returns the examples of one shard, without their outputs.

    Args:
      path: A file of `write_generations`.
    """
    rows = _columns(path, *_EXAMPLE_FIELDS)
    return [Example(**{name: _as_tuple(value) for name, value in row.items()}) for row in rows]


def stored_groups(path: str | os.PathLike[str]) -> list[str | None]:
    """Returns the group of every example of one shard.

    Args:
      path: A file of `write_generations`.
    """
    return [row.get(_GROUP) for row in _columns(path, "id", _GROUP)]


def _columns(path: str | os.PathLike[str], *names: str) -> list[dict[str, Any]]:
    """Returns some columns of a shard, by row, without that of groups if there is none."""
    with open_shard(path) as file:
        stored = [name for name in names if name != _GROUP or name in file.schema_arrow.names]
        rows: list[dict[str, Any]] = file.read(columns=stored, use_threads=False).to_pylist()
    return rows


def _as_tuple(value: Any) -> Any:
    if not isinstance(value, list):
        return value
    # Of lists within lists alone, since the other lists are long.
    return tuple(map(_as_tuple, value)) if value and isinstance(value[0], list) else tuple(value)
