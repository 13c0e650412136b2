"""Many texts against transformers itself, if it is installed; stored ids of a few are always compared."""

import random

import pytest

from calm_beam.inputs.examples import messages_of
from calm_beam.inputs.vocabularies.chat_templates import OWN_TEMPLATE, chat_of, rendered
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


@pytest.mark.parametrize("family", ["llama_3", "qwen", "zephyr"])
def test_stop_strings_end_at_the_same_token(family: str) -> None:
    """An output ends with the token at which transformers' own criterion stops, whatever a stop string is cut into."""
    torch = pytest.importorskip("torch")
    theirs = transformers.AutoTokenizer.from_pretrained(str(FOLDER / family))
    generator = random.Random(11)
    ended = 0
    for texts in (["the"], ["\n\n", "User:"], [". ", "é"], ["ing t"]):
        stops = open_vocabulary(FOLDER / family / "tokenizer.json", stop_strings=texts).stops
        assert stops is not None
        criterion = transformers.StopStringCriteria(theirs, texts)
        for text in _texts(100, seed=9):
            cut = generator.randint(0, len(text))
            ids = theirs(f"{text[:cut]}{generator.choice(texts)}{text[cut:]}", add_special_tokens=False)["input_ids"]
            counts = range(1, len(ids) + 1)
            expected = next((n for n in counts if criterion(torch.tensor([ids[:n]]), None)[0]), None)
            assert next((n for n in counts if stops.ends(ids[:n])), None) == expected, (text, texts)
            ended += expected is not None
    assert ended > 200


@pytest.mark.parametrize("family", ["llama_3", "mistral", "qwen", "zephyr"])
def test_chats_of_several_turns(family: str) -> None:
    """Text and ids of a chat of several turns are those of `apply_chat_template`."""
    theirs = transformers.AutoTokenizer.from_pretrained(str(FOLDER / family))
    tokenizer = str(FOLDER / family / "tokenizer.json")
    for system in (None, "Answer in one word."):
        chat = chat_of(OWN_TEMPLATE, tokenizer=tokenizer, system=system)
        vocabulary = open_vocabulary(tokenizer, chat=chat)
        for count in (1, 3, 5):
            *earlier, text = TEXTS[:count]
            messages = [
                *([] if system is None else [{"role": "system", "content": system}]),
                *messages_of(text, earlier),
            ]
            expected = theirs.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
            assert rendered(chat, text, earlier=earlier) == expected
            ids = theirs(expected, add_special_tokens=False)["input_ids"]
            assert vocabulary.encode_prompt(text, room=10_000, earlier=earlier)[0] == tuple(ids)
