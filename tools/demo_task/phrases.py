"""Bilingual noun phrases and subjects: one English wording, all its French renderings.

English leaves open what French must decide: whether "you" is tu or vous, whether "I" is a man or a woman. A `Voice`
is one such decision, taken once for a whole sentence, so that its clauses agree with each other.
"""

import dataclasses
import random
from collections.abc import Callable, Sequence

from tools.demo_task import english, french, french_numbers, lexicon
from tools.demo_task.french_verbs import Subject


@dataclasses.dataclass(frozen=True, kw_only=True)
class Voice:
    """The speaker and the person spoken to.

    Attributes:
      you: Grammatical person of "you": 1 (tu) or 4 (vous).
      you_are_many: Whether "vous" is several people.
      feminine: Whether "I", "you" and "we" are feminine.
      says_on: Whether "we" is "on" rather than "nous".
    """

    you: int = 1
    you_are_many: bool = False
    feminine: bool = False
    says_on: bool = False


# Each voice with the English pronouns for which it differs from the first one.
VOICES: tuple[tuple[Voice, frozenset[str]], ...] = (
    (Voice(), frozenset()),
    (Voice(you=4), frozenset({"you"})),
    (Voice(says_on=True), frozenset({"we"})),
    (Voice(feminine=True), frozenset({"I", "you", "we"})),
    (Voice(you=4, you_are_many=True), frozenset({"you"})),
    (Voice(you=4, feminine=True), frozenset({"you"})),
)
_PRONOUNS = ("I", "you", "he", "she", "we", "they")
_OWNERS = {"my": 0, "your": 1, "his": 2, "her": 2, "our": 3, "their": 5}
_OWNER_SPEAKERS = {"my": "I", "your": "you", "our": "we"}


@dataclasses.dataclass(frozen=True, kw_only=True)
class BilingualSubject:
    """A subject.

    Attributes:
      english: Its English words.
      person: English grammatical person, 0 to 5.
      possessive: English possessive that refers back to it; empty where the gender is not known.
      speakers: English pronouns whose French depends on the voice.
      render: Gives the French renderings in a voice.
    """

    english: str
    person: int
    possessive: str
    speakers: frozenset[str]
    render: Callable[[Voice], list[Subject]]


@dataclasses.dataclass(frozen=True, kw_only=True)
class NounPhrase:
    """A noun with its determiner and perhaps an adjective.

    Attributes:
      determiner: "the", "a" (also "some" and no article), "this", a possessive, or a number in digits or words.
      noun: The noun.
      adjective: Its adjective, if any.
      is_plural: Whether the phrase is plural.
      quantity: The number, when the determiner is one; 0 otherwise.
    """

    determiner: str
    noun: lexicon.Noun
    adjective: lexicon.Adjective | None = None
    is_plural: bool = False
    quantity: int = 0

    @property
    def speakers(self) -> frozenset[str]:
        """English pronouns in it whose French depends on the voice."""
        return frozenset({_OWNER_SPEAKERS[self.determiner]} if self.determiner in _OWNER_SPEAKERS else ())

    def in_english(self, *, negative: bool = False) -> str:
        """Returns the English words; after a negation "some" becomes "any"."""
        noun = self.noun.english_plural if self.is_plural else self.noun.english
        words = f"{self.adjective.english} {noun}" if self.adjective else noun
        if self.determiner == "this":
            return f"{'these' if self.is_plural else 'this'} {words}"
        if self.determiner != "a":
            return f"{self.determiner} {words}"
        if self.is_plural or "mass" in self.noun.tags:
            return f"{'any' if negative else 'some'} {words}"
        return english.an(words)

    def in_french(self, voice: Voice, *, negative: bool = False, after_de: bool = False) -> list[Subject]:
        """Returns the French renderings, each with its gender and number.

        Args:
          voice: Who speaks to whom.
          negative: Whether it is the object of a negated verb, where un, des and du become "de".
          after_de: Whether it follows the preposition "de", which swallows des and du ("besoin de pain").
        """
        adjectives = self.adjective.french if self.adjective else (None,)
        return [
            self._render(word, adjective, voice, negative=negative, after_de=after_de)
            for word in self.noun.french
            for adjective in adjectives
        ]

    def _render(
        self,
        word: lexicon.FrenchNoun,
        adjective: french.FrenchAdjective | None,
        voice: Voice,
        *,
        negative: bool,
        after_de: bool,
    ) -> Subject:
        words = word.plural if self.is_plural else word.singular
        precedes = adjective is not None and adjective.precedes
        if adjective is not None:
            agreed = adjective.agree(word.gender, is_plural=self.is_plural, before=words if precedes else "")
            words = f"{agreed} {words}" if precedes else f"{words} {agreed}"
        return Subject(
            text=f"{self._article(word, words, voice, precedes, negative=negative, after_de=after_de)} {words}",
            person=5 if self.is_plural else 2,
            gender=word.gender,
            is_plural=self.is_plural,
            pronoun={"m": "il", "f": "elle"}[word.gender] + ("s" if self.is_plural else ""),
        )

    def _article(
        self,
        word: lexicon.FrenchNoun,
        words: str,
        voice: Voice,
        precedes: bool,
        *,
        negative: bool,
        after_de: bool,
    ) -> str:
        """Returns the French determiner of a phrase that goes on with `words`."""
        if self.quantity:
            digits = str(self.quantity)
            return french_numbers.number(self.quantity, gender=word.gender) if self.determiner == digits else digits
        if self.determiner in _OWNERS:
            person = voice.you if self.determiner == "your" else _OWNERS[self.determiner]
            return french.possessive(person, word.gender, is_plural=self.is_plural, before=words)
        if self.determiner == "this":
            return french.demonstrative(word.gender, is_plural=self.is_plural, before=words)
        if self.determiner == "the":
            return french.definite(word.gender, is_plural=self.is_plural)
        if negative:
            return "de"
        is_mass = "mass" in self.noun.tags
        if after_de and (is_mass or self.is_plural):
            return ""
        if is_mass:
            return french.partitive(word.gender)
        return french.indefinite(word.gender, is_plural=self.is_plural, before_adjective=precedes)


