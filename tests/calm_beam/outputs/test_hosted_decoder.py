"""An external decoder's contract is checked, and each error is reported in one line."""

import gc
import threading
import time
import weakref
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import pytest

from calm_beam.inputs.examples import Example
from calm_beam.outputs import Generation
from calm_beam.outputs.hosted_decoder import DecoderError, HostedDecoder, SettingOutput

_SETTINGS = ("full", 3)


def _example(index: int = 0, **changes: Any) -> Example:
    fields: dict[str, Any] = {
        "id": f"e{index}",
        "has_own_id": True,
        "input": f"prompt {index}",
        "input_ids": None,
        "references": (),
        "file_index": 0,
        "line": index + 1,
    }
    return Example(**{**fields, **changes})


def _hosted(decoder: Any, *, timeout: float | None = None) -> HostedDecoder:
    return HostedDecoder(decoder, name="mine", settings=_SETTINGS, timeout=timeout)


def _outcomes(
    decoder: Any,
    examples: Sequence[Example] = (_example(),),
    *,
    batch_size: int | None = None,
    on_error: str = "fail",
    timeout: float | None = None,
) -> list[Generation]:
    return list(_hosted(decoder, timeout=timeout).outcomes(examples, batch_size=batch_size, on_error=on_error))


def _wrong(value: Any) -> Any:
    """Returns a value of an invalid type."""
    return value


def _giving(answer: Any, *, of: str | int = 3) -> Callable[[list[Any], tuple[Any, ...]], dict[Any, list[Any]]]:
    """Returns a decoder that gives an answer to every prompt under one setting, and echoes it under the others."""
    return lambda prompts, settings: {
        setting: [answer] * len(prompts) if setting == of else [str(prompt) for prompt in prompts]
        for setting in settings
    }


@pytest.mark.parametrize(
    ("answer", "words"),
    [
        (7, "it is 7, expected a text, token ids or a SettingOutput"),
        (SettingOutput(), "a SettingOutput needs a text or token_ids"),
        (SettingOutput(text=_wrong(b"x")), "its text is b'x', expected a str"),
        ("half \ud800", "its text holds half a surrogate pair"),
        (SettingOutput(text="x", cost=float("nan")), "its cost is nan, expected a finite number of at least 0"),
        (SettingOutput(text="x", cost=-1), "its cost is -1.0, expected a finite number of at least 0"),
        (SettingOutput(text="x", cost=True), "its cost is True, expected a finite number"),
        (SettingOutput(text="x", exit_layers=[0]), "among its exit layers is 0, expected one from 1"),
        (SettingOutput(text="x", token_ids=[1, 2], exit_layers=[1]), "it has 1 exit layer for 2 tokens"),
        (SettingOutput(text="x", token_ids=_wrong([1.5])), "among its token ids is 1.5, expected a whole number"),
        (SettingOutput(text="x", token_ids=[2**31]), "among its token ids is 2147483648, expected one from 0"),
        ([5, 6], "it is token ids, and prompt or references are text: give its text too"),
    ],
)
def test_what_is_no_answer_is_refused(answer: Any, words: str) -> None:
    """An answer that cannot be stored or compared ends the run under any --on_error, with its setting and example."""
    with pytest.raises(DecoderError) as raised:
        _outcomes(_giving(answer), on_error="worst_case")
    said = str(raised.value)
    assert said.startswith("decoder mine: gave no valid answer under setting 3 for example e0: ")
    assert words in said
    assert "\n" not in said


@pytest.mark.parametrize(
    ("decoder", "words"),
    [
        (lambda prompts, settings: ["x"], "decoder mine: returned ['x'], expected a dict of answers by setting."),
        (lambda prompts, settings: {3: ["x"]}, "decoder mine: gave no answers under setting 'full'."),
        (
            lambda prompts, settings: {"full": ["x"], 3: ["x"], 4: ["x"]},
            "decoder mine: gave answers under 4, which is none of the settings.",
        ),
        (lambda prompts, settings: {"full": "x", 3: ["x"]}, "returned 'x' under setting 'full', expected a list"),
        (lambda prompts, settings: {"full": [], 3: []}, "returned 0 answers to 1 prompt under setting 'full'"),
        (lambda prompts, settings: {"full": None, 3: []}, "the decoder raised TypeError: 'NoneType'"),
    ],
)
def test_every_prompt_is_answered_under_every_setting(decoder: Any, words: str) -> None:
    """Missing or unrequested answers are refused in one line that names the setting."""
    with pytest.raises(DecoderError) as raised:
        _outcomes(decoder)
    assert words in str(raised.value)


def test_costs_are_told_for_all_or_none() -> None:
    """A cost for only some answers under a setting is refused: its mean would be of other examples."""

    def some(prompts: list[str], settings: tuple[Any, ...]) -> Any:
        return {
            setting: [SettingOutput(text=prompt, cost=None if place else 1) for place, prompt in enumerate(prompts)]
            for setting in settings
        }

    with pytest.raises(DecoderError, match="gave a cost for 1 of 2 answers under setting 'full': give all, or none"):
        _outcomes(some, [_example(0), _example(1)])


