"""TFRecord files and SeqIO tasks: the same examples as from JSONL, and errors for damaged ones."""

import gzip
import itertools
import pathlib
import re
import struct
import tempfile
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import pytest
import seqio
import tensorflow as tf

from calm_beam.inputs import Reading, read_examples, seqio_shards
from calm_beam.inputs.examples import LARGEST_ROW, DataError, Example
from calm_beam.storage import replacing
from tests import seqio_tasks
from tests.builders import train_vocabulary
from tests.data_files import feature_map, write_parquet, write_tfrecord
from tests.pipelines import id_rows, text_rows, write_rows

_numbers = itertools.count()
_TEXT = f"seqio:{seqio_tasks.TEXT_TASK}/validation"


def _read(path: pathlib.Path | str, **reading: Any) -> list[Example]:
    return list(read_examples(str(path), Reading(**reading)))


def _read_task(name: str, **reading: Any) -> list[Example]:
    return [example for shard in seqio_shards(name, ()) for example in _read(shard, **reading)]


def _records(path: pathlib.Path, records: Iterable[bytes]) -> pathlib.Path:
    with tf.io.TFRecordWriter(str(path)) as writer:
        for record in records:
            writer.write(record)
    return path


def _add_task(
    source: Any,
    *,
    features: Mapping[str, seqio.Feature] | None = None,
    preprocessors: Sequence[Callable[..., Any]] = (),
) -> str:
    """Registers a task with a split `test`, and returns its name for the data flag."""
    name = f"calm_beam_test_{next(_numbers)}"
    features = seqio_tasks.text_features() if features is None else features
    seqio.TaskRegistry.add(name, source=source, preprocessors=list(preprocessors), output_features=features)
    return f"seqio:{name}/test"


def _rows_of(features: Mapping[str, Any], **signature: tf.TensorSpec) -> seqio.FunctionDataSource:
    """Returns a source of one example."""

    def dataset(split: str, shuffle_files: bool) -> tf.data.Dataset:
        return tf.data.Dataset.from_generator(lambda: iter([features]), output_signature=signature)

    return seqio.FunctionDataSource(dataset, splits=["test"])


# A record holds the ids of one reference.
_ID_ROWS = [{**row, "reference_ids": row["reference_ids"][:1]} for row in id_rows(6)]


@pytest.mark.parametrize("name", ["a.tfrecord", "a.tfrecord.gz", "a.tfrecord-00000-of-00001"])
@pytest.mark.parametrize("rows", [text_rows(6), _ID_ROWS], ids=["text", "ids"])
def test_tfrecord_holds_what_jsonl_holds(rows: list[dict[str, Any]], name: str, tmp_path: pathlib.Path) -> None:
    """The same rows as records give equal examples, with equal ids; compressed or not, as text or as token ids."""
    assert _read(write_tfrecord(tmp_path / name, rows)) == _read(write_rows(tmp_path / "a.jsonl", rows))


def test_features_may_have_other_names(tmp_path: pathlib.Path) -> None:
    """Features are found under the given names; ids do not depend on names."""
    rows = text_rows(3)
    path = write_tfrecord(tmp_path / "a.tfrecord", rows, inputs="question", targets="answers")
    assert _read(path, inputs_field="question", targets_field="answers") == _read(
        write_rows(tmp_path / "a.jsonl", rows)
    )
    with pytest.raises(DataError, match=r"record 1: has no feature inputs, only answers, question\. Name that of the"):
        _read(path)


def test_clusters_in_records(tmp_path: pathlib.Path) -> None:
    """A cluster is named by bytes or by an integer, as in JSONL."""
    records = [feature_map({"inputs": "a", "page": 3}), feature_map({"inputs": "b", "page": "3"})]
    path = _records(tmp_path / "a.tfrecord", records)
    assert [example.cluster for example in _read(path, cluster_key="page")] == ["3", "3"]
    with pytest.raises(DataError, match="record 1: has no 'chapter', by which"):
        _read(path, cluster_key="chapter")


