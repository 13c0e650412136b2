"""Bilingual clauses: a subject, a verb phrase, a tense, a polarity and a time expression."""

import dataclasses
import random
from collections.abc import Callable, Sequence
from typing import TypeVar

from tools.demo_task import circumstances, english, french_verbs, verb_phrases
from tools.demo_task.french_verbs import Subject
from tools.demo_task.phrases import BilingualSubject, Voice, random_subject
from tools.demo_task.settings import TimeExpression
from tools.demo_task.verb_phrases import VerbPhrase

T = TypeVar("T")

# Renderings of one clause kept when it becomes a part of a longer sentence.
_MAX_RENDERINGS = 8
NO_TIME = TimeExpression(english="", french=("",))


@dataclasses.dataclass(frozen=True, kw_only=True)
class Draft:
    """An English sentence or clause without capital and full stop, and its French renderings in a voice.

    Attributes:
      english: The English words.
      render: Its French renderings, not yet spelt, the usual one first.
      speakers: English pronouns whose French depends on the voice.
      mark: Final punctuation of both languages.
    """

    english: str
    render: Callable[[Voice], list[str]]
    speakers: frozenset[str] = frozenset()
    mark: str = "."


Template = Callable[[random.Random], Draft]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Polarity:
    """The modifier of the conjugated verb: a negation or an adverb.

    Attributes:
      english: "not", "never", "often" …, after the auxiliary.
      suffix: What English puts at the end ("yet").
      negation: Second half of the French negation, empty in the affirmative.
      adverbs: French adverbs, the usual one first.
    """

    english: str = ""
    suffix: str = ""
    negation: str = ""
    adverbs: tuple[str, ...] = ("",)


AFFIRMATIVE = Polarity()
NOT = Polarity(english="not", negation="pas")
_NEVER = Polarity(english="never", negation="jamais")
_NO_LONGER = Polarity(english="no longer", negation="plus")
_NOT_YET = Polarity(english="not", suffix="yet", negation="pas encore")
_ALREADY = Polarity(english="already", adverbs=("déjà",))
_STILL = Polarity(english="still", adverbs=("encore", "toujours"))
_FREQUENCIES = (
    Polarity(english="often", adverbs=("souvent",)),
    Polarity(english="always", adverbs=("toujours",)),
    Polarity(english="rarely", adverbs=("rarement",)),
    Polarity(english="sometimes", adverbs=("parfois", "quelquefois")),
)
# English tense of an action: its weight and the French tenses that translate it, the usual one first.
_TENSES: dict[str, tuple[int, tuple[str, ...]]] = {
    "present": (6, ("present",)),
    "progressive": (4, ("present",)),
    "past": (9, ("past",)),
    "past progressive": (2, ("imperfect",)),
    "perfect": (3, ("past",)),
    "near": (4, ("near",)),
    "future": (3, ("future", "near")),
    "can": (2, ("pouvoir:present",)),
    "must": (2, ("devoir:present",)),
    "have to": (1, ("devoir:present",)),
    "should": (1, ("devoir:conditional",)),
    "want": (2, ("vouloir:present",)),
    "would like": (1, ("vouloir:conditional", "aimer:conditional")),
}
_TIME_KINDS = {"present": "habit", "progressive": "now", "past": "past", "near": "future", "future": "future"}
_AFFIRMATIVE_ONLY = frozenset({"have to", "would like"})


def statement(
    subject: BilingualSubject,
    phrase: VerbPhrase,
    tense: str,
    *,
    polarity: Polarity = AFFIRMATIVE,
    time: TimeExpression = NO_TIME,
    time_first: bool = False,
    tense_is_clear: bool = False,
) -> Draft:
    """Returns the clause that puts the subject, verb phrase and tense together.

    Args:
      subject: Who.
      phrase: Does what.
      tense: An English tense of `tools.demo_task.english.conjugate`.
      polarity: Negation or adverb.
      time: When; French may put it first or last.
      time_first: Whether English, and the usual French rendering, begin with the time.
      tense_is_clear: Whether the sentence around the clause makes clear if it is present or past.
    """
    is_negative = bool(polarity.negation)
    # "They read a book" is present or past, and only a time expression or an auxiliary would tell.
    is_ambiguous = (
        phrase.verb.base == phrase.verb.past
        and tense in ("present", "past")
        and subject.person != 2
        and not (time.english or polarity.english or tense_is_clear)
    )
    auxiliary, rest = english.conjugate(
        phrase.verb, tense, subject.person, needs_auxiliary=polarity.english.startswith("not")
    )
    words = [subject.english, auxiliary, polarity.english, rest, english_tail(phrase, subject, negative=is_negative)]
    words.append(polarity.suffix)
    text = " ".join(word for word in words if word).replace("can not ", "cannot ")
    text = f"{time.english}, {text}" if time_first else f"{text} {time.english}".rstrip()

    def render(voice: Voice) -> list[str]:
        clauses = [
            f"{who.text} {predicate} {complement}"
            for who in subject.render(voice)
            for verb, complement in phrase.render(voice, who, is_negative)
            for french_tense in (("past", "present") if is_ambiguous else french_tenses(tense, phrase, verb))
            for adverb in polarity.adverbs
            for predicate in (
                french_verbs.predicate(verb, french_tense, who, negation=polarity.negation, adverb=adverb),
            )
        ]
        if not time.english:
            return clauses
        at_end = [f"{clause} {when}" for clause in clauses for when in time.french]
        at_start = [f"{when}, {clause}" for clause in clauses for when in time.french]
        return at_start + at_end if time_first else at_end + at_start

    return Draft(english=" ".join(text.split()), render=render, speakers=subject.speakers | phrase.speakers)


