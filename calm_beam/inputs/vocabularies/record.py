"""What a manifest, or a folder of outputs, says of a vocabulary."""

from collections.abc import Mapping
from dataclasses import dataclass

from calm_beam.storage.record_values import AnyText, Count, Text
from calm_beam.storage.records import Record


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
