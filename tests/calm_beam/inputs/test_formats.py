"""Formats that need no TensorFlow: the same examples from each, and errors for damaged files."""

import codecs
import gzip
import itertools
import pathlib
import re
import tracemalloc
from typing import Any

import pyarrow
import pyarrow.parquet
import pytest

from calm_beam.inputs import FORMATS, Reading, format_of, parts_of, place_of, read_examples
from calm_beam.inputs.examples import LARGEST_ROW, DataError, Example
from tests.data_files import write_parquet
from tests.pipelines import write_rows

_ROWS: list[dict[str, Any]] = [
    {"input": "où est-il ?", "references": ["a", "b"]},
    {"input": " two  spaces ", "references": []},
    {"input": "ligne\u2028une", "references": ["\n"]},
]


def _read(path: pathlib.Path, **reading: Any) -> list[Example]:
    return list(read_examples(str(path), Reading(**reading), file_index=3))


@pytest.mark.parametrize(
    "rows",
    [
        _ROWS,
        [{"id": f"x{index}", "input_ids": [5 + index, 7, 1], "reference_ids": [[7]]} for index in range(3)],
        [{"messages": [{"role": role, "content": text} for role in ("user", "assistant")]} for text in "abc"],
    ],
    ids=["text", "ids", "messages"],
)
def test_parquet_holds_what_jsonl_holds(rows: list[dict[str, Any]], tmp_path: pathlib.Path) -> None:
    """The same rows in Parquet give equal examples, with equal ids, also from several row groups."""
    expected = _read(write_rows(tmp_path / "a.jsonl", rows))
    assert _read(write_parquet(tmp_path / "a.parquet", rows)) == expected
    assert _read(write_parquet(tmp_path / "b.parquet", rows, row_group_size=2)) == expected
    assert {example.file_index for example in expected} == {3}


def test_row_groups_are_read_independently(tmp_path: pathlib.Path) -> None:
    """Each part knows the place of its rows in the file; together they are all of it, in any order."""
    path = str(write_parquet(tmp_path / "a.parquet", [{"input": f"p{index}"} for index in range(5)], row_group_size=2))
    parts = parts_of(path, file_index=1)
    found = [
        (example.input, example.line, example.file_index) for part in parts[::-1] for example in read_examples(part)
    ]
    assert found == [("p4", 5, 1), ("p2", 3, 1), ("p3", 4, 1), ("p0", 1, 1), ("p1", 2, 1)]


def test_a_null_is_a_missing_key(tmp_path: pathlib.Path) -> None:
    """A null in Parquet, which has no missing entries, is a missing key."""
    rows: list[dict[str, Any]] = [
        {"input": "a", "input_ids": None, "id": None, "references": None},
        {"input": None, "input_ids": [4]},
    ]
    text, ids = _read(write_parquet(tmp_path / "a.parquet", rows))
    assert (text.input, text.input_ids, text.has_own_id, text.references) == ("a", None, False, ())
    assert (ids.input, ids.input_ids) == (None, (4,))
    with pytest.raises(DataError, match="row 1: expected exactly one of the keys input and input_ids, got keys"):
        _read(write_parquet(tmp_path / "b.parquet", [{"input": None, "input_ids": None}]))


