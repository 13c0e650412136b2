"""BLEURT: a BERT model trained to judge how well a text expresses its reference.

Reads the published checkpoints unchanged; they do not come with calm-beam. A checkpoint is a folder with a SavedModel,
`bleurt_config.json`, `bert_config.json` and a vocabulary. The model takes texts as ids: [CLS] reference [SEP]
candidate [SEP]. Pairs are scored one at a time, so that scores do not depend on a batch.

Older checkpoints read texts in BERT's word pieces, which are made here exactly as BERT's tokenizer makes them: another
piece gives another score. TensorFlow's tokenizer differs: it folds case (ß becomes ss) where BERT lowercases, limits
words in bytes, and knows fewer white spaces.
Source: Sellam et al. (2020), "BLEURT: learning robust metrics for text generation"; Pu et al. (2021), "Learning
compact metrics for MT" (BLEURT-20).
"""

import dataclasses
import functools
import hashlib
import pathlib
import threading
import unicodedata
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, Self

import numpy as np
import sentencepiece

from calm_beam.errors import CalmBeamError
from calm_beam.extras import tensorflow_on_cpu
from calm_beam.metrics import Sight, Sighted, best_over_references
from calm_beam.storage import cached_folder, is_cloud_path, joined, list_below, strict_json

CONFIG = "bleurt_config.json"
NEEDS: Any = {"extra": "bleurt", "needed_for": 'the metric "bleurt"'}
_INPUTS = ("input_ids", "input_mask", "segment_ids")
_OUTPUT = "predictions"


class BleurtError(CalmBeamError, ValueError):
    """A BLEURT checkpoint that cannot be read, or a folder that is not one."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class BleurtConfig:
    """The contents of the two configuration files of a checkpoint.

    Attributes:
      folder: The local folder of the checkpoint.
      name: The checkpoint's own name.
      max_seq_length: Most tokens of a pair, special ones included.
      vocab_size: Number of ids that the model knows.
      vocabulary: File of the vocabulary.
      is_sentencepiece: Whether that is a SentencePiece model, and not a list of word pieces.
      do_lower_case: Whether word pieces are made from lower-case text without accents.
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
        """Returns the configuration in a folder.

        Raises:
          BleurtError: If a file is missing or is not of the published form.
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
    """Returns the local folder of a checkpoint: the given one, or a copy from Cloud Storage.

    Raises:
      BleurtError: If there is no such folder.
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
    """Returns the SHA-256, in hexadecimal digits, over the checkpoint's files, which decide all scores.

    Raises:
      BleurtError: If the folder is not a checkpoint.
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
      length: The only length that it accepts; None for any.
    """

    predict: Callable[[np.ndarray], float]
    length: int | None


