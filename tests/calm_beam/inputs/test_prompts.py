"""From examples to token ids."""

import dataclasses
import re

import pytest

from calm_beam.decoding.settings import DecodeSettings
from calm_beam.exits.rule import ExitRule
from calm_beam.inputs.examples import DataError, Example
from calm_beam.inputs.prompts import encode_prompt, with_reference_texts
from calm_beam.inputs.vocabularies.vocabulary import EOS_ID, Vocabulary
from tests.builders import train_vocabulary

_TEXT = "the cat sat on the mat"


@pytest.fixture(scope="module")
def vocabulary(tmp_path_factory: pytest.TempPathFactory) -> Vocabulary:
    """Gives a tiny vocabulary."""
    return Vocabulary(train_vocabulary(tmp_path_factory.mktemp("vocabulary") / "sentencepiece.model"))


def _settings(*, max_input_length: int = 64, task_prefix: str = "") -> DecodeSettings:
    return DecodeSettings(
        rule=ExitRule(),
        thresholds=(0.5,),
        max_input_length=max_input_length,
        max_decode_length=8,
        task_prefix=task_prefix,
    )


def _example(text: str | None = None, ids: tuple[int, ...] | None = None) -> Example:
    return Example(id="e7", has_own_id=True, input=text, input_ids=ids, references=(), file_index=0, line=1)


def test_text_is_encoded_and_ended(vocabulary: Vocabulary) -> None:
    """A text becomes its ids and one eos, uncut."""
    prompt = encode_prompt(_example(_TEXT), vocabulary, settings=_settings(), vocab_size=64, on_long="error")
    assert prompt.ids == (*vocabulary.encode(_TEXT), EOS_ID)
    assert not prompt.truncated
    assert prompt.example.input == _TEXT


def test_the_prefix_is_part_of_the_text(vocabulary: Vocabulary) -> None:
    """The task prefix is put before the text before it is split into pieces."""
    settings = _settings(task_prefix="a small ")
    prompt = encode_prompt(_example(_TEXT), vocabulary, settings=settings, vocab_size=64, on_long="error")
    assert prompt.ids == (*vocabulary.encode("a small " + _TEXT), EOS_ID)


def test_a_prompt_of_just_the_longest_length_is_whole(vocabulary: Vocabulary) -> None:
    """A prompt of the longest length, eos included, is neither cut nor refused; one token less room cuts it."""
    length = len(vocabulary.encode(_TEXT)) + 1
    exact = _settings(max_input_length=length)
    for on_long in ("error", "truncate"):
        prompt = encode_prompt(_example(_TEXT), vocabulary, settings=exact, vocab_size=64, on_long=on_long)
        assert (len(prompt.ids), prompt.truncated) == (length, False)
    shorter = _settings(max_input_length=length - 1)
    assert encode_prompt(_example(_TEXT), vocabulary, settings=shorter, vocab_size=64, on_long="truncate").truncated


@pytest.mark.parametrize("longest", [1, 2, 5])
def test_cutting_keeps_eos(vocabulary: Vocabulary, longest: int) -> None:
    """A text that is too long loses its last pieces, never its eos."""
    prompt = encode_prompt(
        _example(_TEXT), vocabulary, settings=_settings(max_input_length=longest), vocab_size=64, on_long="truncate"
    )
    assert prompt.ids == (*vocabulary.encode(_TEXT)[: longest - 1], EOS_ID)
    assert prompt.truncated


def test_ids_are_taken_as_they_are(vocabulary: Vocabulary) -> None:
    """Given ids get neither prefix nor eos, and need no vocabulary."""
    example = _example(ids=(7, 8, 9))
    settings = _settings(task_prefix="a small ")
    for given in (None, vocabulary):
        prompt = encode_prompt(example, given, settings=settings, vocab_size=64, on_long="error")
        assert (prompt.ids, prompt.truncated) == ((7, 8, 9), False)


def test_given_ids_are_cut_at_the_end() -> None:
    """Too many given ids lose the last ones, and no eos is added."""
    settings = _settings(max_input_length=3)
    prompt = encode_prompt(_example(ids=(7, 8, 9, 1)), None, settings=settings, vocab_size=64, on_long="truncate")
    assert (prompt.ids, prompt.truncated) == ((7, 8, 9), True)
    assert not encode_prompt(_example(ids=(7, 8, 9)), None, settings=settings, vocab_size=64, on_long="error").truncated


