"""A folder that holds one model: `config.json`, weights in safetensors, and the files of a vocabulary.

Without `config.json` there is no model. The header of a file of safetensors is believed only as far as the file and
the memory go. In the native layout, the three are `config.json`, `model.safetensors` and a vocabulary. Its tensor names
are those of the T5X tree, with slashes. Weights are float32 or float16; bfloat16 is refused on writing, since rounding
to it changes far more outputs than float16 does.
"""

import contextlib
import json
import pathlib
import struct
from collections.abc import Callable, Iterator, Mapping
from typing import Any

# For the name bfloat16, which numpy does not know otherwise.
import ml_dtypes  # noqa: F401
import numpy as np
import safetensors

from calm_beam.inputs.vocabularies.sentence_piece import (
    SENTINEL_FILES,
    SentinelsError,
    extra_ids_beside,
    write_extra_ids,
)
from calm_beam.inputs.vocabularies.tokenizer_json import TOKENIZER, TOKENIZER_FILES
from calm_beam.storage import replacing

from .checkpoint import BY_NAME, Arrays, Config, StoredModel, stored_architecture
from .metadata import CheckpointError, check_is_file, check_memory, read_json, shortened
from .stored_array import FileStamp, Slices, StoredArray, StoredArrays, pieces

_STORED = {"float32": "F32", "float16": "F16", "bfloat16": "BF16"}
_FLOATS = tuple(_STORED)
# What numpy calls the types of headers, before their bits.
_KINDS = {"F": "float", "BF": "bfloat", "I": "int", "U": "uint"}


def read_safetensors(path: pathlib.Path, *, keeps: Callable[[str], bool]) -> StoredArrays:
    """Returns the arrays of a file by name, none of which is read yet.

    Args:
      path: The file.
      keeps: Which arrays to read, by name.

    Raises:
      CheckpointError: If it is missing or damaged, or an array does not fit into memory or is of another type than a
        float of 16 or 32 bits.
    """
    check_is_file(path, failed="cannot be read as safetensors")
    stamp = FileStamp.of(path)
    try:
        file: Any = safetensors.safe_open(path, framework="numpy")
        places = {name: file.get_slice(name) for name in file.keys() if keeps(name)}  # noqa: SIM118 - it is no mapping
        check_memory({name: tuple(place.get_shape()) for name, place in places.items()})
        return StoredArrays({name: _array(path, name, place=place) for name, place in places.items()}, [stamp])
    # Damaged headers raise errors of several types.
    except Exception as error:
        raise _unreadable(path, error) from error


def write_safetensors(path: pathlib.Path, arrays: Arrays, *, dtype: str) -> None:
    """Writes arrays to a file, piece by piece.

    Args:
      path: The file.
      arrays: By name.
      dtype: What to store them as, one of numpy's names of floats of 16 or 32 bits.
    """
    width, header, end = np.dtype(dtype).itemsize, {}, 0
    for name, array in arrays.items():
        begin, end = end, end + width * array.size
        header[name] = {"dtype": _STORED[dtype], "shape": list(array.shape), "data_offsets": [begin, end]}
    text = json.dumps(header, separators=(",", ":")).encode()
    # Arrays begin at a multiple of 8, as the library has them.
    text += b" " * (-len(text) % 8)
    with path.open("wb") as file:
        file.write(struct.pack("<Q", len(text)) + text)
        for array in arrays.values():
            for values in pieces(array):
                file.write(np.ascontiguousarray(values, dtype).data)


def _array(path: pathlib.Path, name: str, *, place: Any) -> StoredArray:
    """Returns an array that is read through a slice of the library's."""
    stored: str = place.get_dtype()
    kind = stored.rstrip("0123456789")
    dtype = f"{_KINDS.get(kind, kind)}{stored.removeprefix(kind)}"
    if dtype not in _FLOATS:
        raise CheckpointError(f"{shortened(name)} is {shortened(dtype)}, expected {', '.join(_FLOATS)}.")

    def read(slices: Slices) -> np.ndarray:
        try:
            values: np.ndarray = place[slices if slices else ...]
        except Exception as error:
            raise _unreadable(path, error) from error
        return values

    return StoredArray(tuple(place.get_shape()), np.dtype(dtype), read=read)


def _unreadable(path: pathlib.Path, error: Exception) -> CheckpointError:
    return CheckpointError(f"{path}: cannot be read as safetensors: {shortened(error)}")


CONFIG = "config.json"
WEIGHTS = "model.safetensors"
_WRITABLE = ("float32", "float16")


def check_range(arrays: Arrays, dtype: str) -> None:
    """Refuses weights that a type cannot hold.

    Args:
      arrays: By name.
      dtype: `float32` or `float16`.

    Raises:
      ValueError: If `dtype` is another one, or a weight is not finite in it.
    """
    if dtype not in _WRITABLE:
        raise ValueError(f"dtype must be one of {', '.join(_WRITABLE)}, got {dtype!r}.")
    limit = np.finfo(dtype).max
    for name, array in arrays.items():
        if not all(np.all(np.abs(values) <= limit) for values in pieces(array)):
            raise ValueError(f"{name} has values that are not finite in {dtype} (its largest is {limit}).")


@contextlib.contextmanager
def replacing_model(directory: pathlib.Path, fields: Mapping[str, Any]) -> Iterator[None]:
    """Makes a folder for what is written inside, and writes `config.json` last.

    Args:
      directory: The folder; an overwritten model is no model until its last file is there.
      fields: What `config.json` says.
    """
    directory.mkdir(parents=True, exist_ok=True)
    (directory / CONFIG).unlink(missing_ok=True)
    yield
    write_json(directory / CONFIG, fields)


