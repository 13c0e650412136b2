"""Templates of sentences with two verbs: conjunctions, conditions, reported speech, relative clauses."""

import random

from tools.demo_task import (
    clauses,
    french_verbs,
    lexicon,
    settings,
    verb_phrases,
    verb_tables,
)
from tools.demo_task.clauses import Draft, spread
from tools.demo_task.french_verbs import Subject
from tools.demo_task.phrases import BilingualSubject, Voice, noun_phrase, noun_subject, random_subject

_CONJUNCTIONS = (
    ("and", ("et",)),
    ("but", ("mais",)),
    ("because", ("parce que", "car")),
    ("because", ("parce que",)),
    ("so", ("donc", "alors")),
)
_WEATHER = (
    ("it is raining", "il pleut"),
    ("it is snowing", "il neige"),
    ("it is cold", "il fait froid"),
    ("it is hot", "il fait chaud"),
    ("the weather is nice", "il fait beau"),
    ("the weather is bad", "il fait mauvais"),
    ("it is windy", "il y a du vent"),
    ("it is sunny", "il y a du soleil"),
    ("it was raining", "il pleuvait"),
    ("it was cold", "il faisait froid"),
    ("it was hot", "il faisait chaud"),
    ("it is dark", "il fait nuit"),
)


def two_clauses(rng: random.Random) -> Draft:
    """Returns two clauses joined by and, but, because or so."""
    first = clauses.random_clause(rng, time_rate=0.2)
    word, conjunctions = rng.choice(_CONJUNCTIONS)
    second = clauses.random_clause(rng, avoid=_they(first), time_rate=0.15)
    return _joined(first, word, conjunctions, second)


def interrupted(rng: random.Random) -> Draft:
    """Returns "I was reading when Paul arrived": imparfait, then passé composé."""
    first = clauses.random_clause(rng, tenses=("past progressive",), time_rate=0, state_rate=0)
    second = clauses.random_clause(rng, avoid=_they(first), tenses=("past",), time_rate=0, state_rate=0)
    return _joined(first, "when", ("quand", "lorsque"), second)


def condition(rng: random.Random) -> Draft:
    """Returns "If it rains, we will stay at the hotel": present, then future."""
    if rng.random() < 0.3:
        words, text = rng.choice((("it rains", "il pleut"), ("it snows", "il neige"), ("it is cold", "il fait froid")))
        first = Draft(english=words, render=lambda voice: [text])
    else:
        first = clauses.random_clause(rng, tenses=("present",), time_rate=0)
    second = clauses.random_clause(rng, avoid=_they(first), tenses=("future",), time_rate=0.1, state_rate=0)

    def render(voice: Voice) -> list[str]:
        pairs = [(one, two) for one in spread(first.render(voice)) for two in spread(second.render(voice))]
        return [f"si {one}, {two}" for one, two in pairs] + [f"{two} si {one}" for one, two in pairs]

    return Draft(english=f"if {first.english}, {second.english}", render=render, speakers=_speakers(first, second))


def reported(rng: random.Random) -> Draft:
    """Returns "Claire thinks that the station is far": a verb of saying and a clause."""
    subject = random_subject(rng)
    base, third, infinitives = rng.choice(
        (("think", "thinks", ("penser", "croire")), ("say", "says", ("dire",)), ("know", "knows", ("savoir",)))
    )
    avoid = frozenset({"they"}) if subject.person == 5 else frozenset()
    second = clauses.random_clause(rng, avoid=avoid, time_rate=0.2)
    that = rng.choice((" that", ""))

    def render(voice: Voice) -> list[str]:
        return [
            f"{who.text} {french_verbs.conjugate(infinitive, 'present', who.person)} que {clause}"
            for who in subject.render(voice)
            for infinitive in infinitives
            for clause in spread(second.render(voice))
        ]

    verb = third if subject.person == 2 else base
    words = f"{subject.english} {verb}{that} {second.english}"
    return Draft(english=words, render=render, speakers=subject.speakers | second.speakers)


