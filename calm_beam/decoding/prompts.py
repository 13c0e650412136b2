"""Prompts as token ids."""

import dataclasses

from calm_beam.examples import DataError, Example
from calm_beam.vocabulary import EOS_ID, Vocabulary

from .settings import DecodeSettings


@dataclasses.dataclass(frozen=True, kw_only=True)
class Prompt:
    """An example's token ids, at most `max_input_length` of them, and whether some were cut."""

    example: Example
    ids: tuple[int, ...]
    truncated: bool


def encode_prompt(
    example: Example, vocabulary: Vocabulary | None, settings: DecodeSettings, *, vocab_size: int, on_long: str
) -> Prompt:
    """Returns the token ids of an example: prefix and text, cut to length, then eos.

    Token ids given in the data are taken as they are: nothing is put before or after them.

    Args:
      example: The example.
      vocabulary: Needed where the prompt is text.
      settings: Gives prefix and longest length.
      vocab_size: Token ids that the model knows.
      on_long: `truncate` or `error`.

    Raises:
      DataError: If the prompt is text and there is no vocabulary, has an id the model does not know, or is too long and
        `on_long` is `error`.
    """
    end = () if example.input is None else (EOS_ID,)
    if example.input is None:
        assert example.input_ids is not None
        ids = example.input_ids
        if max(ids) >= vocab_size:
            raise DataError(
                f"example {example.id}: its input_ids have {max(ids)}; the model knows ids from 0 to {vocab_size - 1}."
            )
    elif vocabulary is None:
        raise DataError(f"example {example.id}: its input is text, which needs a vocabulary. Pass --vocabulary.")
    else:
        ids = tuple(vocabulary.encode(settings.task_prefix + example.input))
    room = settings.max_input_length - len(end)
    if len(ids) > room and on_long == "error":
        raise DataError(
            f"example {example.id}: its input has {len(ids) + len(end)} tokens, max_input_length is "
            f"{settings.max_input_length}. Raise it, or pass --on_long=truncate to cut and count such inputs."
        )
    return Prompt(example=example, ids=(*ids[:room], *end), truncated=len(ids) > room)
