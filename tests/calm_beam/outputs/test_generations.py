"""Stored generations."""

import contextlib
import hashlib
import json
import pathlib
import re
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import numpy as np
import pyarrow
import pyarrow.parquet
import pytest

from calm_beam.inputs.examples import Example
from calm_beam.outputs import (
    Generation,
    Output,
    OutputsError,
    StoredShard,
    read_generations,
    stored_examples,
    stored_failures,
    stored_prompts,
    stored_shard,
    write_generations,
)


def _example(**changes: Any) -> Example:
    values: dict[str, Any] = {
        "id": "a",
        "has_own_id": True,
        "input": "häst ☃ \n",
        "input_ids": None,
        "references": ("one", ""),
        "cluster": "§ 3",
        "file_index": 3,
        "line": 2**40,
    }
    return Example(**{**values, **changes})


def _output(*tokens: int) -> Output:
    return Output(
        text=" ".join(map(str, tokens)),
        tokens=tokens,
        exit_layers=tuple(1 + token % 8 for token in tokens),
        confidences=tuple(float(np.float32(token / 7)) for token in tokens),
    )


_WHOLE = Generation(
    example=_example(), truncated=True, duplicate=False, failure=None, outputs=(_output(5, 6, 1), _output(5, 1))
)
_GENERATIONS = [
    _WHOLE,
    Generation(
        example=_example(
            id="b",
            has_own_id=False,
            input=None,
            input_ids=(7, 0, 2**31 - 1),
            references=("7 9", ""),
            reference_ids=((7, 9, 1), ()),
            cluster=None,
        ),
        truncated=False,
        duplicate=True,
        failure=None,
        outputs=(_output(1), _output(*range(300))),
    ),
    Generation(
        example=_example(id="c", references=()),
        truncated=False,
        duplicate=False,
        failure="it was not finite",
        outputs=(),
    ),
]


def test_what_is_read_is_what_was_written(tmp_path: pathlib.Path) -> None:
    """Texts, ids, failures, missing inputs and empty references read back equal, of the same types, in order."""
    path = tmp_path / "shard.parquet"
    write_generations(path, _GENERATIONS)
    found = list(read_generations(path))
    assert found == _GENERATIONS
    assert isinstance(found[1].example.input_ids, tuple)
    assert found[1].example.input is None
    assert found[0].example.input_ids is None
    assert found[2].example.references == ()
    assert type(found[0].outputs[0].confidences[0]) is float


def test_an_output_without_tokens_survives(tmp_path: pathlib.Path) -> None:
    """Empty lists inside an output read back as empty tuples, not as None."""
    path = tmp_path / "shard.parquet"
    empty = Generation(example=_example(), truncated=False, duplicate=False, failure=None, outputs=(_output(),))
    write_generations(path, [empty])
    assert list(read_generations(path)) == [empty]


def test_files_of_earlier_versions_are_read(tmp_path: pathlib.Path) -> None:
    """Their digest is that of their rows as JSON; a wrong one is refused."""
    path = tmp_path / "shard.parquet"
    write_generations(path, _GENERATIONS)
    table = pyarrow.parquet.read_table(path)
    about = table.schema.metadata[b"calm_beam"]
    content = about + b"".join(json.dumps(row).encode() for row in table.to_pylist())
    for digest, is_right in ((hashlib.sha256(content).hexdigest(), True), ("0" * 64, False)):
        earlier = table.replace_schema_metadata({b"calm_beam": about, b"calm_beam_content": digest})
        pyarrow.parquet.write_table(earlier, path)
        with contextlib.nullcontext() if is_right else pytest.raises(OutputsError, match="not what was written"):
            assert list(read_generations(path)) == _GENERATIONS


@pytest.mark.parametrize("column", ["text", "tokens", "confidences", "line", "failure"])
def test_another_value_is_another_content(column: str, tmp_path: pathlib.Path) -> None:
    """A file with another value in any column, but the digest of the first, is refused."""
    path = tmp_path / "shard.parquet"
    write_generations(path, _GENERATIONS)
    table = pyarrow.parquet.read_table(path)
    rows = table.to_pylist()
    changed: dict[str, Any] = {"line": 7, "failure": ""}
    if column in changed:
        rows[0][column] = changed[column]
    else:
        values = rows[0]["outputs"][0][column]
        rows[0]["outputs"][0][column] = values[:-1] if column == "text" else [*values[:-1], 3]
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(rows, schema=table.schema), path)
    with pytest.raises(OutputsError, match="not what was written"):
        list(read_generations(path))


def test_some_generations_are_read(tmp_path: pathlib.Path) -> None:
    """Generations of given ids come in the order of the file; unknown ids are ignored, and no ids give none."""
    path = tmp_path / "shard.parquet"
    write_generations(path, _GENERATIONS)
    ids = [item.example.id for item in _GENERATIONS]
    assert list(read_generations(path, only=[ids[1], "another", ids[0]])) == _GENERATIONS[:2]
    assert list(read_generations(path, only=[])) == []