def pronoun(word: str) -> BilingualSubject:
    """Returns the subject pronoun I, you, he, she, we or they."""
    person = {"I": 0, "you": 1, "he": 2, "she": 2, "we": 3, "they": 5}[word]

    def render(voice: Voice) -> list[Subject]:
        gender = "f" if voice.feminine or word == "she" else "m"
        if word == "they":
            return [
                Subject(text="ils", person=5, gender="m", is_plural=True, pronoun="ils"),
                Subject(text="elles", person=5, gender="f", is_plural=True, pronoun="elles"),
            ]
        if word == "you":
            text = "vous" if voice.you == 4 else "tu"
            many = voice.you_are_many
            return [Subject(text=text, person=voice.you, gender=gender, is_plural=many, pronoun=text)]
        if word == "we" and voice.says_on:
            return [Subject(text="on", person=2, gender=gender, is_plural=True, pronoun="on")]
        text = {"I": "je", "he": "il", "she": "elle", "we": "nous"}[word]
        if word in ("he", "she"):
            gender = {"he": "m", "she": "f"}[word]
        inverted = "" if word == "I" else text
        return [Subject(text=text, person=person, gender=gender, is_plural=word == "we", pronoun=inverted)]

    return BilingualSubject(
        english=word,
        person=person,
        possessive={"I": "my", "you": "your", "he": "his", "she": "her", "we": "our", "they": "their"}[word],
        speakers=frozenset({word} & {"I", "you", "we"}),
        render=render,
    )


def named(*names: str) -> BilingualSubject:
    """Returns one person, or several, called by first names."""
    feminine = all(name in lexicon.WOMEN for name in names)
    many = len(names) > 1
    subject = Subject(
        text=" et ".join(names),
        person=5 if many else 2,
        gender="f" if feminine else "m",
        is_plural=many,
        pronoun=("elle" if feminine else "il") + ("s" if many else ""),
    )
    return BilingualSubject(
        english=" and ".join(names),
        person=subject.person,
        possessive="their" if many else "her" if feminine else "his",
        speakers=frozenset(),
        render=lambda voice: [subject],
    )


def noun_subject(phrase: NounPhrase) -> BilingualSubject:
    """Returns a noun phrase as the subject of a verb."""
    owner = "their" if phrase.is_plural else next(iter(phrase.noun.tags & {"his", "her"}), "")
    return BilingualSubject(
        english=phrase.in_english(),
        person=5 if phrase.is_plural else 2,
        possessive=owner,
        speakers=phrase.speakers,
        render=phrase.in_french,
    )


def noun_phrase(
    rng: random.Random,
    nouns: Sequence[lexicon.Noun],
    *,
    determiners: Sequence[str],
    adjective_rate: float = 0.3,
    plural_rate: float = 0.25,
) -> NounPhrase:
    """Returns a random noun phrase that makes sense; family words always get a possessive or "the"."""
    noun = rng.choice(nouns)
    adjective = None
    if rng.random() < adjective_rate:
        adjective = rng.choice(lexicon.adjectives(*noun.tags) or (None,))
    never_plural = noun.tags & {"mass", "single"}
    is_plural = not never_plural and rng.random() < plural_rate
    determiner = rng.choice(determiners)
    if "family" in noun.tags and determiner in ("a", "the", "this"):
        determiner = rng.choice(("my", "your", "our", "my"))
    return NounPhrase(determiner=determiner, noun=noun, adjective=adjective, is_plural=is_plural)


def random_subject(rng: random.Random, *, avoid: frozenset[str] = frozenset()) -> BilingualSubject:
    """Returns a random subject, a person or several, other than the pronouns to `avoid`."""
    kind = rng.random()
    if kind < 0.45:
        return pronoun(rng.choice([word for word in _PRONOUNS if word not in avoid]))
    if kind < 0.65:
        return named(rng.choice(lexicon.MEN + lexicon.WOMEN))
    if kind < 0.72:
        return named(*rng.sample(lexicon.MEN + lexicon.WOMEN, 2))
    people = noun_phrase(rng, lexicon.nouns("person"), determiners=("the", "the", "my", "your", "our", "this"))
    return noun_subject(people)