def test_plain_text_is_one_prompt_a_line(tmp_path: pathlib.Path) -> None:
    """Lines are prompts unchanged, without the line's end and the mark of UTF-8; compressed or not."""
    path, packed = tmp_path / "a.txt", tmp_path / "a.txt.gz"
    path.write_bytes(codecs.BOM_UTF8 + b"eins \r\nzw\xc3\xb6lf\nend")
    packed.write_bytes(gzip.compress(path.read_bytes()))
    examples = _read(path)
    assert [(each.input, each.line) for each in examples] == [("eins ", 1), ("zwölf", 2), ("end", 3)]
    assert _read(packed) == examples
    rows = write_rows(tmp_path / "a.jsonl", [{"input": each.input} for each in examples])
    assert _read(rows) == examples


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"a\n\nb\n", "line 2: is blank. Every line must be one prompt."),
        (b"a\nb\xff\n", "line 2: is not UTF-8 ("),
        ("a".encode("utf-16-le"), "line 1: 'a\\x00' holds a NUL character, which"),
    ],
)
def test_bad_lines_of_text(content: bytes, message: str, tmp_path: pathlib.Path) -> None:
    """A line that is not a prompt is named."""
    (tmp_path / "a.txt").write_bytes(content)
    with pytest.raises(DataError, match=re.escape(f"a.txt, {message}")):
        _read(tmp_path / "a.txt")


def test_text_has_no_references(tmp_path: pathlib.Path) -> None:
    """If references or clusters are needed, the first line is refused, since plain text has none."""
    (tmp_path / "a.txt").write_text("a\n")
    with pytest.raises(DataError, match=r"a\.txt, line 1: risk consistency needs references"):
        _read(tmp_path / "a.txt", needs_references=True)
    with pytest.raises(DataError, match=r"a\.txt, line 1: has no 'page', by which"):
        _read(tmp_path / "a.txt", cluster_key="page")


@pytest.mark.parametrize(
    ("columns", "message"),
    [
        ({"prompt": ["a"]}, "has none of the columns input and input_ids, only prompt. Name the column of the prompts"),
        ({"input": ["a", ""]}, "row 2: input is empty."),
        ({"input": [1.5]}, "row 1: input must be a text, got float."),
        ({"input": [b"\xff"]}, "row 1: input must be a text, got bytes."),
        ({"input": ["a"], "references": ["b"]}, "row 1: references must be a list of texts, got 'b'."),
        ({"input": ["a"], "id": [7]}, "row 1: id must be a text that is not empty, got 7."),
        ({"input": ["a", "b\0"]}, "row 2: 'b\\x00' holds a NUL character, which"),
        ({"input_ids": [[4]], "reference_ids": [[5]]}, "row 1: each of reference_ids must be a list of integers of at"),
        (
            {"input_ids": [[4]], "references": [["a"]], "reference_ids": [[[5]]]},
            "row 1: has both references and reference",
        ),
        ({"input_ids": [[4], [5, -1]]}, "row 2: input_ids must be a list of integers of at least 0, got [5, -1]."),
    ],
)
def test_bad_rows_of_parquet(columns: dict[str, list[Any]], message: str, tmp_path: pathlib.Path) -> None:
    """Errors in a row are reported as for JSONL, with file and row."""
    pyarrow.parquet.write_table(pyarrow.table(columns), tmp_path / "a.parquet")
    with pytest.raises(DataError, match=re.escape(message)) as caught:
        _read(tmp_path / "a.parquet")
    assert str(caught.value).startswith(f"{tmp_path / 'a.parquet'}")


@pytest.mark.parametrize("name", ["input", "note"])
def test_two_columns_of_one_name(name: str, tmp_path: pathlib.Path) -> None:
    """A file with two columns of one name is refused, whatever they are."""
    columns = [pyarrow.array(["a"]), pyarrow.array(["b"]), pyarrow.array(["c"])]
    table = pyarrow.Table.from_arrays(columns, names=["input", name, "note"])
    pyarrow.parquet.write_table(table, tmp_path / "a.parquet")
    with pytest.raises(DataError, match=re.escape(f"a.parquet: has two columns named {name!r}. Rename or drop one")):
        _read(tmp_path / "a.parquet")


def test_text_in_parquet_that_is_not_utf_8(tmp_path: pathlib.Path) -> None:
    """A column that claims to be text and is not is refused by its row."""
    column = pyarrow.array([b"a", b"\xff\xfe", b"c"]).cast(pyarrow.binary())
    broken = pyarrow.StringArray.from_buffers(3, *column.buffers()[1:])
    pyarrow.parquet.write_table(pyarrow.table({"input": broken}), tmp_path / "a.parquet")
    with pytest.raises(DataError, match=r"a\.parquet, row 2: holds text that is not UTF-8"):
        _read(tmp_path / "a.parquet")


