"""Pipelines give every prompt the answer of a single call, once, however prompts are spread."""

import dataclasses
import gzip
import itertools
import json
import pathlib
from collections.abc import Sequence
from typing import Any

import apache_beam as beam
import pytest
from apache_beam.runners.portability.fn_api_runner import FnApiRunner

from calm_beam.checkpoints import load_checkpoint
from calm_beam.errors import UsageError
from calm_beam.inputs.demo import embedded
from calm_beam.inputs.examples import DataError
from calm_beam.manifest import DataRecord, GroupRecord, Manifest, ManifestError, read_manifest, write_manifest
from calm_beam.outputs import read_answers
from calm_beam.serving import Generator
from calm_beam.serving.loss_meter import LossMeter
from calm_beam.transforms import Generate, ReadExamples, ReadPrompts, ShardPrompts
from tests.answers import THRESHOLD, assert_same_answers, named_rows, write_embedded_manifest, write_served_folder
from tests.calm_beam.serving.builders import build_entry, build_served_manifest
from tests.pipelines import BROKEN_ID, id_rows, split_rows, write_model, write_rows

_BATCH_SIZE = 4


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> pathlib.Path:
    """A tiny model with a vocabulary, its manifest, and forty texts."""
    return write_served_folder(tmp_path_factory.mktemp("served"))


@pytest.fixture(scope="module")
def broken(tmp_path_factory: pytest.TempPathFactory) -> pathlib.Path:
    """A model whose logits are not finite once a prompt has `BROKEN_ID`, its manifest, and token ids."""
    folder = tmp_path_factory.mktemp("broken")
    model = write_model(folder / "model", is_broken=True)
    write_manifest(build_served_manifest(load_checkpoint(model)), folder / "manifest.json")
    rows = [*id_rows(12), {"id": "bad", "input_ids": [BROKEN_ID, 1]}, {"id": "strange", "input_ids": [9, 64]}]
    write_rows(folder / "rows.jsonl", rows)
    return folder


def _run(source: beam.PTransform, output: pathlib.Path, folder: pathlib.Path, **asked: Any) -> list[dict[str, Any]]:
    """Answers into a folder with the model and manifest of another, and returns the rows."""
    settings = {"manifest": str(folder), "model": str(folder / "model"), "batch_size": _BATCH_SIZE, **asked}
    with beam.Pipeline(runner=FnApiRunner()) as pipeline:
        _ = pipeline | source | Generate(output=str(output), **settings)
    return list(read_answers(str(output)))


def _lines(path: pathlib.Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]


def test_answers_are_those_of_one_at_a_time(tmp_path: pathlib.Path) -> None:
    """The demo model answers a hundred prompts as `Generator` does one by one; near ties would be counted."""
    manifest = write_embedded_manifest(tmp_path / "manifest.json")
    with gzip.open(embedded.CALIBRATION_SET, "rt", encoding="utf-8") as file:
        prompts = [json.loads(line) for line in itertools.islice(file, 100)]
    path = write_rows(tmp_path / "rows.jsonl", prompts)
    rows = _run(
        ReadPrompts(str(path), num_shards=2),
        tmp_path / "answers",
        tmp_path,
        manifest=str(manifest),
        model=str(embedded.MODEL),
        batch_size=None,
    )
    generator = Generator.from_manifest(manifest, embedded.MODEL)
    expected = {prompt["id"]: generator.generate(prompt["input"]) for prompt in prompts}
    assert assert_same_answers(rows, expected, threshold=0.9) <= 1


@pytest.mark.parametrize(("files", "num_shards", "output_format"), [(1, 1, "parquet"), (3, 5, "jsonl")])
def test_answers_do_not_depend_on_how_prompts_are_spread(
    folder: pathlib.Path, tmp_path: pathlib.Path, files: int, num_shards: int, output_format: str
) -> None:
    """Other files, another order, other shards and another format hold the same answers."""
    generator = Generator.from_manifest(folder / "manifest.json", folder / "model")
    prompts = named_rows(40)
    paths = split_rows(tmp_path / "data", prompts[::-1], files=files)
    rows = _run(ReadPrompts(paths, num_shards=num_shards), tmp_path / "answers", folder, output_format=output_format)
    expected = {row["id"]: generator.generate(row["input"]) for row in prompts}
    assert assert_same_answers(rows, expected, threshold=THRESHOLD) == 0
    if output_format == "jsonl":
        shards = sorted((tmp_path / "answers").glob("answers-*-of-00005.jsonl.gz"))
        lines = [line for shard in shards for line in gzip.decompress(shard.read_bytes()).decode().splitlines()]
        assert [json.loads(line) for line in lines] == rows


