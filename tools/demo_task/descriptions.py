"""Templates of simple statements and commands: comparisons, possession, origin, what is forbidden."""

import random

from tools.demo_task import (
    clauses,
    english,
    french,
    french_verbs,
    lexicon,
    settings,
    verb_phrases,
)
from tools.demo_task.clauses import Draft
from tools.demo_task.french_verbs import IMPERSONAL, FrenchVerb, Subject
from tools.demo_task.phrases import (
    BilingualSubject,
    NounPhrase,
    Voice,
    named,
    noun_phrase,
    noun_subject,
    random_subject,
)

_COMPARED = {"more": "plus", "less": "moins", "as": "aussi"}
_IMPERSONAL = (
    ("it is forbidden to", "il est interdit de"),
    ("it is dangerous to", "il est dangereux de"),
    ("it is important to", "il est important de"),
    ("it is easy to", "il est facile de"),
    ("it is difficult to", "il est difficile de"),
    ("it is impossible to", "il est impossible de"),
    ("it is not allowed to", "il n'est pas permis de"),
    ("it is necessary to", "il faut"),
)


def single_clause(rng: random.Random) -> Draft:
    """Returns one clause: "Yesterday, Marie sold her old car"."""
    return clauses.random_clause(rng)


def comparison(rng: random.Random) -> Draft:
    """Returns "Paul is taller than Marie", "as tall as" or "less tall than"."""
    if rng.random() < 0.6:
        people = lexicon.nouns("person")
        adjective = rng.choice([one for one in lexicon.adjectives("person", predicate=True) if one.comparative])
        first = random_subject(rng)
        second = named(rng.choice(lexicon.MEN + lexicon.WOMEN))
        if rng.random() < 0.5:
            second = noun_subject(noun_phrase(rng, people, determiners=("the", "my", "your"), adjective_rate=0))
    else:
        nouns = lexicon.nouns("thing", "vehicle", "clothes", "home")
        first, second = (
            noun_subject(noun_phrase(rng, nouns, determiners=("the", "this", "my", "your"), adjective_rate=0.2))
            for _ in range(2)
        )
        adjective = rng.choice([one for one in lexicon.adjectives("thing", "vehicle") if one.comparative])
    degree = rng.choice(("more", "more", "as", "less"))
    is_past = rng.random() < 0.25
    auxiliary, _ = english.conjugate(
        verb_phrases.BE, "past" if is_past else "present", first.person, needs_auxiliary=True
    )
    middle = f"as {adjective.english} as" if degree == "as" else f"less {adjective.english} than"
    if degree == "more":
        middle = f"{adjective.comparative} than"

    def render(voice: Voice) -> list[str]:
        return [
            f"{who.text} {french_verbs.conjugate('être', 'imperfect' if is_past else 'present', who.person)} "
            f"{_compared(degree, option, who)} que {other.text}"
            for who in first.render(voice)
            for other in second.render(voice)
            for option in adjective.french
        ]

    words = f"{first.english} {auxiliary} {middle} {second.english}"
    return Draft(english=words, render=render, speakers=first.speakers | second.speakers)


def possession(rng: random.Random) -> Draft:
    """Returns "Marie's car is red", "This is my brother's house"."""
    nouns = lexicon.nouns("thing", "vehicle", "clothes", "animal", "home", "portable")
    thing = noun_phrase(rng, nouns, determiners=("the",), adjective_rate=0, plural_rate=0.3)
    owner = named(rng.choice(lexicon.MEN + lexicon.WOMEN))
    if rng.random() < 0.5:
        owner = noun_subject(
            noun_phrase(rng, lexicon.nouns("person"), determiners=("the", "my", "your", "this"), plural_rate=0)
        )
    noun = thing.in_english().removeprefix("the ")
    owned = f"{owner.english}'s {noun}"
    if rng.random() < 0.4:
        start = "these are" if thing.is_plural else "this is"
        is_or_are = "ce sont" if thing.is_plural else "ce est"

        def identify(voice: Voice) -> list[str]:
            return [f"{is_or_are} {text}" for text, _ in _owned(thing, owner, voice)]

        return Draft(english=f"{start} {owned}", render=identify, speakers=owner.speakers)
    adjective = rng.choice(lexicon.adjectives(*thing.noun.tags) or lexicon.adjectives("thing"))
    negation = rng.choice(("", "", "not "))
    verb = "are" if thing.is_plural else "is"

    def render(voice: Voice) -> list[str]:
        be = FrenchVerb(infinitive="être")
        return [
            f"{text} {french_verbs.predicate(be, 'present', what, negation='pas' if negation else '')} "
            f"{option.agree(what.gender, is_plural=what.is_plural)}"
            for text, what in _owned(thing, owner, voice)
            for option in adjective.french
        ]

    return Draft(english=f"{owned} {verb} {negation}{adjective.english}", render=render, speakers=owner.speakers)


