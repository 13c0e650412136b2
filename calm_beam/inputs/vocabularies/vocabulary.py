"""Text to token ids and back, by a SentencePiece model or a `tokenizer.json`."""

import os
from collections.abc import Callable, Sequence

from calm_beam.inputs.vocabularies import ChatRecord, VocabularyModel, VocabularyRecord
from calm_beam.inputs.vocabularies import VocabularyError as VocabularyError
from calm_beam.inputs.vocabularies.chat_templates import rendered
from calm_beam.inputs.vocabularies.sentence_piece import EOS_ID as EOS_ID
from calm_beam.inputs.vocabularies.sentence_piece import PAD_ID as PAD_ID
from calm_beam.inputs.vocabularies.sentence_piece import UNK_ID as UNK_ID
from calm_beam.inputs.vocabularies.sentence_piece import SentencePieceModel, SentinelsError, extra_ids_beside
from calm_beam.inputs.vocabularies.stop_strings import StopStrings
from calm_beam.inputs.vocabularies.tokenizer_json import TokenizerModel, read_tokenizer_files
from calm_beam.storage import base_name, open_input

# The largest known SentencePiece model has 5 MB, the largest `tokenizer.json` 35 MB; the most sentinels are 300.
_MOST_BYTES = 256 << 20
_MOST_EXTRA_IDS = 100_000
# transformers' name for a T5's SentencePiece model; with that name, special tokens are found anywhere in a text.
_HUGGING_FACE_NAME = "spiece.model"


class Vocabulary:
    """Text to token ids and back, and prompts from text. Not picklable; workers load their own."""

    def __init__(
        self,
        path: str | os.PathLike[str],
        *,
        extra_ids: int = 0,
        chat: ChatRecord | None = None,
        stop_strings: Sequence[str] = (),
    ) -> None:
        """Loads a vocabulary.

        Args:
          path: A SentencePiece model with T5's conventions, or a Hugging Face `tokenizer.json`, local or on Cloud
            Storage. If the model is called `spiece.model`, as in transformers folders, texts are cut at special tokens
            as transformers does, and the tokens that files next to it name are added.
          extra_ids: Number of sentinels to add to a SentencePiece model, 100 for the public T5 vocabularies.
          chat: How texts become prompts; None for the text itself.
          stop_strings: Texts that end an output.

        Raises:
          VocabularyError: If the file is missing or of neither kind, or a SentencePiece model has other ids for pad
            and eos; or if `extra_ids` is negative or too large, or is given and the file has sentinels itself.
          MissingExtraError: If a needed package is not installed.
        """
        if not 0 <= extra_ids <= _MOST_EXTRA_IDS:
            raise VocabularyError(
                f"extra_ids must be from 0 to {_MOST_EXTRA_IDS}, got {extra_ids}. The public T5 vocabularies have 100."
            )
        self._model = _open_model(os.fspath(path), extra_ids=extra_ids)
        self.extra_ids = extra_ids
        self.chat = chat
        self.stops = StopStrings(stop_strings, self._model) if stop_strings else None

    @property
    def size(self) -> int:
        """Number of ids, sentinels included."""
        return self._model.size

    @property
    def fingerprint(self) -> str:
        """`sha256:` and a digest of the file, and of all in the files next to it that decides ids and texts."""
        return f"sha256:{self._model.fingerprint}"

    @property
    def end_ids(self) -> tuple[int, ...]:
        """Ids that end a text."""
        return self._model.end_ids

    def record(self) -> VocabularyRecord:
        """Returns its record in a manifest or in generations."""
        return VocabularyRecord(
            fingerprint=self.fingerprint,
            extra_ids=self.extra_ids,
            chat=self.chat,
            stop_strings=None if self.stops is None else self.stops.texts,
        )

    def has_sentinels(self) -> bool:
        """Returns whether `<extra_id_0>` is one of the pieces."""
        return self._model.has_sentinels()

    def encode(self, text: str) -> list[int]:
        """Returns the ids of a text, without eos or other ids before or after a prompt."""
        return self._model.encode(text)

    def encode_prompt(self, text: str, *, room: int, earlier: Sequence[str] = ()) -> tuple[tuple[int, ...], int]:
        """Returns the ids of a prompt, cut to `room`, and their number before the cut.

        A text that is not a chat gets the vocabulary's ids before and after it, and loses its last ids if there is no
        room. A chat is not cut: without its end, no answer would begin.

        Args:
          text: The prompt, with its task prefix.
          room: Most ids.
          earlier: Texts of a chat's turns before it, by user and assistant in turn.

        Raises:
          VocabularyError: If the chat template cannot be rendered.
        """
        if self.chat is not None:
            ids = tuple(self._model.encode(rendered(self.chat, text, earlier=earlier)))
            return ids, len(ids)
        assert not earlier, "turns need a chat template"
        begins, ends = self._model.begins, self._model.ends
        ids = tuple(self._model.encode(text))
        whole = len(begins) + len(ids) + len(ends)
        return (*begins, *ids[: max(0, room - len(begins) - len(ends))], *ends), whole

    def piece(self, index: int) -> str:
        """Returns the piece of an id, with ▁ for a space; an id outside the vocabulary reads as unknown."""
        return self._model.piece(index)

    def decode(self, ids: Sequence[int]) -> str:
        """Returns the text of ids, without tokens that are not text.

        Output heads are often padded beyond the vocabulary, so ids outside it can be generated.
        """
        return self._model.decode(ids)