def test_prompts_of_a_pipeline_of_ones_own_are_answered(folder: pathlib.Path, tmp_path: pathlib.Path) -> None:
    """Rows, texts and examples of a user's pipeline are answered without files; equal texts get one answer each."""
    generator = Generator.from_manifest(folder / "manifest.json", folder / "model")
    made: list[Any] = [{"id": "a", "input": "the owl"}, {"id": "b", "input_ids": [5, 9, 1]}, "the cat", "the cat"]
    with beam.Pipeline(runner=FnApiRunner()) as pipeline:
        _ = (
            pipeline
            | beam.Create(made)
            | ShardPrompts(num_shards=3)
            | Generate(manifest=str(folder), model=str(folder / "model"), output=str(tmp_path / "a"), batch_size=4)
        )
    rows = {row["id"]: row["text"] for row in read_answers(str(tmp_path / "a"))}
    assert len(rows) == 4
    assert (rows["a"], rows["b"]) == (generator.generate("the owl").text, generator.generate([5, 9, 1]).text)
    assert list(rows.values()).count(generator.generate("the cat").text) >= 2
    examples = _run(ReadExamples(str(folder / "rows.jsonl"), num_shards=2), tmp_path / "b", folder)
    assert sorted(row["id"] for row in examples) == [row["id"] for row in named_rows(40)]


def test_a_prompt_without_an_answer_is_listed(broken: pathlib.Path, tmp_path: pathlib.Path) -> None:
    """Unfit prompts and those without an output are in failures.jsonl with their reasons; others have answers."""
    data = ReadPrompts(str(broken / "rows.jsonl"), num_shards=2)
    rows = _run(data, tmp_path / "answers", broken, on_error="list")
    assert sorted(row["id"] for row in rows) == sorted(row["id"] for row in id_rows(12))
    reasons = {row["id"]: row["reason"] for row in _lines(tmp_path / "answers" / "failures.jsonl")}
    place = broken / "rows.jsonl"
    assert reasons == {
        "bad": f"{place}, line 13 (bad): the model gave logits that are not finite.",
        "strange": f"{place}, line 14 (strange): token ids must be integers from 0 to 63, got 64.",
    }
    mark = json.loads((tmp_path / "answers" / "complete.json").read_text())
    assert (mark["prompts"], mark["failed"]) == (14, 2)


@pytest.mark.parametrize(
    ("asked", "message"),
    [
        ({}, r"line 1[34] .*Pass --on_error=list to list such prompts in failures\.jsonl"),
        ({"on_error": "list", "max_failures": 1}, "2 examples failed, more than the 1 that may"),
    ],
)
def test_failures_end_the_run_unless_they_may_be(
    broken: pathlib.Path, tmp_path: pathlib.Path, asked: dict[str, Any], message: str
) -> None:
    """By default the first failure ends the run, else the first above the limit; no mark of success is written."""
    data = ReadPrompts(str(broken / "rows.jsonl"), num_shards=1)
    with pytest.raises(Exception, match=message):
        _run(data, tmp_path / "answers", broken, **asked)
    assert not (tmp_path / "answers" / "complete.json").exists()


def test_ids_are_unique(folder: pathlib.Path, tmp_path: pathlib.Path) -> None:
    """Two prompts with one id end the run before anything is decoded, from files and from a user's pipeline."""
    rows = [{"id": "a", "input": "the owl"}, {"id": "a", "input": "the cat"}]
    path = write_rows(tmp_path / "rows.jsonl", rows)
    with pytest.raises(Exception, match=r"id 'a' occurs 2 times.* Ids must be unique: they name the answers"):
        _run(ReadPrompts(str(path)), tmp_path / "one", folder)
    with pytest.raises(Exception, match=r"id 'a' occurs 2 times.* Ids must be unique: they name the answers"):
        _run(_Made(rows), tmp_path / "two", folder)
    assert not list(tmp_path.glob("*/answers-*"))


