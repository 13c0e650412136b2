"""Which part of an output's text each of its tokens is."""

from collections.abc import Sequence

from calm_beam.vocabulary import EOS_ID, Vocabulary

END = "</s>"
"""Stands for the end of an output, which has no text."""


def token_texts(tokens: Sequence[int], vocabulary: Vocabulary | None) -> tuple[str, ...]:
    """Returns the text of every token; together, without the end, they are the text of the output.

    A token that is a part of a letter only has no text: the one that completes the letter has all of it.

    Args:
      tokens: Generated ids, with the final eos if it was generated.
      vocabulary: None where there is none; then the text is the ids joined by spaces.

    Returns:
      One text for each token; `</s>` for eos.
    """
    body = tokens[:-1] if tokens and tokens[-1] == EOS_ID else tokens
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
