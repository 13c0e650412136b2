"""Malformed logs end `certify` with clear messages, and nothing is written."""

import dataclasses
import gzip
import json
import pathlib
import re
import shutil
import struct
import zipfile
from collections.abc import Callable, Mapping
from typing import Any

import pyarrow
import pyarrow.parquet
import pytest

from calm_beam.launch.cli import main
from tests.calm_beam.inputs.losses.builders import (
    pack_in_zstandard,
    write_helm,
    write_inspect,
    write_lighteval,
    write_lm_eval,
)

_SCORES = [1.0, 0.0, 1.0]
_DEEP = "[" * 5000
_Spoil = Callable[[pathlib.Path], object]


@dataclasses.dataclass(frozen=True, kw_only=True)
class _Framework:
    """The log format of a framework.

    Attributes:
      write: Writes one into a folder, and returns the path for `certify`.
      log: Name of its log, as a glob below the folder.
      metric: Name of the compared metric.
    """

    write: Callable[[pathlib.Path], pathlib.Path]
    log: str
    metric: str


_FRAMEWORKS = {
    "lm_eval": _Framework(
        write=lambda folder: write_lm_eval(folder, {"none": _SCORES}, higher=True),
        log="**/samples_*.jsonl",
        metric="exact_match",
    ),
    "lighteval": _Framework(
        write=lambda folder: write_lighteval(folder, _SCORES, higher=True), log="**/details_*.parquet", metric="acc"
    ),
    "inspect": _Framework(
        write=lambda folder: write_inspect(folder / "log.eval", ["C", "I", "C"]), log="log.eval", metric="match"
    ),
    "inspect_json": _Framework(
        write=lambda folder: write_inspect(folder / "log.json", ["C", "I", "C"]), log="log.json", metric="match"
    ),
    "helm": _Framework(
        write=lambda folder: write_helm(folder, _SCORES, asked="", higher=True),
        log="**/per_instance_stats.json",
        metric="exact_match",
    ),
}


def _line(**changes: Any) -> _Spoil:
    """Returns a function that changes keys of the second line; None removes one."""

    def spoil(path: pathlib.Path) -> None:
        lines = path.read_text().splitlines()
        row = {**json.loads(lines[1]), **changes}
        lines[1] = json.dumps({key: value for key, value in row.items() if value is not _GONE})
        path.write_text("\n".join(lines) + "\n")

    return spoil


_GONE = object()


def _text(old: str, new: str) -> _Spoil:
    """Returns a function that replaces a text of the file, once."""
    return lambda path: path.write_text(path.read_text().replace(old, new, 1))


def _content(content: str | bytes) -> _Spoil:
    return lambda path: path.write_bytes(content if isinstance(content, bytes) else content.encode())


def _cut(count: int) -> _Spoil:
    return lambda path: path.write_bytes(path.read_bytes()[:-count])


def _beside(name: str, content: object, *, up: int = 0) -> _Spoil:
    """Returns a function that writes a file next to the log, or the given number of folders above."""

    def spoil(path: pathlib.Path) -> None:
        place = [path.parent, *path.parent.parents][up]
        (found,) = list(place.glob(name)) or [place / name]
        found.write_text(content if isinstance(content, str) else json.dumps(content))

    return spoil


def _member(name: str, change: Callable[[Any], Any], *, method: int = zipfile.ZIP_DEFLATED) -> _Spoil:
    """Returns a function that changes the value in a member of a ZIP file; a change to None removes the member."""

    def spoil(path: pathlib.Path) -> None:
        with zipfile.ZipFile(path) as source:
            members = {each: source.read(each) for each in source.namelist()}
        with zipfile.ZipFile(path, "w", method) as target:
            for each, content in members.items():
                value = change(json.loads(content)) if each == name else content
                if value is not None:
                    target.writestr(each, value if isinstance(value, str | bytes) else json.dumps(value))

    return spoil


def _sample(**changes: Any) -> _Spoil:
    return _member("samples/1_epoch_1.json", lambda sample: {**sample, **changes})


def _header(**changes: Any) -> _Spoil:
    return _member("header.json", lambda header: {**header, **changes})