def test_damaged_parquet(tmp_path: pathlib.Path) -> None:
    """An invalid file, one that was cut off, and one with a damaged page are refused by name."""
    path = write_parquet(tmp_path / "a.parquet", [{"input": f"prompt {index}"} for index in range(50)])
    content = path.read_bytes()
    path.write_bytes(content[:-20])
    with pytest.raises(DataError, match=r"a\.parquet: cannot be read as Parquet \("):
        _read(path)
    pyarrow.parquet.write_table(
        pyarrow.table({"input": [f"prompt {index}" for index in range(50)]}),
        path,
        write_page_checksum=True,
        compression="none",
        use_dictionary=False,
    )
    content = path.read_bytes()
    path.write_bytes(content.replace(b"prompt 17", b"prompt 71", 1))
    with pytest.raises(DataError, match=r"a\.parquet: damaged Parquet data after row 0 \("):
        _read(path)


def test_a_file_that_was_replaced_is_noticed(tmp_path: pathlib.Path) -> None:
    """Parts of two files are never mixed, though they are opened one after the other."""
    path = tmp_path / "a.parquet"
    parts = parts_of(str(write_parquet(path, [{"input": "a"}, {"input": "b"}], row_group_size=1)))
    path.unlink()
    write_parquet(path, [{"input": "c"}, {"input": "d"}], row_group_size=1)
    with pytest.raises(DataError, match=r"a\.parquet: was replaced while it was read\."):
        list(read_examples(parts[0]))


def test_fields_may_have_other_names(tmp_path: pathlib.Path) -> None:
    """A named field of references may hold one text; ids do not depend on names."""
    rows: list[dict[str, Any]] = [{"question": "a", "answer": "b"}, {"question": "c", "answer": ["d", "e"]}]
    usual = [{"input": "a", "references": ["b"]}, {"input": "c", "references": ["d", "e"]}]
    named = {"inputs_field": "question", "targets_field": "answer"}
    expected = _read(write_rows(tmp_path / "usual.jsonl", usual))
    assert _read(write_rows(tmp_path / "a.jsonl", rows), **named) == expected
    assert _read(write_parquet(tmp_path / "a.parquet", rows[:1]), **named) == expected[:1]
    with pytest.raises(DataError, match="expected exactly one of the keys question and input_ids, got keys"):
        _read(write_rows(tmp_path / "b.jsonl", usual), **named)


@pytest.mark.parametrize(
    ("path", "name"),
    [
        ("a.jsonl", "jsonl"),
        ("gs://b/c.d/a.jsonl.gz", "jsonl"),
        ("a.txt", "text"),
        ("a.txt.gz", "text"),
        ("a.parquet", "parquet"),
        ("a.tfrecord", "tfrecord"),
        ("a.tfrecords.gz", "tfrecord"),
        ("wmt-validation.tfrecord-00003-of-00016", "tfrecord"),
        ("seqio:wmt/validation/00003-of-00016", "seqio"),
    ],
)
def test_suffixes_tell_formats(path: str, name: str) -> None:
    """Without a format, the suffix decides; with one, it decides but for SeqIO tasks."""
    assert format_of(path) is FORMATS[name]
    named = format_of(path, Reading(data_format="text"))
    assert named is FORMATS["seqio" if name == "seqio" else "text"]


@pytest.mark.parametrize("path", ["a.csv", "a", "a.jsonl.bz2", "a.parquet.gz", "jsonl"])
def test_other_suffixes_tell_none(path: str) -> None:
    """A file of an unknown format is refused."""
    with pytest.raises(DataError, match=re.escape(f"{path}: its suffix tells no format (.jsonl, .txt,")):
        format_of(path)