def test_references_may_be_token_ids(tmp_path: pathlib.Path) -> None:
    """If prompts are token ids, the ids of one reference may be too, without padding."""
    (example,) = _read(_records(tmp_path / "a.tfrecord", [feature_map({"inputs": [5, 1, 0], "targets": [7, 9, 1, 0]})]))
    assert (example.input_ids, example.references, example.reference_ids) == ((5, 1), (), ((7, 9, 1),))


def test_text_references_of_ids_stay_text(tmp_path: pathlib.Path) -> None:
    """A record may have token ids as prompt and texts as references."""
    record = feature_map({"inputs": [5, 1], "targets": ["seven", "nine"]})
    (example,) = _read(_records(tmp_path / "a.tfrecord", [record]))
    assert (example.input_ids, example.references, example.reference_ids) == ((5, 1), ("seven", "nine"), None)


def test_a_feature_twice(tmp_path: pathlib.Path) -> None:
    """A record with a repeated feature is refused: readers of maps keep the last one silently."""
    twice = feature_map({"inputs": "a", "note": "x"}) + feature_map({"note": "y"})
    path = _records(tmp_path / "a.tfrecord", [feature_map({"inputs": "a"}), twice])
    with pytest.raises(DataError, match=re.escape(f"{path}, record 2: has two features named 'note'.")):
        _read(path)


@pytest.mark.parametrize(
    ("record", "message"),
    [
        (b"no protobuf", "record 2: is not a tf.Example ("),
        (b"", "record 2: has no feature inputs, only none."),
        ({"inputs": b"\xff"}, "record 2: inputs is not UTF-8 ("),
        ({"inputs": ""}, "record 2: inputs is empty."),
        ({"inputs": 1.5}, "record 2: inputs must hold bytes or int64, got float_list."),
        ({"inputs": ["a", "b"]}, "record 2: inputs must have one value, got 2."),
        ({"inputs": []}, "record 2: inputs must have one value, got 0."),
        ({"inputs": [5, -1]}, "record 2: input_ids must be a list of integers of at least 0, got [5, -1]."),
        ({"inputs": [2**31]}, "record 2: input_ids must be at most 2147483647, got 2147483648."),
        ({"inputs": "a", "targets": [5, 6]}, "record 2: targets are token ids, but inputs is a text."),
        ({"inputs": "a", "targets": 0.5}, "record 2: targets must hold bytes or int64, got float_list."),
        ({"inputs": "a", "targets": b"\xff"}, "record 2: targets is not UTF-8 ("),
        ({"inputs": "a\0b"}, "record 2: 'a\\x00b' holds a NUL character, which"),
        ({"inputs": "a", "id": 7}, "record 2: id must be a text that is not empty, got 7."),
        ({"inputs": "a"}, "record 2: risk consistency needs references, example content-"),
    ],
    ids=str,
)
def test_bad_records(record: bytes | dict[str, Any], message: str, tmp_path: pathlib.Path) -> None:
    """A record that is not an example is named with its file and number."""
    bad = record if isinstance(record, bytes) else feature_map(record)
    path = _records(tmp_path / "a.tfrecord", [feature_map({"inputs": "x", "targets": "y"}), bad])
    with pytest.raises(DataError, match=re.escape(f"{path}, {message}")):
        _read(path, needs_references=message.endswith("content-"))


def test_damaged_records(tmp_path: pathlib.Path) -> None:
    """A wrong checksum, a file that was cut off, and one that is no TFRecord file are refused."""
    path = write_tfrecord(tmp_path / "a.tfrecord", text_rows(4))
    content = path.read_bytes()
    path.write_bytes(content.replace(b"the owl sees 2", b"the fox sees 2"))
    with pytest.raises(DataError, match=r"a\.tfrecord: damaged TFRecord data after record 2 \(.*corrupted record"):
        _read(path)
    path.write_bytes(content[:-3])
    with pytest.raises(DataError, match=r"a\.tfrecord: damaged TFRecord data after record 3 \(.*truncated record"):
        _read(path)
    path.write_text("no records, but a text that is longer than a header")
    with pytest.raises(DataError, match=r"a\.tfrecord, record 1: is longer than 4 MiB, .* damaged, or of another"):
        _read(path)