class _Made(beam.PTransform):
    """Prompts that a pipeline makes."""

    def __init__(self, rows: Sequence[Any]) -> None:
        super().__init__()
        self._rows = rows

    # Beam has no type hints for tuples of PCollections, and would report so at every run.
    @beam.typehints.decorators.no_annotations
    def expand(self, pipeline: beam.Pipeline) -> Any:
        return pipeline | beam.Create(self._rows) | ShardPrompts(num_shards=2)


def test_sampled_prompts_have_a_loss_each(broken: pathlib.Path, tmp_path: pathlib.Path) -> None:
    """Losses equal the meter's single ones; a prompt without output has loss 1, a refused one none."""
    data = ReadPrompts(str(broken / "rows.jsonl"), num_shards=3)
    probe = {"on_error": "list", "probe_share": 0.999999, "probe_salt": "s"}
    answers = {row["id"]: row for row in _run(data, tmp_path / "answers", broken, **probe)}
    losses = {row["id"]: row for row in _lines(tmp_path / "answers" / "losses.jsonl")}
    generator = Generator.from_manifest(broken / "manifest.json", broken / "model")
    meter = LossMeter(generator, share=1, salt="s")
    for row in id_rows(12):
        answer = generator.generate(row["input_ids"])
        assert answer.text == answers[row["id"]]["text"]
        measured = meter.measure(row["id"], row["input_ids"], answer=answer)
        assert (losses[row["id"]]["loss"], losses[row["id"]]["failure"]) == (measured.value, None)
        assert losses[row["id"]]["manifest"] == generator.manifest.digest
    assert losses["bad"]["loss"] == 1
    assert "not finite" in losses["bad"]["failure"]
    assert losses.keys() == answers.keys() | {"bad"}


def test_a_sample_is_drawn_by_ids_alone(folder: pathlib.Path, tmp_path: pathlib.Path) -> None:
    """The same salt samples the same prompts, however they are spread, and answers do not change."""
    taken = []
    for num_shards in (1, 4):
        output = tmp_path / str(num_shards)
        data = ReadPrompts(str(folder / "rows.jsonl"), num_shards=num_shards)
        _run(data, output, folder, probe_share=0.3, probe_salt="s")
        taken.append({row["id"]: row["loss"] for row in _lines(output / "losses.jsonl")})
    assert taken[0] == taken[1]
    assert 0 < len(taken[0]) < 40


def _grouped(model: pathlib.Path) -> Manifest:
    """Returns a manifest with entries for all prompts, for group a, and for group b, which never exits."""
    checkpoint = load_checkpoint(model)
    path = (dataclasses.replace(build_entry(None).path[0], n=100),)
    entries = (
        build_entry(0.3),
        build_entry(0.5, group="a", path=(dataclasses.replace(build_entry(0.5).path[0], n=100),)),
        build_entry(None, group="b", path=path),
    )
    data = DataRecord(
        patterns=("data",),
        examples=200,
        duplicates=0,
        failed=0,
        truncated=0,
        fingerprint="sha256:64",
        groups=tuple(GroupRecord(name=name, examples=100) for name in "ab"),
    )
    return build_served_manifest(checkpoint, entries, data=data)


@pytest.mark.parametrize("output_format", ["parquet", "jsonl"])
def test_groups_are_answered_by_their_entries(tmp_path: pathlib.Path, output_format: str) -> None:
    """Rows name their threshold; each entry has its losses, and never exit and unknown groups have none."""
    model = write_model(tmp_path / "model")
    write_manifest(_grouped(model), tmp_path / "manifest.json")
    names = itertools.cycle(("a", "b", "unknown"))
    rows = [{**row, "group": next(names)} for row in id_rows(12)]
    data = ReadPrompts(str(write_rows(tmp_path / "rows.jsonl", rows)), num_shards=2, group_key="group")
    probe = {"probe_share": 0.999999, "probe_salt": "s", "output_format": output_format}
    found = {row["id"]: row for row in _run(data, tmp_path / "answers", tmp_path, **probe)}
    thresholds = {"a": 0.5, "b": None, "unknown": None}
    for row in rows:
        assert found[row["id"]]["group"] == row["group"]
        assert found[row["id"]]["threshold"] == thresholds[row["group"]]
    mark = json.loads((tmp_path / "answers" / "complete.json").read_text())
    assert [(group["group"], group["prompts"]) for group in mark["groups"]] == [("a", 4), ("b", 4), ("unknown", 4)]
    assert mark["losses"] == [{"calibration": 1, "losses": 4}]
    of_a = {row["id"] for row in rows if row["group"] == "a"}
    assert {row["id"] for row in _lines(tmp_path / "answers" / "losses-00001.jsonl")} == of_a
    assert not (tmp_path / "answers" / "losses.jsonl").exists()


