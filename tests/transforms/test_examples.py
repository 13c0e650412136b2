"""Reading a calibration set: accepted rows, and the message of each refusal."""

import gzip
import json
import pathlib
import re
from collections.abc import Sequence
from typing import Any

import apache_beam as beam
import pytest
from apache_beam.options.pipeline_options import PipelineOptions
from apache_beam.runners.portability.fn_api_runner import FnApiRunner

from calm_beam.inputs import Reading, read_examples
from calm_beam.inputs.examples import DataError, Example
from calm_beam.inputs.set_parts import CALIBRATING, CONFIRMING, Split
from calm_beam.transforms import ReadExamples
from calm_beam.transforms.examples import DivideExamples
from tests.pipelines import TEXTUAL, run_calibration, write_model, write_rows

_ROWS = [{"id": f"r{index}", "input": f"text {index}", "references": [f"ref {index}"]} for index in range(10)]


def _write_gzip(path: pathlib.Path, rows: Sequence[object]) -> pathlib.Path:
    path.write_bytes(gzip.compress("".join(json.dumps(row) + "\n" for row in rows).encode()))
    return path


_KEPT: list[tuple[int, list[Example]]] = []
_COUNTS: list[int] = []


def _keep(element: tuple[int, list[Example]]) -> None:
    _KEPT.append((element[0], sorted(element[1], key=lambda example: (example.file_index, example.line))))


def _keep_count(count: int) -> None:
    _COUNTS.append(count)


def _read(
    *paths: pathlib.Path,
    num_shards: int = 4,
    needs_references: bool = False,
    order: str | None = None,
    cluster_key: str | None = None,
    part: Split | None = None,
) -> list[tuple[int, list[Example]]]:
    """Returns the transform's output for these files: shards with their examples, both sorted."""
    _COUNTS.clear()
    _KEPT.clear()
    pipeline = beam.Pipeline(runner=FnApiRunner(), options=PipelineOptions([]))
    read = pipeline | ReadExamples(
        [str(path) for path in paths],
        num_shards=num_shards,
        needs_references=needs_references,
        order=order,
        cluster_key=cluster_key,
        part=part,
    )
    _ = read.shards | "Keep" >> beam.Map(_keep)
    _ = read.count | "KeepCount" >> beam.Map(_keep_count)
    pipeline.run().wait_until_finish()
    return sorted(_KEPT, key=lambda pair: pair[0])


def _ids(shards: list[tuple[int, list[Example]]]) -> list[str]:
    return sorted(example.id for _, examples in shards for example in examples)


def test_reads_plain_and_compressed_files(tmp_path: pathlib.Path) -> None:
    """The same rows with their line numbers are read from .jsonl and .jsonl.gz."""
    plain = list(read_examples(str(write_rows(tmp_path / "a.jsonl", _ROWS)), file_index=2))
    packed = list(read_examples(str(_write_gzip(tmp_path / "a.jsonl.gz", _ROWS)), file_index=2))
    assert plain == packed
    assert [example.id for example in plain] == [row["id"] for row in _ROWS]
    assert [example.line for example in plain] == list(range(1, 11))
    assert plain[3].references == ("ref 3",)
    assert {example.file_index for example in plain} == {2}


def test_fields_of_an_example(tmp_path: pathlib.Path) -> None:
    """Token ids lose padding at their end, a missing id is derived, and other keys are ignored."""
    rows: list[dict[str, Any]] = [{"input_ids": [5, 0, 7, 1, 0, 0], "note": "x"}, {"id": "b", "input": " é "}]
    ids, text = read_examples(str(write_rows(tmp_path / "a.jsonl", rows)))
    assert (ids.input, ids.input_ids, ids.references, ids.has_own_id) == (None, (5, 0, 7, 1), (), False)
    assert ids.id.startswith("content-")
    assert (text.input, text.input_ids, text.id, text.has_own_id) == (" é ", None, "b", True)


def test_several_files_make_one_set(tmp_path: pathlib.Path) -> None:
    """All rows of all files arrive once, with the name of their file."""
    one = write_rows(tmp_path / "one.jsonl", _ROWS[:4])
    two = _write_gzip(tmp_path / "two.jsonl.gz", _ROWS[4:])
    shards = _read(one, two)
    assert _ids(shards) == sorted(f"r{index}" for index in range(10))
    assert {e.id for _, examples in shards for e in examples if e.file_index == 1} == {r["id"] for r in _ROWS[4:]}
    assert all(0 <= shard < 4 for shard, _ in shards)
    assert len(shards) > 1


