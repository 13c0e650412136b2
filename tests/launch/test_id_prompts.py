"""Prompts of token ids are scored on their outputs' texts, and ids are never compared with texts."""

import json
import pathlib
import shutil
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import pytest

from calm_beam.inputs.vocabularies.vocabulary import EOS_ID, Vocabulary
from calm_beam.launch.cli import main
from calm_beam.manifest import Manifest, read_manifest
from calm_beam.outputs import DecodeJob, read_generations
from calm_beam.outputs.folder import SweepHome
from calm_beam.serving import Generator
from tests.data_files import write_parquet, write_tfrecord
from tests.pipelines import SHORT_FLAGS, id_rows, text_rows, write_model, write_rows, write_vocabulary
from tests.sampling import sampled

_FLAGS = (*SHORT_FLAGS, "--num_shards=1", "--metric=rouge_l", "--delta=0.3,0.6")
_Rows = Sequence[Mapping[str, Any]]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> pathlib.Path:
    """Gives a folder with a model, its vocabulary, and the risk table of a calibration on texts."""
    folder = tmp_path_factory.mktemp("ids")
    write_model(folder / "model", vocabulary=write_vocabulary(folder / "trained.model"))
    rows = write_rows(folder / "rows.jsonl", _text_rows())
    assert _calibrate(folder / "model", rows, folder / "text") == 0
    return folder


def _text_rows() -> list[dict[str, Any]]:
    """Returns texts, each with one reference that shares words with the model's outputs."""
    return [{"id": f"row-{index}", **row, "references": ["the cat the owl"]} for index, row in enumerate(text_rows(20))]


def _encoded(rows: _Rows, vocabulary: Vocabulary, *, references: bool) -> list[dict[str, Any]]:
    """Returns rows with their prompts as token ids, and their references too if asked for."""
    encoded = []
    for row in rows:
        as_ids = {"id": row["id"], "input_ids": [*vocabulary.encode(row["input"]), EOS_ID]}
        if references:
            as_ids["reference_ids"] = [[*vocabulary.encode(text), EOS_ID] for text in row["references"]]
        else:
            as_ids["references"] = row["references"]
        encoded.append(as_ids)
    return encoded


def _calibrate(model: pathlib.Path, data: pathlib.Path | str, output: pathlib.Path, *flags: str) -> int:
    """Calibrates on a file, or on data that a flag names."""
    named = data if isinstance(data, str) else f"--data={data}"
    paths = (f"--checkpoint={model}", named, f"--output={output}")
    return main(["calibrate", *paths, "--consistency=textual,risk", *_FLAGS, *flags])


def _says_something(manifest: Manifest) -> bool:
    """Returns whether each kind of consistency has a risk other than 0."""
    found = {(entry.consistency, step.risk != 0) for entry in manifest.calibrations for step in entry.path}
    return {("textual", True), ("risk", True)} <= found


def _vocabulary(folder: pathlib.Path) -> Vocabulary:
    return Vocabulary(folder / "model" / "sentencepiece.model")


def _seqio_task(name: str, rows: _Rows) -> str:
    """Registers a task of token ids alone, and returns the flag that names it."""
    seqio = pytest.importorskip("seqio")
    import tensorflow as tf

    def dataset(split: str, shuffle_files: bool) -> tf.data.Dataset:
        def features() -> Iterator[dict[str, Any]]:
            for row in rows:
                (targets,) = row["reference_ids"]
                yield {"id": row["id"], "inputs": row["input_ids"], "targets": targets}

        ids = tf.TensorSpec([None], tf.int32)
        signature = {"id": tf.TensorSpec([], tf.string), "inputs": ids, "targets": ids}
        return tf.data.Dataset.from_generator(features, output_signature=signature)

    feature = seqio.Feature(seqio.PassThroughVocabulary(size=64), add_eos=False)
    seqio.TaskRegistry.add(
        name,
        source=seqio.FunctionDataSource(dataset, splits=["validation"]),
        preprocessors=[],
        output_features={"inputs": feature, "targets": feature},
    )
    return f"--seqio_task={name}"


