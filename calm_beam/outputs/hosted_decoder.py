"""Host of a user's decoder: calls it with batches, checks what it returns, and reports its failures in one line.

A decoder's answers are checked before they are stored: there is one for every prompt under every setting, it is text or
token ids, and no cost is NaN. Prompts at which the decoder raises are isolated from their batch by bisection.
"""

import dataclasses
import math
import numbers
import queue
import threading
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, Protocol, TypeVar

from calm_beam.errors import CalmBeamError, UserCode, shown
from calm_beam.inputs.examples import AnyPrompt, Example
from calm_beam.inputs.prompts import with_reference_texts
from calm_beam.text import counted

from .rows import Generation, Output
from .sharding import duplicate_prompts

Setting = str | int | float
"""Name of a setting."""

MOST_ID = 2**31 - 1
"""The largest token id that is stored."""

_WORST_CASE = "on_error='worst_case' counts such examples with loss 1 under every setting, and goes on"
_T = TypeVar("_T")


class DecoderError(CalmBeamError, RuntimeError):
    """A user's decoder failed, hung, or did not return an answer for every prompt and setting."""


class _RaisedError(CalmBeamError):
    """The error text of a decoder's call, caused by one prompt or by all."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class SettingOutput:
    """An answer with its cost and exit layers, which a user's decoder may return instead of text or token ids.

    Attributes:
      text: The text that metrics see; None if there are only ids.
      token_ids: Generated ids; None if there is only a text.
      cost: Cost of the answer, at least 0, in any unit; None if unknown.
      exit_layers: The exit layer of each token, from 1; None if unknown.
    """

    text: str | None = None
    token_ids: Sequence[int] | None = None
    cost: float | None = None
    exit_layers: Sequence[int] | None = None


class SettingDecoder(Protocol):
    """The hosted decoder: a function, or an object with this method and optionally a method `setup`."""

    def __call__(self, prompts: list[Any], settings: tuple[Any, ...]) -> Mapping[Any, Sequence[Any]]:
        """Returns the answers under every setting, in the order of the prompts.

        Args:
          prompts: Texts, or lists of token ids if the data have those.
          settings: All settings, as the user named them.

        Returns:
          By setting, for every prompt a text, a sequence of token ids, a `SettingOutput`, or None if there is no
          answer: then the prompt has failed.
        """
        ...


class HostedDecoder:
    """A user's decoder; its setup and all calls run on one thread, one after the other."""

    def __init__(
        self,
        decoder: SettingDecoder | Callable[[], SettingDecoder],
        *,
        name: str,
        settings: Sequence[Setting],
        timeout: float | None,
    ) -> None:
        """Sets up the decoder.

        Args:
          decoder: The decoder, or a class that is instantiated without arguments.
          name: Its name, for messages.
          settings: All settings, as the user named them.
          timeout: Most seconds of a call; None for no limit.

        Raises:
          DecoderError: If setting it up fails.
        """
        self._name, self._settings, self._timeout = name, tuple(settings), timeout
        self._lock = threading.Lock()
        self._thread = _OwnThread()
        self._decoder = self._thread.result_of(lambda: self._set_up(decoder), timeout=None)

    def outcomes(self, examples: Sequence[Example], *, batch_size: int | None, on_error: str) -> Iterator[Generation]:
        """Yields the generation of every example, in their order.

        Args:
          examples: The examples of a shard.
          batch_size: Most prompts of a call; None for all at once.
          on_error: `fail`, or `worst_case`, which lets examples without an answer fail.

        Raises:
          DecoderError: If an example has no answer and may not fail, or if the decoder hangs or breaks its contract.
        """
        duplicates = duplicate_prompts(examples)
        size = batch_size or max(1, len(examples))
        for first in range(0, len(examples), size):
            for example, outputs in self._isolated(examples[first : first + size]):
                failure = outputs if isinstance(outputs, str) else None
                if failure is not None and on_error == "fail":
                    raise DecoderError(f"{example.in_words()}: {failure}. Fix the decoder; or {_WORST_CASE}.")
                yield Generation(
                    example=_with_references(example),
                    truncated=False,
                    duplicate=example.id in duplicates,
                    failure=failure,
                    outputs=() if isinstance(outputs, str) else outputs,
                )

    def _set_up(self, decoder: Any) -> SettingDecoder:
        with UserCode(lambda said: DecoderError(f"decoder {self._name} cannot be set up: it raised {said}.")):
            made = decoder() if isinstance(decoder, type) else decoder
            if callable(setup := getattr(made, "setup", None)):
                setup()
        if not callable(made):
            raise DecoderError(f"decoder {self._name}: is not callable, it is of type {type(made).__name__}.")
        return made  # type: ignore[no-any-return]

    def _isolated(self, batch: Sequence[Example]) -> Iterator[tuple[Example, tuple[Output, ...] | str]]:
        """Yields every example with its outputs, or with the reason why it has none."""
        try:
            found = self._answered(batch)
        except _RaisedError as error:
            if len(batch) == 1:
                yield batch[0], str(error)
                return
            middle = (len(batch) + 1) // 2
            yield from self._isolated(batch[:middle])
            yield from self._isolated(batch[middle:])
        else:
            yield from zip(batch, found, strict=True)

    def _answered(self, batch: Sequence[Example]) -> list[tuple[Output, ...] | str]:
        """Returns the outputs of every example under all settings, or the reason why it has none."""
        prompts = [_as_list(example.prompt) for example in batch]
        with self._lock:
            answers = self._thread.result_of(lambda: self._call(prompts), timeout=self._timeout)
            if answers is _TIMED_OUT:
                raise DecoderError(
                    f"decoder {self._name}: gave no answers to {counted(len(batch), 'prompt')} within "
                    f"{self._timeout:g} s, {batch[0].in_words()} first. Finished shards are stored: repeat the run "
                    "with resume=True, and with a longer decode_timeout or a smaller batch_size."
                )
        by_setting = [self._outputs(answers[setting], batch, setting=setting) for setting in self._settings]
        rows: list[tuple[Output, ...] | str] = []
        for of_example in zip(*by_setting, strict=True):
            missing = next((output for output in of_example if isinstance(output, str)), None)
            rows.append(missing or tuple(output for output in of_example if isinstance(output, Output)))
        return rows

    def _call(self, prompts: list[Any]) -> dict[Setting, list[Any]]:
        """Returns the answers by setting, one per prompt under each; runs in the decoder's thread."""
        with UserCode(lambda said: _RaisedError(f"the decoder raised {said}"), passing=DecoderError):
            found = self._decoder(prompts, self._settings)
            if not isinstance(found, Mapping):
                raise self._broken(f"returned {shown(found)}, expected a dict of answers by setting")
            answers = {}
            for setting in self._settings:
                if setting not in found:
                    raise self._broken(f"gave no answers under setting {setting!r}")
                given = found[setting]
                if isinstance(given, str | bytes | Mapping):
                    raise self._broken(f"returned {shown(given)} under setting {setting!r}, expected a list of answers")
                answers[setting] = list(given)
                if len(answers[setting]) != len(prompts):
                    raise self._broken(
                        f"returned {counted(len(answers[setting]), 'answer')} to {counted(len(prompts), 'prompt')} "
                        f"under setting {setting!r}: every prompt needs one, in the order of the prompts, or None "
                        "where there is none"
                    )
            if strange := [setting for setting in found if setting not in self._settings]:
                raise self._broken(f"gave answers under {strange[0]!r}, which is none of the settings")
            return answers

    def _outputs(self, answers: Sequence[Any], batch: Sequence[Example], *, setting: Setting) -> list[Output | str]:
        """Returns the outputs under a setting, or the reason why there is none; refuses invalid answers."""
        outputs: list[Output | str] = []
        for answer, example in zip(answers, batch, strict=True):
            where = f"under setting {setting!r} for {example.in_words()}"
            if answer is None:
                outputs.append(f"the decoder gave no answer under setting {setting!r}")
                continue
            try:
                # The user's own classes may raise anything when they are inspected.
                with UserCode(lambda said: DecoderError(f"it raised {said}"), passing=DecoderError):
                    outputs.append(_output(answer, example))
            except DecoderError as error:
                raise self._broken(f"gave no valid answer {where}: {error}") from error
        told = [output.cost is not None for output in outputs if isinstance(output, Output)]
        if any(told) and not all(told):
            raise self._broken(
                f"gave a cost for {sum(told)} of {len(told)} answers under setting {setting!r}: give all, or none"
            )
        return outputs

    def _broken(self, what: str) -> DecoderError:
        return DecoderError(f"decoder {self._name}: {what}.")


