"""Templates of questions, with the three French ways of asking: est-ce que, inversion, and intonation."""

import dataclasses
import random
from collections.abc import Callable

from tools.demo_task import clauses, english, french_verbs, lexicon, settings, verb_phrases, verb_tables
from tools.demo_task.clauses import Draft
from tools.demo_task.french_verbs import FrenchVerb, Subject
from tools.demo_task.phrases import BilingualSubject, Voice, noun_phrase, noun_subject, pronoun, random_subject
from tools.demo_task.verb_phrases import VerbPhrase

_PRONOUN_TEXTS = frozenset(["je", "tu", "il", "elle", "on", "nous", "vous", "ils", "elles"])
# The perfect comes last: it does not go with a question about time.
_ACTION_TENSES = ("present", "progressive", "past", "past", "near", "future", "can", "must", "want", "want", "perfect")


def yes_or_no(rng: random.Random) -> Draft:
    """Returns "Did Paul buy a car?"."""
    subject = random_subject(rng)
    if rng.random() < 0.7:
        phrase, tense = clauses.random_action(rng, subject.possessive), rng.choice(_ACTION_TENSES)
    else:
        phrase, tense = clauses.random_state(rng, subject.possessive), rng.choice(("present", "past"))
    return _question(subject, phrase, tense, "", "", with_intonation=True)


def where(rng: random.Random) -> Draft:
    """Returns "Where did you buy this coat?"."""
    return _with_word(rng, "where", "où", lambda phrase: not phrase.has_place)


def when(rng: random.Random) -> Draft:
    """Returns "When will she leave?"; a verb phrase with its own clock time is not asked this."""
    return _with_word(rng, "when", "quand", lambda phrase: not phrase.is_reflexive)


def why(rng: random.Random) -> Draft:
    """Returns "Why are you selling your house?"."""
    return _with_word(rng, "why", "pourquoi", lambda phrase: True)


def at_what_time(rng: random.Random) -> Draft:
    """Returns "At what time does the doctor get up?"."""
    return _with_word(rng, "at what time", "à quelle heure", lambda phrase: not phrase.is_reflexive)


def who(rng: random.Random) -> Draft:
    """Returns "Who repaired this car?"."""
    asked = BilingualSubject(
        english="who",
        person=2,
        possessive="",
        speakers=frozenset(),
        render=lambda voice: [Subject(text="qui", person=2, gender="m", is_plural=False, pronoun="il")],
    )
    phrase = clauses.random_action(rng)
    draft = clauses.statement(asked, phrase, rng.choice(("past", "past", "present", "can", "want", "future", "near")))
    return dataclasses.replace(draft, mark="?")


def what(rng: random.Random) -> Draft:
    """Returns "What are you looking for?"."""
    subject = random_subject(rng)
    rows = [row for row in verb_tables.TRANSITIVE if not row.french[0][1] and "person" not in row.tags]
    row = rng.choice(rows)
    phrase = VerbPhrase(
        verb=row.verb,
        tail=row.particle,
        negative_tail=row.particle,
        render=lambda voice, who, negative: [(row.french[0][0], "")],
    )
    return _question(subject, phrase, rng.choice(_ACTION_TENSES), "what", "que")


def how_much(rng: random.Random) -> Draft:
    """Returns "How much do these shoes cost?"."""
    nouns = lexicon.nouns("thing", "clothes")
    phrase = noun_phrase(rng, nouns, determiners=("this", "the"), adjective_rate=0.5, plural_rate=0.4)
    verb = english.EnglishVerb(base="cost", past="cost", participle="cost")
    costing = VerbPhrase(
        verb=verb,
        tail="",
        negative_tail="",
        render=lambda voice, subject, negative: [(FrenchVerb(infinitive="coûter"), "")],
    )
    return _question(noun_subject(phrase), costing, "present", "how much", "combien")


def how_long(rng: random.Random) -> Draft:
    """Returns "How long have you been working in Rome?": a present tense in French."""
    subject = random_subject(rng)
    base, infinitive = rng.choice((("working", "travailler"), ("living", "habiter"), ("studying", "étudier")))
    place = rng.choice(settings.PLACES)
    have = "has" if subject.person == 2 else "have"

    def render(voice: Voice) -> list[str]:
        return [
            form
            for nominal in subject.render(voice)
            for form in _forms(
                nominal, FrenchVerb(infinitive=infinitive), "present", place.at, "depuis combien de temps", False
            )
        ]

    words = f"how long {have} {subject.english} been {base} in {place.english}"
    return Draft(english=words, render=render, speakers=subject.speakers, mark="?")


def how_old(rng: random.Random) -> Draft:
    """Returns "How old is your brother?"."""
    subject = random_subject(rng)
    auxiliary, _ = english.conjugate(verb_phrases.BE, "present", subject.person, needs_auxiliary=True)

    def render(voice: Voice) -> list[str]:
        return [
            form
            for nominal in subject.render(voice)
            for form in _forms(nominal, FrenchVerb(infinitive="avoir"), "present", "", "quel âge", False)
        ]

    return Draft(english=f"how old {auxiliary} {subject.english}", render=render, speakers=subject.speakers, mark="?")