def test_examples_that_are_there_are_divided_alike(tmp_path: pathlib.Path) -> None:
    """Examples already read by the launching machine are put in the shards that files would put them in, once each."""
    path = write_rows(tmp_path / "a.jsonl", [*_ROWS, {**_ROWS[0], "id": "again"}])
    from_file = _read(path)
    _KEPT.clear()
    pipeline = beam.Pipeline(runner=FnApiRunner(), options=PipelineOptions([]))
    shards, count = pipeline | DivideExamples(list(read_examples(str(path))), num_shards=4)
    _ = shards | beam.Map(_keep)
    _ = count | beam.Map(lambda number: _keep((-1, [])) if number == 11 else None)
    pipeline.run().wait_until_finish()
    assert sorted(_KEPT, key=lambda pair: pair[0]) == [(-1, []), *from_file]


def _homes(shards: list[tuple[int, list[Example]]]) -> dict[str, int]:
    return {example.id: shard for shard, examples in shards for example in examples}


def test_in_order_shards_depend_on_ids_alone(tmp_path: pathlib.Path) -> None:
    """With other prompts, files or rows every id stays in its shard; another salt moves it."""
    one = write_rows(tmp_path / "one.jsonl", _ROWS)
    home = _homes(_read(one, order="a"))
    changed = [{**row, "input": f"another {row['input']}"} for row in reversed(_ROWS)]
    two, three = write_rows(tmp_path / "two.jsonl", changed[:3]), write_rows(tmp_path / "three.jsonl", changed[3:])
    assert _homes(_read(two, three, order="a")) == home
    assert _homes(_read(one, order="b")) != home
    assert len(set(home.values())) > 1


def test_in_order_repeated_prompts_are_spread_and_counted_once(tmp_path: pathlib.Path) -> None:
    """Examples with one prompt are independent draws: they are spread, and all but the first are marked."""
    rows = [{"id": f"r{index}", "input": f"text {index % 2}"} for index in range(40)]
    shards = _read(write_rows(tmp_path / "rows.jsonl", rows), order="a", num_shards=5)
    for prompt in ("text 0", "text 1"):
        found = [
            (shard, example.id, example.repeats_prompt)
            for shard, examples in shards
            for example in examples
            if example.input == prompt
        ]
        assert len({shard for shard, _, _ in found}) == 5
        # By shard and id: any number of rounds has its own number of repeated prompts.
        assert [repeats for *_, repeats in sorted(found)] == [False] + [True] * 19


def test_in_order_equal_examples_without_ids_are_spread(tmp_path: pathlib.Path) -> None:
    """Equal rows without ids get distinct ids before they are divided, so that they are spread as well."""
    rows: list[dict[str, Any]] = [{"input": "the same", "references": ["x"]}] * 30
    shards = _read(write_rows(tmp_path / "rows.jsonl", rows), order="a", num_shards=5)
    assert len(shards) == 5
    assert len(set(_ids(shards))) == 30


