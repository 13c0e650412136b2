"""Jobs and marks of generations describe a folder, and refuse one that differs."""

import dataclasses
import json
import pathlib
import re
from collections.abc import Callable
from typing import Any

import hypothesis
import pytest
from hypothesis import strategies as st

from calm_beam.decoding.settings import DecodeSettings
from calm_beam.exits.rule import ExitRule
from calm_beam.inputs.examples import Example
from calm_beam.manifest import ModelRecord, VocabularyRecord, content_digest
from calm_beam.outputs import COMPLETE, DecodeJob, FinishedSweep, OutputsError, StoredShard


def build_job(**changes: Any) -> DecodeJob:
    """Returns a job, with the given fields changed."""
    values: dict[str, Any] = {
        "model": ModelRecord(uri="models/t5", fingerprint="sha256:6d", layers=8),
        "vocabulary": VocabularyRecord(fingerprint="sha256:76", extra_ids=100),
        "settings": DecodeSettings(
            rule=ExitRule(schedule="decay", tau=4.0),
            thresholds=(1, 0.5, 0.1),
            max_input_length=32,
            max_decode_length=8,
            task_prefix="translate é: ",
        ),
        "on_long": "truncate",
        "cluster_key": None,
        "patterns": ("data/*.jsonl",),
        "files": ("/data/a.jsonl", "/data/b.jsonl"),
        "num_shards": 4,
        "software": {"jax": "0.10.2"},
    }
    return DecodeJob(**{**values, **changes})


def build_shard(**changes: Any) -> StoredShard:
    """Returns the description of a shard of three examples, with the given fields changed."""
    return StoredShard(**{"shard": 2, "examples": 3, "failed": 0, "digest": "sha256:00", **changes})


def _example(**changes: Any) -> Example:
    values: dict[str, Any] = {
        "id": "a",
        "has_own_id": True,
        "input": "text",
        "input_ids": None,
        "references": ("x", "y"),
        "cluster": None,
        "file_index": 0,
        "line": 1,
    }
    return Example(**{**values, **changes})


@pytest.mark.parametrize(
    "changes", [{}, {"vocabulary": None, "cluster_key": "page", "on_long": "error", "end_ids": (7, 9)}]
)
def test_a_job_returns_from_its_file(tmp_path: pathlib.Path, changes: dict[str, Any]) -> None:
    """A written job reads back equal, with the same fingerprint and digest."""
    job = build_job(**changes)
    job.write(str(tmp_path))
    read = DecodeJob.read(str(tmp_path))
    assert read == job
    assert (read.outputs(), read.digest()) == (job.outputs(), job.digest())


def test_what_ends_outputs_is_said_where_it_is_not_t5s(tmp_path: pathlib.Path) -> None:
    """T5's jobs omit the default end ids, so that jobs of earlier versions are read and resumed."""
    build_job().write(str(tmp_path))
    assert "end_ids" not in json.loads((tmp_path / "decode.json").read_text())
    assert DecodeJob.read(str(tmp_path)).end_ids == (1,)


_CHANGES: dict[str, dict[str, Any]] = {
    "model.uri is 'models/t5' there, 'elsewhere' here": {
        "model": ModelRecord(uri="elsewhere", fingerprint="sha256:6d", layers=8)
    },
    "vocabulary.extra_ids is 100 there, 0 here": {"vocabulary": VocabularyRecord(fingerprint="sha256:76", extra_ids=0)},
    "end_ids is None there, [7, 9] here": {"end_ids": (7, 9)},
    "on_long is 'truncate' there, 'error' here": {"on_long": "error"},
    "cluster_key is None there, 'page' here": {"cluster_key": "page"},
    "patterns is ['data/*.jsonl'] there, ['data/a*.jsonl'] here": {"patterns": ("data/a*.jsonl",)},
    "files is ['/data/a.jsonl', '/data/b.jsonl'] there, ['/data/a.jsonl'] here": {"files": ("/data/a.jsonl",)},
    "num_shards is 4 there, 5 here": {"num_shards": 5},
    "software.jax is '0.10.2' there, '0.11' here": {"software": {"jax": "0.11"}},
    "settings.rule.confidence is 'softmax' there, 'state' here": {
        "settings": dataclasses.replace(
            build_job().settings, rule=ExitRule(confidence="state", schedule="decay", tau=4.0)
        )
    },
    "settings.thresholds is [1.0, 0.5, 0.1] there, [1.0, 0.5] here": {
        "settings": dataclasses.replace(build_job().settings, thresholds=(1, 0.5))
    },
}