def test_ids_and_texts_are_not_compared() -> None:
    """Token ids of any library are stored as ids joined by spaces; a text is refused if references are ids."""
    of_ids = _example(input=None, input_ids=(1, 2), reference_ids=((1, 2),))
    (generation,) = _outcomes(lambda prompts, settings: {each: np.array(prompts) for each in settings}, [of_ids])
    assert [(output.text, output.tokens) for output in generation.outputs] == [("1 2", (1, 2))] * 2
    with pytest.raises(DecoderError, match="it is text, and the references are token ids"):
        _outcomes(_giving("1 2"), [of_ids])


@pytest.mark.parametrize("bad", [(0,), (4,), (2, 6)])
def test_prompts_that_raise_are_isolated(bad: tuple[int, ...]) -> None:
    """A prompt at which the decoder raises fails alone in any batch; the others have their answers, in order."""
    calls: list[int] = []

    def decoder(prompts: list[str], settings: tuple[Any, ...]) -> Any:
        calls.append(len(prompts))
        if wrong := [prompt for prompt in prompts if int(prompt.split()[1]) in bad]:
            raise RuntimeError(f"no {wrong[0]}")
        return _giving("x")(prompts, settings)

    examples = [_example(index) for index in range(7)]
    outcomes = _outcomes(decoder, examples, on_error="worst_case")
    assert [each.example for each in outcomes] == examples
    failed = {place: each.failure for place, each in enumerate(outcomes) if each.failure is not None}
    assert failed == {place: f"the decoder raised RuntimeError: no prompt {place}" for place in bad}
    assert all(len(each.outputs) == 2 for each in outcomes if each.failure is None)
    assert calls[0] == 7
    with pytest.raises(DecoderError, match=rf"^example e{bad[0]}: the decoder raised RuntimeError.*worst_case"):
        _outcomes(decoder, examples)


def test_no_answer_is_a_failure_of_its_prompt() -> None:
    """None for one prompt under one setting fails that prompt, or ends the run if it may not fail."""

    def decoder(prompts: list[str], settings: tuple[Any, ...]) -> Any:
        return {
            each: [None if prompt == "prompt 1" and each == 3 else prompt for prompt in prompts] for each in settings
        }

    examples = [_example(index) for index in range(3)]
    failures = [each.failure for each in _outcomes(decoder, examples, on_error="worst_case")]
    assert failures == [None, "the decoder gave no answer under setting 3", None]
    with pytest.raises(DecoderError, match="example e1: the decoder gave no answer under setting 3"):
        _outcomes(decoder, examples)


def test_a_decoder_that_hangs_is_told() -> None:
    """A call that exceeds its time is reported with its first prompt, without waiting for its end."""
    end = threading.Event()
    host = _hosted(lambda prompts, settings: end.wait(60), timeout=0.05)
    start = time.monotonic()
    with pytest.raises(DecoderError, match=r"decoder mine: gave no answers to 1 prompt within 0\.05 s, example e0"):
        list(host.outcomes([_example()], batch_size=None, on_error="worst_case"))
    assert time.monotonic() - start < 30
    end.set()


def test_exits_of_the_process_are_errors() -> None:
    """A decoder that calls `sys.exit` raises an error and does not end the process as successful."""

    def decoder(prompts: list[str], settings: tuple[Any, ...]) -> Any:
        raise SystemExit(0)

    with pytest.raises(DecoderError, match="SystemExit: 0, which would have ended the process"):
        _outcomes(decoder)


class _Counting:
    """A decoder that records the threads of its setup and calls."""

    def __init__(self) -> None:
        self.threads: list[int] = []

    def setup(self) -> None:
        self.threads.append(threading.get_ident())

    def __call__(self, prompts: list[Any], settings: tuple[Any, ...]) -> Any:
        self.threads.append(threading.get_ident())
        return _giving("x")(prompts, settings)


def test_setup_and_calls_are_of_one_thread() -> None:
    """An object is set up once, before its first call, and all calls come from the same thread."""
    decoder = _Counting()
    outcomes = _outcomes(decoder, [_example(index) for index in range(5)], batch_size=2)
    assert len(outcomes) == 5
    assert len(decoder.threads) == 1 + 3
    assert len(set(decoder.threads)) == 1
    assert decoder.threads[0] != threading.get_ident()


def test_a_class_is_made_an_instance_of() -> None:
    """A class is instantiated without arguments, and set up; its errors, and objects without a call, are reported."""

    class Wrong:
        def __init__(self) -> None:
            raise FileNotFoundError("no weights")

    assert len(_outcomes(_Counting)) == 1
    with pytest.raises(DecoderError, match="decoder mine cannot be set up: it raised FileNotFoundError: no weights"):
        _hosted(Wrong)
    with pytest.raises(DecoderError, match="decoder mine: is not callable, it is of type object"):
        _hosted(object)


def test_what_nobody_holds_is_let_go_of() -> None:
    """Once a host is gone, its decoder with its memory, and its thread, are freed."""
    before = threading.active_count()
    decoder = _Counting()
    gone = weakref.ref(decoder)
    host = _hosted(decoder)
    list(host.outcomes([_example()], batch_size=None, on_error="fail"))
    del host, decoder
    gc.collect()
    deadline = time.monotonic() + 30
    while (gone() is not None or threading.active_count() > before) and time.monotonic() < deadline:
        time.sleep(0.01)
    assert gone() is None
    assert threading.active_count() <= before
