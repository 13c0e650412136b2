"""Prompts as token ids."""

import dataclasses
from typing import Protocol

from .examples import DataError, Example, no_vocabulary_for
from .vocabularies.vocabulary import Vocabulary, VocabularyError, reference_text

NO_TEMPLATE_FOR_TURNS = (
    "is a chat of several turns, of which only a chat template makes a prompt: pass --chat_template=model, or a file."
)
"""End of messages about such a chat without a template."""


ONE_TURN = (
    "has earlier turns, and the calibrated chats had one turn each: nothing is promised about answers to later ones. "
    "Calibrate on chats of several turns"
)
"""End of messages about a chat of several turns under a promise about chats of one."""


class PromptSettings(Protocol):
    """How prompts become token ids."""

    @property
    def task_prefix(self) -> str:
        """The text before every prompt."""
        ...

    @property
    def max_input_length(self) -> int:
        """Most token ids of a prompt."""
        ...


@dataclasses.dataclass(frozen=True, kw_only=True)
class Prompt:
    """An example with its references as texts, its token ids, at most `max_input_length`, and whether it was cut."""

    example: Example
    ids: tuple[int, ...]
    truncated: bool


def encode_prompt(
    example: Example, vocabulary: Vocabulary | None, *, settings: PromptSettings, vocab_size: int, on_long: str
) -> Prompt:
    """Returns the token ids of an example: of prefix and text, with the ids that belong before and after them.

    Token ids from the data are unchanged: nothing is added before or after them.

    Args:
      example: The example.
      vocabulary: Needed if the prompt is text.
      settings: Gives the prefix and the maximum length.
      vocab_size: Number of token ids that the model knows.
      on_long: `truncate` or `error`.

    Raises:
      DataError: If the prompt is text and there is no vocabulary, has an id the model does not know, or is too long and
        `on_long` is `error`; also the errors of `with_reference_texts`.
    """
    example = with_reference_texts(example, vocabulary, vocab_size=vocab_size)
    room = settings.max_input_length
    if example.input is None:
        assert example.input_ids is not None
        ids, whole = example.input_ids[:room], len(example.input_ids)
        if (largest := max(example.input_ids)) >= vocab_size:
            raise DataError(
                f"{example.in_words()}: its input_ids have {largest}; the model knows ids from 0 to {vocab_size - 1}."
            )
    elif vocabulary is None:
        raise DataError(f"{example.in_words()}: its input is text, which needs a vocabulary. Pass --vocabulary.")
    else:
        if example.earlier is not None and vocabulary.chat is None:
            raise DataError(f"{example.in_words()}: {NO_TEMPLATE_FOR_TURNS}")
        text, earlier = settings.task_prefix + example.input, example.earlier or ()
        try:
            ids, whole = vocabulary.encode_prompt(text, room=room, earlier=earlier)
        except VocabularyError as error:
            raise DataError(f"{example.in_words()}: {error}") from error
    if len(ids) > room:
        raise DataError(
            f"{example.in_words()}: its input has {whole} tokens, max_input_length is {room}. Raise it: prompts that a "
            "chat template made are not cut."
        )
    if whole > room and on_long == "error":
        raise DataError(
            f"{example.in_words()}: its input has {whole} tokens, max_input_length is {room}. Raise it, or pass "
            "--on_long=truncate to cut and count such inputs."
        )
    if not ids:
        raise DataError(f"{example.in_words()}: its input has no tokens, so that there is nothing to go on from.")
    return Prompt(example=example, ids=ids, truncated=whole > room)


def with_reference_texts(example: Example, vocabulary: Vocabulary | None, *, vocab_size: int) -> Example:
    """Returns the example with `references` that metrics can compare with its outputs: both texts, or both ids.

    Args:
      example: The example, as read or as returned by this function.
      vocabulary: Turns `reference_ids` into texts like outputs; without it, both are ids joined by spaces.
      vocab_size: Number of token ids that the model knows.

    Raises:
      DataError: If references have an id that the model cannot generate, or are texts and there is no vocabulary:
        compared with ids, they would give every output a score of 0, and so a risk of 0.
    """
    if example.reference_ids is None:
        if example.references and vocabulary is None:
            raise DataError(no_vocabulary_for(f"{example.in_words()}: its"))
        return example
    if example.references:
        return example
    known = vocab_size if vocabulary is None else vocabulary.size
    largest = max((index for ids in example.reference_ids for index in ids), default=0)
    if largest >= known:
        whose = "the model knows" if vocabulary is None else "the vocabulary has"
        hint = "" if largest >= vocab_size else " If these are sentinels, pass --extra_ids."
        raise DataError(
            f"{example.in_words()}: its reference_ids have {largest}; {whose} ids from 0 to {known - 1}.{hint}"
        )
    texts = tuple(reference_text(ids, vocabulary) for ids in example.reference_ids)
    return dataclasses.replace(example, references=texts)
