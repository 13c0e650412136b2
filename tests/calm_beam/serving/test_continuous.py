"""Continuous batching: prompts join and leave the batch, and each answer is that of the prompt alone."""

import concurrent.futures
import dataclasses
import threading
from collections.abc import Iterator, Sequence
from typing import Any

import pytest

from calm_beam.checkpoints import Checkpoint, load_checkpoint
from calm_beam.decoding import batch
from calm_beam.decoding.branches import Request
from calm_beam.decoding.compilation import CompileTime
from calm_beam.serving import Answer, BusyError, ContinuousGenerator, Generator, OutputError, PromptError
from tests.builders import build_checkpoint, build_prompts
from tests.calm_beam.serving.builders import build_served_manifest
from tests.pipelines import BROKEN_ID, CONFIG, write_model

_CHECKPOINT = build_checkpoint(CONFIG)
_PROMPTS = [[*map(int, prompt)] for prompt in build_prompts(*range(1, 31))]


def _generator(checkpoint: Checkpoint = _CHECKPOINT, *, batch_size: int = 3, **options: Any) -> Generator:
    return Generator.from_manifest(build_served_manifest(checkpoint, **options), checkpoint, batch_size=batch_size)


@pytest.fixture(scope="module")
def alone() -> list[Answer]:
    """The answer to each prompt by itself."""
    served = _generator()
    return [served.generate(prompt) for prompt in _PROMPTS]


def _assert_same(found: Sequence[Answer], expected: Sequence[Answer]) -> None:
    for one, other in zip(found, expected, strict=True):
        assert dataclasses.replace(one, confidences=other.confidences) == other
        assert one.confidences == pytest.approx(other.confidences, abs=1e-5)


def test_answers_are_those_of_prompts_alone(alone: list[Answer]) -> None:
    """With many threads, more prompts than places, and two widths, answers are those of prompts alone."""
    with ContinuousGenerator(_generator(decode={"max_input_length": 48})) as continuous:
        _assert_same([continuous.submit(prompt).result() for prompt in _PROMPTS[:4]], alone[:4])
        with concurrent.futures.ThreadPoolExecutor(6) as pool:
            futures = list(pool.map(continuous.submit, [*_PROMPTS, [9] * 40, *_PROMPTS]))
        found = [future.result() for future in futures]
    _assert_same([*found[:30], *found[31:]], [*alone, *alone])
    assert not found[30].truncated


def test_a_prompt_joins_a_running_batch(alone: list[Answer], monkeypatch: pytest.MonkeyPatch) -> None:
    """A prompt that arrives while another is decoded does not wait for its end."""
    begun, has_joined = threading.Event(), threading.Event()
    taken: list[Request] = []
    admit, step = batch.Batch.admit, batch.Batch.step

    def watched_admit(self: Any, waiting: batch.Waiting) -> None:
        taken.extend(request for queue in waiting.values() for request in queue)
        admit(self, waiting)

    def watched_step(self: Any) -> Iterator[Any]:
        begun.set()
        assert has_joined.wait(30)
        return step(self)

    monkeypatch.setattr(batch.Batch, "admit", watched_admit)
    monkeypatch.setattr(batch.Batch, "step", watched_step)
    order: list[str] = []
    longest, shorter = max(range(30), key=lambda index: len(alone[index].tokens)), 0
    with ContinuousGenerator(_generator()) as continuous:
        first = continuous.submit(_PROMPTS[longest], on_token=lambda *_: order.append("first"))
        assert begun.wait(30)
        second = continuous.submit(_PROMPTS[shorter], on_token=lambda *_: order.append("second"))
        has_joined.set()
        _assert_same([first.result(), second.result()], [alone[longest], alone[shorter]])
    assert [tuple(request.ids) for request in taken] == [tuple(_PROMPTS[longest]), tuple(_PROMPTS[shorter])]
    # The second had tokens before the first was finished.
    assert order.index("second") < len(order) - order[::-1].index("first")