def _directory(field: str, place: int, value: int, *, entry: int = 2) -> _Spoil:
    """Returns a function that sets a field of an entry of a ZIP file's directory, at a place in that entry."""

    def spoil(path: pathlib.Path) -> None:
        content = bytearray(path.read_bytes())
        start = -1
        for _ in range(entry + 1):
            start = content.index(b"PK\x01\x02", start + 1)
        struct.pack_into(field, content, start + place, value)
        path.write_bytes(bytes(content))

    return spoil


def _zstandard(then: _Spoil) -> _Spoil:
    def spoil(path: pathlib.Path) -> None:
        plain = path.rename(path.with_name("plain"))
        pack_in_zstandard(plain, path)
        plain.unlink()
        then(path)

    return spoil


def _log(**changes: Any) -> _Spoil:
    """Returns a function that changes keys of a log of Inspect in JSON."""
    return lambda path: path.write_text(json.dumps({**json.loads(path.read_text()), **changes}))


def _twice(path: pathlib.Path) -> None:
    with pytest.warns(UserWarning, match="Duplicate name"), zipfile.ZipFile(path, "a") as archive:
        archive.writestr("samples/1_epoch_1.json", archive.read("samples/1_epoch_1.json"))


def _entries(change: Callable[[list[dict[str, Any]]], Any]) -> _Spoil:
    """Returns a function that changes the list of HELM's statistics."""
    return lambda path: path.write_text(json.dumps(change(json.loads(path.read_text()))))


