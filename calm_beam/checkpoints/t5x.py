"""The layout that T5X's `Checkpointer` writes: one msgpack file, and one zarr array a parameter.

`checkpoint_<step>/checkpoint` holds the tree; its leaves are either small arrays or TensorStore specs whose path is
relative to the folder. Only the `target` tree (the weights) is read or written, never an optimizer's state: T5X infers
without it, and fine-tunes from the weights alone with `fallback_to_scratch`. T5X itself is not needed.
Source: T5X `checkpoints.py` (version 3 of its format) and `train_state.py` (`InferenceState`).
"""

import os
import pathlib
import shutil
from collections.abc import Callable
from typing import Any

import numpy as np

from calm_beam.model import T5Config
from calm_beam.storage import replacing

from .architectures import Config, stored_architecture
from .checkpoint import Arrays
from .declared import Declared
from .error import CheckpointError
from .metadata import read_whole, shortened
from .scanned import split_heads
from .stored_array import StoredArrays
from .t5x_facts import GIN_FILE, find_facts, gin_text
from .vocabulary_files import write_vocabulary
from .zarr_arrays import read_arrays

_VERSION = 3
_CHUNK_BYTES = 64 * 2**20
# Most bytes of arrays that are written at the same time, if one alone is not larger.
_PENDING_BYTES = 256 * 2**20


def read_t5x(directory: pathlib.Path, *, keeps: Callable[[str], bool]) -> StoredArrays:
    """Returns the weights of a `checkpoint_<step>` folder by name, to be read as float32.

    Args:
      directory: The folder with the msgpack file `checkpoint`.
      keeps: Which arrays to read, by name.

    Returns:
      Mapping from names such as `decoder/layers_0/mlp/wi_0/kernel` to arrays.

    Raises:
      CheckpointError: If the msgpack file is not a T5X checkpoint, or an array is missing or broken.
    """
    import flax.serialization
    import flax.traverse_util

    path = directory / "checkpoint"
    content = read_whole(path)
    try:
        target = flax.serialization.msgpack_restore(content)["optimizer"]["target"]
        if not isinstance(target, dict):
            raise TypeError(f"its target is a {type(target).__name__}, not a tree")
        leaves = flax.traverse_util.flatten_dict(target, is_leaf=lambda _, value: _is_spec(value), sep="/")
    except Exception as error:
        # msgpack raises a dozen unrelated types on damaged input; all of them mean the same to the user.
        raise CheckpointError(
            f"{path}: not a T5X checkpoint ({type(error).__name__}: {shortened(error)}). "
            'Expected msgpack with {"optimizer": {"target": ...}}.'
        ) from error
    kept = {name: leaf for name, leaf in leaves.items() if keeps(name)}
    unreadable = [name for name, leaf in kept.items() if not isinstance(leaf, np.ndarray) and not _is_spec(leaf)]
    if unreadable:
        raise CheckpointError(f"{path}: {shortened(unreadable[0])} is neither an array nor the place of one.")
    return read_arrays(path, {name: _place(directory, leaf) for name, leaf in kept.items()})


def write_t5x(
    directory: pathlib.Path,
    config: Config,
    *,
    arrays: Arrays,
    step: int,
    vocabulary_path: pathlib.Path | None,
    extra_ids: int = 0,
) -> pathlib.Path:
    """Writes a `checkpoint_<step>` folder, which appears whole or not at all, and returns it.

    Beside it, `config.gin` says what the arrays do not show, where that is not T5's. A model whose layers have relative
    position biases of their own is written as `scalable_t5` has it with `scan_layers=False`, heads on their own axis.

    Args:
      directory: Where to; made if needed.
      config: Sizes of the model.
      arrays: Weights by name; stored as float32.
      step: Number of the training step, at least 1: T5X takes 0 for "there is none". One of that number is replaced.
      vocabulary_path: The SentencePiece model, or `tokenizer.json`, to copy to `directory`; with None, none is left
        there.
      extra_ids: Its sentinels, which a file beside it then names.

    Raises:
      ValueError: If the model is no T5, or one that begins or ends outputs in a way of its own; `step` is below 1; or
        a `config.gin` in `directory` is of another model.
    """
    if not isinstance(config, T5Config):
        raise ValueError(f"T5X's layout holds T5s only, and this model is a {stored_architecture(config).name}.")
    if (config.start_id, config.end_ids) != (T5Config.start_id, T5Config.end_ids):
        raise ValueError(
            f"T5X's layout cannot say that outputs begin with token {config.start_id} and end with "
            f"{' or '.join(map(str, config.end_ids))}: its models begin with {T5Config.start_id} and end with "
            f"{T5Config.end_ids[0]}. Use the native layout."
        )
    if step < 1:
        raise ValueError(f"step must be at least 1, got {step}.")
    text = _missing_gin_text(directory, config)
    final = directory / f"checkpoint_{step}"
    # Names that no reader takes for a step.
    mark = os.urandom(8).hex()
    temporary, replaced = directory / f".{final.name}.{mark}.tmp", directory / f".{final.name}.{mark}.old"
    temporary.mkdir(parents=True)
    try:
        _write_tree(temporary, config, arrays=arrays, step=step)
        if vocabulary_path is not None:
            write_vocabulary(directory, vocabulary_path, extra_ids=extra_ids)
        if text is not None:
            with replacing(directory / GIN_FILE) as gin_file:
                gin_file.write_text(text, encoding="utf-8")
        if os.path.lexists(final):
            os.rename(final, replaced)
        os.rename(temporary, final)
    finally:
        shutil.rmtree(temporary, ignore_errors=True)
    if replaced.is_symlink():
        # What lies behind it is not ours.
        replaced.unlink()
    else:
        shutil.rmtree(replaced, ignore_errors=True)
    if vocabulary_path is None:
        write_vocabulary(directory, None, extra_ids=0)
    return final