def load_model(config: BleurtConfig) -> BleurtModel:
    """Returns the model of a checkpoint.

    Raises:
      BleurtError: If TensorFlow cannot load it, or its inputs or outputs are not those of BLEURT.
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
        # Refers to the model, since the signature alone would not keep its variables alive.
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


UNKNOWN = "[UNK]"

# Most characters of a word that is split into pieces; longer ones are unknown.
_LONGEST_WORD = 200
_CONTINUED = "##"
# ASCII characters that are symbols in Unicode, but count as punctuation here.
_SYMBOLS = frozenset("$+<=>^`|~")
# Each of these is a word. The ranges are BERT's: later additions to Unicode are not included.
_IDEOGRAPHS = (
    (0x3400, 0x4DBF),
    (0x4E00, 0x9FFF),
    (0xF900, 0xFAFF),
    (0x20000, 0x2A6DF),
    (0x2A700, 0x2B73F),
    (0x2B740, 0x2B81F),
    (0x2B820, 0x2CEAF),
    (0x2F800, 0x2FA1F),
)


def words(text: str, *, lower_case: bool) -> Iterator[str]:
    r"""Yields the words of a text: split at white space, punctuation and ideographs; the last two are words too.

    Control characters are dropped. Lower-case models see neither case nor accents.

    Source: BERT, `tokenization.py` (BasicTokenizer).

    >>> list(words("L'été,\tà\u2028la plage", lower_case=True))
    ['l', "'", 'ete', ',', 'a', 'la', 'plage']
    """
    # Also splits at line and paragraph separators, which are neither control characters nor spaces.
    for chunk in "".join(map(_cleaned, text)).split():
        letters = _without_accents(chunk.lower()) if lower_case else chunk
        yield from "".join(f" {letter} " if _is_punctuation(letter) else letter for letter in letters).split()


def word_ids(word: str, ids: Mapping[str, int]) -> list[int]:
    """Returns the ids of a word's pieces, the longest that fits each time, or the unknown id if none fits.

    Args:
      word: A word that `words` yields.
      ids: Ids of all pieces; those inside a word begin with `##`.

    Source: BERT, `tokenization.py` (WordpieceTokenizer).

    >>> word_ids("unable", {"[UNK]": 0, "un": 1, "##a": 2, "##able": 3}), word_ids("able", {"[UNK]": 0, "##able": 1})
    ([1, 3], [0])
    """
    found: list[int] = []
    begin = 0
    while begin < len(word) <= _LONGEST_WORD:
        mark = _CONTINUED if begin else ""
        fitting = (end for end in range(len(word), begin, -1) if mark + word[begin:end] in ids)
        end = next(fitting, None)
        if end is None:
            return [ids[UNKNOWN]]
        found.append(ids[mark + word[begin:end]])
        begin = end
    return found or [ids[UNKNOWN]]


def _cleaned(character: str) -> str:
    category = unicodedata.category(character)
    if character in "\t\n\r" or category == "Zs":
        return " "
    if character == "\ufffd" or category in ("Cc", "Cf"):
        return ""
    code = ord(character)
    return f" {character} " if any(first <= code <= last for first, last in _IDEOGRAPHS) else character


def _without_accents(text: str) -> str:
    decomposed = unicodedata.normalize("NFD", text)
    return "".join(character for character in decomposed if unicodedata.category(character) != "Mn")


def _is_punctuation(character: str) -> bool:
    return character in _SYMBOLS or unicodedata.category(character).startswith("P")


_SPECIAL_TOKENS = ("[CLS]", "[SEP]")
# SentencePiece's sign for a space.
_SPACE = "\N{LOWER ONE EIGHTH BLOCK}"


@dataclasses.dataclass(frozen=True, kw_only=True)
class Encoder:
    """Turns pairs of texts into ids.

    Attributes:
      tokenize: Returns the ids of a text, without special ones.
      known: Returns the pieces of a text that are in the vocabulary.
      cls_id: Id of [CLS].
      sep_id: Id of [SEP].
      max_length: Most ids of a pair, the three special ones included.
    """

    tokenize: Callable[[str], list[int]]
    known: Callable[[str], list[str]]
    cls_id: int
    sep_id: int
    max_length: int

    @classmethod
    def of(cls, config: BleurtConfig) -> Self:
        """Returns the encoder of a checkpoint.

        Raises:
          BleurtError: If its vocabulary cannot be read, lacks special tokens or does not match its model.
        """
        tokenize, known, ids = _sentencepiece(config) if config.is_sentencepiece else _word_pieces(config)
        return cls(
            tokenize=tokenize, known=known, cls_id=ids["[CLS]"], sep_id=ids["[SEP]"], max_length=config.max_seq_length
        )

    def encode(self, *, reference: str, candidate: str) -> tuple[list[int], list[int]]:
        """Returns the ids of a pair, and the segment of each id: 0 up to the first [SEP], then 1.

        If there are too many, the longer text loses its last id, repeatedly; if both have equal length, the candidate
        does.
        """
        first, second = self.tokenize(reference), self.tokenize(candidate)
        # Three ids are special.
        room = self.max_length - 3
        while len(first) + len(second) > room:
            (first if len(first) > len(second) else second).pop()
        ids = [self.cls_id, *first, self.sep_id, *second, self.sep_id]
        return ids, [0] * (len(first) + 2) + [1] * (len(second) + 1)


_Tokenize = Callable[[str], list[int]]
_Known = Callable[[str], list[str]]


def _word_pieces(config: BleurtConfig) -> tuple[_Tokenize, _Known, dict[str, int]]:
    """Returns a word-piece vocabulary's tokenizer, the function for known pieces, and the ids of special tokens."""
    try:
        lines = config.vocabulary.read_text(encoding="utf-8").removesuffix("\n").split("\n")
    except UnicodeDecodeError as error:
        raise BleurtError(f"{_named(config)} is not UTF-8 ({error}).") from error
    pieces = [line.strip() for line in lines]
    if len(pieces) != config.vocab_size:
        raise BleurtError(_size_mismatch(config, len(pieces)))
    ids = {piece: index for index, piece in enumerate(pieces)}
    if len(ids) != len(pieces):
        raise BleurtError(f"{_named(config)} has {len(pieces) - len(ids)} pieces twice.")
    for token in (UNKNOWN, *_SPECIAL_TOKENS):
        if token not in ids:
            raise BleurtError(f"{_named(config)} has no {token}.")

    def tokenize(text: str) -> list[int]:
        return [index for word in words(text, lower_case=config.do_lower_case) for index in word_ids(word, ids)]

    def known(text: str) -> list[str]:
        unknown = ids[UNKNOWN]
        return [word for word in words(text, lower_case=config.do_lower_case) if word_ids(word, ids) != [unknown]]

    return tokenize, known, ids