def test_tokens_are_told_as_they_are_made(alone: list[Answer]) -> None:
    """All tokens but the last are reported in order, with their exit layers."""
    told: list[list[tuple[int, int]]] = [[] for _ in _PROMPTS]
    with ContinuousGenerator(_generator()) as continuous:
        futures = [
            continuous.submit(prompt, on_token=lambda *token, into=into: into.append(token))
            for prompt, into in zip(_PROMPTS, told, strict=True)
        ]
    for answer, future, tokens in zip(alone, futures, told, strict=True):
        assert tokens == list(zip(answer.tokens, answer.exit_layers, strict=True))[:-1]
        assert future.done()


def test_what_is_cancelled_makes_room(alone: list[Answer]) -> None:
    """A cancelled prompt, waiting or running, makes room, and the others are answered as without it."""
    with ContinuousGenerator(_generator(batch_size=2)) as continuous:
        futures = [continuous.submit(prompt) for prompt in _PROMPTS]
        cancelled = [index for index in range(0, 30, 3) if futures[index].cancel()]
        left = [index for index in range(30) if index not in cancelled]
        _assert_same([futures[index].result() for index in left], [alone[index] for index in left])
        assert cancelled
        _assert_same([continuous.submit(_PROMPTS[7]).result()], [alone[7]])


def test_a_bounded_number_waits(monkeypatch: pytest.MonkeyPatch) -> None:
    """Prompts beyond the waiting limit are refused, and accepted later."""
    goes_on = threading.Event()
    step = batch.Batch.step

    def held_step(self: Any) -> Iterator[Any]:
        assert goes_on.wait(30)
        return step(self)

    monkeypatch.setattr(batch.Batch, "step", held_step)
    with ContinuousGenerator(_generator(batch_size=1), most_waiting=2) as continuous:
        futures: list[concurrent.futures.Future[Answer]] = []
        with pytest.raises(BusyError, match=r"2 prompts wait already\. Come again later\."):
            futures.extend(continuous.submit(_PROMPTS[0]) for _ in range(5))
        # One is decoded, if it was taken in time, and two wait.
        assert 2 <= len(futures) <= 3
        goes_on.set()
        assert {len(future.result().tokens) for future in futures}
        assert continuous.submit(_PROMPTS[0]).result().tokens
    with pytest.raises(ValueError, match="most_waiting must be at least 1, got 0"):
        ContinuousGenerator(_generator(), most_waiting=0)


def test_what_is_cancelled_keeps_nobody_out(monkeypatch: pytest.MonkeyPatch) -> None:
    """Cancelled prompts take no places, and the number of prompts is known."""
    goes_on, begun = threading.Event(), threading.Event()
    step = batch.Batch.step

    def held_step(self: Any) -> Iterator[Any]:
        begun.set()
        assert goes_on.wait(30)
        return step(self)

    monkeypatch.setattr(batch.Batch, "step", held_step)
    with ContinuousGenerator(_generator(batch_size=1), most_waiting=2) as continuous:
        first = continuous.submit(_PROMPTS[0])
        assert begun.wait(30)
        waiting = [continuous.submit(_PROMPTS[0]) for _ in range(2)]
        assert (continuous.running, continuous.waiting, continuous.room) == (1, 2, 0)
        with pytest.raises(BusyError):
            continuous.submit(_PROMPTS[0])
        assert waiting[0].cancel()
        waiting.append(continuous.submit(_PROMPTS[0]))
        assert waiting[1].cancel()
        assert (continuous.running, continuous.waiting, continuous.room) == (1, 1, 1)
        goes_on.set()
        _assert_same([waiting[2].result()], [first.result()])