def test_compressed_records_that_were_cut_off(tmp_path: pathlib.Path) -> None:
    """A compressed file that ends too early is refused even if the rest is whole records."""
    records = write_tfrecord(tmp_path / "a.tfrecord", text_rows(4)).read_bytes()
    (size,) = struct.unpack("<Q", records[:8])
    packed = tmp_path / "a.tfrecord.gz"
    # One record, and the gzip stream goes on.
    packed.write_bytes(gzip.compress(records[: 8 + 4 + size + 4])[:-8])
    with pytest.raises(DataError, match=r"a\.tfrecord\.gz: damaged gzip data after record 1 \("):
        _read(packed)


def test_records_are_read_as_they_are_asked_for(tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """First records are read from the beginning of a large compressed file, and records are copied in small batches."""
    monkeypatch.setattr("calm_beam.inputs.tensorflow_formats._COPIED_BYTES", 100)
    rows = text_rows(40)
    path = write_tfrecord(tmp_path / "a.tfrecord.gz", rows)
    whole = _read(path)
    assert whole == _read(write_rows(tmp_path / "a.jsonl", rows))
    # Stored without compression, so that bytes of the file are bytes of records.
    packed = tmp_path / "b.tfrecord.gz"
    packed.write_bytes(gzip.compress(gzip.decompress(path.read_bytes()), compresslevel=0)[:1500])
    examples = read_examples(str(packed))
    assert list(itertools.islice(examples, 5)) == whole[:5]
    with pytest.raises(DataError, match=r"b\.tfrecord\.gz: damaged gzip data after record \d+ \("):
        list(examples)


@pytest.mark.parametrize("name", ["a.tfrecord", "a.tfrecord.gz"])
@pytest.mark.parametrize("length", [2**28 + 1, 10**12, 2**63 - 1, 2**64 - 1])
def test_a_length_that_no_record_has(length: int, name: str, tmp_path: pathlib.Path) -> None:
    """A length that would end the process in TensorFlow, with a right checksum, is refused with a clear message."""
    head = struct.pack("<Q", length)
    content = write_tfrecord(tmp_path / "good.tfrecord", text_rows(1)).read_bytes() + head + b"sum, a record"
    path = tmp_path / name
    path.write_bytes(gzip.compress(content) if name.endswith(".gz") else content)
    with pytest.raises(DataError, match=r"record 2: is longer than 4 MiB, .* the file is damaged"):
        _read(path)


@pytest.mark.timeout(120)
def test_files_on_cloud_storage(bucket: str, tmp_path: pathlib.Path) -> None:
    """TFRecord and Parquet files on Cloud Storage read as local ones, and leave no copy."""
    expected = _read(write_rows(tmp_path / "a.jsonl", text_rows(6)))
    tempdir = tmp_path / "temporary"
    tempdir.mkdir()
    for write, name in (
        (write_tfrecord, "a.tfrecord"),
        (write_tfrecord, "a.tfrecord.gz"),
        (write_parquet, "a.parquet"),
    ):
        with replacing(f"{bucket}/{name}") as temporary:
            temporary.write_bytes(write(tmp_path / name, text_rows(6)).read_bytes())
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(tempfile, "tempdir", str(tempdir))
            assert _read(f"{bucket}/{name}") == expected
    assert not list(tempdir.iterdir())


def test_a_task_of_texts_holds_what_jsonl_holds(tmp_path: pathlib.Path) -> None:
    """A SeqIO task gives the examples of JSONL with the same content, with equal ids and positions."""
    expected = _read(write_rows(tmp_path / "a.jsonl", text_rows(30)))
    assert _read_task(_TEXT) == expected
    assert seqio_shards(_TEXT, ()) == (f"{_TEXT}/00000-of-00001",)


def test_shards_of_a_task_are_its_files(tmp_path: pathlib.Path) -> None:
    """Every file of the source is a shard; together they are all examples, each once."""
    rows = text_rows(9)
    for part in range(3):
        write_tfrecord(
            tmp_path / f"part-{part}.tfrecord",
            [{"input": row["input"], "references": row["references"][:1]} for row in rows[part::3]],
        )
    features = {name: tf.io.FixedLenFeature([], tf.string) for name in ("inputs", "targets")}
    source = seqio.TFExampleDataSource({"test": str(tmp_path / "part-*.tfrecord")}, features)
    shards = seqio_shards(_add_task(source), ())
    assert [shard[-14:] for shard in shards] == [f"0000{index}-of-00003" for index in range(3)]
    assert [[example.input for example in _read(shard)] for shard in shards] == [
        [row["input"] for row in rows[part::3]] for part in range(3)
    ]
    (tmp_path / "part-1.tfrecord").write_bytes(b"")
    with pytest.raises(DataError, match=re.escape(f"{shards[1]}: its source is empty. A part that was lost")):
        _read(shards[1])
    (tmp_path / "part-2.tfrecord").write_bytes(b"no records at all, however long it may be")
    with pytest.raises(DataError, match=re.escape(f"{shards[2]}: SeqIO cannot read on after example 0 (DataLossError")):
        _read(shards[2])


def test_datasets_of_tfds_are_tasks_too(tmp_path: pathlib.Path) -> None:
    """A dataset on disk in the layout of TFDS is read through SeqIO, each of its files as a shard."""
    pytest.importorskip("importlib_resources", reason="TFDS needs it, and comes without it")
    import tensorflow_datasets as tfds

    rows = [{**row, "references": row["references"][:1]} for row in text_rows(9)]
    folder = tmp_path / "tiny_pairs" / "1.0.0"
    folder.mkdir(parents=True)
    for part in range(3):
        write_tfrecord(folder / f"tiny_pairs-test.tfrecord-0000{part}-of-00003", rows[3 * part : 3 * part + 3])
    texts = {"inputs": tfds.features.Text(), "targets": tfds.features.Text()}
    split = tfds.core.SplitInfo(name="test", shard_lengths=[3, 3, 3], num_bytes=0)
    tfds.folder_dataset.write_metadata(
        data_dir=folder,
        features=tfds.features.FeaturesDict(texts),
        split_infos=[split],
        filename_template="{DATASET}-{SPLIT}.{FILEFORMAT}-{SHARD_X_OF_Y}",
        check_data=False,
    )
    source = seqio.TfdsDataSource(tfds_name="tiny_pairs:1.0.0", tfds_data_dir=str(tmp_path), splits=["test"])
    name = _add_task(source)
    expected = [(row["input"], tuple(row["references"])) for row in rows]
    assert len(seqio_shards(name, ())) == 3
    assert [(example.input, example.references) for example in _read_task(name)] == expected


def test_a_tokenized_task_is_read_as_text(tmp_path: pathlib.Path) -> None:
    """If preprocessors keep the text together with its tokens the text is used, as in other formats; else the ids."""
    vocabulary = seqio.SentencePieceVocabulary(str(train_vocabulary(tmp_path / "sentencepiece.model")))
    features = {name: seqio.Feature(vocabulary) for name in ("inputs", "targets")}
    path = write_tfrecord(tmp_path / "a.tfrecord", [{"input": "the cat", "references": ["the dog"]}])
    stored = {name: tf.io.FixedLenFeature([], tf.string) for name in features}
    source = seqio.TFExampleDataSource({"test": str(path)}, stored)
    steps = [seqio.preprocessors.tokenize, seqio.preprocessors.append_eos]
    (text,) = _read_task(_add_task(source, features=features, preprocessors=steps))
    assert (text.input, text.input_ids, text.references) == ("the cat", None, ("the dog",))

    def forget(dataset: tf.data.Dataset) -> tf.data.Dataset:
        return dataset.map(lambda row: {name: row[name] for name in features})

    (ids,) = _read_task(_add_task(source, features=features, preprocessors=[*steps, forget]))
    assert ids.input is None
    assert ids.input_ids == (*vocabulary.encode("the cat"), 1)
    assert (ids.references, ids.reference_ids) == ((), ((*vocabulary.encode("the dog"), 1),))


def test_random_preprocessors_give_the_same_examples_again() -> None:
    """A shard that is read again, on any worker, gives the same examples."""

    @seqio.map_over_dataset(num_seeds=1)
    def draw(row: dict[str, tf.Tensor], seed: tf.Tensor) -> dict[str, tf.Tensor]:
        number = tf.random.stateless_uniform([], seed, 0, 10**9, tf.int32)
        return {**row, "inputs": tf.strings.as_string(number)}

    spec = tf.TensorSpec([], tf.string)
    name = _add_task(_rows_of({"inputs": "a", "targets": "b"}, inputs=spec, targets=spec), preprocessors=[draw])
    assert _read_task(name) == _read_task(name)


@pytest.mark.parametrize(
    ("features", "message"),
    [
        ({"inputs": b"\xff"}, "example 1: inputs is not UTF-8 ("),
        ({"inputs": " "}, "example 1: inputs is empty."),
        ({"inputs": 1.5}, "example 1: inputs must be a text or token ids, got float32 of shape ()."),
        ({"question": "a"}, "example 1: has no feature inputs, only question. Name that of the prompts with"),
        ({"inputs": "a", "targets": [4, 5]}, "example 1: targets are token ids, but inputs is a text."),
        ({"inputs": ["a", "b"]}, "example 1: inputs must have one value, got 2."),
        (
            {"inputs": [4, 5], "targets": 0.5},
            "example 1: targets must be a text or token ids, got float32 of shape ().",
        ),
        ({"inputs": "a\0b"}, "example 1: 'a\\x00b' holds a NUL character, which"),
    ],
    ids=str,
)
def test_bad_examples_of_tasks(features: dict[str, Any], message: str) -> None:
    """An invalid example is named with its shard and number."""
    tensors = {name: tf.constant(value) for name, value in features.items()}
    source = _rows_of(tensors, **{name: tf.TensorSpec(value.shape, value.dtype) for name, value in tensors.items()})
    name = _add_task(source, features={})
    with pytest.raises(DataError, match=re.escape(f"{name}/00000-of-00001, {message}")):
        _read_task(name)


@pytest.mark.parametrize(
    ("name", "modules", "message"),
    [
        ("seqio:calm_beam_txt/test", (), "is not registered. Did you mean calm_beam_text? Pass the module"),
        ("seqio:calm_beam_text/test", (), "SeqIO task calm_beam_text: has no split test, only validation."),
        ("seqio:calm_beam_mixture/test", (), "is a mixture, which draws its examples from tasks at random."),
        ("seqio:calm_beam_text/x", ("no_such",), "SeqIO module no_such: cannot be imported (ModuleNotFoundError:"),
        ("seqio:calm_beam_text", (), "seqio:calm_beam_text: expected seqio:TASK/SPLIT, such as seqio:wmt/validation."),
    ],
)
def test_tasks_that_cannot_be_had(name: str, modules: tuple[str, ...], message: str) -> None:
    """A missing task or package is reported before anything is read."""
    with pytest.raises(ValueError, match=re.escape(message)):
        seqio_shards(name, modules)


def test_shards_that_are_no_longer_the_same(tmp_path: pathlib.Path) -> None:
    """A source that has lost or gained files since the run was started is refused."""
    with pytest.raises(DataError, match=r"/00001-of-00002: the split has 1 shard now, 2 when the run was started\."):
        _read(f"{_TEXT}/00001-of-00002")
    source = seqio.TFExampleDataSource({"test": str(tmp_path / "*.tfrecord")}, {})
    with pytest.raises(DataError, match=r"there are no files of split test\."):
        seqio_shards(_add_task(source), ())


@pytest.mark.parametrize("name", ["a.tfrecord", "a.tfrecord.gz"])
def test_a_record_without_end_is_refused(name: str, tmp_path: pathlib.Path) -> None:
    """A record beyond the limit of a row is named without calling TensorFlow."""
    path = write_tfrecord(tmp_path / name, [{"input": "a"}, {"input": "a" * LARGEST_ROW}])
    with pytest.raises(DataError, match=re.escape(f"{path}, record 2: is longer than 4 MiB, the most that a row may")):
        _read(path)
