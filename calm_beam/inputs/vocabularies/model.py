"""What every format of vocabularies provides."""

import abc
from collections.abc import Sequence

from calm_beam.errors import CalmBeamError


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