def test_in_order_clusters_stay_together(tmp_path: pathlib.Path) -> None:
    """A cluster is the unit of drawing: its examples are in one shard, which depends on its name alone."""
    rows = [{"id": f"r{index}", "input": f"text {index}", "page": index // 4} for index in range(40)]
    shards = _read(write_rows(tmp_path / "rows.jsonl", rows), order="a", cluster_key="page")
    homes: dict[str | None, set[int]] = {}
    for shard, examples in shards:
        for example in examples:
            homes.setdefault(example.cluster, set()).add(shard)
    assert [len(found) for found in homes.values()] == [1] * 10
    assert len(set.union(*homes.values())) > 1


def test_shards_depend_on_prompts_alone(tmp_path: pathlib.Path) -> None:
    """With other files, order, ids or references every prompt stays in its shard, and equal prompts share one."""
    one = write_rows(tmp_path / "one.jsonl", _ROWS)
    changed = [{"input": row["input"], "id": f"other-{row['id']}"} for row in reversed(_ROWS)]
    two = write_rows(tmp_path / "two.jsonl", changed)
    home = {example.input: shard for shard, examples in _read(one) for example in examples}
    both = _read(two, one)
    assert {example.input: shard for shard, examples in both for example in examples} == home
    assert sum(len(examples) for _, examples in both) == 20


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("{", "not JSON: Expecting property name"),
        ("", "is blank"),
        ("[]", "expected a JSON object, got list."),
        ("{}", "expected exactly one of the keys input and input_ids, got keys []."),
        ('{"input": "a", "input_ids": [1]}', "expected exactly one of the keys input and input_ids"),
        ('{"inputs": "a"}', "got keys ['inputs']."),
        ('{"input": 5}', "input must be a text, got int."),
        ('{"input": null}', "input must be a text, got NoneType."),
        ('{"input": " \\n"}', "input is empty."),
        ('{"input_ids": "5 6"}', "input_ids must be a list of integers of at least 0, got '5 6'."),
        ('{"input_ids": [5, -1]}', "input_ids must be a list of integers of at least 0, got [5, -1]."),
        ('{"input_ids": [5, true]}', "input_ids must be a list of integers of at least 0, got [5, True]."),
        ('{"input_ids": [0, 0]}', "input_ids is empty or holds padding (0) only."),
        ('{"input": "a", "references": "b"}', "references must be a list of texts, got 'b'."),
        ('{"input": "a", "references": [1]}', "references must be a list of texts, got [1]."),
        ('{"input": "a", "id": 7}', "id must be a text that is not empty, got 7."),
        ('{"input": "a", "id": ""}', "id must be a text that is not empty, got ''."),
    ],
)
@pytest.mark.parametrize("suffix", [".jsonl", ".jsonl.gz"])
def test_malformed_lines_are_located(tmp_path: pathlib.Path, suffix: str, line: str, message: str) -> None:
    """A bad line is refused with its file, its number and the error."""
    content = (json.dumps(_ROWS[0]) + "\n" + line + "\n").encode()
    path = tmp_path / f"rows{suffix}"
    path.write_bytes(gzip.compress(content) if suffix.endswith("gz") else content)
    with pytest.raises(DataError) as caught:
        list(read_examples(str(path)))
    assert str(caught.value).startswith(f"{path}, line 2: ")
    assert message in str(caught.value)


def test_text_that_is_not_utf_8(tmp_path: pathlib.Path) -> None:
    """Latin-1 is refused with file and line, and not read as other text."""
    path = tmp_path / "rows.jsonl"
    path.write_bytes('{"input": "été"}\n'.encode("latin-1"))
    with pytest.raises(DataError, match=re.escape(f"{path}, line 1: not UTF-8 text: 'utf-8' codec can't decode")):
        list(read_examples(str(path)))


def test_deeply_nested_json(tmp_path: pathlib.Path) -> None:
    """JSON nested beyond what Python parses is a bad line like any other."""
    path = tmp_path / "rows.jsonl"
    path.write_text("[" * 100_000)
    with pytest.raises(DataError, match=re.escape(f"{path}, line 1: not JSON that we read: nested")):
        list(read_examples(str(path)))


def test_lone_surrogates_are_refused(tmp_path: pathlib.Path) -> None:
    """Half of a surrogate pair is refused: neither vocabularies nor files can hold it."""
    path = tmp_path / "rows.jsonl"
    path.write_text('{"input": "\\ud800 x"}\n')
    with pytest.raises(DataError, match=re.escape(f"{path}, line 1: ")):
        list(read_examples(str(path)))


def test_an_empty_file_has_no_examples(tmp_path: pathlib.Path) -> None:
    """Empty files, compressed or not, have no examples and are no reading error."""
    assert list(read_examples(str(write_rows(tmp_path / "a.jsonl", [])))) == []
    assert list(read_examples(str(_write_gzip(tmp_path / "a.jsonl.gz", [])))) == []


def test_truncated_gzip(tmp_path: pathlib.Path) -> None:
    """A truncated compressed file is refused by name; no row is silently lost."""
    path = _write_gzip(tmp_path / "a.jsonl.gz", [{"input": f"{7919 * index} text"} for index in range(2000)])
    path.write_bytes(path.read_bytes()[:3000])
    with pytest.raises(DataError, match=rf"{re.escape(str(path))}: damaged gzip data after line [1-9]\d* \("):
        list(read_examples(str(path)))