def write_weights(path: pathlib.Path, arrays: Arrays, *, source: Arrays, dtype: str) -> None:
    """Writes arrays to a file of safetensors, which appears whole or not at all.

    Args:
      path: The file.
      arrays: By the names that they have in it.
      source: What they are made of, whose files must not change meanwhile.
      dtype: As in `check_range`.
    """
    with replacing(path) as temporary:
        write_safetensors(temporary, arrays, dtype=dtype)
        if isinstance(source, StoredArrays):
            source.check_unchanged()


def write_json(path: pathlib.Path, fields: Mapping[str, Any]) -> None:
    """Writes an object to a file, which appears whole or not at all."""
    with replacing(path) as temporary:
        temporary.write_text(json.dumps(fields, indent=2) + "\n", encoding="utf-8")


_SENTENCE_PIECE = "sentencepiece.model"
# What transformers calls it, in whose way texts are then cut at special tokens.
SPIECE = "spiece.model"
_ALL = (_SENTENCE_PIECE, SPIECE, *dict.fromkeys((*TOKENIZER_FILES, *SENTINEL_FILES)))


def write_vocabulary(
    folder: pathlib.Path, vocabulary_path: pathlib.Path | None, *, extra_ids: int, name: str | None = None
) -> None:
    """Writes a vocabulary; what is there of another is taken away, since readers would take that.

    Args:
      folder: Where to.
      vocabulary_path: A SentencePiece model, or a `tokenizer.json`; the latter, and a `spiece.model`, go with what
        belongs to them. With None, none is left in the folder.
      extra_ids: Sentinels of a SentencePiece model, which a file beside it then names.
      name: What a SentencePiece model is called in the folder; None for the one of two names that it has now.
    """
    # Read before anything is taken away, as it may lie in this folder.
    copied: dict[str, bytes] = {}
    is_tokenizer = vocabulary_path is not None and vocabulary_path.name == TOKENIZER
    if vocabulary_path is not None:
        is_theirs = vocabulary_path.name == SPIECE
        name = TOKENIZER if is_tokenizer else name or (SPIECE if is_theirs else _SENTENCE_PIECE)
        names = TOKENIZER_FILES if is_tokenizer else SENTINEL_FILES if is_theirs else ()
        beside = {each: vocabulary_path.with_name(each) for each in names}
        copied = {each: path.read_bytes() for each, path in beside.items() if path.is_file()}
        copied[name] = vocabulary_path.read_bytes()
    for each in _ALL:
        if each not in copied:
            (folder / each).unlink(missing_ok=True)
    for each, content in copied.items():
        with replacing(folder / each) as temporary:
            temporary.write_bytes(content)
    if not is_tokenizer and extra_ids != _extra_ids_in(folder):
        write_extra_ids(folder, extra_ids)


def _extra_ids_in(folder: pathlib.Path) -> int | None:
    """Returns how many sentinels the files in a folder name; None if they cannot be understood."""
    try:
        return extra_ids_beside(folder / _SENTENCE_PIECE)
    except SentinelsError:
        return None


_FORMAT = "calm-beam/model/v1"
# Of models that do not name theirs: there was one when they were written, and it still does not.
_FIRST_ARCHITECTURE = "t5"


def read_native(directory: pathlib.Path, *, keeps: Callable[[str], bool]) -> StoredModel:
    """Returns the config of a native model folder, as it is written, and its weights, none of which is read yet.

    Args:
      directory: Folder with `config.json` and `model.safetensors`.
      keeps: Which arrays to read, by name.

    Raises:
      CheckpointError: If either file is missing, malformed or of an unknown format.
    """
    path = directory / CONFIG
    expected = f'a JSON object with "format": "{_FORMAT}", or with "model_type": "t5" (Hugging Face)'
    fields = read_json(path, constants_allowed=False, expected=expected)
    if fields.pop("format", None) != _FORMAT:
        raise CheckpointError(f"{path}: expected {expected}.")
    name = fields.pop("architecture", _FIRST_ARCHITECTURE)
    if not isinstance(name, str) or name not in BY_NAME:
        raise CheckpointError(
            f"{path}: architecture is {shortened(repr(name))}, this version knows {', '.join(BY_NAME)}."
        )
    try:
        config = BY_NAME[name].config_of(fields)
    except (TypeError, ValueError) as error:
        raise CheckpointError(f"{path}: {shortened(error)}") from error
    return StoredModel(config=config, arrays=read_safetensors(directory / WEIGHTS, keeps=keeps))


def write_native(
    directory: pathlib.Path,
    config: Config,
    *,
    arrays: Arrays,
    vocabulary_path: pathlib.Path | None,
    extra_ids: int = 0,
    dtype: str = "float32",
) -> None:
    """Writes a native model folder; each file appears whole or not at all, `config.json` last.

    Args:
      directory: Where to; made if needed.
      config: Sizes of the model.
      arrays: Weights by name.
      vocabulary_path: The SentencePiece model, or `tokenizer.json`, to copy beside the weights; with None, none is left
        there.
      extra_ids: Its sentinels, which a file beside it then names.
      dtype: `float32` or `float16`. float16 halves the file and rounds the weights.

    Raises:
      ValueError: If `dtype` is another one, or a weight is not finite in it.
    """
    check_range(arrays, dtype)
    name = stored_architecture(config).name
    head = {"format": _FORMAT} if name == _FIRST_ARCHITECTURE else {"format": _FORMAT, "architecture": name}
    with replacing_model(directory, {**head, **stored_architecture(config).fields(config)}):
        write_vocabulary(directory, vocabulary_path, extra_ids=extra_ids)
        write_weights(directory / WEIGHTS, arrays, source=arrays, dtype=dtype)
