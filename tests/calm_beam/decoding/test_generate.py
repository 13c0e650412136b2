"""From decoded prompts to generations, with a decoder whose answers are known."""

import dataclasses
from collections.abc import Iterator, Sequence
from typing import cast

import numpy as np
import pytest

from calm_beam.decoding.generate import DecodeError, generate
from calm_beam.decoding.prompts import Prompt
from calm_beam.decoding.sweep import SweepDecoder, SweepResult
from calm_beam.examples import Example
from calm_beam.generations import Generation
from calm_beam.vocabulary import Vocabulary
from tests.builders import train_vocabulary

_BROKEN = 13


@dataclasses.dataclass(frozen=True)
class _Echo:
    """A decoder that repeats the prompt: whole in the full model's lane, its first token alone in the other.

    Prompts end in the opposite order. A prompt with token 13 is not finite.
    """

    steps: int = 6

    def decode(self, prompts: Sequence[Sequence[int]]) -> Iterator[tuple[int, SweepResult]]:
        """Yields the results, the last prompt's first."""
        for index, prompt in reversed(list(enumerate(prompts))):
            tokens = np.zeros((2, self.steps), np.int32)
            tokens[0, : len(prompt)] = prompt
            tokens[1, :2] = prompt[0], 1
            used = tokens > 0
            yield (
                index,
                SweepResult(
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
    decoder = cast(SweepDecoder, _Echo())
    return list(generate(decoder, prompts, vocabulary, on_error=on_error, duplicates=duplicates))


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
    """For a prompt of ids, the text is the generated ids joined by spaces, whatever vocabulary there is."""
    (generation,) = _generate([_prompt("a", (7, 8, 1))])
    assert [output.text for output in generation.outputs] == ["7 8", "7"]


def test_texts_are_read_by_the_vocabulary(tmp_path_factory: pytest.TempPathFactory) -> None:
    """For a prompt of text, the vocabulary turns ids into text; for one of ids beside it, it does not."""
    vocabulary = Vocabulary(train_vocabulary(tmp_path_factory.mktemp("vocabulary") / "sentencepiece.model"))
    ids = (*vocabulary.encode("the cat")[:5], 1)
    by_text, by_ids = _generate([_prompt("ids", ids), _prompt("text", ids, text="the cat")], vocabulary)
    assert by_text.outputs[0].text == vocabulary.decode(ids)
    assert by_ids.outputs[0].text == " ".join(map(str, ids[:-1]))


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
    """With on_error=fail, the example that could not be decoded is named, and how to go on."""
    with pytest.raises(DecodeError, match=r"example bad: the model gave logits that are not finite.*worst_case"):
        _generate([_prompt("a", (7, 1)), _prompt("bad", (_BROKEN, 1))])


def test_a_failure_can_be_kept() -> None:
    """With on_error=worst_case, the example stays, with its failure and without outputs; the others are whole."""
    prompts = [_prompt("a", (7, 1)), _prompt("bad", (_BROKEN, 1)), _prompt("c", (9, 1))]
    generations = {each.example.id: each for each in _generate(prompts, on_error="worst_case")}
    assert generations.keys() == {"a", "bad", "c"}
    assert generations["bad"].failure == "the model gave logits that are not finite"
    assert generations["bad"].outputs == ()
    assert all(generations[name].failure is None and len(generations[name].outputs) == 2 for name in ("a", "c"))