_FORMATS: Mapping[str, Callable[[pathlib.Path, _Rows, _Rows], pathlib.Path | str]] = {
    "jsonl": lambda folder, texts, _: write_rows(folder / "a.jsonl", texts),
    "jsonl, references as ids": lambda folder, _, ids: write_rows(folder / "a.jsonl", ids),
    "parquet": lambda folder, texts, _: write_parquet(folder / "a.parquet", texts, row_group_size=7),
    "parquet, references as ids": lambda folder, _, ids: write_parquet(folder / "a.parquet", ids, row_group_size=7),
    "tfrecord": lambda folder, texts, _: write_tfrecord(folder / "a.tfrecord", texts),
    "tfrecord, references as ids": lambda folder, _, ids: write_tfrecord(folder / "a.tfrecord", ids),
    "seqio": lambda folder, _, ids: _seqio_task(f"calm_beam_ids_{folder.name}", ids),
}
"""From rows with token ids and references as texts, and rows with both as ids, to data."""


@pytest.mark.parametrize("form", sampled(_FORMATS, keep=(0, 3, 6)))
def test_ids_give_what_their_texts_give(form: str, folder: pathlib.Path, tmp_path: pathlib.Path) -> None:
    """Prompts given as ids have the same risk table to the byte as texts, whatever form references have."""
    vocabulary = _vocabulary(folder)
    with_texts, with_ids = (_encoded(_text_rows(), vocabulary, references=references) for references in (False, True))
    output = tmp_path / "out"
    assert _calibrate(folder / "model", _FORMATS[form](tmp_path, with_texts, with_ids), output) == 0
    table = (output / "risk_table.csv").read_bytes()
    assert table == (folder / "text" / "risk_table.csv").read_bytes()
    ours, theirs = (read_manifest(each / "manifest.json") for each in (output, folder / "text"))
    assert (ours.vocabulary, ours.plan, ours.calibrations) == (theirs.vocabulary, theirs.plan, theirs.calibrations)
    assert ours.vocabulary is not None
    assert _says_something(ours)


@pytest.fixture(scope="module")
def bare(tmp_path_factory: pytest.TempPathFactory) -> pathlib.Path:
    """Gives a folder with a model that has no vocabulary, and a calibration with references as ids."""
    folder = tmp_path_factory.mktemp("bare")
    write_model(folder / "model")
    rows = [{**row, "reference_ids": [[7, 9, *range(20, 40)]]} for row in id_rows(20)]
    assert _calibrate(folder / "model", write_rows(folder / "rows.jsonl", rows), folder / "out") == 0
    return folder


def test_without_a_vocabulary_ids_are_compared(bare: pathlib.Path) -> None:
    """Without a vocabulary, outputs and references are ids joined by spaces, also in stored files, and losses vary."""
    manifest = read_manifest(bare / "out" / "manifest.json")
    assert manifest.vocabulary is None
    (path,) = DecodeJob.shard_files(SweepHome(str(bare / "out")).only_folder())
    for generation in read_generations(path):
        assert generation.example.references == (" ".join(map(str, [7, 9, *range(20, 40)])),)
        output = generation.outputs[0]
        assert output.text == " ".join(str(token) for token in output.tokens if token != EOS_ID)
    assert _says_something(manifest)


def _text_reference_first(rows: list[dict[str, Any]]) -> str:
    rows[3] = {"id": "row-3", "input_ids": [5, 1], "references": ["a"]}
    return "line 4: its references are texts, but outputs are token ids, since there is no vocabulary in or next to the"


def _text_reference_late(rows: list[dict[str, Any]]) -> str:
    rows.append({"id": "late", "input_ids": [5, 1], "references": ["a"]})
    return (
        "line 111: its references are texts, but outputs are token ids, since there is no vocabulary in or next to the"
    )


def _text_late(rows: list[dict[str, Any]]) -> str:
    rows.append({"id": "late", "input": "some text", "reference_ids": [[5]]})
    return "line 111: its prompt is text, but that of {path}, line 1 is token ids."


