"""Vocabularies: text to token ids and back, with one module for each file format, and chat templates.

Here are the interface of every vocabulary format, and the vocabulary records of manifests and of output folders.
The manifest reader imports this, so it needs the standard library only.
"""

import abc
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated

from calm_beam.errors import CalmBeamError
from calm_beam.storage.record_values import AnyText, Count, Items, Text
from calm_beam.storage.records import Record


class VocabularyError(CalmBeamError, ValueError):
    """A vocabulary that cannot be read, or does not follow the conventions of its format."""


class VocabularyModel(abc.ABC):
    """Text to token ids and back, by one file and the files next to it.

    Attributes:
      fingerprint: 64 hexadecimal digits over everything that decides ids and texts.
      size: Number of ids, the highest plus one.
      begins: Ids before every prompt.
      ends: Ids after every prompt.
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
        """Returns the ids of a text, without those before or after a prompt."""

    @abc.abstractmethod
    def piece(self, index: int) -> str:
        """Returns the piece of an id, with ▁ for a space."""

    @abc.abstractmethod
    def decode(self, ids: Sequence[int]) -> str:
        """Returns the text of ids."""


@dataclass(frozen=True, kw_only=True)
class ChatRecord(Record):
    """How texts become prompts by a chat template, which is part of every prompt.

    Attributes:
      template: The Jinja template itself.
      tokens: Texts of special tokens that the template may use, by name.
      system: System text at the beginning of every chat; None for none.
    """

    template: Text
    tokens: Mapping[Text, AnyText]
    system: AnyText | None = None


@dataclass(frozen=True, kw_only=True)
class VocabularyRecord(Record):
    """The vocabulary that turns text into token ids, and outputs into text.

    Attributes:
      fingerprint: Fingerprint of the SentencePiece model, or of the tokenizer.
      extra_ids: Number of sentinel ids above its pieces.
      chat: How texts become prompts; None if a prompt is the text itself.
      stop_strings: Texts that end an output, whose text then stops before the first of them; None for none.
    """

    fingerprint: Text
    extra_ids: Count
    chat: ChatRecord | None = None
    stop_strings: Annotated[tuple[Text, ...], Items(1, "have one or more texts, each once", unique=True)] | None = None
