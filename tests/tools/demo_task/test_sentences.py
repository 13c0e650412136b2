"""Tests of the generator of sentence pairs."""

import functools
import itertools
import re

import pytest

from tools.demo_task import sentences
from tools.demo_task.clauses import Draft
from tools.demo_task.sentences import SentencePair

_FORBIDDEN = re.compile(
    r"\b(?:"
    r"(?:le|la|je|me|te|se|ne|de|que|lorsque) (?!onz|huit|héros|hibou|haricot|hongrois)[aàâeéèêëiîoôœuûh]"
    r"|(?:de|à) les?\b|si ils?\b|ce est|ce (?:ami|homme|enfant|oncle|oiseau|éléphant|article|acteur|étudiant|hôpital)"
    r"|(?:ma|ta|sa) [aàâeéèêiîoôœuû]|cet [bcdfgjklmnpqrstvwxz]"
    r"|beau (?:oiseau|appartement)|nouveau (?:ordinateur|article)|vieux (?:ami|homme|oncle)"
    r"|de de\b|(?:au|du|des|aux) (?:la|le|les)\b)",
    re.IGNORECASE,
)


@functools.cache
def _pairs() -> tuple[SentencePair, ...]:
    return tuple(sentences.generate_pairs(seed=11, count=5000))


def _french() -> list[str]:
    return [text for pair in _pairs() for text in pair.french]


def test_deterministic_in_the_seed() -> None:
    """The same seed gives the same pairs, another seed gives others."""
    first = sentences.generate_pairs(seed=3, count=200)
    assert first == sentences.generate_pairs(seed=3, count=200)
    assert first != sentences.generate_pairs(seed=4, count=200)


def test_a_longer_draw_begins_with_the_shorter_one() -> None:
    """Asking for more pairs only adds to those of a smaller count."""
    assert sentences.generate_pairs(seed=3, count=100)[:40] == sentences.generate_pairs(seed=3, count=40)


def test_english_sentences_are_distinct() -> None:
    """No two English sentences are equal without case and punctuation."""
    assert len({sentences.normalized(pair.english) for pair in _pairs()}) == len(_pairs())


def test_references() -> None:
    """Every sentence has from one to six distinct references."""
    for pair in _pairs():
        assert 1 <= len(pair.french) <= 6
        assert len(set(pair.french)) == len(pair.french)
    assert any(len(pair.french) == 6 for pair in _pairs())


def test_typography() -> None:
    """Sentences of both languages have a capital, one final mark, and single spaces."""
    for pair in _pairs():
        assert re.fullmatch(r"[A-Z0-9É].*[^ ][.?!]", pair.english), pair.english
        for text in (pair.english, *pair.french):
            assert "  " not in text, text
            assert text == text.strip(), text
            assert text[0] == text[0].upper(), text
            assert not re.search(r" [.,]|\{|\}|_|’", text), text
        for text in pair.french:
            assert text.endswith(pair.english[-1])
            assert re.search(r"(?: [?!]|[^ ]\.)$", text), text


def test_no_unspelt_words() -> None:
    """No reference holds a missing elision or contraction."""
    assert [text for text in _french() if _FORBIDDEN.search(text)] == []


@pytest.mark.parametrize("wrong", ["je ai", "le ami", "de le", "à les", "que il", "si il", "ma amie", "cet chat"])
def test_the_check_finds_unspelt_words(wrong: str) -> None:
    """The pattern of the test above does find what it looks for."""
    assert _FORBIDDEN.search(f"Paul dit {wrong} ici.")


def test_auxiliary_and_participle_agree_after_elle() -> None:
    """After "elle est" and "elles sont", a participle of movement is feminine."""
    participle = r"(?:allé|venu|revenu|arrivé|resté|retourné|né|rentré)"
    wrong = re.compile(rf"\b(?:elle (?:n')?est (?:pas )?{participle}\b|elles sont {participle}e?\b)", re.IGNORECASE)
    assert [text for text in _french() if wrong.search(text)] == []


def test_lengths_vary() -> None:
    """English sentences have from 3 words to more than 18."""
    lengths = [len(pair.english.split()) for pair in _pairs()]
    assert min(lengths) == 3
    assert 18 <= max(lengths) <= 30


def test_both_ways_to_say_you_are_listed() -> None:
    """Short questions to "you" have references with tu and with vous."""
    pair = next(pair for pair in _pairs() if pair.english.startswith("How long have you been"))
    words = set(itertools.chain.from_iterable(text.lower().replace("-", " ").split() for text in pair.french))
    assert {"tu", "vous"} <= words


def test_canonical_reference_varies() -> None:
    """The same ambiguous words do not always have the same canonical translation."""
    cars = [pair.french[0] for pair in _pairs() if re.search(r"\bcar\b", pair.english)]
    assert {bool(re.search(r"\bauto\b", text)) for text in cars} == {True, False}


def test_training_and_calibration_do_not_overlap() -> None:
    """No calibration sentence is in the training set, and both have the sizes asked for."""
    training, calibration = sentences.training_and_calibration(seed=5, training=1000, calibration=300)
    assert (len(training), len(calibration)) == (1000, 300)
    known = {sentences.normalized(pair.english) for pair in training}
    assert not known & {sentences.normalized(pair.english) for pair in calibration}


def test_training_and_calibration_have_the_same_distribution() -> None:
    """Mean length and share of questions differ between the two sets by no more than chance allows."""
    training, calibration = sentences.training_and_calibration(seed=6, training=1500, calibration=1500)
    lengths = [sum(len(pair.english.split()) for pair in part) / 1500 for part in (training, calibration)]
    questions = [sum(pair.english.endswith("?") for pair in part) / 1500 for part in (training, calibration)]
    assert abs(lengths[0] - lengths[1]) < 0.5
    assert abs(questions[0] - questions[1]) < 0.05


@pytest.mark.parametrize("count", [0, -3])
def test_count_too_small(count: int) -> None:
    """A count below 1 is refused with its value."""
    with pytest.raises(ValueError, match=f"count must be at least 1, got {count}"):
        sentences.generate_pairs(seed=1, count=count)
    with pytest.raises(ValueError, match=f"calibration must be at least 1, got {count}"):
        sentences.training_and_calibration(seed=1, training=5, calibration=count)


def test_exhausted_space(monkeypatch: pytest.MonkeyPatch) -> None:
    """A grammar with fewer sentences than asked for ends in an error, not in an endless loop."""
    monkeypatch.setattr(sentences, "TEMPLATES", {_only_sentence: 1})
    with pytest.raises(ValueError, match="count must be at most the distinct sentences of the grammar, got 3"):
        sentences.generate_pairs(seed=1, count=3)


def _only_sentence(rng: object) -> Draft:
    return Draft(english="it is raining", render=lambda voice: ["il pleut"])
