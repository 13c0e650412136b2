"""Formats that TensorFlow reads: TFRecord files of tf.Example, and SeqIO tasks, which include TFDS datasets.

SeqIO reads files its own way, also on Cloud Storage: TensorFlow opens them, not `calm_beam.storage`. A feature says
neither whether it is text nor whether it is a list; both formats turn features into rows alike.
"""

import collections
import difflib
import functools
import gzip
import importlib
import tempfile
import threading
import zlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

from google.protobuf import descriptor_pb2, descriptor_pool, message_factory
from google.protobuf.message import DecodeError

from calm_beam.errors import CalmBeamError, UserCode
from calm_beam.extras import imported, tensorflow_on_cpu
from calm_beam.storage import open_input, writing
from calm_beam.text import counted

from .examples import DataError, Example, RowKeys, check_row_size, example_of_row
from .reading import FilePart, Reading, SeqIOShard, WholeFiles, task_and_split


def as_texts(values: Iterable[bytes], name: str, *, where: str) -> list[str]:
    """Returns bytes as texts.

    Raises:
      DataError: If they are not UTF-8; names the feature.
    """
    try:
        return [value.decode() for value in values]
    except UnicodeDecodeError as error:
        raise DataError(f"{where}: {name} is not UTF-8 ({error}).") from error


def single(values: Sequence[Any], name: str, *, where: str) -> Any:
    """Returns the only value of a feature.

    Raises:
      DataError: If it has none or several; names the feature.
    """
    if len(values) != 1:
        raise DataError(f"{where}: {name} must have one value, got {len(values)}.")
    return values[0]


INPUTS, TARGETS = "inputs", "targets"
# A record has its length and a checksum of that before it (8 and 4 bytes), and its own checksum after it.
_HEAD_BYTES, _TAIL_BYTES = 12, 4
_COPIED_BYTES = 2**22
_TFRECORD_NEEDS: Any = {"extra": "tensorflow", "needed_for": "reading TFRecord files"}


class TFRecord(WholeFiles):
    """TFRecord files, compressed if the name ends in `.gz`; a file is one part, since records have no index.

    The feature `inputs` of a record is a text (one value of bytes) or token ids (int64). `targets` is any number of
    texts, or the ids of one reference. `id` is a text. Of the other features, only cluster and group are read.
    """

    row = "record"
    has_fields = True

    def check_installed(self) -> None:
        """Raises `MissingExtraError` without TensorFlow."""
        tensorflow_on_cpu(**_TFRECORD_NEEDS)

    def examples(self, part: FilePart, reading: Reading) -> Iterator[Example]:
        """Yields the examples; `DataError` names a malformed record."""
        tensorflow = tensorflow_on_cpu(**_TFRECORD_NEEDS)
        keys = reading.keys(inputs=INPUTS, targets=TARGETS)
        for position, record in enumerate(_records(tensorflow, part.path), start=1):
            where = f"{part.path}, record {position}"
            try:
                features = tensorflow.train.Example.FromString(record).features.feature
            except DecodeError as error:
                raise DataError(f"{where}: is not a tf.Example ({error}).") from error
            _check_names(record, where)
            row = _record_row(features, keys, where=where)
            yield example_of_row(row, where=where, position=position, file_index=part.file_index, keys=keys)


class _DamageError(CalmBeamError):
    """Bytes that are not records."""


def _records(tensorflow: Any, path: str) -> Iterator[bytes]:
    """Yields the records of a file, whose checksums TensorFlow verifies.

    TensorFlow gets copies of some records at a time, so that no more is read than needed and each byte is copied once.
    Given the file, it would take a truncated compressed file for a complete one, end the process at a length that no
    memory holds, and read Cloud Storage its own way.
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
    """Yields some megabytes of whole records at a time; whole records come before the error about a damaged one."""
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
    """Yields records with their lengths and checksums, unverified."""
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
    """Refuses a record with two features of one name: a map would silently keep the last."""
    names = [entry.key for entry in _record_entries().FromString(record).features.feature]
    twice = next((name for name, count in collections.Counter(names).items() if count > 1), None)
    if twice is not None:
        raise DataError(f"{where}: has two features named {as_texts([twice], 'a name', where=where)[0]!r}.")


@functools.cache
def _record_entries() -> Any:
    """Returns a message class that reads a tf.Example's map of features as the list of entries that is on disk."""
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


