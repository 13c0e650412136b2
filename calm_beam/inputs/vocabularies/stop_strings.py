"""Stop strings: texts that end an output, whose text then stops before the first of them.

An output ends with the first token with which its text has a stop string. That depends on its token ids alone: a
decoder may stop there, or go on and be cut, and the output is the same. As with an end token, the tokens up to there
were needed, and count.

Source: transformers `generation/stopping_criteria.py` (`StopStringCriteria`), which ends at the same token, but where
a stop string begins in the prompt, or is a part of special tokens' names: here the texts of outputs count.
"""

from collections.abc import Sequence

from . import VocabularyModel

_PART_OF_LETTER = "\N{REPLACEMENT CHARACTER}"
# Stands for a space in pieces.
_SPACE = "▁"


class StopStrings:
    """The texts that end outputs of a vocabulary."""

    def __init__(self, texts: Sequence[str], model: VocabularyModel) -> None:
        """Stores the texts, none of which is empty, and the vocabulary's model."""
        self.texts = tuple(texts)
        self._model = model
        self._names = frozenset(text.replace(" ", _SPACE) for text in texts)
        self._last_letters = frozenset(text[-1] for text in texts)
        self._completing: dict[int, bool] = {}

    def ends(self, tokens: Sequence[int]) -> bool:
        """Returns whether the last of an output's tokens ends it, if none before has ended it."""
        # Few tokens complete a stop string, and others need not be decoded.
        last = int(tokens[-1])
        may_complete = self._completing.get(last)
        if may_complete is None:
            may_complete = self._completing[last] = self._may_complete(last)
        if not may_complete:
            return False
        return self._is_named(last) or self._find(self._model.decode(tokens)) is not None

    def cut(self, text: str) -> str:
        """Returns a text up to the first stop string in it."""
        return text[: self._find(text)]

    def settled(self, text: str) -> str:
        """Returns the beginning of a growing text that no stop string can take away any more."""
        text = self.cut(text)
        ends = (size for stop in self.texts for size in range(1, len(stop)) if text.endswith(stop[:size]))
        return text[: len(text) - max(ends, default=0)]

    def _find(self, text: str) -> int | None:
        """Returns where the first stop string begins in a text; None if there is none."""
        return min((place for stop in self.texts if (place := text.find(stop)) >= 0), default=None)

    def _may_complete(self, token: int) -> bool:
        # Twice, to see what may be put between tokens; alone, a token may lose its space.
        texts = (
            self._model.piece(token).replace(_SPACE, " "),
            self._model.decode([token]),
            self._model.decode([token] * 2),
        )
        return any(_PART_OF_LETTER in text or not self._last_letters.isdisjoint(text) for text in texts)

    def _is_named(self, token: int) -> bool:
        """Returns whether a stop string is the name of a special token, which outputs' texts do not show."""
        return self._model.piece(token) in self._names and not self._model.decode([token])
