"""Which part of an output's text each of its tokens is, when all of it is there and while it grows."""

from collections.abc import Sequence

from calm_beam.inputs.vocabularies.vocabulary import EOS_ID, Vocabulary, output_text

END = "</s>"
"""Stands for the end of an output, which has no text."""

_NO_LETTER = "\N{REPLACEMENT CHARACTER}"


def token_texts(tokens: Sequence[int], vocabulary: Vocabulary | None) -> tuple[str, ...]:
    """Returns the text of every token; together, without the end, they are the text of the output.

    A token that is a part of a letter only has no text: the one that completes the letter has all of it.

    Args:
      tokens: Generated ids, with the final eos if it was generated.
      vocabulary: None where there is none; then the text is the ids joined by spaces.

    Returns:
      One text for each token; `</s>` for eos.
    """
    end_ids = vocabulary.end_ids if vocabulary else (EOS_ID,)
    body = tokens[:-1] if tokens and tokens[-1] in end_ids else tokens
    end = (END,) if len(body) < len(tokens) else ()
    if vocabulary is None:
        return (*(f"{' ' if index else ''}{token}" for index, token in enumerate(body)), *end)
    whole = vocabulary.decode(body)
    texts, shown = [], 0
    for index in range(1, len(body) + 1):
        # Beginnings of a letter decode to something that the whole does not begin with.
        beginning = vocabulary.decode(body[:index]) if index < len(body) else whole
        until = len(beginning) if whole.startswith(beginning) else shown
        texts.append(whole[shown:until])
        shown = max(shown, until)
    return (*texts, *end)


class GrowingText:
    """The text of an output whose tokens come one by one: what each of them adds to it.

    What it returned is never taken back. Letters may be made of several tokens, and read as U+FFFD until the last is
    there: such an end is held back until it is clear what it will be.
    """

    def __init__(self, vocabulary: Vocabulary | None) -> None:
        """Begins an output without tokens; without a vocabulary, its text is the ids joined by spaces."""
        self._vocabulary = vocabulary
        self._tokens: list[int] = []
        self._text = ""

    def add(self, token: int) -> str:
        """Returns what one more token adds to the text; "" for a part of a letter, and for eos."""
        self._tokens.append(token)
        return self._grown(output_text(self._tokens, self._vocabulary).rstrip(_NO_LETTER))

    def end(self) -> str:
        """Returns what was held back, as no more tokens come: "", or what stands for the beginning of a letter."""
        return self._grown(output_text(self._tokens, self._vocabulary))

    def _grown(self, text: str) -> str:
        """Returns what a text has beyond what was returned."""
        if not text.startswith(self._text):
            return ""
        added = text[len(self._text) :]
        self._text = text
        return added
