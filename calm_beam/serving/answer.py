"""Prompts and answers of a service: checked prompts, what they become, and what goes wrong instead.

An answer can be a row of a file. Its pieces say which part of the output's text each token is, when the text is
complete and while it grows. A tally counts the results of prompts.
"""

import collections
import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any, Self

from calm_beam.decoding.settings import recorded_rule
from calm_beam.errors import CalmBeamError
from calm_beam.exits.measures import Need
from calm_beam.exits.token_cost import tests_at
from calm_beam.inputs.examples import NO_UTF_8, NUL_CHARACTER, AnyPrompt, Example, Turns
from calm_beam.inputs.prompts import Prompt
from calm_beam.inputs.vocabularies.vocabulary import EOS_ID, PAD_ID, Vocabulary, output_text
from calm_beam.manifest import Calibration, Manifest
from calm_beam.manifest.notebook import html_of
from calm_beam.risk.monitor import SampledLoss
from calm_beam.text import check_count

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
    whole = output_text(body, vocabulary)
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

    Text that was returned is never revised. Letters may be made of several tokens, and read as U+FFFD until the last is
    there: such an end is held back until it is clear what it will be. So is an end that may become a stop string.
    """

    def __init__(self, vocabulary: Vocabulary | None) -> None:
        """Begins an output without tokens; without a vocabulary, its text is the ids joined by spaces."""
        self._vocabulary = vocabulary
        self._tokens: list[int] = []
        self._text = ""

    def add(self, token: int) -> str:
        """Returns what one more token adds to the text; "" for a part of a letter, and for eos."""
        self._tokens.append(token)
        text = output_text(self._tokens, self._vocabulary).rstrip(_NO_LETTER)
        stops = None if self._vocabulary is None else self._vocabulary.stops
        return self._grown(text if stops is None else stops.settled(text))

    def end(self) -> str:
        """Returns what was held back, as no more tokens come: "", or the beginning of a letter or of a stop string."""
        return self._grown(output_text(self._tokens, self._vocabulary))

    def _grown(self, text: str) -> str:
        """Returns what a text has beyond what was returned."""
        if not text.startswith(self._text):
            return ""
        added = text[len(self._text) :]
        self._text = text
        return added


class PromptError(CalmBeamError, ValueError):
    """A prompt that is not served: the client has to change it."""


class OutputError(CalmBeamError, RuntimeError):
    """A prompt that was served as it should be, and has no output: the model or the device is broken."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Answer:
    """The output of one prompt.

    Attributes:
      text: The output, as the calibration's metrics saw it: without eos, and up to a stop string; under a manifest
        without a vocabulary, the generated ids joined by spaces.
      tokens: Generated ids, with the final eos if it was generated, or with those of the stop string that ended it.
      exit_layers: Layers used for each token, from 1.
      confidences: Confidence at each token's exit layer.
      num_layers: Decoder depth: layers that the full model uses for each token.
      truncated: Whether the prompt was longer than the manifest allows, and was cut.
      finish_reason: `stop` if the output ended by itself, with an end token or a stop string; `length` if it was cut at
        the manifest's `max_decode_length`.
      group: The group that the request named, or that the generator is for; None for none.
      entry: Entry of the manifest whose threshold let tokens exit. Only if its group is `group` does its promise cover
        the prompt. None where the full model answered whatever the manifest says.
      vocabulary: That of the model, for `token_texts`; taken when the answer is made, and no field.
    """

    text: str
    tokens: tuple[int, ...]
    exit_layers: tuple[int, ...]
    confidences: tuple[float, ...]
    num_layers: int
    truncated: bool
    finish_reason: str = "stop"
    group: str | None = None
    entry: Calibration | None = None
    vocabulary: dataclasses.InitVar[Vocabulary | None] = None

    def __post_init__(self, vocabulary: Vocabulary | None) -> None:
        # No field: an answer is compared, written as JSON and sent to other processes without it.
        object.__setattr__(self, "_vocabulary", vocabulary)

    def __getstate__(self) -> dict[str, Any]:
        return {field.name: getattr(self, field.name) for field in dataclasses.fields(self)}

    @property
    def token_texts(self) -> tuple[str, ...] | None:
        """The text of every token, as `calm_beam.serving.token_texts` gives them; None for an answer that was sent."""
        texts = token_texts(self.tokens, self.__dict__.get("_vocabulary"))
        return texts if "".join(text for text in texts if text != END) == self.text else None

    @property
    def layers_used(self) -> int:
        """Decoder layers that were run, over all tokens."""
        return sum(self.exit_layers)

    @property
    def layers_saved(self) -> int:
        """Further decoder layers that the full model would have run for the same tokens."""
        return self.num_layers * len(self.tokens) - self.layers_used

    def __str__(self) -> str:
        """Returns the text, as `print` shows it."""
        return self.text

    def _repr_html_(self) -> str | None:
        """Returns what a notebook shows; None, for its text, in calm-beam-serving."""
        return html_of(self, "answer_html")


@dataclasses.dataclass(frozen=True, kw_only=True)
class ProbedAnswer(Answer):
    """An answer whose prompt was sampled: the full model answered it as well.

    Attributes:
      loss: What the answer loses.
    """

    loss: SampledLoss


