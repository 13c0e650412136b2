"""Folders with one model: `config.json`, weights in safetensors, and the files of a vocabulary.

Without `config.json` there is no model. A safetensors header is checked against the size of the file and of the memory.
In the native layout, the three are `config.json`, `model.safetensors` and a vocabulary; next to them is what is kept of
the `generation_config.json` that a model came with. Its tensor names are those of the T5X tree, with slashes. Weights
are float32 or float16. Writing bfloat16 is refused: its rounding changes far more outputs than that of float16.
"""

import contextlib
import json
import pathlib
import struct
from collections.abc import Callable, Iterator, Mapping
from typing import Any

# Registers the name bfloat16 with numpy.
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

from .checkpoint import BY_NAME, NO_FACTS, Arrays, Config, GenerationFacts, StoredModel, stored_architecture
from .metadata import CheckpointError, check_is_file, check_memory, read_json, shortened
from .stored_array import FileStamp, Slices, StoredArray, StoredArrays, pieces

_STORED = {"float32": "F32", "float16": "F16", "bfloat16": "BF16"}
_FLOATS = tuple(_STORED)
# numpy's names for the header's types, without bits.
_KINDS = {"F": "float", "BF": "bfloat", "I": "int", "U": "uint"}


def read_safetensors(path: pathlib.Path, *, keeps: Callable[[str], bool]) -> StoredArrays:
    """Returns the unread arrays of a file by name.

    Args:
      path: The file.
      keeps: Which arrays to read, by name.

    Raises:
      CheckpointError: If it is missing or damaged, or an array does not fit into memory or has another type than a
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
      arrays: Arrays by name.
      dtype: Type to store them in, one of numpy's names of floats of 16 or 32 bits.
    """
    width, header, end = np.dtype(dtype).itemsize, {}, 0
    for name, array in arrays.items():
        begin, end = end, end + width * array.size
        header[name] = {"dtype": _STORED[dtype], "shape": list(array.shape), "data_offsets": [begin, end]}
    text = json.dumps(header, separators=(",", ":")).encode()
    # Arrays begin at a multiple of 8, as the safetensors library writes them.
    text += b" " * (-len(text) % 8)
    with path.open("wb") as file:
        file.write(struct.pack("<Q", len(text)) + text)
        for array in arrays.values():
            for values in pieces(array):
                file.write(np.ascontiguousarray(values, dtype).data)


def _array(path: pathlib.Path, name: str, *, place: Any) -> StoredArray:
    """Returns an array that is read through a slice object of the library."""
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
GENERATION = "generation_config.json"
WEIGHTS = "model.safetensors"
_WRITABLE = ("float32", "float16")


def check_range(arrays: Arrays, dtype: str) -> None:
    """Refuses weights that are out of a type's range.

    Args:
      arrays: Arrays by name.
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
    """Makes a folder for the files that the block writes, and writes `config.json` last.

    Args:
      directory: The folder; while a model is overwritten, there is no model until `config.json` is there.
      fields: Content of `config.json`.
    """
    directory.mkdir(parents=True, exist_ok=True)
    (directory / CONFIG).unlink(missing_ok=True)
    yield
    write_json(directory / CONFIG, fields)


def write_weights(path: pathlib.Path, arrays: Arrays, *, source: Arrays, dtype: str) -> None:
    """Writes arrays to a safetensors file, atomically.

    Args:
      path: The file.
      arrays: Arrays by their names in the file.
      source: The arrays that they are made from, whose files must not change meanwhile.
      dtype: `float32` or `float16`.
    """
    with replacing(path) as temporary:
        write_safetensors(temporary, arrays, dtype=dtype)
        if isinstance(source, StoredArrays):
            source.check_unchanged()


def write_json(path: pathlib.Path, fields: Mapping[str, Any]) -> None:
    """Writes an object to a file, atomically."""
    with replacing(path) as temporary:
        temporary.write_text(json.dumps(fields, indent=2) + "\n", encoding="utf-8")


_SENTENCE_PIECE = "sentencepiece.model"
# transformers' name for it; under that name, texts are cut at special tokens.
SPIECE = "spiece.model"
_ALL = (_SENTENCE_PIECE, SPIECE, *dict.fromkeys((*TOKENIZER_FILES, *SENTINEL_FILES)))


def write_vocabulary(
    folder: pathlib.Path, vocabulary_path: pathlib.Path | None, *, extra_ids: int, name: str | None = None
) -> None:
    """Writes a vocabulary; removes the files of another one, since readers would use those.

    Args:
      folder: The folder to write to.
      vocabulary_path: A SentencePiece model, or a `tokenizer.json`; the files that belong to the latter, or to a
        `spiece.model`, are copied too. With None, none is left in the folder.
      extra_ids: Number of sentinels of a SentencePiece model, which a file next to it records.
      name: Name of a SentencePiece model in the folder; None keeps which of the two names it has now.
    """
    # Read before anything is removed, since it may be in this folder.
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
    """Returns the number of sentinels that the files in a folder name; None if they cannot be parsed."""
    try:
        return extra_ids_beside(folder / _SENTENCE_PIECE)
    except SentinelsError:
        return None


_FORMAT = "calm-beam/model/v1"
# The architecture of models whose config names none, because there was only one when the format began.
_FIRST_ARCHITECTURE = "t5"


def read_native(directory: pathlib.Path, *, keeps: Callable[[str], bool]) -> StoredModel:
    """Returns the config of a native model folder as written, and its unread weights.

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
    generation: GenerationFacts = NO_FACTS,
) -> None:
    """Writes a native model folder; each file is written atomically, `config.json` last.

    Args:
      directory: The folder to write to; made if needed.
      config: Sizes of the model.
      arrays: Weights by name.
      vocabulary_path: The SentencePiece model, or `tokenizer.json`, to copy next to the weights; with None, none is
        left there.
      extra_ids: Number of its sentinels, which a file next to it records.
      dtype: `float32` or `float16`. float16 halves the file and rounds the weights.
      generation: What is kept of the settings that the model came with; without any, none are left there.

    Raises:
      ValueError: If `dtype` is another one, or a weight is not finite in it.
    """
    check_range(arrays, dtype)
    name = stored_architecture(config).name
    head = {"format": _FORMAT} if name == _FIRST_ARCHITECTURE else {"format": _FORMAT, "architecture": name}
    with replacing_model(directory, {**head, **stored_architecture(config).fields(config)}):
        write_vocabulary(directory, vocabulary_path, extra_ids=extra_ids)
        write_weights(directory / WEIGHTS, arrays, source=arrays, dtype=dtype)
        if kept := generation.fields():
            write_json(directory / GENERATION, kept)
        else:
            (directory / GENERATION).unlink(missing_ok=True)
