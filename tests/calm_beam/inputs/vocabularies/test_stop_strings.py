"""Stop strings end outputs by their text, with any kind of vocabulary."""

import pathlib
from collections.abc import Sequence

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from calm_beam.decoding.branches import BranchResult
from calm_beam.inputs.vocabularies.vocabulary import Vocabulary, ends_output, output_text, reference_text
from calm_beam.serving import GrowingText, token_texts
from tests.builders import train_vocabulary
from tests.calm_beam.inputs.vocabularies.make_tokenizer_goldens import FOLDER
from tests.calm_beam.model.llama.builders import write_word_tokenizer
from tests.pipelines import text_rows

_STOPS = ("he c", "\n", "€", "s ", "e")


@pytest.fixture(scope="module")
def paths(tmp_path_factory: pytest.TempPathFactory) -> dict[str, pathlib.Path]:
    """Vocabularies of every kind: pieces that spell in bytes, byte-level BPE, WordLevel with spaces between words."""
    folder = tmp_path_factory.mktemp("vocabularies")
    pieces = folder / "sentencepiece.model"
    texts = [row["input"] for row in text_rows(60)]
    return {
        "pieces": train_vocabulary(pieces, texts, 300, byte_fallback=True, hard_vocab_limit=False),
        "words": write_word_tokenizer(folder / "tokenizer.json", 40, ends=(3, 7)),
        **{family: FOLDER / family / "tokenizer.json" for family in ("llama_3", "qwen", "zephyr")},
    }


def _first_end(tokens: Sequence[int], vocabulary: Vocabulary) -> int | None:
    """Returns the first number of tokens whose text has a stop string, by looking at every one."""
    assert vocabulary.stops is not None
    texts = (vocabulary.decode(tokens[:count]) for count in range(1, len(tokens) + 1))
    return next(
        (count for count, text in enumerate(texts, 1) if any(map(text.__contains__, vocabulary.stops.texts))), None
    )


@pytest.mark.parametrize("kind", ["pieces", "words", "llama_3", "qwen", "zephyr"])
@settings(max_examples=100, deadline=None, derandomize=True)
@given(data=st.data())
def test_an_output_ends_with_the_first_token_that_completes_one(
    paths: dict[str, pathlib.Path], kind: str, data: st.DataObject
) -> None:
    """The token is the one that a look at every text finds; the text before it is streamed and never taken back."""
    stops = ("w5 w", "w12", " w9") if kind == "words" else _STOPS
    chosen = data.draw(st.lists(st.sampled_from(stops), min_size=1, max_size=2, unique=True))
    vocabulary = Vocabulary(paths[kind], stop_strings=chosen)
    assert vocabulary.stops is not None
    text = data.draw(st.text("the cats€\n w51", max_size=12))
    tokens = [*vocabulary.encode(text), *data.draw(st.lists(st.integers(2, vocabulary.size - 1), max_size=12))]
    ends, expected = vocabulary.stops.ends, _first_end(tokens, vocabulary)
    found = next((count for count in range(1, len(tokens) + 1) if ends(tokens[:count])), None)
    assert found == expected
    output = tokens[:expected]
    whole = output_text(output, vocabulary)
    assert not any(stop in whole for stop in chosen)
    assert vocabulary.decode(output).startswith(whole)
    growing = GrowingText(vocabulary)
    assert "".join([*map(growing.add, output), growing.end()]) == whole
    if output and output[-1] not in vocabulary.end_ids:
        assert "".join(token_texts(output, vocabulary)) == whole


def test_what_a_decoder_cuts() -> None:
    """Of an output that went on, everything after the token that ended it is 0 and does not count."""
    result = BranchResult(
        tokens=np.array([4, 5, 6, 1, 0], np.int32),
        exit_layers=np.array([2, 1, 2, 2, 0], np.int32),
        confidences=np.array([0.5, 0.25, 1, 1, 0], np.float32),
        length=4,
        is_finite=True,
    )
    cut = result.ended_by(lambda tokens: tokens[-1] == 5)
    assert (cut.tokens.tolist(), cut.exit_layers.tolist(), cut.length) == ([4, 5, 0, 0, 0], [2, 1, 0, 0, 0], 2)
    assert (cut.confidences.tolist(), cut.tokens.dtype, cut.confidences.dtype) == (
        [0.5, 0.25, 0, 0, 0],
        np.int32,
        np.float32,
    )
    assert result.ended_by(lambda tokens: tokens[-1] == 1) is result


def test_a_stop_string_may_be_the_name_of_a_special_token(paths: dict[str, pathlib.Path]) -> None:
    """Outputs' texts do not show special tokens; one that is a stop string ends an output, as in transformers."""
    vocabulary = Vocabulary(paths["words"], stop_strings=["w3"])
    assert vocabulary.stops is not None
    assert vocabulary.decode([5, 3]) == "w5"
    assert [vocabulary.stops.ends([5, token]) for token in (3, 7, 4)] == [True, False, False]


def test_references_are_not_cut(paths: dict[str, pathlib.Path]) -> None:
    """A reference of token ids is the text of all of them, as one that is text stays as it is."""
    vocabulary = Vocabulary(paths["words"], stop_strings=["w5"])
    assert (reference_text([4, 5, 6, 7], vocabulary), output_text([4, 5, 6], vocabulary)) == ("w4 w5 w6", "w4 ")


def test_without_any(paths: dict[str, pathlib.Path]) -> None:
    """Without stop strings, decoders have nothing to ask, and records of vocabularies are as they were."""
    vocabulary = Vocabulary(paths["words"])
    assert (ends_output(vocabulary), ends_output(None), vocabulary.stops) == (None, None, None)
    assert "stop_strings" not in vocabulary.record().to_dict()
    with_stops = Vocabulary(paths["words"], stop_strings=["b", "a"]).record()
    assert with_stops.to_dict()["stop_strings"] == ["b", "a"]
