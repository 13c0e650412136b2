"""BLEURT checkpoints on disk: a folder of a SavedModel, `bleurt_config.json`, `bert_config.json` and a vocabulary."""

import dataclasses
import hashlib
import pathlib
from collections.abc import Callable, Mapping
from typing import Any, Self

import numpy as np

from calm_beam.errors import CalmBeamError
from calm_beam.extras import tensorflow_on_cpu
from calm_beam.storage import cached_folder, is_cloud_path, joined, list_below, strict_json

CONFIG = "bleurt_config.json"
NEEDS: Any = {"extra": "bleurt", "needed_for": 'the metric "bleurt"'}
_INPUTS = ("input_ids", "input_mask", "segment_ids")
_OUTPUT = "predictions"


class BleurtError(CalmBeamError, ValueError):
    """A BLEURT checkpoint that cannot be read, or is none."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class BleurtConfig:
    """The contents of the two configuration files of a checkpoint.

    Attributes:
      folder: The local folder of the checkpoint.
      name: The checkpoint's own name.
      max_seq_length: Most tokens of a pair, special ones included.
      vocab_size: Ids that the model knows.
      vocabulary: File of the vocabulary.
      is_sentencepiece: Whether that is a SentencePiece model, and not a list of word pieces.
      do_lower_case: Whether word pieces are of lower-case text without accents.
    """

    folder: pathlib.Path
    name: str
    max_seq_length: int
    vocab_size: int
    vocabulary: pathlib.Path
    is_sentencepiece: bool
    do_lower_case: bool

    @classmethod
    def read(cls, folder: pathlib.Path) -> Self:
        """Returns what the files in a folder say.

        Raises:
          BleurtError: If one is missing or is not of the published form.
        """
        config = _read_json(folder / CONFIG)
        bert = _read_json(folder / str(config.get("bert_config_file") or "bert_config.json"))
        sentencepiece = config.get("sp_model")
        if sentencepiece:
            vocabulary = folder / f"{str(sentencepiece).removesuffix('.model')}.model"
        else:
            vocabulary = folder / str(config.get("vocab_file") or "vocab.txt")
        for path in (vocabulary, folder / "saved_model.pb", folder / "variables" / "variables.index"):
            if not path.is_file():
                name = path.relative_to(folder)
                raise BleurtError(f"BLEURT checkpoint {folder}: has no {name}. Unpack the published archive whole.")
        return cls(
            folder=folder,
            name=str(config.get("name") or folder.name),
            max_seq_length=_size(config, "max_seq_length", path=folder / CONFIG),
            vocab_size=_size(bert, "vocab_size", path=folder / "bert_config.json"),
            vocabulary=vocabulary,
            is_sentencepiece=bool(sentencepiece),
            do_lower_case=bool(config.get("do_lower_case", True)),
        )


def local_checkpoint(path: str) -> pathlib.Path:
    """Returns the folder of a checkpoint on this machine: itself, or a copy of what lies on Cloud Storage.

    Raises:
      BleurtError: If there is none.
      OSError: If Cloud Storage cannot be read.
    """
    if is_cloud_path(path):
        root = joined(path)
        files = list(list_below(root))
        if not files:
            raise BleurtError(f"BLEURT checkpoint {path}: no such folder, or nothing in it.")
        return cached_folder(root, files)
    folder = pathlib.Path(path)
    if not folder.is_dir():
        raise BleurtError(f"BLEURT checkpoint {path}: no such folder.")
    return folder


def checkpoint_fingerprint(folder: pathlib.Path) -> str:
    """Returns the SHA-256, in hexadecimal digits, of all that decides scores: the files of the checkpoint.

    Raises:
      BleurtError: If the folder is no checkpoint.
    """
    config = BleurtConfig.read(folder)
    variables = sorted((folder / "variables").iterdir())
    files = [folder / CONFIG, config.vocabulary, folder / "saved_model.pb", *variables]
    digest = hashlib.sha256()
    for path in files:
        with open(path, "rb") as file:
            content = hashlib.file_digest(file, "sha256")
        digest.update(f"{path.relative_to(folder).as_posix()}\0{content.hexdigest()}\n".encode())
    return digest.hexdigest()


@dataclasses.dataclass(frozen=True, kw_only=True)
class BleurtModel:
    """A loaded SavedModel.

    Attributes:
      predict: Takes an int64 array of shape (3, 1, length) with token ids, mask and segments; returns the score.
      length: The only length that it takes; None if it takes any.
    """

    predict: Callable[[np.ndarray], float]
    length: int | None


def load_model(config: BleurtConfig) -> BleurtModel:
    """Returns the model of a checkpoint.

    Raises:
      BleurtError: If TensorFlow cannot load it, or it takes or gives something else than BLEURT does.
      MissingExtraError: If TensorFlow is not installed.
    """
    tensorflow = tensorflow_on_cpu(**NEEDS)
    try:
        loaded = tensorflow.saved_model.load(str(config.folder))
    except Exception as error:
        # TensorFlow raises many kinds of errors for damaged files.
        reason = f"{type(error).__name__}: {error}"
        raise BleurtError(f"BLEURT checkpoint {config.folder}: TensorFlow cannot load it ({reason}).") from error
    signature = loaded.signatures.get("serving_default")
    if signature is None:
        found = ", ".join(sorted(loaded.signatures)) or "none"
        raise BleurtError(
            f"BLEURT checkpoint {config.folder}: has no signature serving_default, only {found}. It is not a "
            "BLEURT model."
        )
    specs, outputs = signature.structured_input_signature[1], signature.structured_outputs
    is_typed = all(spec.dtype == tensorflow.int64 and spec.shape.rank == 2 for spec in specs.values())
    if sorted(specs) != sorted(_INPUTS) or not is_typed or _OUTPUT not in outputs:
        taken = ", ".join(f"{name} {spec.dtype.name}{list(spec.shape)}" for name, spec in sorted(specs.items()))
        raise BleurtError(
            f"BLEURT checkpoint {config.folder}: its model takes {taken} and gives {', '.join(sorted(outputs))}; "
            f"BLEURT takes {', '.join(_INPUTS)}, int64 of shape [batch, length], and gives {_OUTPUT}."
        )
    length = specs[_INPUTS[0]].shape[1]
    if length not in (None, config.max_seq_length):
        raise BleurtError(
            f"BLEURT checkpoint {config.folder}: its model takes {length} tokens, {CONFIG} says "
            f"max_seq_length {config.max_seq_length}. They do not belong together."
        )

    def predict(arrays: np.ndarray) -> float:
        # The signature alone would let go of the variables that it reads.
        assert loaded is not None
        inputs = {name: tensorflow.constant(array) for name, array in zip(_INPUTS, arrays, strict=True)}
        return float(signature(**inputs)[_OUTPUT].numpy().item())

    return BleurtModel(predict=predict, length=length)


def _read_json(path: pathlib.Path) -> dict[str, Any]:
    try:
        content = strict_json.loads(path.read_bytes(), constants_allowed=True)
    except FileNotFoundError:
        raise BleurtError(
            f"BLEURT checkpoint {path.parent}: has no {path.name}. Name the folder that holds saved_model.pb."
        ) from None
    except (OSError, ValueError) as error:
        raise BleurtError(f"BLEURT checkpoint {path.parent}: {path.name} cannot be read ({error}).") from error
    if not isinstance(content, dict):
        raise BleurtError(f"BLEURT checkpoint {path.parent}: {path.name} is not a JSON object.")
    return content


def _size(content: Mapping[str, Any], key: str, *, path: pathlib.Path) -> int:
    value = content.get(key)
    if type(value) is not int or value < 1:
        raise BleurtError(f"BLEURT checkpoint {path.parent}: {path.name} has {key} {value!r}, expected an integer.")
    return value