def _missing_gin_text(directory: pathlib.Path, config: T5Config) -> str | None:
    """Returns the `config.gin` that readers of a model need and do not find; None if they take it for what it is."""
    found = find_facts((directory,), Declared(), gated_mlp=config.gated_mlp)
    if (found.activation, found.relative_max_distance) == (config.activation, config.relative_max_distance):
        return None
    if (directory / GIN_FILE).exists():
        raise ValueError(
            f"{directory / GIN_FILE}: is of another model, with activation {found.activation} and relative max "
            f"distance {found.relative_max_distance}; this one has {config.activation} and "
            f"{config.relative_max_distance}. Write to another folder."
        )
    return gin_text(config)


def _is_spec(value: Any) -> bool:
    return isinstance(value, dict) and isinstance(value.get("kvstore"), dict)


def _place(directory: pathlib.Path, leaf: Any) -> Any:
    """Returns an array in the tree itself, or where the zarr array is; T5X stores its path relative to the folder."""
    if isinstance(leaf, np.ndarray):
        return leaf
    relative = pathlib.PurePosixPath(str(leaf["kvstore"].get("path", ""))).name
    return {"driver": "zarr", "kvstore": {"driver": "file", "path": f"{directory / relative}/"}}


def _write_tree(folder: pathlib.Path, config: T5Config, *, arrays: Arrays, step: int) -> None:
    import flax.serialization
    import flax.traverse_util
    import tensorstore

    specs: dict[str, Any] = {}
    pending: list[Any] = []
    pending_bytes = 0

    def finish() -> None:
        try:
            while pending:
                pending.pop().result()
        except ValueError as error:
            raise _not_written(folder, error) from error

    for name, array in arrays.items():
        values = np.asarray(array, np.float32)
        if config.relative_bias_per_layer:
            values = split_heads(name, values, num_heads=config.num_heads)
        specs[name] = _spec(name, values.shape)
        kvstore = {"driver": "file", "path": f"{folder / specs[name]['kvstore']['path']}/"}
        try:
            store = tensorstore.open({**specs[name], "kvstore": kvstore}, create=True).result()
            pending.append(store.write(values))
        except ValueError as error:
            raise _not_written(folder, error) from error
        pending_bytes += values.nbytes
        if pending_bytes > _PENDING_BYTES:
            # What waits is held.
            finish()
            pending_bytes = 0
    finish()
    if isinstance(arrays, StoredArrays):
        arrays.check_unchanged()
    target = flax.traverse_util.unflatten_dict(specs, sep="/")
    tree = {"version": _VERSION, "optimizer": {"target": target, "state": {"step": np.asarray(step, np.int32)}}}
    with replacing(folder / "checkpoint") as path:
        path.write_bytes(flax.serialization.msgpack_serialize(tree))


def _not_written(folder: pathlib.Path, error: ValueError) -> CheckpointError:
    """Returns the error for what TensorStore cannot write, without its specification of the array."""
    reason = str(error).partition(" [")[0].rpartition(": ")[2]
    return CheckpointError(f"{folder.parent}: cannot be written: {reason}. Make room there, or choose another folder.")


def _spec(name: str, shape: tuple[int, ...]) -> dict[str, Any]:
    """Returns the leaf that stands for an array in the tree."""
    row_bytes = 4 * int(np.prod(shape[1:]))
    chunks = [min(shape[0], max(1, _CHUNK_BYTES // row_bytes)), *shape[1:]]
    return {
        "driver": "zarr",
        "dtype": "float32",
        "kvstore": {"driver": "file", "path": f"target.{name.replace('/', '.')}/"},
        "metadata": {"chunks": chunks, "compressor": {"id": "gzip", "level": 1}, "shape": list(shape)},
    }