def origin(rng: random.Random) -> Draft:
    """Returns "The tourists come from the Netherlands"."""
    subject, place = random_subject(rng), rng.choice(settings.PLACES)
    words = rng.choice((f"{'comes' if subject.person == 2 else 'come'} from", "came back from"))
    tense, infinitives = ("past", ("revenir", "rentrer")) if "back" in words else ("present", ("venir",))

    def render(voice: Voice) -> list[str]:
        return [
            f"{who.text} {french_verbs.predicate(FrenchVerb(infinitive=infinitive), tense, who)} {place.origin}"
            for who in subject.render(voice)
            for infinitive in infinitives
        ]

    return Draft(english=f"{subject.english} {words} {place.english}", render=render, speakers=subject.speakers)


def missing(rng: random.Random) -> Draft:
    """Returns "Paul misses his sister": French turns it round, "sa sœur manque à Paul"."""
    missed = noun_phrase(rng, lexicon.nouns("person", "animal"), determiners=("my", "your", "our"))
    name = rng.choice(lexicon.MEN + lexicon.WOMEN)
    misses = rng.random() < 0.5

    def render(voice: Voice) -> list[str]:
        return [
            f"{who.text} {french_verbs.conjugate('manquer', 'present', who.person)} à {name}"
            if misses
            else f"{who.text} me {french_verbs.conjugate('manquer', 'present', who.person)}"
            for who in missed.in_french(voice)
        ]

    words = f"{name if misses else 'I'} {'misses' if misses else 'miss'} {missed.in_english()}"
    return Draft(english=words, render=render, speakers=missed.speakers)


def impersonal(rng: random.Random) -> Draft:
    """Returns "It is forbidden to smoke in the library"."""
    words, start = rng.choice(_IMPERSONAL)
    phrase = clauses.random_action(rng)
    is_negative = words == "it is important to" and rng.random() < 0.4
    if is_negative:
        words = "it is important not to"

    def render(voice: Voice) -> list[str]:
        return [f"{start} {text}" for text in clauses.infinitives(phrase, voice, IMPERSONAL, is_negative=is_negative)]

    if is_negative:
        start = "il est important de ne pas"
    tail = phrase.negative_tail if is_negative else phrase.tail
    return Draft(english=f"{words} {phrase.verb.base} {tail}".rstrip(), render=render, speakers=phrase.speakers)


def command(rng: random.Random) -> Draft:
    """Returns "Close the door!" or "Don't forget your keys!", to tu and to vous."""
    phrase = clauses.random_action(rng, "your")
    while phrase.is_reflexive:
        phrase = clauses.random_action(rng, "your")
    is_negative = rng.random() < 0.35
    nobody = Subject(text="", person=1, gender="m", is_plural=False, pronoun="tu")

    def render(voice: Voice) -> list[str]:
        return [
            f"{french_verbs.imperative(verb.infinitive, voice.you, negation='pas' if is_negative else '')} {tail}"
            for verb, tail in phrase.render(voice, nobody, is_negative)
        ]

    start = "do not " if is_negative else ""
    tail = phrase.negative_tail if is_negative else phrase.tail
    words = f"{start}{phrase.verb.base} {tail}".rstrip()
    return Draft(english=words, render=render, speakers=phrase.speakers | {"you"}, mark=rng.choice("!."))


def _owned(thing: NounPhrase, owner: BilingualSubject, voice: Voice) -> list[tuple[str, Subject]]:
    """Returns "la voiture de le voisin" with what its adjective agrees with."""
    return [(f"{what.text} de {who.text}", what) for what in thing.in_french(voice) for who in owner.render(voice)]


def _compared(degree: str, adjective: french.FrenchAdjective, subject: Subject) -> str:
    """Returns the adjective in a comparison: "plus grande"."""
    return f"{_COMPARED[degree]} {adjective.agree(subject.gender, is_plural=subject.is_plural)}"


TEMPLATES: dict[clauses.Template, int] = {
    single_clause: 26,
    comparison: 5,
    possession: 4,
    origin: 2,
    missing: 1,
    impersonal: 3,
    command: 4,
}
