"""What turns text into token ids and back: one module for each format of files, and chats made of templates.

Here is what every format of vocabularies provides, and what a manifest, or a folder of outputs, says of a vocabulary.
The reader of manifests imports this, so it needs the standard library only.
"""

import abc
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from calm_beam.errors import CalmBeamError
from calm_beam.storage.record_values import AnyText, Count, Text
from calm_beam.storage.records import Record


class VocabularyError(CalmBeamError, ValueError):
    """A vocabulary that cannot be read, or does not follow the conventions of its kind."""


class VocabularyModel(abc.ABC):
    """Text to token ids and back, by one file and what lies beside it.

    Attributes:
      fingerprint: 64 hexadecimal digits that name all that decides ids and texts.
      size: Number of ids, the highest and one.
      begins: Ids before every prompt.
      ends: Ids behind it.
      end_ids: Ids that end a text.
    """

    fingerprint: str
    size: int
    begins: tuple[int, ...]
    ends: tuple[int, ...]
    end_ids: tuple[int, ...]

    @abc.abstractmethod
    def has_sentinels(self) -> bool:
        """Returns whether `<extra_id_0>` is one of the pieces."""

    @abc.abstractmethod
    def encode(self, text: str) -> list[int]:
        """Returns the ids of a text, without those that stand before or behind a prompt."""

    @abc.abstractmethod
    def piece(self, index: int) -> str:
        """Returns the piece of an id, ▁ standing for a space."""

    @abc.abstractmethod
    def decode(self, ids: Sequence[int]) -> str:
        """Returns the text of ids."""


@dataclass(frozen=True, kw_only=True)
class ChatRecord(Record):
    """How prompts were made of texts: by a chat template, which is a part of every prompt.

    Attributes:
      template: The Jinja template itself.
      tokens: Texts of special tokens that it may use, by name.
      system: What every chat began with, before the text; None if it began with that.
    """

    template: Text
    tokens: Mapping[Text, AnyText]
    system: AnyText | None = None


@dataclass(frozen=True, kw_only=True)
class VocabularyRecord(Record):
    """The vocabulary that turned text into token ids, and outputs into text.

    Attributes:
      fingerprint: Identifies the SentencePiece model, or the tokenizer.
      extra_ids: Number of sentinel ids above its pieces.
      chat: How prompts were made of texts; None where a prompt is the text as it is.
    """

    fingerprint: Text
    extra_ids: Count
    chat: ChatRecord | None = None