@pytest.mark.parametrize("name", ["a.jsonl", "a.txt", "a.parquet"])
def test_empty_files_hold_nothing(name: str, tmp_path: pathlib.Path) -> None:
    """A file without rows gives no examples; the reader of a data set refuses that."""
    path = tmp_path / name
    path.touch()
    if name == "a.parquet":
        pyarrow.parquet.write_table(pyarrow.table({"input": pyarrow.array([], pyarrow.string())}), path)
        with pytest.raises(DataError, match=re.escape(f"{path}: holds no examples.")):
            parts_of(str(path))
    assert _read(path) == []


def test_places_are_named_as_formats_count() -> None:
    """Messages name lines, rows, records and examples."""
    places = {place_of(path, 3) for path in ("a.jsonl", "a.txt", "a.parquet", "a.tfrecord", "seqio:t/s/00000-of-00001")}
    assert places == {
        "a.jsonl, line 3",
        "a.txt, line 3",
        "a.parquet, row 3",
        "a.tfrecord, record 3",
        "seqio:t/s/00000-of-00001, example 3",
    }


@pytest.mark.parametrize("name", ["a.jsonl", "a.jsonl.gz", "a.txt", "a.txt.gz"])
def test_a_line_without_end_is_refused(name: str, tmp_path: pathlib.Path) -> None:
    """A line beyond the limit is named, without unpacking more of a small file into memory."""
    path = tmp_path / name
    content = b'{"input": "a"}\n{"input": "' + b"a" * (32 << 20) + b'"}\n'
    path.write_bytes(gzip.compress(content, 1) if path.suffix == ".gz" else content)
    tracemalloc.start()
    try:
        with pytest.raises(
            DataError, match=re.escape(f"{path}, line 2: is longer than 4 MiB, the most that a row may")
        ):
            _read(path)
        assert tracemalloc.get_traced_memory()[1] < 24 << 20
    finally:
        tracemalloc.stop()


@pytest.mark.parametrize(
    "row",
    [
        {"input": "a" * (LARGEST_ROW + 1)},
        {"input": "a", "references": ["b" * (LARGEST_ROW // 2), "c" * (LARGEST_ROW // 2)]},
    ],
    ids=["prompt", "references"],
)
def test_a_row_of_any_format_is_bounded(row: dict[str, Any], tmp_path: pathlib.Path) -> None:
    """The limit of a row holds for all formats: prompt and references together."""
    rows = [{"input": "short", "references": []}, {"references": [], **row}]
    with pytest.raises(DataError, match="row 2: is longer than 4 MiB"):
        _read(write_parquet(tmp_path / "a.parquet", rows))
    smaller = {key: value[:-1] if key == "input" else [text[:-1] for text in value] for key, value in row.items()}
    rows[1] = {"references": [], **smaller, "input": smaller["input"] or "a"}
    assert len(_read(write_parquet(tmp_path / "b.parquet", rows))) == 2


def test_a_cell_that_is_stored_once_is_read_in_small_batches(tmp_path: pathlib.Path) -> None:
    """A long text that is stored once for all rows is not in memory once per row."""
    prompts = pyarrow.DictionaryArray.from_arrays(pyarrow.array([0] * 2000), ["a" * (LARGEST_ROW - 10)])
    path = tmp_path / "a.parquet"
    table = pyarrow.Table.from_arrays([prompts], ["input"])
    pyarrow.parquet.write_table(table, path, dictionary_pagesize_limit=2 * LARGEST_ROW, store_schema=False)
    assert path.stat().st_size < LARGEST_ROW
    before = pyarrow.total_allocated_bytes()
    assert [example.line for example in itertools.islice(read_examples(str(path)), 20)] == [*range(1, 21)]
    assert pyarrow.default_memory_pool().max_memory() - before < 40 * LARGEST_ROW