@pytest.mark.parametrize("difference", _CHANGES)
def test_jobs_differ_in_words(difference: str) -> None:
    """Another value of any field gives another digest, and one sentence with both values."""
    other = build_job(**_CHANGES[difference])
    assert other.digest() != build_job().digest()
    assert other.differences(build_job()) == (difference,)
    assert build_job().differences(build_job()) == ()


def _edited(content: dict[str, Any]) -> str:
    return json.dumps({**content, "num_shards": 5})


@pytest.mark.parametrize(
    ("edit", "message"),
    [
        (_edited, "decode.json: was changed after it was written: its digest is another."),
        (lambda content: json.dumps({**content, "schema": "v9"}), "is not of the form calm-beam/generations/v2, the"),
        (lambda content: "[]", "is not of the form calm-beam/generations/v2, the only one that this calm-beam knows."),
        (lambda content: json.dumps(content)[:-9], "decode.json: not JSON: "),
    ],
)
def test_a_job_that_was_changed_is_refused(
    tmp_path: pathlib.Path, edit: Callable[[dict[str, Any]], str], message: str
) -> None:
    """A file that was edited, cut or has another format is refused by its path."""
    build_job().write(str(tmp_path))
    path = tmp_path / DecodeJob.FILE
    path.write_text(edit(json.loads(path.read_text())))
    with pytest.raises(OutputsError, match=re.escape(message)):
        DecodeJob.read(str(tmp_path))


def _software_is_a_number(content: dict[str, Any]) -> dict[str, Any]:
    return {**content, "software": 3}


def _settings_are_a_list(content: dict[str, Any]) -> dict[str, Any]:
    return {**content, "settings": []}


def _model_is_a_list(content: dict[str, Any]) -> dict[str, Any]:
    return {**content, "model": []}


@pytest.mark.parametrize("edit", [_software_is_a_number, _settings_are_a_list, _model_is_a_list])
def test_a_sealed_file_of_another_form_is_refused(
    tmp_path: pathlib.Path, edit: Callable[[dict[str, Any]], dict[str, Any]]
) -> None:
    """A right digest does not make a job of another file."""
    build_job().write(str(tmp_path))
    content = edit(json.loads((tmp_path / DecodeJob.FILE).read_text()))
    (tmp_path / DecodeJob.FILE).write_text(json.dumps({**content, "digest": content_digest(content)}))
    with pytest.raises(OutputsError, match=r"decode\.json: is not as calm-beam writes it \("):
        DecodeJob.read(str(tmp_path))


@pytest.mark.parametrize("edit", [{"shards": [1]}, {"shards": None}, {"examples": "6"}, {"shards": [{"shard": 0}]}])
def test_a_sealed_mark_of_another_form_is_refused(tmp_path: pathlib.Path, edit: dict[str, Any]) -> None:
    """A right digest does not make a mark of success of another file."""
    job = build_job()
    _complete(tmp_path, job)
    content = {**json.loads((tmp_path / COMPLETE).read_text()), **edit}
    (tmp_path / COMPLETE).write_text(json.dumps({**content, "digest": content_digest(content)}))
    with pytest.raises(OutputsError, match=r"complete\.json: (is not as calm-beam writes it|does not match)"):
        FinishedSweep.read(str(tmp_path), job)


def test_a_folder_without_a_job_says_nothing(tmp_path: pathlib.Path) -> None:
    """A folder without decode.json is not described."""
    with pytest.raises(OutputsError, match=r"decode\.json: no such file, so nothing identifies the generations"):
        DecodeJob.read(str(tmp_path))


def test_shards_that_come_twice_count_once() -> None:
    """The same shard from a repeated bundle counts once; shards are listed by number."""
    first, second = build_shard(shard=1), build_shard(shard=3, examples=4)
    finished = FinishedSweep.of([second, first, second, first], job="j", examples=7)
    assert finished.shards == (first, second)
    assert finished.examples == 7


