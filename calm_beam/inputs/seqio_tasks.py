"""Tasks of SeqIO, and through it datasets of TFDS.

What SeqIO reads it reads its own way: its sources, also on Cloud Storage, are opened by TensorFlow, and not through
`calm_beam.storage`.
"""

import difflib
import functools
import importlib
import threading
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from calm_beam.errors import UserCode
from calm_beam.extras import imported, tensorflow_on_cpu
from calm_beam.inputs.examples import DataError, Example, RowKeys, example_of_row
from calm_beam.inputs.seqio_names import SeqIOShard, task_and_split
from calm_beam.text import counted

from .features import as_texts, single
from .parts import FilePart, WholeFiles
from .reading import Reading
from .tfrecord import INPUTS, TARGETS

_NEEDS: Any = {"extra": "seqio", "needed_for": "reading SeqIO tasks"}
# Of preprocessors that draw random numbers: every worker and every attempt has to see the same examples.
_SEED = 0
# Sources of TFDS are configured anew for each shard, in objects that threads would share.
_lock = threading.Lock()


class SeqIOTasks(WholeFiles):
    """The examples of a task as its preprocessors leave them, in the order of the source and without trimming.

    Where preprocessors have kept the text (`inputs_pretokenized`, or `inputs` that is one), prompt and references are
    text, the same as in any other format; where they have not, they are token ids (`targets` may still be text). Every
    shard of the source is a part.
    """

    row = "example"
    has_fields = True

    def check_installed(self) -> None:
        """Raises `MissingExtraError` without SeqIO."""
        tensorflow_on_cpu(**_NEEDS)
        imported("seqio", **_NEEDS)

    def examples(self, part: FilePart, reading: Reading) -> Iterator[Example]:
        """Yields the examples; `DataError` names the shard, and the example that is none."""
        tensorflow = tensorflow_on_cpu(**_NEEDS)
        keys = reading.keys(inputs=INPUTS, targets=TARGETS)
        shard = SeqIOShard.named(part.path)
        task = _task(shard.task, shard.split, modules=reading.seqio_modules)
        position = 0
        # Sources and preprocessors are the user's, and can fail in any way; what is wrong with a row says so itself.
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
                    _row(features, keys, where=where),
                    where=where,
                    position=position,
                    file_index=part.file_index,
                    keys=keys,
                )
            yield example


def seqio_shards(name: str, modules: Sequence[str]) -> tuple[str, ...]:
    """Returns the names of the shards of a split, which together are all of it.

    Args:
      name: Of `seqio_name`.
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
    tensorflow_on_cpu(**_NEEDS)
    seqio = imported("seqio", **_NEEDS)
    for module in modules:
        # The module is the user's, and can fail in any way when it runs.
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
        # Preprocessors may filter all of it out, but a file that is empty has been lost.
        if not any(True for _ in source.take(1)):
            raise DataError(f"{shard.name()}: its source is empty. A part that was lost would bias the result.")
        dataset = task.preprocess_precache(source, seed=_SEED)
        dataset = task.preprocess_postcache(dataset, sequence_length=None, seed=_SEED)
    options = tensorflow.data.Options()
    options.deterministic = True
    return dataset.with_options(options)


def _row(features: Mapping[str, Any], keys: RowKeys, *, where: str) -> dict[str, Any]:
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
        # Ids where there are both: they are of the same vocabulary as the prompt's.
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
    """Returns a feature as it was before it was tokenized, if that was kept; None if there is neither."""
    return features.get(f"{name}_pretokenized", features.get(name))


def _is_text(value: Any) -> bool:
    # A scalar comes as bytes, more of them as an array of objects.
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