def _stat(**changes: Any) -> _Spoil:
    """Returns a function that changes the first statistic of the second instance."""

    def change(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
        rows[1]["stats"][0].update(changes)
        return rows

    return _entries(change)


def _entry(**changes: Any) -> _Spoil:
    return _entries(lambda rows: [rows[0], {**rows[1], **changes}, *rows[2:]])


def _details(change: Callable[[list[dict[str, Any]]], list[dict[str, Any]]]) -> _Spoil:
    """Returns a function that changes the rows of lighteval's details."""

    def spoil(path: pathlib.Path) -> None:
        rows = change(pyarrow.parquet.read_table(path).to_pylist())
        pyarrow.parquet.write_table(pyarrow.Table.from_pylist(rows), path)

    return spoil


def _each(**changes: Any) -> _Spoil:
    """Returns a function that changes columns of every row."""
    return _details(lambda rows: [{**row, **changes} for row in rows])


def _each_doc(**changes: Any) -> _Spoil:
    return _details(lambda rows: [{**row, "doc": {**row["doc"], **changes}} for row in rows])


def _each_metric(value: Any) -> _Spoil:
    return _details(lambda rows: [{**row, "metric": {"acc": value}} for row in rows])


def _gzip_that_is_none(path: pathlib.Path) -> None:
    path.rename(path.with_name(f"{path.name}.gz"))


def _half_gzip(path: pathlib.Path) -> None:
    content = gzip.compress(path.read_bytes())
    path.with_name(f"{path.name}.gz").write_bytes(content[: len(content) // 2])
    path.unlink()


# Compressed files have another name, so the folder is given.
_RENAMED = (_gzip_that_is_none, _half_gzip)

_CASES: Mapping[str, tuple[tuple[str, _Spoil, str], ...]] = {
    "lm_eval": (
        ("a list among the metrics", _line(metrics=[["exact_match"]]), "line 2: is not a sample"),
        ("an object among the metrics", _line(metrics=[{"name": "exact_match"}]), "line 2: is not a sample"),
        ("a number among the metrics", _line(metrics=[5]), "line 2: is not a sample"),
        ("a text of metrics", _line(metrics="exact_match"), "line 2: is not a sample"),
        ("a number of metrics", _line(metrics=5), "line 2: is not a sample"),
        ("metrics of null", _line(metrics=None), "line 2: is not a sample"),
        ("a metric without a value", _line(exact_match=_GONE), "line 2: is not a sample"),
        ("a list as score", _line(exact_match=[1.0]), r"of example '1' must be a number in \[0, 1\], got \[1.0\]"),
        ("an object as score", _line(exact_match={"score": 1}), r"must be a number in \[0, 1\], got {'score': 1}"),
        ("a text as score", _line(exact_match="1"), r"must be a number in \[0, 1\], got '1'"),
        ("a score of null", _line(exact_match=None), r"must be a number in \[0, 1\], got None"),
        ("a score of 400 digits", _line(exact_match=10**400), r"must be a number in \[0, 1\], got 1000"),
        ("a score of 5000 digits", _text('"exact_match": 0.0', f'"exact_match": {"9" * 5000}'), "line 2: not JSON"),
        ("a score of minus nothing much", _line(exact_match=-1e-300), r"must be a number in \[0, 1\], got -1e-300"),
        ("a score that is infinite", _text('"exact_match": 0.0', '"exact_match": Infinity'), "got inf"),
        ("a list as filter", _line(filter=["none"]), r"line 2: filter must be a name, got \['none'\]"),
        ("a number as filter", _line(filter=1), "line 2: filter must be a name, got 1"),
        ("no id", _line(doc_id=None), "line 2: doc_id must be a text that is not empty, or a number, got None"),
        ("an empty id", _line(doc_id=""), "line 2: doc_id must be a text that is not empty"),
        ("an id of 400 digits", _line(doc_id=10**400), "lacks 1 id"),
        ("an id of true", _line(doc_id=True), "line 2: doc_id must be a text .* got True"),
        ("a list as id", _line(doc_id=[1]), r"line 2: doc_id must be a text .* got \[1\]"),
        ("half a surrogate pair as id", _line(doc_id="\ud800"), "line 2: doc_id .* is not Unicode text"),
        ("an id with NUL", _line(doc_id="a\0"), "line 2: doc_id .* holds a NUL character"),
        ("an id of infinity", _text('"doc_id": 1', '"doc_id": 1e999'), "line 2: doc_id must be .* got inf"),
        (
            "an id that comes twice",
            _line(doc_id=0, doc=_GONE, doc_hash=_GONE),
            r"scores 1 id \('0'\) several times",
        ),
        ("an id of two questions", _line(doc_id=0), "id '0' is of two different examples"),
        ("another question", _line(doc={"question": "hard"}), r"gives 1 id \('1'\) to other examples"),
        ("a line that is a list", _text("\n{", "\n[]\n{"), "line 2: expected an object"),
        ("a blank line", _text("\n{", "\n\n{"), "line 2: not JSON"),
        ("a key twice", _text('"doc_id": 1', '"doc_id": 1, "doc_id": 2'), 'key "doc_id" occurs twice'),
        ("brackets without end", _text("\n{", f"\n{_DEEP}\n{{"), "line 2: not JSON"),
        ("bytes that are no UTF-8", lambda path: path.write_bytes(path.read_bytes() + b"\xff\n"), "not UTF-8 text"),
        ("nothing", _content(""), "is of none of the frameworks|holds no scores"),
        ("gzip that is none", _gzip_that_is_none, "holds no scores of single examples"),
        ("half of a gzip file", _half_gzip, "damaged gzip data|holds no scores of single examples"),
        ("results that are cut", _beside("results_*.json", '{"results": '), r"results_2026.*\.json: not JSON"),
        ("results in a list", _beside("results_*.json", []), r"results_2026.*\.json: expected an object"),
        (
            "results that say the opposite",
            _beside("results_*.json", {"higher_is_better": {"gsm8k": {"exact_match": False}}}),
            "says the opposite",
        ),
    ),
    "lighteval": (
        ("no metric", _details(lambda rows: [{"doc": row["doc"]} for row in rows]), "is of none of the frameworks"),
        ("a metric that is a number", _each(metric=1.0), "row 1: is not a detail of lighteval"),
        ("a metric that is a list", _each(metric=[1.0]), "row 1: is not a detail of lighteval"),
        ("metrics of null", _each(metric=None), "row 1: is not a detail of lighteval"),
        ("a document that is a text", _each(doc="what?"), "row 1: is not a detail of lighteval"),
        ("documents of null", _each(doc=None), "row 1: is not a detail of lighteval"),
        ("an id of null", _each_doc(id=None), r"row 1: doc\.id must be a text .* got None"),
        ("an empty id", _each_doc(id=""), r"row 1: doc\.id must be a text"),
        ("an id of true", _each_doc(id=True), r"row 1: doc\.id must be a text .* got True"),
        ("a list as id", _each_doc(id=[1]), r"row 1: doc\.id must be a text"),
        ("bytes as id", _each_doc(id=b"a"), r"row 1: doc\.id must be a text .* got b'a'"),
        ("one id for all", _each_doc(id="0"), "id '0' is of two different examples"),
        ("other questions", _each_doc(query="hard"), r"gives 3 ids .* to other examples"),
        ("other choices", _each_doc(choices=["no", "yes"]), r"gives 3 ids .* to other examples"),
        ("another right answer", _each_doc(gold_index=1), r"gives 3 ids .* to other examples"),
        ("a list as score", _each_metric([1.0]), r"acc of example '0' must be a number in \[0, 1\], got \[1.0\]"),
        ("a text as score", _each_metric("1"), r"must be a number in \[0, 1\], got '1'"),
        ("a score that is no number", _each_metric(float("nan")), r"must be a number in \[0, 1\], got nan"),
        ("a score in per cent", _each_metric(97.5), r"must be a number in \[0, 1\], got 97.5"),
        ("scores of null", _each_metric(None), "has no metric 'acc'"),
        ("no rows", lambda path: _empty(path), "holds no examples"),
        ("a file that is cut", _cut(40), "is of none of the frameworks"),
        ("nothing but its magic", _content(b"PAR1PAR1"), "is of none of the frameworks"),
        (
            "results that are cut",
            _beside("results/**/results_*.json", "{", up=4),
            r"results_2026.*\.json: not JSON",
        ),
        ("results in a list", _beside("results/**/results_*.json", [], up=4), "expected an object"),
    ),
    "inspect": (
        ("scores in a list", _sample(scores=[{"value": "C"}]), "sample 2: scores must be an object .* got \\[{"),
        ("a number of scores", _sample(scores=5), "sample 2: scores must be an object .* got 5"),
        ("a text of scores", _sample(scores="C"), "sample 2: scores must be an object .* got 'C'"),
        ("no scores", _sample(scores=None), r"has no match for 1 id \('1'\)"),
        (
            "a list as score",
            _sample(scores={"match": {"value": ["C"]}}),
            r"must be a number in \[0, 1\], got \['C'\]",
        ),
        ("a score that is a number", _sample(scores={"match": 1}), "the score of match must be an object .* got 1"),
        ("a score that is a list", _sample(scores={"match": ["C"]}), r"the score of match must be .* got \['C'\]"),
        ("a score of null", _sample(scores={"match": None}), r"match of example '1' must be a number .* got None"),
        (
            "an unknown grade",
            _sample(scores={"match": {"value": "A+"}}),
            r"must be a number in \[0, 1\], got 'A\+'",
        ),
        ("a score of 400 digits", _sample(scores={"match": {"value": 10**400}}), r"in \[0, 1\], got 1000"),
        ("a score inside a score", _sample(scores={"match": {"value": {"a": {"b": 1}}}}), r"has no match for 1 id"),
        ("a sample that is a list", _member("samples/1_epoch_1.json", lambda _: "[]"), "expected an object"),
        ("a sample that is cut", _member("samples/1_epoch_1.json", lambda _: '{"id"'), "1_epoch_1.json: not JSON"),
        ("a sample without id", _sample(id=None), "sample 2: id must be a text"),
        ("a sample with a list as id", _sample(id=[1]), r"sample 2: id must be a text .* got \[1\]"),
        ("two samples of one id", _sample(id=0), "id '0' is of two different examples"),
        ("a second epoch", _sample(epoch=2), "sample '1' has several epochs"),
        ("an epoch that is a text", _sample(epoch="1"), "sample '1' has several epochs"),
        ("another input", _sample(input="hard question"), r"gives 1 id \('1'\) to other examples"),
        ("another target", _sample(target="7"), r"gives 1 id \('1'\) to other examples"),
        ("a sample that was withdrawn", _sample(invalidation={"author": "me"}), "sample '1' was invalidated"),
        ("a log that was withdrawn", _header(invalidated=True), "the log was invalidated"),
        ("a sample too few", _header(results={"total_samples": 4}), "holds 3 samples, and its header counts 4"),
        ("a run that was cancelled", _header(status="cancelled"), "status is 'cancelled'"),
        ("a status that is a list", _header(status=["success"]), r"status is \['success'\]"),
        ("a header without eval", _header(eval=5), "is not a log of inspect, which has eval"),
        ("a header in a list", _member("header.json", lambda _: "[]"), "header.json|expected an object"),
        ("no header", _member("header.json", lambda _: None), r"header\.json: is not there"),
        ("two samples of one name", _twice, "has two members of one name"),
        ("an encrypted sample", _directory("<H", 8, 1), "is not a whole log of inspect .it is encrypted"),
        ("an unknown way of compression", _directory("<H", 10, 97), "is compressed by method 97"),
        ("LZMA", _member("none", lambda value: value, method=zipfile.ZIP_LZMA), "is compressed by method 14"),
        ("an offset past the end", _directory("<I", 42, 10**8), "nothing begins at 100000000"),
        ("an offset into another", _directory("<I", 42, 3), "nothing begins at 3|is not a whole log"),
        ("a size of 4 GB", _directory("<I", 24, 2**32 - 2), "longer than 4 MiB"),
        ("a packed size of 4 GB", _directory("<I", 20, 2**32 - 2), "longer than 4 MiB"),
        ("a size that is too small", _directory("<I", 24, 5), "is not a whole log of inspect .bad CRC-32"),
        ("another checksum", _directory("<I", 16, 7), "is not a whole log of inspect .bad CRC-32"),
        ("zstandard past the end", _zstandard(_directory("<I", 42, 10**8)), "nothing begins at 100000000"),
        ("zstandard of another size", _zstandard(_directory("<I", 24, 7)), "bad CRC-32|is not a whole log"),
        ("zstandard that is none", _directory("<H", 10, 93), "is not a whole log of inspect"),
        ("a file that is cut", _cut(30), "damaged ZIP data"),
        ("a directory of noise", _directory("<I", 0, 7, entry=1), "damaged ZIP data"),
        ("nothing but its magic", _content(b"PK\x05\x06" + bytes(18)), r"header\.json: is not there"),
        ("text", _content("a log"), "is of none of the frameworks"),
    ),
    "inspect_json": (
        ("a number of samples", _log(samples=5), "samples must be a list, got 5"),
        ("samples by id", _log(samples={"0": {}}), "samples must be a list, got {'0': {}}"),
        ("a text of samples", _log(samples="none"), "samples must be a list, got 'none'"),
        ("no samples", _log(samples=None), "holds no examples"),
        ("an empty list of samples", _log(samples=[]), "holds no examples"),
        ("samples that are numbers", _log(samples=[1, 2]), "sample 1: is not a sample of inspect"),
        ("a list of lists", _log(samples=[[]]), "sample 1: is not a sample of inspect"),
        ("a log that was withdrawn", _log(invalidated=True), "the log was invalidated"),
        ("a run that goes on", _log(status="started"), "status is 'started'"),
        ("eval in a list", _log(eval=[]), "is not a log of inspect, which has eval"),
        ("a log that is cut", _cut(20), "log.json: not JSON"),
        ("a key twice", _text('"version": 2', '"version": 2, "version": 3'), 'key "version" occurs twice'),
        ("brackets without end", _text('"samples": [', f'"samples": {_DEEP}'), "log.json: not JSON"),
    ),
    "helm": (
        (
            "a sum of 400 digits",
            _stat(sum=10**400),
            "entry 2: statistic 'exact_match': sum is larger than any number",
        ),
        ("a sum that is a text", _stat(sum="1"), "entry 2: .* has a statistic without name, count or sum"),
        ("a sum of null", _stat(sum=None), "entry 2: .* has a statistic without name, count or sum"),
        (
            "a sum that is no number",
            _stat(sum=float("nan")),
            r"of example 'id1' must be a number in \[0, 1\], got nan",
        ),
        ("a sum that is infinite", _stat(sum=float("inf")), r"must be a number in \[0, 1\], got inf"),
        ("a sum in a list", _stat(sum=[1]), "entry 2: .* has a statistic without name, count or sum"),
        ("a count of 0", _stat(count=0), r"must be a number in \[0, 1\], got None"),
        ("a count below 0", _stat(count=-1, sum=-1), "entry 2: .* count must be at least 0, got -1"),
        ("a count that is no number", _stat(count=float("nan")), "count must be at least 0, got nan"),
        ("a count that is a text", _stat(count="1"), "has a statistic without name, count or sum"),
        ("a count of 400 digits", _stat(count=10**400, sum=1.0), "larger than any number"),
        ("a name that is a list", _stat(name=[["name", "exact_match"]]), "entry 2: has a statistic without name"),
        ("a name that is a text", _stat(name="exact_match"), "entry 2: has a statistic without name"),
        ("a name inside a name", _stat(name={"name": {"name": "x"}}), "entry 2: has a statistic without name"),
        ("no name", _stat(name=None), "entry 2: has a statistic without name"),
        ("another name", _stat(name={"name": "f1"}), r"has no exact_match for 1 id \('id1'\)"),
        ("statistics by name", _entry(stats={"exact_match": 1}), "entry 2: is not the statistics of an instance"),
        ("no statistics", _entry(stats=None), "entry 2: is not the statistics of an instance"),
        ("statistics that are numbers", _entry(stats=[1]), "entry 2: has a statistic without name"),
        ("no id", _entry(instance_id=None), "entry 2: instance_id must be a text"),
        ("an object as id", _entry(instance_id={"a": 1}), "entry 2: instance_id must be a text"),
        ("an id that comes twice", _entry(instance_id="id0"), r"scores 1 id \('id0'\) several times"),
        ("a second trial", _entry(train_trial_index=1), "instance 'id1' is there in several forms"),
        ("a perturbation", _entry(perturbation={"name": "typos"}), "instance 'id1' is there in several forms"),
        ("an entry that is a list", _entries(lambda rows: [rows[0], []]), "entry 2: is not the statistics"),
        ("a statistic twice", _entries(lambda rows: [{**rows[0], "stats": rows[0]["stats"] * 2}]), "several times"),
        ("a file that is cut", _cut(20), "per_instance_stats.json: not JSON"),
        ("brackets without end", _text('"stats": [', f'"stats": {_DEEP}'), "per_instance_stats.json: not JSON"),
        ("questions that are cut", _beside("scenario_state.json", "{"), "scenario_state.json: not JSON"),
        ("questions in a list", _beside("scenario_state.json", []), "scenario_state.json: expected an object"),
        (
            "other questions",
            _beside("instances.json", [{"id": f"id{index}", "input": "hard", "references": []} for index in range(3)]),
            r"gives 3 ids .* to other examples",
        ),
        ("a schema that is cut", _beside("schema.json", "{", up=1), "schema.json: not JSON"),
        ("a schema in a list", _beside("schema.json", [], up=1), "schema.json: expected an object"),
        (
            "a schema that says the opposite",
            _beside("schema.json", {"metrics": [{"name": "exact_match", "lower_is_better": True}]}, up=1),
            "says the opposite",
        ),
    ),
}


def _empty(path: pathlib.Path) -> None:
    pyarrow.parquet.write_table(pyarrow.parquet.read_table(path).slice(0, 0), path)


@pytest.mark.parametrize(
    ("framework", "spoil", "message"),
    [
        pytest.param(framework, spoil, message, id=f"{framework}: {name}")
        for framework, cases in _CASES.items()
        for name, spoil, message in cases
    ],
)
def test_malformed_logs(
    framework: str,
    spoil: _Spoil,
    message: str,
    tmp_path: pathlib.Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """One line names the malformed log and the place of its error; nothing is written."""
    kind = _FRAMEWORKS[framework]
    whole, other = tmp_path / "whole", tmp_path / "other"
    for folder in (whole, other):
        folder.mkdir()
        kind.write(folder)
    (baseline,), (candidate,) = list(whole.glob(kind.log)), list(other.glob(kind.log))
    asked = [f"--baseline={baseline}", f"--metric={kind.metric}", "--delta=0.5", f"--output={tmp_path / 'out'}"]
    assert main(["certify", *asked, f"--candidates=x={candidate}"]) == 0
    shutil.rmtree(tmp_path / "out")
    capsys.readouterr()
    spoil(candidate)
    assert main(["certify", *asked, f"--candidates=x={other if spoil in _RENAMED else candidate}"]) in (1, 2)
    printed = capsys.readouterr()
    assert printed.out == ""
    said = [line for line in printed.err.splitlines() if "score is better" not in line and "caution" not in line]
    assert len(said) == 1, printed.err
    assert re.search(message, said[0]), said[0]
    assert str(tmp_path) in said[0]
    assert len(said[0]) < 1000
    assert not (tmp_path / "out").exists()