def open_recorded(path: str | os.PathLike[str], record: VocabularyRecord | None) -> Vocabulary:
    """Returns a vocabulary with the sentinels, chat and stop strings of a record; its file has none of these.

    Args:
      path: Path of a file that `Vocabulary` reads.
      record: The record in a manifest or in generations; None if they have none.

    Raises:
      VocabularyError: If it cannot be read.
    """
    if record is None:
        return Vocabulary(path)
    stop_strings = record.stop_strings or ()
    return Vocabulary(path, extra_ids=record.extra_ids, chat=record.chat, stop_strings=stop_strings)


def open_vocabulary(
    path: str | os.PathLike[str],
    *,
    extra_ids: int | None = None,
    chat: ChatRecord | None = None,
    stop_strings: Sequence[str] = (),
) -> Vocabulary:
    """Returns a vocabulary with its sentinels.

    Args:
      path: Path of a file that `Vocabulary` reads.
      extra_ids: Number of sentinels; None takes the number in the tokenizer files next to it, or 0 if it has sentinels
        itself.
      chat: How texts become prompts; None for the text itself.
      stop_strings: Texts that end an output.

    Raises:
      VocabularyError: If it, or a tokenizer file next to it, cannot be read.
    """
    sentinels = missing_sentinels(path) if extra_ids is None else extra_ids
    return Vocabulary(path, extra_ids=sentinels, chat=chat, stop_strings=stop_strings)


def missing_sentinels(path: str | os.PathLike[str]) -> int:
    """Returns the number of sentinels that files next to a vocabulary name; 0 if it has sentinels itself.

    Raises:
      VocabularyError: If such a file cannot be read, or names some and the vocabulary cannot be read.
    """
    try:
        beside = extra_ids_beside(path)
    except SentinelsError as error:
        raise VocabularyError(str(error)) from error
    # Tokens above the sentinels have no place without them.
    has_own = not beside or _open_model(os.fspath(path), extra_ids=0, reads_added=False).has_sentinels()
    return 0 if has_own else beside


def output_text(tokens: Sequence[int], vocabulary: Vocabulary | None, *, end_ids: Sequence[int] = (EOS_ID,)) -> str:
    """Returns an output's text for metrics, up to a stop string and without eos.

    Neither is content, and both would make outputs more alike.

    Args:
      tokens: Generated ids.
      vocabulary: None if there is none, which is possible only for prompts of token ids; then the text is the ids
        joined by spaces.
      end_ids: End-of-sequence ids, used without a vocabulary.
    """
    if vocabulary is None:
        return " ".join(str(token) for token in tokens if token not in end_ids)
    text = vocabulary.decode(tokens)
    return text if vocabulary.stops is None else vocabulary.stops.cut(text)


def ends_output(vocabulary: Vocabulary | None) -> Callable[[Sequence[int]], bool] | None:
    """Returns what tells a decoder whether a stop string ends an output with its last token; None if none does."""
    return None if vocabulary is None or vocabulary.stops is None else vocabulary.stops.ends


def reference_text(ids: Sequence[int], vocabulary: Vocabulary | None) -> str:
    """Returns the text of a reference given as token ids, made like an output's text.

    Args:
      ids: Its ids; the first eos and all ids after it are left out, and so is padding at the end.
      vocabulary: None if there is none; then the text is the ids joined by spaces.

    >>> reference_text([5, 7, 1, 0, 0], None), reference_text([0], None)
    ('5 7', '')
    """
    end_ids = vocabulary.end_ids if vocabulary else (EOS_ID,)
    end = next((place for place, index in enumerate(ids) if index in end_ids), len(ids))
    while end and ids[end - 1] == PAD_ID:
        end -= 1
    # A stop string ends outputs alone: references of the same text, as text and as ids, are equal.
    return vocabulary.decode(ids[:end]) if vocabulary else output_text(ids[:end], None)


def _open_model(path: str, *, extra_ids: int, reads_added: bool = True) -> VocabularyModel:
    """Returns the model in a file, whose kind is given by its name."""
    is_json = path.endswith(".json")
    kind = "a tokenizer of Hugging Face's" if is_json else "a SentencePiece model"
    try:
        with open_input(path) as file:
            content = file.read(_MOST_BYTES + 1)
    except OSError as error:
        raise VocabularyError(f"vocabulary {path}: cannot be read as {kind}: {error}") from error
    if len(content) > _MOST_BYTES:
        raise VocabularyError(f"vocabulary {path}: is larger than {_MOST_BYTES >> 20} MiB, which {kind} never is.")
    if not is_json:
        is_cut = reads_added and base_name(path) == _HUGGING_FACE_NAME
        added = _added_tokens(path) if is_cut else None
        return SentencePieceModel(path, content, extra_ids=extra_ids, added_tokens=added)
    if extra_ids:
        raise VocabularyError(
            f"vocabulary {path}: extra_ids is {extra_ids}, but a tokenizer.json names its sentinels itself: leave "
            "extra_ids out."
        )
    return TokenizerModel(path, content)


def _added_tokens(path: str) -> dict[int, str]:
    """Returns the tokens that files next to a `spiece.model` add, by id."""
    files = read_tokenizer_files(path)
    return {index: token["content"] for index, token in files.added_tokens.items()}