def test_only_missing_shards_are_answered(folder: pathlib.Path, tmp_path: pathlib.Path) -> None:
    """A resumed run keeps stored shards, and ends with the same bytes."""
    output = tmp_path / "answers"
    data = str(folder / "rows.jsonl")
    _run(ReadPrompts(data, num_shards=3), output, folder)
    before = {path.name: path.read_bytes() for path in output.iterdir()}
    (output / "complete.json").unlink()
    (output / "answers-00001-of-00003.parquet").unlink()
    inode = (output / "answers-00000-of-00003.parquet").stat().st_ino
    _run(ReadPrompts(data, num_shards=3), output, folder, resume=True)
    assert {path.name: path.read_bytes() for path in output.iterdir()} == before
    assert (output / "answers-00000-of-00003.parquet").stat().st_ino == inode


def test_what_cannot_be_asked_is_told_at_once(folder: pathlib.Path, tmp_path: pathlib.Path) -> None:
    """Other sources, an existing output and prompts of another kind are refused when the pipeline is made."""
    data = str(folder / "rows.jsonl")
    made = beam.Pipeline(runner=FnApiRunner()) | beam.Create([1])
    with pytest.raises(UsageError, match="Generate takes what ReadPrompts, ShardPrompts or ReadExamples gives"):
        (made, made) | Generate(manifest=str(folder), output=str(tmp_path / "a"))
    with pytest.raises(ValueError, match="output_format: invalid choice: 'csv'"):
        _run(ReadPrompts(data), tmp_path / "a", folder, output_format="csv")
    checkpoint = load_checkpoint(write_model(tmp_path / "model"))
    write_manifest(build_served_manifest(checkpoint, (build_entry(None),)), tmp_path / "manifest.json")
    with pytest.raises(ManifestError, match="the entry says never exit: there is no risk to watch"):
        _run(ReadPrompts(data), tmp_path / "a", tmp_path, probe_share=0.5)
    with pytest.raises(DataError, match=r"rows\.jsonl, line 1: is text, but the manifest is about prompts of token"):
        _run(ReadPrompts(data), tmp_path / "a", tmp_path)
    assert not (tmp_path / "a").exists()


def test_losses_of_two_metrics_do_not_meet(
    folder: pathlib.Path, tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A run is not resumed with a changed file of the user's metric, since one list holds losses of one metric."""
    module = tmp_path / "metric_that_changes.py"
    source = "def same(candidate, references):\n    return float(candidate in references)\n"
    module.write_text(source)
    monkeypatch.syspath_prepend(tmp_path)
    manifest = read_manifest(folder / "manifest.json")
    name = "metric_that_changes:same"
    entries = [dataclasses.replace(entry, metric=name) for entry in manifest.calibrations]
    write_manifest(dataclasses.replace(manifest, calibrations=tuple(entries), plan=None), tmp_path / "manifest.json")
    asked = {"manifest": str(tmp_path / "manifest.json"), "metric": name, "probe_share": 0.5}
    path = write_rows(tmp_path / "rows.jsonl", named_rows(6))
    _run(ReadPrompts(str(path), num_shards=1), tmp_path / "answers", folder, **asked)
    module.write_text(f"{source}# Changed.\n")
    with pytest.raises(UsageError, match=r"was begun in another way: .*metric_source"):
        _run(ReadPrompts(str(path), num_shards=1), tmp_path / "answers", folder, resume=True, **asked)
