"""From decoded prompts to generations, with a decoder of known answers."""

import dataclasses
from collections.abc import Iterator, Sequence

import hypothesis
import jax
import numpy as np
import pytest
from hypothesis import strategies as st

from calm_beam.decoding.branches import PromptResult, Request
from calm_beam.decoding.isolation import DecodeError
from calm_beam.inputs.examples import Example
from calm_beam.inputs.prompts import Prompt
from calm_beam.inputs.vocabularies.vocabulary import Vocabulary
from calm_beam.outputs import Generation
from calm_beam.outputs.generate import generate
from tests.builders import train_vocabulary

_BROKEN = 13


@dataclasses.dataclass(frozen=True)
class _Echo:
    """A decoder that repeats the prompt: whole in the full model's branch, only its first token in the other.

    Prompts end in the opposite order. A prompt with token 13 is not finite.
    """

    steps: int = 6

    def decode(self, prompts: Sequence[Request]) -> Iterator[tuple[int, PromptResult]]:
        """Yields the results, the last prompt's first."""
        for index, prompt in reversed([(index, request.ids) for index, request in enumerate(prompts)]):
            tokens = np.zeros((2, self.steps), np.int32)
            tokens[0, : len(prompt)] = prompt
            tokens[1, :2] = prompt[0], 1
            used = tokens > 0
            yield (
                index,
                PromptResult(
                    tokens=tokens,
                    exit_layers=np.where(used, [[4], [2]], 0).astype(np.int32),
                    confidences=np.where(used, np.array([[0.5], [0.75]], np.float32), np.float32(0)),
                    lengths=used.sum(axis=1),
                    is_finite=_BROKEN not in prompt,
                ),
            )


def _prompt(name: str, ids: tuple[int, ...], *, text: str | None = None, truncated: bool = False) -> Prompt:
    example = Example(
        id=name,
        has_own_id=True,
        input=text,
        input_ids=None if text else ids,
        references=("a",),
        file_index=0,
        line=1,
    )
    return Prompt(example=example, ids=ids, truncated=truncated)


def _generate(
    prompts: Sequence[Prompt],
    vocabulary: Vocabulary | None = None,
    *,
    on_error: str = "fail",
    duplicates: frozenset[str] = frozenset(),
) -> list[Generation]:
    decoder = _Echo()
    made = generate(decoder, prompts, vocabulary=vocabulary, on_error=on_error, duplicates=duplicates)
    return [generation for (generation,) in made]


def test_outputs_are_cut_to_their_length() -> None:
    """The full model's output comes first, each without padding, with layer and confidence of every token."""
    (generation,) = _generate([_prompt("a", (7, 8, 9, 1))])
    full, early = generation.outputs
    assert full.tokens == (7, 8, 9, 1)
    assert full.exit_layers == (4, 4, 4, 4)
    assert full.confidences == (0.5, 0.5, 0.5, 0.5)
    assert early.tokens == (7, 1)
    assert early.exit_layers == (2, 2)
    assert early.confidences == (0.75, 0.75)
    assert all(type(token) is int for token in full.tokens)


def test_ids_become_words_without_eos() -> None:
    """Without a vocabulary, the text is the generated ids joined by spaces."""
    (generation,) = _generate([_prompt("a", (7, 8, 1))])
    assert [output.text for output in generation.outputs] == ["7 8", "7"]


def test_texts_are_read_by_the_vocabulary(tmp_path_factory: pytest.TempPathFactory) -> None:
    """The vocabulary turns generated ids into text, for prompts of text and of ids alike."""
    vocabulary = Vocabulary(train_vocabulary(tmp_path_factory.mktemp("vocabulary") / "sentencepiece.model"))
    ids = (*vocabulary.encode("the cat")[:5], 1)
    by_text, by_ids = _generate([_prompt("ids", ids), _prompt("text", ids, text="the cat")], vocabulary)
    assert by_text.outputs[0].text == by_ids.outputs[0].text == vocabulary.decode(ids)


def test_every_prompt_keeps_its_own_output() -> None:
    """Generations come as prompts end, each with its own example, and say whether it was cut or is a duplicate."""
    prompts = [_prompt("a", (7, 1)), _prompt("b", (8, 1), truncated=True), _prompt("c", (9, 1))]
    generations = _generate(prompts, duplicates=frozenset({"c"}))
    assert [(each.example.id, each.outputs[0].tokens) for each in generations] == [
        ("c", (9, 1)),
        ("b", (8, 1)),
        ("a", (7, 1)),
    ]
    assert [each.truncated for each in generations] == [False, True, False]
    assert [each.duplicate for each in generations] == [True, False, False]
    assert [each.failure for each in generations] == [None, None, None]


def test_a_failure_stops_the_run_by_name() -> None:
    """With on_error=fail, the example that could not be decoded is named, with how to continue."""
    with pytest.raises(DecodeError, match=r"example bad: the model gave logits that are not finite.*worst_case"):
        _generate([_prompt("a", (7, 1)), _prompt("bad", (_BROKEN, 1))])


