"""TFRecord files of tf.Example."""

import contextlib
import gzip
import os
import shutil
import tempfile
import zlib
from collections.abc import Iterator, Mapping
from typing import Any

from google.protobuf.message import DecodeError

from calm_beam.examples import DataError, Example, RowKeys, check_row_size, example_of_row
from calm_beam.extras import tensorflow_on_cpu
from calm_beam.storage import is_cloud_path, open_input, writing

from .features import as_texts, ids_as_text, single
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
            _check_sizes(path, part.path)
            for position, record in enumerate(_records(tensorflow, path, part.path), start=1):
                where = f"{part.path}, record {position}"
                try:
                    features = tensorflow.train.Example.FromString(record).features.feature
                except DecodeError as error:
                    raise DataError(f"{where}: is no tf.Example ({error}).") from error
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
            with open_input(path) as raw, gzip.open(raw) if is_compressed else raw as content, writing(copy.name):
                shutil.copyfileobj(content, copy)
                copy.flush()
        except (EOFError, zlib.error, gzip.BadGzipFile) as error:
            raise DataError(f"{path}: damaged gzip data ({error}).") from error
        yield copy.name


def _check_sizes(path: str, name: str) -> None:
    """Refuses a record that is too large, before TensorFlow has it in memory.

    A record is its length, 8 bytes and a checksum of 4, its content, and another checksum. What does not fit into the
    file is damaged, as TensorFlow will find.
    """
    end = os.path.getsize(path)
    with open(path, "rb") as file:
        position = 0
        while len(header := file.read(12)) == 12:
            position += 1
            length = int.from_bytes(header[:8], "little")
            if file.tell() + length > end:
                return
            check_row_size(length, f"{name}, record {position}")
            file.seek(length + 4, os.SEEK_CUR)


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
        row[keys.targets] = [ids_as_text(targets)] if are_ids else targets
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