def test_prompts_for_which_there_is_room_do_not_wait(alone: list[Answer]) -> None:
    """Between two batches all places are free: as many prompts may arrive at once, plus those that may wait."""
    with ContinuousGenerator(_generator(batch_size=2), most_waiting=1) as continuous:
        _assert_same([continuous.submit(_PROMPTS[0]).result()], [alone[0]])
        while continuous.room < 3:
            pass
        futures = [continuous.submit(prompt) for prompt in _PROMPTS[:3]]
        _assert_same([future.result() for future in futures], alone[:3])


def test_nobody_waits_for_a_compiler_after_the_warm_up() -> None:
    """After the warm-up every program for any batch and width is compiled, and each is announced with the total.

    A second warm-up compiles nothing.
    """
    # A size for which no other test has compiled anything.
    with ContinuousGenerator(_generator(batch_size=20, decode={"max_input_length": 40})) as continuous:
        told: list[tuple[int, int]] = []
        continuous.warm_up(on_shape=lambda *shapes: told.append(shapes))
        (total,) = {total for _, total in told}
        assert [done for done, _ in told] == list(range(total + 1))
        with CompileTime() as compiled:
            continuous.warm_up()
            for count in (1, 2, 5, 20, 60):
                prompts = [*_PROMPTS, *([9] * 36 for _ in _PROMPTS)][:count]
                for future in [continuous.submit(prompt) for prompt in prompts]:
                    tokens = len(future.result().tokens)
        assert compiled.seconds() == 0
        assert continuous.work.layer_rows > tokens
    with pytest.raises(RuntimeError, match="is closed"):
        continuous.warm_up()


def test_a_warm_up_that_fails_says_so(alone: list[Answer], monkeypatch: pytest.MonkeyPatch) -> None:
    """A failing warm-up raises its error to callers that wait for it; prompts are still answered."""

    def failing(_: object, **__: object) -> None:
        raise RuntimeError("the device has no memory left")

    monkeypatch.setattr(batch.Batch, "warm_up", failing)
    with ContinuousGenerator(_generator()) as continuous:
        with pytest.raises(RuntimeError, match="the device has no memory left"):
            continuous.warm_up()
        _assert_same([continuous.submit(_PROMPTS[0]).result()], [alone[0]])


def test_a_broken_prompt_disturbs_nobody(tmp_path: Any) -> None:
    """An invalid prompt is refused at once; one without an output has the error in its own future."""
    served = _generator(load_checkpoint(write_model(tmp_path, is_broken=True)))
    with ContinuousGenerator(served) as continuous:
        with pytest.raises(PromptError, match="the prompt is empty"):
            continuous.submit([])
        broken, whole = continuous.submit([5, BROKEN_ID, 1]), continuous.submit([5, 1])
        with pytest.raises(OutputError, match="logits that are not finite"):
            broken.result()
        _assert_same([whole.result()], [served.generate([5, 1])])


def test_after_a_crash_it_goes_on(alone: list[Answer], monkeypatch: pytest.MonkeyPatch) -> None:
    """After a crash, prompts in the batch get the reason, and later ones are answered."""
    step = batch.Batch.step
    crashes = iter([True])

    def crashing_step(self: Any) -> Iterator[Any]:
        if next(crashes, False):
            raise RuntimeError("the device is gone")
        return step(self)

    monkeypatch.setattr(batch.Batch, "step", crashing_step)
    with ContinuousGenerator(_generator()) as continuous:
        with pytest.raises(RuntimeError, match="the device is gone"):
            continuous.submit(_PROMPTS[0]).result()
        _assert_same([continuous.submit(_PROMPTS[1]).result()], [alone[1]])


def test_closing_answers_what_was_taken(alone: list[Answer]) -> None:
    """Closing answers accepted prompts, and takes no new ones."""
    continuous = ContinuousGenerator(_generator())
    continuous.warm_up()
    futures = [continuous.submit(prompt) for prompt in _PROMPTS[:9]]
    continuous.close()
    _assert_same([future.result(timeout=0) for future in futures], alone[:9])
    with pytest.raises(RuntimeError, match="is closed"):
        continuous.submit(_PROMPTS[0])