def before_doing(rng: random.Random) -> Draft:
    """Returns "She closed the door before going to bed"; also "without" and "to" for a purpose."""
    subject = random_subject(rng)
    first = clauses.statement(subject, clauses.random_action(rng, subject.possessive), rng.choice(("past", "near")))
    second = clauses.random_action(rng, subject.possessive)
    word, preposition = rng.choice(
        (("before", "avant de"), ("without", "sans"), ("in order to", "pour"), ("to", "pour"))
    )
    if word in ("before", "without"):
        words = f"{word} {second.verb.ing} {second.negative_tail if word == 'without' else second.tail}"
    else:
        words = f"{word} {second.verb.base} {second.tail}"

    def render(voice: Voice) -> list[str]:
        nominals = subject.render(voice)
        mains = first.render(voice)
        # The main clause lists its renderings subject by subject, in equal numbers.
        share = len(mains) // len(nominals)
        return [
            f"{main} {preposition} {infinitive}"
            for index, who in enumerate(nominals)
            for main in spread(mains[index * share : (index + 1) * share])
            for infinitive in clauses.infinitives(second, voice, who, is_negative=word == "without")
        ]

    return Draft(english=f"{first.english} {words}".rstrip(), render=render, speakers=first.speakers | second.speakers)


def weather(rng: random.Random) -> Draft:
    """Returns "It is raining in Scotland", sometimes with a second clause."""
    words, text = rng.choice(_WEATHER)
    place = rng.choice(settings.PLACES)
    first = Draft(english=f"{words} in {place.english}", render=lambda voice: [f"{text} {place.at}"])
    if rng.random() < 0.3:
        return first
    word, conjunctions = rng.choice(_CONJUNCTIONS)
    second = clauses.random_clause(rng, time_rate=0.1)
    short = Draft(english=words, render=lambda voice: [text])
    return _joined(first if rng.random() < 0.5 else short, word, conjunctions, second)


def who_relative(rng: random.Random) -> Draft:
    """Returns "The woman who lives in Rome is a doctor"."""
    people = noun_phrase(rng, lexicon.nouns("person"), determiners=("the",), adjective_rate=0.2)
    subject = noun_subject(people)
    if rng.random() < 0.35:
        place = rng.choice(settings.PLACES)
        inner_english = f"{'live' if people.is_plural else 'lives'} in {place.english}"
        inner_phrase = None
    else:
        inner_phrase = clauses.random_action(rng, subject.possessive)
    inner_tense = rng.choice(("past", "present", "progressive"))
    outer = clauses.random_state(rng) if rng.random() < 0.6 else clauses.random_action(rng)
    outer_tense = "present" if outer.is_state else rng.choice(("past", "near", "must", "want"))
    if inner_phrase is not None:
        inner_english = clauses.statement(_bare(subject), inner_phrase, inner_tense).english
    outer_english = clauses.statement(_bare(subject), outer, outer_tense).english

    def render(voice: Voice) -> list[str]:
        found = []
        for who in subject.render(voice):
            if inner_phrase is None:
                inners = [
                    f"{french_verbs.conjugate(verb, 'present', who.person)} {place.at}" for verb in clauses.TO_LIVE
                ]
            else:
                inners = _predicates(inner_phrase, inner_tense, voice, who)
            outers = _predicates(outer, outer_tense, voice, who)
            found += [f"{who.text} qui {one} {two}" for one in spread(inners) for two in spread(outers)]
        return found

    return Draft(
        english=f"{subject.english} who {inner_english} {outer_english}",
        render=render,
        speakers=subject.speakers | outer.speakers | (inner_phrase.speakers if inner_phrase else frozenset()),
    )