def _sentencepiece(config: BleurtConfig) -> tuple[_Tokenize, _Known, dict[str, int]]:
    """Returns a SentencePiece model's tokenizer, the function for known pieces, and the ids of special tokens."""
    try:
        processor = sentencepiece.SentencePieceProcessor(model_file=str(config.vocabulary))
    except (OSError, RuntimeError) as error:
        raise BleurtError(f"{_named(config)} is not a SentencePiece model ({error}).") from error
    # The model's embedding may be padded.
    if processor.get_piece_size() > config.vocab_size:
        raise BleurtError(_size_mismatch(config, processor.get_piece_size()))
    ids = {token: processor.piece_to_id(token) for token in _SPECIAL_TOKENS}
    for token, index in ids.items():
        if index == processor.unk_id():
            raise BleurtError(f"{_named(config)} has no {token}.")

    def known(text: str) -> list[str]:
        pieces = (processor.id_to_piece(index) for index in processor.encode(text) if index != processor.unk_id())
        # A piece that is only the mark of a space may precede an unknown word.
        return [piece for piece in pieces if piece.strip(_SPACE)]

    return processor.encode, known, ids


def _named(config: BleurtConfig) -> str:
    return f"BLEURT checkpoint {config.folder}: {config.vocabulary.name}"


def _size_mismatch(config: BleurtConfig, size: int) -> str:
    return f"{_named(config)} has {size} pieces, its model {config.vocab_size}. They do not belong together."


_SHORTEST = 32


class Bleurt(Sighted):
    """BLEURT with one checkpoint, on the CPU, clipped to [0, 1]; thread-safe.

    A pair is scored alone, padded to the smallest of a few lengths that holds it (32, 64, 128, ... tokens, or the only
    length that the model accepts). The last bits of scores in a batch depend on its size, and a threshold can depend on
    those bits; on a CPU a batch takes these models as long as its pairs one after the other.
    """

    def __init__(self, folder: pathlib.Path) -> None:
        """Loads a checkpoint.

        Args:
          folder: A published checkpoint: `bleurt_config.json`, `saved_model.pb`, `variables/` and a vocabulary.

        Raises:
          BleurtError: If it cannot be read, or is not a checkpoint.
          MissingExtraError: If the extra `bleurt` is not installed.
        """
        config = BleurtConfig.read(folder)
        self.name = config.name
        self._encoder = Encoder.of(config)
        self._model = load_model(config)
        self._lengths = _lengths(self._model, config.max_seq_length)
        self._lock = threading.Lock()
        self._clipped = 0
        # A model that loads may still fail to run.
        self._predict([self._encoder.cls_id], [0])

    def __call__(self, candidate: str, references: Sequence[str]) -> float:
        """Returns the score of the candidate, best over references.

        Args:
          candidate: The text to score.
          references: At least one text.

        Returns:
          A score in [0, 1]. Identical texts score 1, though BLEURT itself gives them somewhat less: otherwise the full
          model would not be consistent with itself. An empty text is scored like any other if the vocabulary has
          a piece of the other text.

        Raises:
          TypeError: If `references` is a single string.
          ValueError: If `references` is empty.
        """
        return best_over_references(self._clipped_score, candidate, references=references, sight=self.sight)

    @property
    def sight(self) -> Sight:
        """The pieces that the vocabulary has."""
        return Sight(tokens=self._encoder.known)

    def score(self, *, reference: str, candidate: str) -> float:
        """Returns the model's prediction for a pair of texts, unclipped."""
        return self._predict(*self._encoder.encode(reference=reference, candidate=candidate))

    def take_clipped(self) -> int:
        """Returns how many scores were outside [0, 1] since the last call."""
        with self._lock:
            count, self._clipped = self._clipped, 0
        return count

    def _clipped_score(self, candidate: str, reference: str) -> float:
        if candidate == reference:
            return 1.0
        score = self.score(reference=reference, candidate=candidate)
        if score < 0 or score > 1:
            with self._lock:
                self._clipped += 1
            return min(max(score, 0.0), 1.0)
        # May be NaN: the caller refuses it, and names the example.
        return score

    def _predict(self, ids: Sequence[int], segments: Sequence[int]) -> float:
        length = next(length for length in self._lengths if length >= len(ids))
        # [1, length], padded with zeros.
        arrays = np.zeros((3, 1, length), np.int64)
        arrays[0, 0, : len(ids)] = ids
        arrays[1, 0, : len(ids)] = 1
        arrays[2, 0, : len(ids)] = segments
        return self._model.predict(arrays)


@functools.cache
def _locks(path: str) -> threading.Lock:
    return threading.Lock()


@functools.cache
def _loaded(path: str) -> tuple[Bleurt, str]:
    folder = local_checkpoint(path)
    return Bleurt(folder), checkpoint_fingerprint(folder)


def load_bleurt(path: str) -> tuple[Bleurt, str]:
    """Returns a checkpoint as a metric, and its fingerprint; all threads of a process share it.

    Args:
      path: Folder, local or on Cloud Storage.

    Raises:
      BleurtError: If it cannot be read, or is not a checkpoint.
      MissingExtraError: If the extra `bleurt` is not installed.
      OSError: If Cloud Storage cannot be read.
    """
    with _locks(path):
        return _loaded(path)


def _lengths(model: BleurtModel, longest: int) -> tuple[int, ...]:
    """Returns the lengths that pairs are padded to, ascending."""
    if model.length is not None:
        return (model.length,)
    lengths = []
    length = _SHORTEST
    while length < longest:
        lengths.append(length)
        length *= 2
    return (*lengths, longest)