def _record_row(features: Mapping[str, Any], keys: RowKeys, *, where: str) -> dict[str, Any]:
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


_SEQIO_NEEDS: Any = {"extra": "seqio", "needed_for": "reading SeqIO tasks"}
# Seed of preprocessors that draw random numbers: every worker and every attempt must see the same examples.
_SEED = 0
# TFDS sources are configured for each shard, in objects that threads would share.
_lock = threading.Lock()


class SeqIOTasks(WholeFiles):
    """The examples of a task after its preprocessors, in the order of the source and without trimming.

    If preprocessors keep the text (`inputs_pretokenized`, or text in `inputs`), prompt and references are text, as in
    any other format. Otherwise they are token ids (`targets` may still be text). Every shard of the source is a part.
    """

    row = "example"
    has_fields = True

    def check_installed(self) -> None:
        """Raises `MissingExtraError` without SeqIO."""
        tensorflow_on_cpu(**_SEQIO_NEEDS)
        imported("seqio", **_SEQIO_NEEDS)

    def examples(self, part: FilePart, reading: Reading) -> Iterator[Example]:
        """Yields the examples; `DataError` names the shard and a malformed example."""
        tensorflow = tensorflow_on_cpu(**_SEQIO_NEEDS)
        keys = reading.keys(inputs=INPUTS, targets=TARGETS)
        shard = SeqIOShard.named(part.path)
        task = _task(shard.task, shard.split, modules=reading.seqio_modules)
        position = 0
        # Sources and preprocessors are user code, and may raise anything; errors about a row name it already.
        may_fail = UserCode(
            lambda said: DataError(f"{part.path}: SeqIO cannot read on after example {position} ({said})."),
            passing=DataError,
        )
        with may_fail:
            rows = iter(_dataset(tensorflow, task, shard=shard).as_numpy_iterator())
        while True:
            with may_fail:
                features = next(rows, None)
            if features is None:
                return
            position += 1
            where = f"{part.path}, example {position}"
            with may_fail:
                example = example_of_row(
                    _task_row(features, keys, where=where),
                    where=where,
                    position=position,
                    file_index=part.file_index,
                    keys=keys,
                )
            yield example


def seqio_shards(name: str, modules: Sequence[str]) -> tuple[str, ...]:
    """Returns the names of all shards of a split.

    Args:
      name: A name that `seqio_name` has made.
      modules: Modules to import first, in which the task is registered.

    Raises:
      MissingExtraError: If SeqIO is not installed.
      ValueError: If there is no such module, task or split, or the source cannot be listed.
    """
    task_name, split = task_and_split(name)
    task = _task(task_name, split, modules=modules)
    count = _count_shards(task, split)
    return tuple(SeqIOShard(task_name, split, index, count).name() for index in range(count))


def _task(name: str, split: str, *, modules: Sequence[str]) -> Any:
    """Returns a registered task that has the split."""
    tensorflow_on_cpu(**_SEQIO_NEEDS)
    seqio = imported("seqio", **_SEQIO_NEEDS)
    for module in modules:
        # The module is user code, and may raise anything when it runs.
        with UserCode(functools.partial(_not_imported, module)):
            importlib.import_module(module)
    known = seqio.TaskRegistry.names()
    if name in seqio.MixtureRegistry.names() and name not in known:
        raise DataError(
            f"SeqIO task {name}: is a mixture, which draws its examples from tasks at random. Name one of its tasks."
        )
    if name not in known:
        nearest = difflib.get_close_matches(name, list(known), n=1)
        hint = f" Did you mean {nearest[0]}?" if nearest else ""
        raise DataError(
            f"SeqIO task {name}: is not registered.{hint} Pass the module that registers it as --seqio_module."
        )
    task = seqio.TaskRegistry.get(name)
    with UserCode(lambda said: DataError(f"SeqIO task {name}: its splits cannot be listed ({said}).")), _lock:
        requires_caching, splits = task.requires_caching, sorted(task.splits)
    if requires_caching:
        raise DataError(f"SeqIO task {name}: can only be read from SeqIO's cache, which is not supported.")
    if split not in splits:
        raise DataError(f"SeqIO task {name}: has no split {split}, only {', '.join(splits)}.")
    return task


