"""Many texts against transformers itself, if it is installed; stored ids of a few are always compared."""

import random

import pytest

from calm_beam.inputs.vocabularies.vocabulary import open_vocabulary
from tests.calm_beam.inputs.vocabularies.make_tokenizer_goldens import FOLDER, ODD_TEXTS, TEXTS

transformers = pytest.importorskip("transformers")
pytestmark = pytest.mark.slow


def _texts(count: int, seed: int) -> list[str]:
    """Returns pieces of texts in any order: cut within words, with odd characters between them."""
    generator = random.Random(seed)
    texts = []
    for _ in range(count):
        pieces = generator.choices((*TEXTS, *ODD_TEXTS), k=generator.randint(1, 4))
        cuts = [sorted(generator.choices(range(len(piece) + 1), k=2)) for piece in pieces]
        texts.append("".join(piece[start:end] for piece, (start, end) in zip(pieces, cuts, strict=True)))
    return texts


@pytest.mark.parametrize("family", ["llama_3", "mistral", "qwen", "zephyr"])
def test_ids_and_texts_of_5000(family: str) -> None:
    """Ids and decoded texts of 5,000 texts are those of transformers."""
    ours = open_vocabulary(FOLDER / family / "tokenizer.json")
    theirs = transformers.AutoTokenizer.from_pretrained(str(FOLDER / family))
    for text in _texts(5000, seed=7):
        ids = theirs(text)["input_ids"]
        assert ours.encode_prompt(text, room=10_000) == (tuple(ids), len(ids))
        assert ours.encode(text) == theirs(text, add_special_tokens=False)["input_ids"]
        assert ours.decode(ids) == theirs.decode(ids, skip_special_tokens=True)