def test_gzip_that_is_none(tmp_path: pathlib.Path) -> None:
    """A plain file named .gz is refused by name."""
    path = write_rows(tmp_path / "a.jsonl.gz", _ROWS)
    message = f"{path}: damaged gzip data after line 0 (Not a gzipped file"
    with pytest.raises(DataError, match=re.escape(message)):
        list(read_examples(str(path)))


def test_gzip_with_flipped_bits(tmp_path: pathlib.Path) -> None:
    """Compressed data that are damaged in the middle are refused by name."""
    path = _write_gzip(tmp_path / "a.jsonl.gz", [{"input": f"{7919 * index} text"} for index in range(2000)])
    content = bytearray(path.read_bytes())
    # The first byte after the header: a kind of block that does not exist.
    content[10] = 0xFF
    path.write_bytes(content)
    with pytest.raises(DataError, match=rf"{re.escape(str(path))}: damaged gzip data after line \d+ \("):
        list(read_examples(str(path)))


def test_references_are_needed_for_risk(tmp_path: pathlib.Path) -> None:
    """If references are needed, the first example without one is refused by file, line and id."""
    path = write_rows(tmp_path / "a.jsonl", [*_ROWS[:2], {"id": "bare", "input": "x"}])
    assert len(list(read_examples(str(path)))) == 3
    message = f"{path}, line 3: risk consistency needs references, example bare has none."
    with pytest.raises(DataError, match=re.escape(message)):
        list(read_examples(str(path), Reading(needs_references=True)))
    with pytest.raises(DataError, match=re.escape(message)):
        _read(path, needs_references=True)


def test_an_id_twice_in_one_file(tmp_path: pathlib.Path) -> None:
    """An id that occurs twice ends the run, with both lines."""
    path = write_rows(tmp_path / "a.jsonl", [*_ROWS, {"id": "r3", "input": "else"}])
    message = f"id 'r3' occurs 2 times ({path}, line 4 and {path}, line 11)"
    with pytest.raises(DataError, match=re.escape(message)):
        _read(path)


def test_an_id_in_two_files(tmp_path: pathlib.Path) -> None:
    """Ids are unique over all files, even for examples that are equal in everything."""
    one = write_rows(tmp_path / "one.jsonl", _ROWS)
    two = write_rows(tmp_path / "two.jsonl", [{"id": "z", "input": "z"}, _ROWS[7]])
    with pytest.raises(DataError, match=re.escape(f"id 'r7' occurs 2 times ({one}, line 8 and {two}, line 2)")):
        _read(one, two)


def test_nothing_is_decoded_before_ids_are_checked(tmp_path: pathlib.Path) -> None:
    """With an id twice, the run ends without a generation."""
    rows = [{"id": f"r{index % 20}", "input_ids": [5, index + 2]} for index in range(21)]
    paths = [str(write_rows(tmp_path / "a.jsonl", rows))]
    model = write_model(tmp_path / "model")
    with pytest.raises(DataError, match="id 'r0' occurs 2 times"):
        run_calibration(tmp_path / "out", model=model, paths=paths, specs=TEXTUAL)
    stored = tmp_path / "out" / "generations"
    assert {path.name for path in stored.rglob("*") if path.is_file()} <= {"decode.json"}


