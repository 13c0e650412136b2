"""TFRecord files of tf.Example."""

import collections
import functools
import gzip
import tempfile
import zlib
from collections.abc import Iterator, Mapping
from typing import Any

from google.protobuf import descriptor_pb2, descriptor_pool, message_factory
from google.protobuf.message import DecodeError

from calm_beam.errors import CalmBeamError
from calm_beam.extras import tensorflow_on_cpu
from calm_beam.inputs.examples import DataError, Example, RowKeys, check_row_size, example_of_row
from calm_beam.storage import open_input, writing

from .features import as_texts, single
from .parts import FilePart, WholeFiles
from .reading import Reading

INPUTS, TARGETS = "inputs", "targets"
# Length and its checksum, 8 and 4 bytes, come before a record, its checksum behind it.
_HEAD_BYTES, _TAIL_BYTES = 12, 4
_COPIED_BYTES = 2**22
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

    def examples(self, part: FilePart, reading: Reading) -> Iterator[Example]:
        """Yields the examples; `DataError` names the record that is none."""
        tensorflow = tensorflow_on_cpu(**_NEEDS)
        keys = reading.keys(inputs=INPUTS, targets=TARGETS)
        for position, record in enumerate(_records(tensorflow, part.path), start=1):
            where = f"{part.path}, record {position}"
            try:
                features = tensorflow.train.Example.FromString(record).features.feature
            except DecodeError as error:
                raise DataError(f"{where}: is not a tf.Example ({error}).") from error
            _check_names(record, where)
            row = _row(features, keys, where=where)
            yield example_of_row(row, where=where, position=position, file_index=part.file_index, keys=keys)


class _DamageError(CalmBeamError):
    """Bytes that are no records."""


def _records(tensorflow: Any, path: str) -> Iterator[bytes]:
    """Yields the records of a file, whose checksums TensorFlow compares.

    It is given copies of some records at a time: so no more is read than is asked for, and each byte is copied once.
    By itself it takes a compressed file that was cut off for one that has ended, ends the process at a length that no
    memory holds, and reads Cloud Storage its own way.
    """
    count = 0
    with tempfile.NamedTemporaryFile(prefix="calm-beam-", suffix=".tfrecord") as copy:
        try:
            for some in _copied_together(path):
                with writing(copy.name):
                    copy.seek(0)
                    copy.truncate()
                    copy.write(some)
                    copy.flush()
                for record in tensorflow.data.TFRecordDataset(copy.name).as_numpy_iterator():
                    count += 1
                    yield record
        except (tensorflow.errors.OpError, _DamageError) as error:
            reason = getattr(error, "message", error)
            raise DataError(f"{path}: damaged TFRecord data after record {count} ({reason}).") from error
        except (EOFError, zlib.error, gzip.BadGzipFile) as error:
            raise DataError(f"{path}: damaged gzip data after record {count} ({error}).") from error


def _copied_together(path: str) -> Iterator[bytes]:
    """Yields some megabytes of whole records at a time; what is whole comes before the error about what is not."""
    frames: list[bytes] = []
    size, error = 0, None
    try:
        for frame in _frames(path):
            frames.append(frame)
            size += len(frame)
            if size >= _COPIED_BYTES:
                yield b"".join(frames)
                frames, size = [], 0
    except (_DamageError, EOFError, zlib.error, gzip.BadGzipFile) as damage:
        error = damage
    if frames:
        yield b"".join(frames)
    if error is not None:
        raise error


def _frames(path: str) -> Iterator[bytes]:
    """Yields records with their lengths and checksums, which are not looked at."""
    with open_input(path) as raw, gzip.open(raw) if path.endswith(".gz") else raw as content:
        position = 0
        while head := content.read(_HEAD_BYTES):
            position += 1
            length = int.from_bytes(head[:8], "little")
            check_row_size(length, f"{path}, record {position}")
            frame = head + content.read(length + _TAIL_BYTES)
            if len(frame) < _HEAD_BYTES + length + _TAIL_BYTES:
                raise _DamageError("truncated record")
            yield frame


def _check_names(record: bytes, where: str) -> None:
    """Refuses a record that has a feature twice, of which a map would keep the last without a word."""
    names = [entry.key for entry in _record_entries().FromString(record).features.feature]
    twice = next((name for name, count in collections.Counter(names).items() if count > 1), None)
    if twice is not None:
        raise DataError(f"{where}: has two features named {as_texts([twice], 'a name', where=where)[0]!r}.")


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


def _row(features: Mapping[str, Any], keys: RowKeys, *, where: str) -> dict[str, Any]:
    """Returns the features of a record as a row."""
    if keys.inputs not in features:
        raise DataError(
            f"{where}: has no feature {keys.inputs}, only {', '.join(sorted(features)) or 'none'}. Name that of the "
            "prompts with --inputs_field."
        )
    row: dict[str, Any] = {}
    inputs = _values(features, keys.inputs, where=where)
    if inputs and isinstance(inputs[0], int):
        row["input_ids"] = inputs
    else:
        row[keys.inputs] = single(inputs, keys.inputs, where=where)
    if keys.targets in features:
        targets = _values(features, keys.targets, where=where)
        are_ids = bool(targets) and isinstance(targets[0], int)
        if are_ids and "input_ids" not in row:
            raise DataError(
                f"{where}: {keys.targets} are token ids, but {keys.inputs} is a text. Outputs are compared with "
                "references as text: write both as bytes, or both as int64."
            )
        row["reference_ids" if are_ids else keys.targets] = [targets] if are_ids else targets
    for name in ("id", keys.cluster, keys.group):
        if name is not None and name in features:
            row[name] = single(_values(features, name, where=where), name, where=where)
    return row


def _values(features: Mapping[str, Any], name: str, *, where: str) -> list[Any]:
    """Returns the values of a feature: all of them texts, or all of them integers."""
    feature = features[name]
    match feature.WhichOneof("kind"):
        case "bytes_list":
            return as_texts(feature.bytes_list.value, name, where=where)
        case "int64_list":
            return list(feature.int64_list.value)
        case kind:
            raise DataError(f"{where}: {name} must hold bytes or int64, got {kind or 'nothing'}.")