def test_a_failure_can_be_kept() -> None:
    """With on_error=worst_case, a failed example is kept with its reason and no outputs; the others are complete."""
    prompts = [_prompt("a", (7, 1)), _prompt("bad", (_BROKEN, 1)), _prompt("c", (9, 1))]
    generations = {each.example.id: each for each in _generate(prompts, on_error="worst_case")}
    assert generations.keys() == {"a", "bad", "c"}
    assert generations["bad"].failure == "the model gave logits that are not finite"
    assert generations["bad"].outputs == ()
    assert all(generations[name].failure is None and len(generations[name].outputs) == 2 for name in ("a", "c"))


class _Fragile(_Echo):
    """Raises for certain prompts, by their first token, after it has yielded the results of later ones."""

    def __init__(self, crashes: dict[int, Exception | list[Exception]]) -> None:
        """Prompts that begin with a key crash, always by an exception or as often as there are exceptions in a list."""
        super().__init__()
        object.__setattr__(self, "crashes", crashes)
        object.__setattr__(self, "calls", [])

    def decode(self, prompts: Sequence[Request]) -> Iterator[tuple[int, PromptResult]]:
        """Yields results from the last prompt on, until one crashes."""
        crashes, calls = vars(self)["crashes"], vars(self)["calls"]
        calls.append([prompt.ids[0] for prompt in prompts])
        for index, result in super().decode(prompts):
            crash = crashes.get(prompts[index].ids[0])
            if isinstance(crash, Exception):
                raise crash
            if crash:
                raise crash.pop()
            yield index, result


def _fragile(
    crashes: dict[int, Exception | list[Exception]], firsts: Sequence[int], *, on_error: str = "worst_case"
) -> tuple[dict[str, Generation], list[list[int]]]:
    """Returns the results of prompts that begin with these tokens, and which were decoded together."""
    decoder = _Fragile(crashes)
    prompts = [_prompt(f"p{first}", (first, 5, 1)) for first in firsts]
    made = generate(decoder, prompts, vocabulary=None, on_error=on_error, duplicates=frozenset())
    found = [generation for (generation,) in made]
    assert len({each.example.id for each in found}) == len(found)
    return {each.example.id: each for each in found}, vars(decoder)["calls"]


@hypothesis.given(bad=st.sets(st.integers(20, 50), max_size=6), count=st.integers(1, 31))
@hypothesis.settings(max_examples=40, deadline=None)
def test_a_crash_takes_nobody_along(bad: set[int], count: int) -> None:
    """Exactly the crashing prompts fail, each tried alone; all others have their own outputs, once."""
    firsts = range(20, 20 + count)
    found, calls = _fragile({first: ValueError("boom") for first in bad}, firsts)
    assert found.keys() == {f"p{first}" for first in firsts}
    for first in firsts:
        generation = found[f"p{first}"]
        if first in bad:
            assert (generation.failure, generation.outputs) == ("ValueError: boom", ())
            assert [first] in calls
        else:
            assert generation.failure is None
            assert generation.outputs[0].tokens == (first, 5, 1)


def test_what_passes_alone_does_not_fail() -> None:
    """A crash that does not recur is no failure, also for a prompt that was alone from the start."""
    for firsts in ((20,), (20, 21, 22)):
        found, _ = _fragile({20: [ValueError("once")]}, firsts, on_error="fail")
        assert [generation.failure for generation in found.values()] == [None] * len(firsts)


def test_a_prompt_that_is_not_finite_is_tried_again_alone() -> None:
    """A prompt with non-finite logits is decoded again alone before it counts as failed."""
    found, calls = _fragile({}, (7, _BROKEN, 9))
    assert found[f"p{_BROKEN}"].failure == "the model gave logits that are not finite"
    assert calls == [[7, _BROKEN, 9], [_BROKEN]]


def test_a_crash_ends_the_run_by_default() -> None:
    """With `fail`, the message names the failing prompt and its error, not the others of the batch."""
    with pytest.raises(
        DecodeError, match=r"example p21: ValueError: boom\. Check the checkpoint; --on_error=worst_case"
    ):
        _fragile({21: ValueError("boom")}, (20, 21, 22), on_error="fail")


@pytest.mark.parametrize(
    "error", [MemoryError("no memory"), jax.errors.JaxRuntimeError("RESOURCE_EXHAUSTED: out of memory")]
)
def test_no_prompt_is_blamed_for_a_full_memory(error: Exception) -> None:
    """Lack of device memory ends the run whatever --on_error says, and no prompt counts as failed."""
    with pytest.raises(DecodeError, match=r"out of memory while decoding .* --max_cache_tokens.* with --resume\."):
        _fragile({21: error}, (20, 21, 22))


def test_a_decoder_that_loses_prompts_is_found_out() -> None:
    """A prompt without a result and without an error is an error of the decoder, and not dropped."""

    class _Forgetful(_Echo):
        def decode(self, prompts: Sequence[Request]) -> Iterator[tuple[int, PromptResult]]:
            yield from list(super().decode(prompts))[1:]

    with pytest.raises(DecodeError, match="the decoder gave no result for 1 of 2 prompts"):
        list(
            generate(
                _Forgetful(),
                [_prompt("a", (7, 1)), _prompt("b", (8, 1))],
                vocabulary=None,
                on_error="worst_case",
                duplicates=frozenset(),
            )
        )
