"""Prompts as token ids, grouped into batches of few fixed shapes."""

import dataclasses
from collections.abc import Iterable, Iterator, Sequence

import numpy as np

from calm_beam.examples import DataError, Example
from calm_beam.vocabulary import EOS_ID, Vocabulary

from .settings import DecodeSettings

_NARROWEST_BUCKET = 32
_NOTHING: tuple[int, ...] = ()


@dataclasses.dataclass(frozen=True, kw_only=True)
class Prompt:
    """An example's token ids, at most `max_input_length` of them, and whether some were cut."""

    example: Example
    ids: tuple[int, ...]
    truncated: bool


@dataclasses.dataclass(frozen=True, kw_only=True)
class PromptBatch:
    """Prompts that are decoded together.

    Attributes:
      prompts: At most as many as `source_tokens` has rows; row k belongs to the k-th.
      source_tokens: int32, shape (batch, width), padded with 0; rows beyond the prompts are padding only.
    """

    prompts: tuple[Prompt, ...]
    source_tokens: np.ndarray


def encode_prompt(example: Example, vocabulary: Vocabulary | None, settings: DecodeSettings, *, on_long: str) -> Prompt:
    """Returns the token ids of an example: prefix and text, cut to length, then eos.

    Token ids given in the data are taken as they are: nothing is put before or after them.

    Args:
      example: The example.
      vocabulary: Needed where the prompt is text.
      settings: Gives prefix and longest length.
      on_long: `truncate` or `error`.

    Raises:
      DataError: If the prompt is text and there is no vocabulary, or it is too long and `on_long` is `error`.
    """
    if example.input is None:
        assert example.input_ids is not None
        ids, end = example.input_ids, _NOTHING
    elif vocabulary is None:
        raise DataError(f"example {example.id}: its input is text, which needs a vocabulary. Pass --vocabulary.")
    else:
        ids, end = tuple(vocabulary.encode(settings.task_prefix + example.input)), (EOS_ID,)
    room = settings.max_input_length - len(end)
    if len(ids) > room and on_long == "error":
        raise DataError(
            f"example {example.id}: its input has {len(ids) + len(end)} tokens, max_input_length is "
            f"{settings.max_input_length}. Raise it, or pass --on_long=truncate to cut and count such inputs."
        )
    return Prompt(example=example, ids=(*ids[:room], *end), truncated=len(ids) > room)


def batch_prompts(prompts: Iterable[Prompt], *, batch_size: int, max_input_length: int) -> Iterator[PromptBatch]:
    """Yields all prompts in batches of `batch_size` rows, each as wide as the bucket of its prompts.

    A prompt's width depends on its own length alone, so that it does not matter beside which others it stands. There
    are few widths, since each is compiled for.

    Args:
      prompts: Prompts of at most `max_input_length` tokens.
      batch_size: Rows of every batch, the unfilled included.
      max_input_length: Width of the last bucket.
    """
    buckets: dict[int, list[Prompt]] = {}
    # Neighbours of like length: outputs tend to end together, and a batch runs until its last one does.
    for prompt in sorted(prompts, key=lambda prompt: (len(prompt.ids), prompt.example.id)):
        buckets.setdefault(bucket_width(len(prompt.ids), max_input_length), []).append(prompt)
    for width, members in buckets.items():
        for start in range(0, len(members), batch_size):
            rows = members[start : start + batch_size]
            yield PromptBatch(prompts=tuple(rows), source_tokens=_padded(rows, batch_size, width))


def bucket_width(length: int, max_input_length: int) -> int:
    """Returns the width that a prompt is padded to: the next of 32, 64, 128, ..., at most `max_input_length`.

    >>> bucket_width(33, 512), bucket_width(33, 48)
    (64, 48)
    """
    width = _NARROWEST_BUCKET
    while width < length:
        width *= 2
    return min(width, max_input_length)


def _padded(prompts: Sequence[Prompt], batch_size: int, width: int) -> np.ndarray:
    tokens = np.zeros((batch_size, width), np.int32)
    for row, prompt in enumerate(prompts):
        tokens[row, : len(prompt.ids)] = prompt.ids
    return tokens