@pytest.mark.parametrize("files", [1, 2])
def test_text_and_ids_in_one_set(files: int, tmp_path: pathlib.Path) -> None:
    """Prompts of both kinds end the run with the first row of each, in whatever files and rows they are."""
    one = write_rows(tmp_path / "one.jsonl", [*_ROWS, {"input_ids": [5, 1]}, {"input_ids": [6, 1]}][: 9 + 3 // files])
    two = write_rows(tmp_path / "two.jsonl", [{"input_ids": [5, 1]}, {"input_ids": [7, 1]}])
    ids = f"{one}, line 11" if files == 1 else f"{two}, line 1"
    message = f"{one}, line 1: its prompt is text, but that of {ids} is token ids."
    with pytest.raises(DataError, match=re.escape(message)):
        _read(*([one] if files == 1 else [two, one]))


def test_identical_rows_without_ids_are_counted(tmp_path: pathlib.Path) -> None:
    """Rows without ids may repeat: each counts as an example, and all but one as a duplicate."""
    rows = [{"input_ids": [5, 6, 1]}] * 3 + [{"input_ids": [7, 1]}]
    paths = [str(write_rows(tmp_path / "a.jsonl", rows))]
    manifest = run_calibration(tmp_path / "out", model=write_model(tmp_path / "model"), paths=paths, specs=TEXTUAL)
    assert (manifest.data.examples, manifest.data.duplicates) == (4, 2)


def test_equal_inputs_in_different_files_are_counted(tmp_path: pathlib.Path) -> None:
    """A prompt that occurs again counts as a duplicate, whatever its file, id and references."""
    one = write_rows(tmp_path / "one.jsonl", [{"id": "a", "input_ids": [5, 6, 1]}, {"id": "b", "input_ids": [6, 1]}])
    two = write_rows(
        tmp_path / "two.jsonl", [{"id": "c", "input_ids": [5, 6, 1, 0], "reference_ids": [[7]]}, {"input_ids": [6, 1]}]
    )
    manifest = run_calibration(
        tmp_path / "out", model=write_model(tmp_path / "model"), paths=[str(one), str(two)], specs=TEXTUAL
    )
    assert (manifest.data.examples, manifest.data.duplicates) == (4, 2)


_PARTS = [Split(name=name, confirm_share=0.4, salt="s") for name in (CALIBRATING, CONFIRMING)]


@pytest.mark.parametrize("order", [None, "o"])
def test_parts_make_up_the_whole(order: str | None, tmp_path: pathlib.Path) -> None:
    """Every example is in one part, which counts its own; shards are those of all the data."""
    paths = [write_rows(tmp_path / f"{part}.jsonl", _ROWS[part::2]) for part in range(2)]
    whole = {shard: {example.id for example in examples} for shard, examples in _read(*paths, order=order)}
    found: list[str] = []
    for part in _PARTS:
        shards = _read(*paths, order=order, part=part)
        assert [len(_ids(shards))] == _COUNTS
        assert all({example.id for example in examples} <= whole[shard] for shard, examples in shards)
        assert all(part.takes(example) for _, examples in shards for example in examples)
        found += _ids(shards)
    assert sorted(found) == sorted(str(row["id"]) for row in _ROWS)


def test_equal_rows_are_in_both_parts(tmp_path: pathlib.Path) -> None:
    """Equal rows get distinct ids first: kept together, a frequent prompt would be in one part only."""
    path = write_rows(tmp_path / "a.jsonl", [{"input": "a"}] * 40)
    sizes = [len(_ids(_read(path, part=part))) for part in _PARTS]
    assert sum(sizes) == 40
    assert min(sizes) > 5


def test_what_confirms_repeats_what_chose(tmp_path: pathlib.Path) -> None:
    """A prompt of both parts is marked in the holdout, so that the parts together count every repetition."""
    names = {part.name: [f"p{at}" for at in range(99) if part.has(f"p{at}")] for part in _PARTS}
    rows = [
        {"id": names[CALIBRATING][0], "input": "of both"},
        {"id": names[CONFIRMING][0], "input": "of both"},
        {"id": names[CALIBRATING][1], "input": "of one"},
        {"id": names[CONFIRMING][1], "input": "of the other"},
    ]
    path = write_rows(tmp_path / "a.jsonl", rows)
    marked = [
        example.input
        for part in _PARTS
        for _, examples in _read(path, part=part)
        for example in examples
        if example.repeats_prompt
    ]
    assert marked == ["of both"]


def test_an_id_of_both_parts_is_refused(tmp_path: pathlib.Path) -> None:
    """Two clusters with a common id may be in different parts; the ids of both are compared, and the id is refused."""
    names = [next(f"p{at}" for at in range(99) if part.has(f"p{at}")) for part in _PARTS]
    path = write_rows(tmp_path / "a.jsonl", [{"id": "x", "input": "a", "page": name} for name in names])
    for part in _PARTS:
        with pytest.raises(Exception, match="id 'x' occurs 2 times"):
            _read(path, cluster_key="page", part=part)