def _as_list(prompt: AnyPrompt) -> str | list[Any]:
    """Returns a prompt in the form that decoders take: a text, a list of ids, or a list of a chat's messages."""
    return prompt if isinstance(prompt, str) else list(prompt)


def _with_references(example: Example) -> Example:
    """Returns an example whose reference ids are texts in the form of output ids: ids joined by spaces."""
    return example if example.reference_ids is None else with_reference_texts(example, None, vocab_size=MOST_ID + 1)


def _output(answer: Any, example: Example) -> Output:
    """Returns an answer in its stored form.

    Raises:
      DecoderError: If it is invalid; says what it is and what was expected.
    """
    given = answer if isinstance(answer, SettingOutput) else None
    if given is None:
        given = SettingOutput(text=answer) if isinstance(answer, str) else SettingOutput(token_ids=answer)
    if given.text is None and given.token_ids is None:
        raise DecoderError("a SettingOutput needs a text or token_ids")
    tokens = () if given.token_ids is None else _whole_numbers(given.token_ids, lowest=0, of="token ids")
    layers = () if given.exit_layers is None else _whole_numbers(given.exit_layers, lowest=1, of="exit layers")
    if layers and tokens and len(layers) != len(tokens):
        raise DecoderError(f"it has {counted(len(layers), 'exit layer')} for {counted(len(tokens), 'token')}")
    text = given.text
    if text is None:
        # Comparing ids with text gives every output the same score, so every loss would be 0.
        if example.input is not None or (example.references and example.reference_ids is None):
            raise DecoderError("it is token ids, and prompt or references are text: give its text too")
        text = " ".join(map(str, tokens))
    elif example.reference_ids is not None:
        raise DecoderError("it is text, and the references are token ids: give its token_ids alone")
    if not isinstance(text, str):
        raise DecoderError(f"its text is {shown(text)}, expected a str")
    try:
        text.encode()
    except UnicodeEncodeError:
        raise DecoderError("its text holds half a surrogate pair, which no file can hold") from None
    return Output(text=text, tokens=tokens, exit_layers=layers, confidences=(), cost=_cost(given.cost))