@dataclasses.dataclass(frozen=True, kw_only=True)
class Unanswered:
    """Takes the place of a missing answer, among those of other prompts.

    Attributes:
      error: Why there is none.
      loss: What counts for it, if it was sampled and the promise is about it; None if not.
    """

    error: PromptError | OutputError
    loss: SampledLoss | None = None


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
    text = ids = earlier = None
    if _are_messages(prompt):
        try:
            turns = Turns.of(prompt)
        except ValueError as error:
            raise PromptError(f"{name}: {error}.") from error
        if turns.answer is not None:
            raise PromptError(f"{name}: ends with an assistant's message, and there is nothing to answer.")
        prompt, earlier = turns.text, turns.earlier or None
    if isinstance(prompt, str):
        text = prompt
        if not text.strip():
            raise PromptError(f"{name} is empty. Give a text that is more than blanks.")
        whole = "".join((*(earlier or ()), text))
        if "\0" in whole:
            raise PromptError(f"{name}: holds {NUL_CHARACTER}")
        try:
            whole.encode()
        except UnicodeEncodeError as error:
            raise PromptError(f"{name}: is not Unicode text: {NO_UTF_8}") from error
    else:
        ids = _checked_ids(prompt, name, vocab_size=vocab_size)
    return Example(
        id=name,
        has_own_id=True,
        input=text,
        input_ids=ids,
        references=(),
        cluster=None,
        file_index=0,
        line=1,
        earlier=earlier,
    )


def _are_messages(prompt: Any) -> bool:
    return isinstance(prompt, Sequence) and bool(prompt) and all(isinstance(each, Mapping) for each in prompt)


def _checked_ids(prompt: Any, name: str, *, vocab_size: int) -> tuple[int, ...]:
    if isinstance(prompt, bytes | bytearray) or not isinstance(prompt, Sequence):
        raise PromptError(f"{name}: expected a text or a list of token ids, got {type(prompt).__name__}.")
    if any(isinstance(each, str) for each in prompt):
        raise PromptError(
            f"{name}: expected a text or token ids, got a list of texts. For several, call generate_batch."
        )
    for index in prompt:
        if type(index) is not int or not 0 <= index < vocab_size:
            raise PromptError(f"{name}: token ids must be integers from 0 to {vocab_size - 1}, got {index!r}.")
    # Padding at the end is none of the prompt.
    end = len(prompt)
    while end and prompt[end - 1] == PAD_ID:
        end -= 1
    if not end:
        raise PromptError(f"{name} is empty, or holds padding (0) only.")
    return tuple(prompt[:end])


def answer_row(request_id: str, answer: Answer, *, has_groups: bool) -> dict[str, Any]:
    """Returns an answer as a row of a file, in plain values.

    Args:
      request_id: What the row is called.
      answer: The answer.
      has_groups: Whether the manifest has groups; then the row says for which group, and at which threshold, the prompt
        was answered.
    """
    row: dict[str, Any] = {
        "id": request_id,
        "text": answer.text,
        "tokens": answer.tokens,
        "exit_layers": answer.exit_layers,
        "confidences": answer.confidences,
        "layers_used": answer.layers_used,
        "layers_saved": answer.layers_saved,
        "truncated": answer.truncated,
        "finish_reason": answer.finish_reason,
    }
    if has_groups and answer.entry is not None:
        row |= {"group": answer.group, "threshold": answer.entry.threshold}
    return row


@dataclasses.dataclass(frozen=True, kw_only=True)
class Tally:
    """Counts of answers; those of several parts are added.

    Attributes:
      prompts: Prompts, those that failed included.
      failed: Prompts without an answer.
      truncated: Prompts that were longer than the manifest allows, and were cut.
      tokens: Tokens of all answers.
      layers_used: Decoder layers that were run for them.
      layers_saved: Further decoder layers that the full model would have run.
    """

    prompts: int = 0
    failed: int = 0
    truncated: int = 0
    tokens: int = 0
    layers_used: int = 0
    layers_saved: int = 0

    def __post_init__(self) -> None:
        for name in _NAMES:
            check_count(name, getattr(self, name))

    def __add__(self, other: "Tally") -> "Tally":
        return Tally(**{name: getattr(self, name) + getattr(other, name) for name in _NAMES})

    def answered(self, answer: Answer) -> Self:
        """Returns the counts with one more answer."""
        return dataclasses.replace(
            self,
            prompts=self.prompts + 1,
            truncated=self.truncated + answer.truncated,
            tokens=self.tokens + len(answer.tokens),
            layers_used=self.layers_used + answer.layers_used,
            layers_saved=self.layers_saved + answer.layers_saved,
        )

    def failing(self) -> Self:
        """Returns the counts with one more prompt that has no answer."""
        return dataclasses.replace(self, prompts=self.prompts + 1, failed=self.failed + 1)

    def in_words(self) -> str:
        """Returns the counts of answers, as the last line of a command."""
        layers = f"{self.layers_used / self.tokens:.2f} layers per token" if self.tokens else "no layers"
        saved = self.layers_saved / max(1, self.layers_used + self.layers_saved)
        return (
            f"prompts: {self.prompts}, of which too long and cut: {self.truncated}; tokens: {self.tokens}, {layers}, "
            f"{saved:.0%} of the full model's saved"
        )


def exit_tests(answer: Answer, manifest: Manifest) -> int:
    """Returns the number of exit tests for the tokens of an answer: the cost of exits in addition to the layers.

    Args:
      answer: By an entry of the manifest, or by the full model, which asks nothing.
      manifest: Says by which measure that entry exits, and where.
    """
    entry = answer.entry
    if entry is None or entry.threshold is None:
        return 0
    rule = recorded_rule(manifest.decode_of(entry))
    if rule.measure().needs is Need.LAYER:
        return 0
    tokens_at = collections.Counter(answer.exit_layers)
    return sum(tokens * tests_at(layer, rule, layers=answer.num_layers) for layer, tokens in tokens_at.items())


_NAMES = tuple(field.name for field in dataclasses.fields(Tally))


def merged(left: Mapping[str | None, Tally], right: Mapping[str | None, Tally]) -> dict[str | None, Tally]:
    """Returns counts by group, added."""
    return {name: left.get(name, Tally()) + right.get(name, Tally()) for name in {**left, **right}}