def test_long_inputs_can_be_refused(vocabulary: Vocabulary) -> None:
    """With on_long=error, the message names the example, its length, the limit, and what to do."""
    length = len(vocabulary.encode(_TEXT)) + 1
    message = rf"example e7: its input has {length} tokens, max_input_length is 5\. .*--on_long=truncate"
    with pytest.raises(DataError, match=message):
        encode_prompt(
            _example(_TEXT), vocabulary, settings=_settings(max_input_length=5), vocab_size=64, on_long="error"
        )
    with pytest.raises(DataError, match="example e7: its input has 4 tokens, max_input_length is 3"):
        encode_prompt(
            _example(ids=(7, 8, 9, 1)), None, settings=_settings(max_input_length=3), vocab_size=64, on_long="error"
        )


def test_ids_that_the_model_does_not_know_are_refused() -> None:
    """An id beyond the embedding's rows is refused with example and id, not decoded into NaN."""
    with pytest.raises(DataError, match="example e7: its input_ids have 64; the model knows ids from 0 to 63"):
        encode_prompt(_example(ids=(7, 64)), None, settings=_settings(), vocab_size=64, on_long="error")


def test_an_example_without_an_id_is_found_by_its_place() -> None:
    """If the id was derived from the content, the message has the place of the row."""
    example = dataclasses.replace(_example(ids=(7, 64)), id="content-0", has_own_id=False, file_index=2, line=31)
    message = "example content-0 (row 31 of data file 3, sorted by name): its input_ids have 64; the model knows"
    with pytest.raises(DataError, match=re.escape(message)):
        encode_prompt(example, None, settings=_settings(), vocab_size=64, on_long="error")


def test_text_needs_a_vocabulary() -> None:
    """A text without a vocabulary is refused with the flag."""
    with pytest.raises(DataError, match=r"example e7: its input is text, which needs a vocabulary\. Pass --vocabulary"):
        encode_prompt(_example(_TEXT), None, settings=_settings(), vocab_size=64, on_long="error")


def test_the_vocabulary_fixture_is_small(vocabulary: Vocabulary) -> None:
    """The texts here have several pieces, so cutting them has an effect."""
    assert vocabulary.size == 48
    assert len(vocabulary.encode(_TEXT)) > 6


def test_reference_ids_become_texts_as_outputs_do(vocabulary: Vocabulary) -> None:
    """Reference ids become texts with a vocabulary, else ids joined by spaces; both up to eos, without padding."""
    ids = (*vocabulary.encode(_TEXT), EOS_ID, 5)
    example = dataclasses.replace(_example(ids=(7, 1)), reference_ids=(ids, (7, 9, 0), ()))
    texts = with_reference_texts(example, vocabulary, vocab_size=64)
    assert texts.references == (_TEXT, vocabulary.decode([7, 9]), "")
    assert texts == with_reference_texts(texts, vocabulary, vocab_size=64)
    assert texts == encode_prompt(example, vocabulary, settings=_settings(), vocab_size=64, on_long="error").example
    as_ids = with_reference_texts(example, None, vocab_size=64)
    assert as_ids.references == (" ".join(map(str, ids[:-2])), "7 9", "")
    assert as_ids.reference_ids == texts.reference_ids == example.reference_ids


def test_text_is_never_held_against_ids() -> None:
    """Text references need a vocabulary: without one, outputs would be ids, and every risk 0."""
    example = dataclasses.replace(_example(ids=(7, 1)), references=("a",))
    with pytest.raises(DataError, match="example e7: its references are texts, but outputs are token ids, since"):
        encode_prompt(example, None, settings=_settings(), vocab_size=64, on_long="error")


def test_reference_ids_that_nothing_generates_are_refused(vocabulary: Vocabulary) -> None:
    """Reference ids beyond the vocabulary would all read as unknown; ids beyond the model cannot be generated."""
    example = dataclasses.replace(_example(ids=(7, 1)), reference_ids=((5, 63),))
    assert with_reference_texts(example, None, vocab_size=64).references == ("5 63",)
    message = r"example e7: its reference_ids have 63; the vocabulary has ids from 0 to 47\. If .* pass --extra_ids\."
    with pytest.raises(DataError, match=message):
        with_reference_texts(example, vocabulary, vocab_size=64)
    with pytest.raises(DataError, match=r"its reference_ids have 63; the model knows ids from 0 to 62\.$"):
        with_reference_texts(example, None, vocab_size=63)