def _cost(value: Any) -> float | None:
    if value is None:
        return None
    if isinstance(value, bool) or not isinstance(value, numbers.Real):
        raise DecoderError(f"its cost is {shown(value)}, expected a finite number of at least 0")
    cost = float(value)
    if not (math.isfinite(cost) and cost >= 0):
        raise DecoderError(f"its cost is {cost}, expected a finite number of at least 0")
    return cost


def _whole_numbers(values: Any, *, lowest: int, of: str) -> tuple[int, ...]:
    """Returns whole numbers of any library as ints."""
    if isinstance(values, str | bytes | Mapping) or not hasattr(values, "__iter__"):
        raise DecoderError(f"it is {shown(values)}, expected a text, {of} or a SettingOutput")
    found = []
    for value in values:
        if isinstance(value, bool) or not hasattr(value, "__index__"):
            raise DecoderError(f"among its {of} is {shown(value)}, expected a whole number")
        number = value.__index__()
        if not lowest <= number <= MOST_ID:
            raise DecoderError(f"among its {of} is {number}, expected one from {lowest} to {MOST_ID}")
        found.append(number)
    return tuple(found)


_TIMED_OUT: Any = object()
_Answer = queue.SimpleQueue[tuple[bool, Any]]
_Work = queue.SimpleQueue[tuple[Callable[[], Any], _Answer] | None]


class _OwnThread:
    """A thread that runs functions one after the other; it ends with this object, or with the process.

    It is not a pool's thread, because it must end with the process whatever it waits for: a decoder that hangs must not
    keep the process alive.
    """

    def __init__(self) -> None:
        self._work: _Work = queue.SimpleQueue()
        threading.Thread(target=_run_all, args=(self._work,), name="calm-beam-decoder", daemon=True).start()
        weakref.finalize(self, self._work.put, None)

    def result_of(self, run: Callable[[], _T], *, timeout: float | None) -> _T:
        """Returns what a function returns, or raises what it raises; `_TIMED_OUT` if it exceeds the timeout."""
        answer: _Answer = queue.SimpleQueue()
        self._work.put((run, answer))
        try:
            is_error, result = answer.get(timeout=timeout)
        except queue.Empty:
            return _TIMED_OUT  # type: ignore[no-any-return]
        if is_error:
            raise result
        return result  # type: ignore[no-any-return]


def _run_all(work: _Work) -> None:
    while (item := work.get()) is not None:
        run, answer = item
        try:
            answer.put((False, run()))
        except BaseException as error:
            answer.put((True, error))
        # They keep the decoder, and so its memory, alive.
        del item, run, answer
