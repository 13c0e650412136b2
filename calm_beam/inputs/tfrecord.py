"""TFRecord files of tf.Example."""

import collections
import contextlib
import functools
import gzip
import shutil
import tempfile
import zlib
from collections.abc import Iterator, Mapping
from typing import Any

from google.protobuf import descriptor_pb2, descriptor_pool, message_factory
from google.protobuf.message import DecodeError

from calm_beam.examples import DataError, Example, RowKeys, example_of_row
from calm_beam.extras import tensorflow_on_cpu
from calm_beam.storage import is_cloud_path, open_input

from .features import as_texts, single
from .parts import Part, WholeFiles
from .reading import Reading

INPUTS, TARGETS = "inputs", "targets"
_NEEDS: Any = {"extra": "tensorflow", "needed_for": "reading TFRecord files"}


class TFRecord(WholeFiles):
    """TFRecord files, compressed where the name ends in `.gz`; a file is one part, since records have no index.

    The feature `inputs` of a record is a text (one value of bytes) or token ids (int64), `targets` any number of texts,
    or the ids of one reference; `id` is a text, and all other features but the cluster's are ignored.
    """

    row = "record"
    has_fields = True

    def check_installed(self) -> None:
        """Raises `MissingExtraError` without TensorFlow."""
        tensorflow_on_cpu(**_NEEDS)

    def examples(self, part: Part, reading: Reading) -> Iterator[Example]:
        """Yields the examples; `DataError` names the record that is none."""
        tensorflow = tensorflow_on_cpu(**_NEEDS)
        keys = reading.keys(inputs=INPUTS, targets=TARGETS)
        with _local_file(part.path) as path:
            for position, record in enumerate(_records(tensorflow, path, part.path), start=1):
                where = f"{part.path}, record {position}"
                try:
                    features = tensorflow.train.Example.FromString(record).features.feature
                except DecodeError as error:
                    raise DataError(f"{where}: is no tf.Example ({error}).") from error
                _check_names(record, where)
                row = _row(features, keys, where)
                yield example_of_row(row, where=where, position=position, file_index=part.file_index, keys=keys)


@contextlib.contextmanager
def _local_file(path: str) -> Iterator[str]:
    """Gives the file, uncompressed, where TensorFlow can read it.

    A copy on this machine's disk if it is on Cloud Storage or compressed: so its checksum is compared, and a compressed
    file that was cut off is noticed, which TensorFlow takes for one that has ended.
    """
    is_compressed = path.endswith(".gz")
    if not is_compressed and not is_cloud_path(path):
        yield path
        return
    with tempfile.NamedTemporaryFile(prefix="calm-beam-", suffix=".tfrecord") as copy:
        try:
            with open_input(path) as raw, gzip.open(raw) if is_compressed else raw as content:
                shutil.copyfileobj(content, copy)
        except (EOFError, zlib.error, gzip.BadGzipFile) as error:
            raise DataError(f"{path}: damaged gzip data ({error}).") from error
        copy.flush()
        yield copy.name


def _records(tensorflow: Any, path: str, name: str) -> Iterator[bytes]:
    """Yields the records of a file, whose checksums TensorFlow compares."""
    records = tensorflow.data.TFRecordDataset(path).as_numpy_iterator()
    count = 0
    while True:
        try:
            record = next(records)
        except StopIteration:
            return
        except tensorflow.errors.OpError as error:
            raise DataError(f"{name}: damaged TFRecord data after record {count} ({error.message}).") from error
        count += 1
        yield record


def _check_names(record: bytes, where: str) -> None:
    """Refuses a record that has a feature twice, of which a map would keep the last without a word."""
    names = [entry.key for entry in _record_entries().FromString(record).features.feature]
    twice = next((name for name, count in collections.Counter(names).items() if count > 1), None)
    if twice is not None:
        raise DataError(f"{where}: has two features named {as_texts([twice], 'a name', where)[0]!r}.")


@functools.cache
def _record_entries() -> Any:
    """Returns a message class that reads a tf.Example's map of features as the list of entries that it is on disk."""
    file = descriptor_pb2.FileDescriptorProto(
        name="calm_beam/record_entries.proto", package="calm_beam", syntax="proto3"
    )
    field = descriptor_pb2.FieldDescriptorProto
    for name, its_field, label, type_, type_name in (
        ("Entry", "key", field.LABEL_OPTIONAL, field.TYPE_BYTES, None),
        ("Entries", "feature", field.LABEL_REPEATED, field.TYPE_MESSAGE, ".calm_beam.Entry"),
        ("Record", "features", field.LABEL_OPTIONAL, field.TYPE_MESSAGE, ".calm_beam.Entries"),
    ):
        message = file.message_type.add(name=name)
        message.field.add(name=its_field, number=1, label=label, type=type_, type_name=type_name)
    pool = descriptor_pool.DescriptorPool()
    pool.Add(file)
    return message_factory.GetMessageClass(pool.FindMessageTypeByName("calm_beam.Record"))


def _row(features: Mapping[str, Any], keys: RowKeys, where: str) -> dict[str, Any]:
    """Returns the features of a record as a row."""
    if keys.inputs not in features:
        raise DataError(
            f"{where}: has no feature {keys.inputs}, only {', '.join(sorted(features)) or 'none'}. Name that of the "
            "prompts with --inputs_field."
        )
    row: dict[str, Any] = {}
    inputs = _values(features, keys.inputs, where)
    if inputs and isinstance(inputs[0], int):
        row["input_ids"] = inputs
    else:
        row[keys.inputs] = single(inputs, keys.inputs, where)
    if keys.targets in features:
        targets = _values(features, keys.targets, where)
        are_ids = bool(targets) and isinstance(targets[0], int)
        if are_ids and "input_ids" not in row:
            raise DataError(
                f"{where}: {keys.targets} are token ids, but {keys.inputs} is a text. Outputs are compared with "
                "references as text: write both as bytes, or both as int64."
            )
        row["reference_ids" if are_ids else keys.targets] = [targets] if are_ids else targets
    for name in ("id", keys.cluster):
        if name is not None and name in features:
            row[name] = single(_values(features, name, where), name, where)
    return row


def _values(features: Mapping[str, Any], name: str, where: str) -> list[Any]:
    """Returns the values of a feature: all of them texts, or all of them integers."""
    feature = features[name]
    match feature.WhichOneof("kind"):
        case "bytes_list":
            return as_texts(feature.bytes_list.value, name, where)
        case "int64_list":
            return list(feature.int64_list.value)
        case kind:
            raise DataError(f"{where}: {name} must hold bytes or int64, got {kind or 'nothing'}.")