def where_is(rng: random.Random) -> Draft:
    """Returns "Where is the station?"."""
    nouns = lexicon.nouns("place", "portable", "sight", "animal", "person", "clothes")
    phrase = noun_phrase(rng, nouns, determiners=("the", "my", "your", "our"), adjective_rate=0.4)
    is_or_are = "are" if phrase.is_plural else "is"
    verb = "sont" if phrase.is_plural else "est"

    def render(voice: Voice) -> list[str]:
        texts = [nominal.text for nominal in phrase.in_french(voice)]
        return [f"où {verb} {text}" for text in texts] + [
            f"où se trouve{'nt' if phrase.is_plural else ''} {text}" for text in texts
        ]

    english_words = f"where {is_or_are} {phrase.in_english()}"
    return Draft(english=english_words, render=render, speakers=phrase.speakers, mark="?")


def polite_request(rng: random.Random) -> Draft:
    """Returns "Could you open the window, please?"."""
    row = rng.choice([row for row in verb_tables.TRANSITIVE if row.verb.base in _REQUESTED])
    phrase = verb_phrases.with_object(rng, row, "your")
    you = pronoun("you")
    start = rng.choice(("could you", "can you"))
    tense = "pouvoir:conditional" if start == "could you" else "pouvoir:present"

    def render(voice: Voice) -> list[str]:
        nominal = you.render(voice)[0]
        please = "s'il vous plaît" if voice.you == 4 else "s'il te plaît"
        return [
            f"{form}, {please}"
            for verb, complement in phrase.render(voice, nominal, False)
            for form in _forms(nominal, verb, tense, complement, "", True)
        ]

    words = f"{start} {phrase.verb.base} {phrase.tail}, please"
    return Draft(english=words, render=render, speakers=frozenset({"you"}) | phrase.speakers, mark="?")


_REQUESTED = frozenset(
    [
        "buy",
        "sell",
        "bring",
        "repair",
        "clean",
        "wash",
        "call",
        "help",
        "open",
        "close",
        "prepare",
        "carry",
        "read",
        "wait",
        "draw",
    ]
)


def _with_word(rng: random.Random, word: str, french_word: str, suits: Callable[[VerbPhrase], bool]) -> Draft:
    """Returns a question about an action that begins with an interrogative word."""
    subject = random_subject(rng)
    phrase = clauses.random_action(rng, subject.possessive)
    while not suits(phrase):
        phrase = clauses.random_action(rng, subject.possessive)
    return _question(subject, phrase, rng.choice(_ACTION_TENSES[:-1]), word, french_word)


def _question(
    subject: BilingualSubject,
    phrase: VerbPhrase,
    tense: str,
    word: str,
    french_word: str,
    *,
    with_intonation: bool = False,
) -> Draft:
    """Returns a question that begins with an interrogative word, or with the verb when it is empty."""
    auxiliary, rest = english.conjugate(phrase.verb, tense, subject.person, needs_auxiliary=True)
    # A question asks for "any" where a statement has "some".
    tail = clauses.english_tail(phrase, subject, negative=not word)
    text = " ".join(f"{word} {auxiliary} {subject.english} {rest} {tail}".split())

    def render(voice: Voice) -> list[str]:
        return [
            form
            for nominal in subject.render(voice)
            for verb, complement in phrase.render(voice, nominal, False)
            for french_tense in clauses.french_tenses(tense, phrase, verb)
            for form in _forms(nominal, verb, french_tense, complement, french_word, with_intonation)
        ]

    return Draft(english=text, render=render, speakers=subject.speakers | phrase.speakers, mark="?")


def _forms(
    subject: Subject, verb: FrenchVerb, tense: str, complement: str, word: str, with_intonation: bool
) -> list[str]:
    """Returns the ways to ask one French question."""
    plain = f"{subject.text} {french_verbs.predicate(verb, tense, subject)} {complement}"
    asked = "qu'est-ce que" if word == "que" else f"{word} est-ce que"
    forms = [f"{asked} {plain}"]
    if subject.pronoun:
        inverted = french_verbs.predicate(verb, tense, subject, invert=True)
        if subject.text in _PRONOUN_TEXTS:
            forms.append(f"{word} {inverted} {complement}")
        elif word != "que":
            # "Que Paul achète-t-il" is not French; every other word allows the doubled subject.
            forms.append(f"{word} {subject.text} {inverted} {complement}")
        if not complement and word in ("combien", "quel âge") and subject.text not in _PRONOUN_TEXTS:
            forms.insert(0, f"{word} {french_verbs.predicate(verb, tense, subject)} {subject.text}")
    if with_intonation:
        forms.append(plain)
    return forms


TEMPLATES: dict[clauses.Template, int] = {
    yes_or_no: 8,
    where: 3,
    when: 3,
    why: 3,
    at_what_time: 2,
    who: 3,
    what: 3,
    how_much: 2,
    how_long: 2,
    how_old: 1,
    where_is: 2,
    polite_request: 2,
}