def english_tail(phrase: VerbPhrase, subject: BilingualSubject, *, negative: bool) -> str:
    """Returns what follows the English verb; "{job:doctor}" becomes "a doctor" or "doctors"."""
    tail = phrase.negative_tail if negative else phrase.tail
    if tail.startswith("{job:"):
        job = tail[5:-1]
        return job + "s" if subject.person in (3, 5) else english.an(job)
    return tail


def french_tenses(tense: str, phrase: VerbPhrase, verb: french_verbs.FrenchVerb) -> tuple[str, ...]:
    """Returns the French tenses for an English one: a past state is in the imparfait."""
    if phrase.is_state and tense == "past":
        return ("imperfect", "past") if verb.infinitive == "être" else ("imperfect",)
    return _TENSES[tense][1]


def weighted(rng: random.Random, weights: dict[T, int]) -> T:
    """Returns a key drawn in proportion to its weight."""
    return rng.choices(list(weights), weights=list(weights.values()))[0]


def random_action(rng: random.Random, owner: str = "") -> VerbPhrase:
    """Returns a random action; `owner` is the possessive that refers to its subject."""
    return weighted(rng, verb_phrases.ACTIONS)(rng, owner)


def random_state(rng: random.Random, owner: str = "") -> VerbPhrase:
    """Returns a random state; `owner` is the possessive that refers to its subject."""
    return weighted(rng, verb_phrases.STATES)(rng, owner)


def random_tense(rng: random.Random) -> str:
    """Returns a random English tense of an action."""
    return weighted(rng, {tense: weight for tense, (weight, _) in _TENSES.items()})


def random_clause(
    rng: random.Random,
    *,
    avoid: frozenset[str] = frozenset(),
    tenses: Sequence[str] = (),
    time_rate: float = 0.4,
    state_rate: float = 0.3,
) -> Draft:
    """Returns a random clause.

    Args:
      rng: Source of randomness.
      avoid: Subject pronouns not to use.
      tenses: Tenses to choose from; all of them when empty.
      time_rate: How often a time expression is added, where the tense allows one.
      state_rate: How often it is a state, in the present or past; 0 unless `tenses` has one of them.
    """
    subject = random_subject(rng, avoid=avoid)
    is_state = rng.random() < state_rate
    if is_state:
        phrase = random_state(rng, subject.possessive)
        tense = rng.choice([name for name in ("present", "present", "past") if not tenses or name in tenses])
    else:
        phrase = random_action(rng, subject.possessive)
        tense = rng.choice(tenses) if tenses else random_tense(rng)
    polarity = _random_polarity(rng, tense, is_state=is_state)
    time = NO_TIME
    # A frequency and a habitual time would say the same thing twice.
    if rng.random() < time_rate and (not polarity.english or polarity is NOT):
        kind = "" if is_state and tense == "present" else _TIME_KINDS.get(tense, "")
        time = circumstances.random_time(rng, kind) if kind else NO_TIME
    time_first = bool(time.english) and time_rate >= 0.4 and rng.random() < 0.25
    return statement(
        subject, phrase, tense, polarity=polarity, time=time, time_first=time_first, tense_is_clear=bool(tenses)
    )


def spread(renderings: list[str]) -> list[str]:
    """Returns a few renderings, the first among them, evenly spaced in the list."""
    if len(renderings) <= _MAX_RENDERINGS:
        return renderings
    step = len(renderings) / _MAX_RENDERINGS
    return [renderings[int(index * step)] for index in range(_MAX_RENDERINGS)]


def infinitives(phrase: VerbPhrase, voice: Voice, who: Subject, *, is_negative: bool) -> list[str]:
    """Returns the French infinitives of a verb phrase whose subject is `who`."""
    return [
        f"{french_verbs.infinitive(verb, person=who.person)} {tail}"
        for verb, tail in phrase.render(voice, who, is_negative)
    ]


def _random_polarity(rng: random.Random, tense: str, *, is_state: bool) -> Polarity:
    draw = rng.random()
    if draw < 0.6 or tense in _AFFIRMATIVE_ONLY:
        return AFFIRMATIVE
    if draw < 0.8:
        return _NOT_YET if tense == "perfect" and draw > 0.7 else NOT
    if draw < 0.86 and tense in ("present", "past", "perfect", "want", "future"):
        return _NEVER
    if draw < 0.9 and tense in ("present", "progressive"):
        return _NO_LONGER
    if tense == "perfect":
        return _ALREADY
    if tense == "present":
        return _STILL if is_state or draw > 0.97 else rng.choice(_FREQUENCIES)
    return AFFIRMATIVE


# "To live somewhere" has two French verbs.
TO_LIVE = ("habiter", "vivre")