def that_relative(rng: random.Random) -> Draft:
    """Returns "The letters that Paul wrote are interesting": the participle agrees with what comes before it."""
    rows = [row for row in verb_tables.TRANSITIVE if not (row.particle or row.french[0][1] or "person" in row.tags)]
    row = rng.choice([row for row in rows if not {"mass", "drunk", "eaten"}.issuperset(row.tags)])
    tags = [tag for tag in row.tags if tag not in ("person", "mass", "eaten", "drunk")] or ["thing"]
    nouns = [noun for noun in lexicon.nouns(*tags) if "mass" not in noun.tags and "person" not in noun.tags]
    thing = noun_phrase(rng, nouns, determiners=("the",), adjective_rate=0.1, plural_rate=0.4)
    subject = random_subject(rng)
    adjective = rng.choice(lexicon.adjectives(*thing.noun.tags) or lexicon.adjectives("thing"))
    is_past = rng.random() < 0.5
    verb, tense = row.french[0][0], rng.choice(("past", "past", "want"))
    buying = clauses.statement(subject, _objectless(row), tense)
    be = ("were" if is_past else "are") if thing.is_plural else ("was" if is_past else "is")

    def render(voice: Voice) -> list[str]:
        found = []
        for what in thing.in_french(voice):
            copula = french_verbs.conjugate("être", "imperfect" if is_past else "present", what.person)
            for who in subject.render(voice):
                french_tense = "past" if tense == "past" else "vouloir:present"
                inner = french_verbs.predicate(verb, french_tense, who, participle_agrees_with=what)
                found += [
                    f"{what.text} que {who.text} {inner} {copula} {option.agree(what.gender, is_plural=what.is_plural)}"
                    for option in adjective.french
                ]
        return found

    words = f"{thing.in_english()} that {buying.english} {be} {adjective.english}"
    return Draft(english=words, render=render, speakers=subject.speakers | thing.speakers)


def _objectless(row: verb_tables.Row) -> verb_phrases.VerbPhrase:
    """Returns the verb of a row without an object, for the English of a relative clause."""
    return verb_phrases.VerbPhrase(verb=row.verb, tail="", negative_tail="", render=lambda voice, who, negative: [])


def _bare(subject: BilingualSubject) -> BilingualSubject:
    """Returns an empty subject, for the English of a predicate that follows "who"."""
    return BilingualSubject(
        english="", person=subject.person, possessive="", speakers=frozenset(), render=lambda voice: []
    )


def _predicates(phrase: verb_phrases.VerbPhrase, tense: str, voice: Voice, who: Subject) -> list[str]:
    """Returns the French predicates of a subject that has been said already."""
    return [
        f"{french_verbs.predicate(verb, french_tense, who)} {tail}"
        for verb, tail in phrase.render(voice, who, False)
        for french_tense in clauses.french_tenses(tense, phrase, verb)
    ]


def _joined(first: Draft, word: str, conjunctions: tuple[str, ...], second: Draft) -> Draft:
    """Returns two clauses with a conjunction between them."""

    def render(voice: Voice) -> list[str]:
        return [
            f"{one} {conjunction} {two}"
            for one in spread(first.render(voice))
            for conjunction in conjunctions
            for two in spread(second.render(voice))
        ]

    return Draft(english=f"{first.english} {word} {second.english}", render=render, speakers=_speakers(first, second))


def _they(draft: Draft) -> frozenset[str]:
    """Returns the pronouns a second clause must not use: "they" again would have to be the same people."""
    return frozenset({"they"}) if "they" in draft.english.lower().split() else frozenset()


def _speakers(*drafts: Draft) -> frozenset[str]:
    """Returns the English pronouns of all the drafts."""
    return frozenset().union(*(draft.speakers for draft in drafts))


TEMPLATES: dict[clauses.Template, int] = {
    two_clauses: 12,
    interrupted: 3,
    condition: 4,
    reported: 4,
    before_doing: 4,
    weather: 3,
    who_relative: 4,
    that_relative: 4,
}
