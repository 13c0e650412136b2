"""Prompts as they come to a service, found fit to be decoded."""

import dataclasses
from collections.abc import Sequence
from typing import Any

from calm_beam.inputs.examples import NO_UTF_8, NUL_CHARACTER, Example
from calm_beam.inputs.prompts import Prompt
from calm_beam.inputs.vocabularies.vocabulary import PAD_ID
from calm_beam.manifest import Calibration

from .answer import PromptError

AnyPrompt = str | Sequence[int]
"""A prompt: text, or token ids where that is what was calibrated."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class ServedRequest:
    """A prompt that a generator has found fit to be decoded.

    Attributes:
      name: What error messages call it.
      encoded: The prompt, as it was given and as token ids.
      group: The group that it names, or that the generator is for; None for none.
      entry: Entry of the manifest by which it is answered.
    """

    name: str
    encoded: Prompt
    group: str | None
    entry: Calibration

    @property
    def ids(self) -> tuple[int, ...]:
        """Its tokens."""
        return self.encoded.ids

    def beginning(self) -> str:
        """Returns what it begins with, for messages."""
        example = self.encoded.example
        given = list(example.input_ids or ()) if example.input is None else example.input
        return f"{given!r:.60}"


def example_of(prompt: AnyPrompt, name: str, *, vocab_size: int) -> Example:
    """Returns a prompt as an example; what no calibration set could hold is refused."""
    text = ids = None
    if isinstance(prompt, str):
        text = prompt
        if not text.strip():
            raise PromptError(f"{name}: is empty.")
        if "\0" in text:
            raise PromptError(f"{name}: holds {NUL_CHARACTER}")
        try:
            text.encode()
        except UnicodeEncodeError as error:
            raise PromptError(f"{name}: is not Unicode text: {NO_UTF_8}") from error
    else:
        ids = _checked_ids(prompt, name, vocab_size=vocab_size)
    return Example(
        id=name, has_own_id=True, input=text, input_ids=ids, references=(), cluster=None, file_index=0, line=1
    )


def _checked_ids(prompt: Any, name: str, *, vocab_size: int) -> tuple[int, ...]:
    if isinstance(prompt, bytes | bytearray) or not isinstance(prompt, Sequence):
        raise PromptError(f"{name}: expected a text or a list of token ids, got {type(prompt).__name__}.")
    for index in prompt:
        if type(index) is not int or not 0 <= index < vocab_size:
            raise PromptError(f"{name}: token ids must be integers from 0 to {vocab_size - 1}, got {index!r}.")
    # Padding at the end is none of the prompt.
    end = len(prompt)
    while end and prompt[end - 1] == PAD_ID:
        end -= 1
    if not end:
        raise PromptError(f"{name}: is empty, or holds padding (0) only.")
    return tuple(prompt[:end])