def test_a_wrong_number_of_examples_is_refused() -> None:
    """A lost shard, one too many, or two results for one shard end the run."""
    shards = [build_shard(shard=1), build_shard(shard=3)]
    for count in (5, 7):
        with pytest.raises(OutputsError, match=rf"{count} examples were read, but 6 decoded\."):
            FinishedSweep.of(shards, job="j", examples=count)
    with pytest.raises(OutputsError, match=r"shard 1 was decoded twice, with different results"):
        FinishedSweep.of([*shards, build_shard(shard=1, digest="sha256:ff")], job="j", examples=6)


def _complete(folder: pathlib.Path, job: DecodeJob, numbers: tuple[int, ...] = (0, 2)) -> FinishedSweep:
    """Fills a folder with empty files and marks it as complete."""
    shards = [build_shard(shard=number) for number in numbers]
    for number in numbers:
        pathlib.Path(job.shard_path(str(folder), number)).touch()
    finished = FinishedSweep.of(shards, job=job.digest(), examples=3 * len(numbers))
    finished.write(str(folder))
    return finished


def test_the_mark_of_success_returns_from_its_file(tmp_path: pathlib.Path) -> None:
    """A complete folder gives its shards; hidden files of a killed process are ignored."""
    job = build_job()
    finished = _complete(tmp_path, job)
    (tmp_path / ".generations-00001-of-00004.parquet.0badcafe.tmp").touch()
    assert FinishedSweep.read(str(tmp_path), job) == finished
    assert [pathlib.Path(path).name for path in DecodeJob.shard_files(str(tmp_path))] == [
        "generations-00000-of-00004.parquet",
        "generations-00002-of-00004.parquet",
    ]


def test_a_folder_that_is_not_complete_is_refused(tmp_path: pathlib.Path) -> None:
    """A missing mark, a shard too few, one too many, and the mark of another job are each reported."""
    job = build_job()
    with pytest.raises(OutputsError, match=r"has no complete\.json, so decoding did not finish there"):
        FinishedSweep.read(str(tmp_path), job)
    _complete(tmp_path, job)
    with pytest.raises(OutputsError, match=r"complete\.json: does not match decode\.json next to it"):
        FinishedSweep.read(str(tmp_path), build_job(num_shards=5))
    strange = pathlib.Path(job.shard_path(str(tmp_path), 1))
    strange.touch()
    with pytest.raises(OutputsError, match=r"generations-00001-of-00004\.parquet: the data have no example for"):
        FinishedSweep.read(str(tmp_path), job)
    strange.unlink()
    pathlib.Path(job.shard_path(str(tmp_path), 2)).unlink()
    with pytest.raises(OutputsError, match=r"1 shard has no file, shard 2 first"):
        FinishedSweep.read(str(tmp_path), job)
    (tmp_path / COMPLETE).write_text((tmp_path / COMPLETE).read_text().replace('"examples": 3', '"examples": 2'))
    with pytest.raises(OutputsError, match=r"complete\.json: was changed after it was written"):
        FinishedSweep.read(str(tmp_path), job)


@hypothesis.settings(deadline=None)
@hypothesis.given(
    changes=st.sampled_from(
        [
            {"id": "b"},
            {"input": "texts"},
            {"references": ("x",)},
            {"references": ("y", "x")},
            {"cluster": "c"},
            {"line": 2},
            {"file_index": 1},
        ]
    ),
    place=st.integers(0, 2),
)
def test_a_digest_tells_examples_apart(changes: dict[str, Any], place: int) -> None:
    """A changed, lost or doubled example, another job or another shard changes a shard's digest."""
    job = build_job()
    examples = [_example(id=f"{index}", line=index + 5) for index in range(3)]
    digest = job.shard_digest(0, examples=examples)
    changed = [dataclasses.replace(each, **changes) if i == place else each for i, each in enumerate(examples)]
    others = [
        job.shard_digest(0, examples=changed),
        job.shard_digest(0, examples=examples[:place] + examples[place + 1 :]),
        job.shard_digest(0, examples=[*examples, examples[place]]),
        build_job(num_shards=5).shard_digest(0, examples=examples),
        job.shard_digest(1, examples=examples),
    ]
    assert digest not in others
    assert digest == job.shard_digest(0, examples=list(examples))