def _both_kinds_of_references(rows: list[dict[str, Any]]) -> str:
    rows[1]["references"] = ["a"]
    return "line 2: has both references and reference_ids. Leave one of them out."


def _unknown_reference(rows: list[dict[str, Any]]) -> str:
    rows[2]["reference_ids"] = [[64]]
    return "example row-2: its reference_ids have 64; the model knows ids from 0 to 63."


@pytest.mark.parametrize(
    "spoil",
    [_text_reference_first, _text_reference_late, _text_late, _both_kinds_of_references, _unknown_reference],
)
def test_what_cannot_be_compared_ends_the_run(
    spoil: Callable[[list[dict[str, Any]]], str],
    bare: pathlib.Path,
    tmp_path: pathlib.Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """Outputs and references that cannot be compared end the run before outputs are stored; the row is named."""
    rows = id_rows(110)
    message = spoil(rows)
    path = write_rows(tmp_path / "rows.jsonl", rows)
    assert _calibrate(bare / "model", path, tmp_path / "out") in (1, 2)
    assert message.format(path=path) in capsys.readouterr().err
    kept = {item.relative_to(tmp_path / "out").parts[0] for item in (tmp_path / "out").rglob("*") if item.is_file()}
    assert kept <= {"plans"}


def test_a_vocabulary_may_be_named(folder: pathlib.Path, bare: pathlib.Path, tmp_path: pathlib.Path) -> None:
    """With --vocabulary a model without one is calibrated on texts."""
    rows = write_rows(tmp_path / "a.jsonl", _encoded(_text_rows(), _vocabulary(folder), references=False))
    named = f"--vocabulary={folder / 'model' / 'sentencepiece.model'}"
    assert _calibrate(bare / "model", rows, tmp_path / "out", named) == 0
    table = (tmp_path / "out" / "risk_table.csv").read_bytes()
    assert table == (folder / "text" / "risk_table.csv").read_bytes()


def test_decode_writes_texts_of_ids(folder: pathlib.Path, tmp_path: pathlib.Path) -> None:
    """Decode writes the vocabulary's texts for prompts of ids."""
    vocabulary = _vocabulary(folder)
    data = write_rows(tmp_path / "a.jsonl", _encoded(_text_rows()[:3], vocabulary, references=True))
    output = tmp_path / "out.jsonl"
    assert (
        main(["decode", f"--checkpoint={folder / 'model'}", f"--data={data}", f"--output={output}", *SHORT_FLAGS]) == 0
    )
    rows = [json.loads(line) for line in output.read_text(encoding="utf-8").splitlines()]
    assert len(rows) == 18
    assert all(row["text"] == vocabulary.decode(row["tokens"]) for row in rows)


@pytest.mark.slow
def test_stored_generations_of_ids_are_calibrated_as_texts(folder: pathlib.Path, tmp_path: pathlib.Path) -> None:
    """Recalibration of stored generations, and random splits of them, compare texts with texts."""
    data = write_rows(tmp_path / "a.jsonl", _encoded(_text_rows(), _vocabulary(folder), references=True))
    assert _calibrate(folder / "model", data, tmp_path / "out") == 0
    again = ("calibrate", f"--generations={tmp_path / 'out'}", f"--output={tmp_path / 'again'}")
    assert main([*again, "--consistency=textual,risk", "--metric=rouge_l", "--delta=0.3,0.6"]) == 0
    table = (tmp_path / "again" / "risk_table.csv").read_bytes()
    assert table == (folder / "text" / "risk_table.csv").read_bytes()
    grids = []
    for name in (folder / "text", tmp_path / "out"):
        output = tmp_path / f"splits of {name.name}"
        flags = ("--trials=3", "--metric=rouge_l", "--delta=0.3,0.6", f"--output={output}")
        assert main(["evaluate", f"--generations={name}", *flags]) == 0
        grids.append((output / "splits_grid.csv").read_bytes())
    assert grids[0] == grids[1]
    assert b"risk" in grids[0]


@pytest.mark.parametrize("name", ["folder", "bare"])
def test_fresh_ids_are_verified_as_they_were_calibrated(
    name: str, request: pytest.FixtureRequest, tmp_path: pathlib.Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Verify compares texts under a manifest with a vocabulary, and ids without, whatever is next to the model now."""
    here: pathlib.Path = request.getfixturevalue(name)
    if name == "folder":
        rows = _encoded(_text_rows()[:10], _vocabulary(here), references=False)
        manifest = here / "text" / "manifest.json"
    else:
        rows = id_rows(10, seed=3)
        manifest = here / "out" / "manifest.json"
    data = write_rows(tmp_path / "fresh.jsonl", rows)
    model = tmp_path / "model"
    shutil.copytree(here / "model", model)
    if name == "bare":
        write_vocabulary(model / "sentencepiece.model")
    flags = (f"--manifest={manifest}", f"--checkpoint={model}", "--batch_size=4", "--num_shards=3")
    assert main(["verify", f"--data={data}", *flags]) == 0
    printed = capsys.readouterr()
    assert "10 examples, 0 failed" in printed.out
    # All of them were calibrated as texts.
    assert ("warning: 10 of 10 prompts are in the calibration set too" in printed.err) == (name == "folder")
    if name == "bare":
        for row in ({"input_ids": [5, 1], "references": ["a"]}, {"input": "a", "reference_ids": [[5]]}):
            assert main(["verify", f"--data={write_rows(data, [row])}", *flags]) == 2
            assert f"{data}, line 1: its " in capsys.readouterr().err


def test_ids_are_answered_with_texts(folder: pathlib.Path, bare: pathlib.Path) -> None:
    """Under a manifest with a vocabulary ids are answered as their text is; without one the answer is ids."""
    vocabulary = _vocabulary(folder)
    entry: dict[str, Any] = {"consistency": "textual", "delta": 0.3}
    generator = Generator.from_manifest(folder / "text" / "manifest.json", folder / "model", **entry)
    text = _text_rows()[0]["input"]
    answer = generator.generate([*vocabulary.encode(text), EOS_ID])
    assert answer == generator.generate(text)
    assert answer.text == vocabulary.decode(answer.tokens)
    of_ids = Generator.from_manifest(bare / "out" / "manifest.json", bare / "model", **entry)
    answer = of_ids.generate([5, 9, 1])
    assert answer.text == " ".join(str(token) for token in answer.tokens if token != EOS_ID)


def test_generations_of_the_first_form_are_refused(
    folder: pathlib.Path, tmp_path: pathlib.Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Generations of the first format, which may hold ids despite a vocabulary, are not recalibrated or resumed."""
    stored = pathlib.Path(SweepHome(str(folder / "text")).only_folder())
    output = tmp_path / "out"
    shutil.copytree(stored, output / "generations" / stored.name)
    (job,) = output.rglob("decode.json")
    content = json.loads(job.read_text(encoding="utf-8"))
    job.write_text(json.dumps({**content, "schema": "calm-beam/generations/v1"}), encoding="utf-8")
    message = "is not of the form calm-beam/generations/v2, the only one that this calm-beam knows. Decode again."
    assert main(["calibrate", f"--generations={output}", f"--output={tmp_path / 'again'}"]) == 2
    assert message in capsys.readouterr().err
    assert _calibrate(folder / "model", folder / "rows.jsonl", output, "--resume") == 2
    assert message in capsys.readouterr().err


def test_empty_references_are_told(
    folder: pathlib.Path, tmp_path: pathlib.Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The number of empty references is printed at the end of a run, for ids and texts."""
    rows = _encoded(_text_rows()[:12], _vocabulary(folder), references=True)
    rows[1]["reference_ids"] = [[EOS_ID]]
    rows[2]["reference_ids"] = [[5], []]
    assert _calibrate(folder / "model", write_rows(tmp_path / "a.jsonl", rows), tmp_path / "out") == 0
    assert "caution: 2 examples have an empty reference, from which only an empty output" in capsys.readouterr().err