def _not_imported(module: str, said: str) -> DataError:
    return DataError(
        f"SeqIO module {module}: cannot be imported ({said}). It has to be installed or on the PYTHONPATH, here and on "
        "every worker."
    )


def _count_shards(task: Any, split: str) -> int:
    with (
        UserCode(
            lambda said: DataError(f"SeqIO task {task.name}: the files of split {split} cannot be listed ({said}).")
        ),
        _lock,
    ):
        count = len(task.source.list_shards(split))
    if not count:
        raise DataError(f"SeqIO task {task.name}: there are no files of split {split}.")
    return count


def _dataset(tensorflow: Any, task: Any, *, shard: SeqIOShard) -> Any:
    """Returns the preprocessed examples of a shard."""
    import seqio

    count = _count_shards(task, shard.split)
    if count != shard.shards:
        raise DataError(
            f"{shard.name()}: the split has {counted(count, 'shard')} now, {shard.shards} when the run was started."
        )
    with _lock:
        source = task.source.get_dataset(
            split=shard.split, shuffle=False, shard_info=seqio.ShardInfo(shard.number, shard.shards)
        )
        # Preprocessors may drop all examples, but an empty source means that a file has been lost.
        if not any(True for _ in source.take(1)):
            raise DataError(f"{shard.name()}: its source is empty. A part that was lost would bias the result.")
        dataset = task.preprocess_precache(source, seed=_SEED)
        dataset = task.preprocess_postcache(dataset, sequence_length=None, seed=_SEED)
    options = tensorflow.data.Options()
    options.deterministic = True
    return dataset.with_options(options)


def _task_row(features: Mapping[str, Any], keys: RowKeys, *, where: str) -> dict[str, Any]:
    """Returns the features of an example as a row: with texts if its input has one, else with token ids."""
    inputs = _with_text(features, keys.inputs)
    if inputs is None:
        raise DataError(
            f"{where}: has no feature {keys.inputs}, only {', '.join(sorted(features))}. Name that of the prompts with "
            "--inputs_field."
        )
    row: dict[str, Any] = {}
    if _is_text(inputs):
        row[keys.inputs] = single(_texts(inputs, keys.inputs, where=where), keys.inputs, where=where)
        targets = _with_text(features, keys.targets)
        if targets is not None:
            if not _is_text(targets):
                raise DataError(
                    f"{where}: {keys.targets} are token ids, but {keys.inputs} is a text. Outputs are compared with "
                    f"references as text: let a preprocessor keep {keys.targets}_pretokenized too."
                )
            row[keys.targets] = _texts(targets, keys.targets, where=where)
    else:
        row["input_ids"] = _ids(inputs, keys.inputs, where=where)
        # If there are both, ids: they belong to the same vocabulary as the prompt's.
        targets = features.get(keys.targets)
        if targets is not None and _is_text(targets):
            row[keys.targets] = _texts(targets, keys.targets, where=where)
        elif targets is not None:
            row["reference_ids"] = [_ids(targets, keys.targets, where=where)]
    for name in ("id", keys.cluster, keys.group):
        if name is not None and name in features:
            value = features[name]
            row[name] = (
                single(_texts(value, name, where=where), name, where=where) if _is_text(value) else _integer(value)
            )
    return row


def _with_text(features: Mapping[str, Any], name: str) -> Any:
    """Returns a feature's text from before tokenization, if it was kept, else the feature; None if there is neither."""
    return features.get(f"{name}_pretokenized", features.get(name))


def _is_text(value: Any) -> bool:
    # A single text comes as bytes, several as an array of objects.
    return isinstance(value, bytes) or getattr(getattr(value, "dtype", None), "kind", "") == "O"


def _texts(value: Any, name: str, *, where: str) -> list[str]:
    return as_texts([value] if isinstance(value, bytes) else value.ravel().tolist(), name, where=where)


def _ids(value: Any, name: str, *, where: str) -> list[int]:
    if getattr(value, "ndim", None) != 1 or value.dtype.kind not in "iu":
        shape, dtype = getattr(value, "shape", ()), getattr(value, "dtype", type(value).__name__)
        raise DataError(f"{where}: {name} must be a text or token ids, got {dtype} of shape {tuple(shape)}.")
    ids: list[int] = value.tolist()
    return ids


def _integer(value: Any) -> Any:
    return value.item() if hasattr(value, "item") else value