def test_examples_are_read_without_outputs(tmp_path: pathlib.Path) -> None:
    """The examples of a shard are those of its generations."""
    path = tmp_path / "shard.parquet"
    write_generations(path, _GENERATIONS)
    assert stored_examples(path) == [item.example for item in _GENERATIONS]


def test_an_empty_shard(tmp_path: pathlib.Path) -> None:
    """A shard without generations is a file that gives none."""
    path = tmp_path / "shard.parquet"
    write_generations(path, [])
    assert path.is_file()
    assert list(read_generations(path)) == []


def test_many_rows(tmp_path: pathlib.Path) -> None:
    """More rows than one batch of the reader are read completely and in order."""
    path = tmp_path / "shard.parquet"
    many = [
        Generation(example=_example(id=str(index)), truncated=False, duplicate=False, failure="x", outputs=())
        for index in range(70_000)
    ]
    write_generations(path, many)
    assert [each.example.id for each in read_generations(path)] == [str(index) for index in range(70_000)]


def test_the_same_generations_give_the_same_file(tmp_path: pathlib.Path) -> None:
    """Writing is deterministic, from a list or from an iterator."""
    write_generations(tmp_path / "one.parquet", _GENERATIONS)
    write_generations(tmp_path / "two.parquet", iter(_GENERATIONS))
    assert (tmp_path / "one.parquet").read_bytes() == (tmp_path / "two.parquet").read_bytes()


def _failing() -> Iterator[Generation]:
    yield _WHOLE
    raise RuntimeError("the worker was lost")


def test_a_failed_write_leaves_the_old_shard(tmp_path: pathlib.Path) -> None:
    """If the generations end in an error, the folder is unchanged, without temporary files."""
    path = tmp_path / "shard.parquet"
    with pytest.raises(RuntimeError, match="the worker was lost"):
        write_generations(path, _failing())
    assert list(tmp_path.iterdir()) == []
    write_generations(path, _GENERATIONS)
    with pytest.raises(RuntimeError, match="the worker was lost"):
        write_generations(path, _failing())
    assert list(tmp_path.iterdir()) == [path]
    assert list(read_generations(path)) == _GENERATIONS


def test_a_shard_can_be_replaced(tmp_path: pathlib.Path) -> None:
    """Writing again replaces the file, since a bundle may run twice."""
    path = tmp_path / "shard.parquet"
    write_generations(path, _GENERATIONS)
    write_generations(path, [_WHOLE])
    assert list(read_generations(path)) == [_WHOLE]


def test_a_file_says_what_it_is(tmp_path: pathlib.Path) -> None:
    """Number, digest, counts and failures with reasons of a shard are read without its generations."""
    path = str(tmp_path / "shard.parquet")
    write_generations(path, _GENERATIONS, shard=7, digest="sha256:00")
    failed = [(each.example.id, each.failure) for each in _GENERATIONS if each.failure is not None]
    assert failed
    expected = StoredShard(shard=7, examples=len(_GENERATIONS), failed=len(failed), digest="sha256:00")
    assert stored_shard(path) == expected
    assert stored_failures(path) == failed


def test_what_is_no_shard_is_refused(tmp_path: pathlib.Path) -> None:
    """A file that was cut, or is another Parquet file, is refused by its path."""
    whole, cut, other = (tmp_path / name for name in ("whole.parquet", "cut.parquet", "other.parquet"))
    write_generations(whole, _GENERATIONS)
    cut.write_bytes(whole.read_bytes()[:-5])
    pyarrow.parquet.write_table(pyarrow.table({"id": ["a"]}), other)
    for path, message in ((cut, "is damaged (ArrowInvalid: "), (other, "is not a shard of this version")):
        with pytest.raises(OutputsError, match=re.escape(f"{path}: {message}")):
            stored_shard(str(path))


@pytest.mark.parametrize("read", [read_generations, stored_examples, stored_failures, stored_prompts])
def test_damaged_pages_are_refused(read: Callable[[str], Iterable[object]], tmp_path: pathlib.Path) -> None:
    """A flipped bit in the data is an error of every reader that names the file and says what to do."""
    path = tmp_path / "shard.parquet"
    write_generations(path, _GENERATIONS)
    content = bytearray(path.read_bytes())
    # The pages are before the footer.
    for position in range(0, len(content) // 2, 7):
        content[position] ^= 4
    path.write_bytes(content)
    with pytest.raises(OutputsError, match=re.escape(f"{path}: is damaged (")) as raised:
        list(read(str(path)))
    assert "Remove it, and repeat the run that made it with --resume" in str(raised.value)


@pytest.mark.slow
def test_no_flipped_bit_gives_other_generations(tmp_path: pathlib.Path) -> None:
    """With any bit flipped, the file is refused, or reads back as written."""
    path = tmp_path / "shard.parquet"
    write_generations(path, _GENERATIONS)
    content = path.read_bytes()
    refused = 0
    for position in range(0, len(content), 5):
        flipped = bytearray(content)
        flipped[position] ^= 1 << (position % 8)
        path.write_bytes(flipped)
        try:
            assert list(read_generations(path)) == _GENERATIONS
        except OutputsError:
            refused += 1
    assert refused > len(content) // 5 // 4
