"""Bilingual verb phrases: a verb with its objects, before a subject and a tense are chosen."""

import dataclasses
import random
from collections.abc import Callable

from tools.demo_task import circumstances, english, french, french_numbers, lexicon, settings, verb_tables
from tools.demo_task.english import EnglishVerb
from tools.demo_task.french_verbs import FrenchVerb, Subject
from tools.demo_task.phrases import NounPhrase, Voice, noun_phrase

# A verb phrase in French for a voice, a subject and a polarity: verbs, each with the words that follow it.
Render = Callable[[Voice, Subject, bool], list[tuple[FrenchVerb, str]]]


@dataclasses.dataclass(frozen=True, kw_only=True)
class VerbPhrase:
    """A verb with its complements.

    Attributes:
      verb: The English verb.
      tail: English words after it.
      negative_tail: The same after a negation ("any" for "some").
      render: Its French renderings.
      speakers: English pronouns whose French depends on the voice.
      is_state: Whether it describes a state: no progressive, past in the imparfait.
      is_reflexive: Whether its French is reflexive.
      has_place: Whether it already says where.
    """

    verb: EnglishVerb
    tail: str
    negative_tail: str
    render: Render
    speakers: frozenset[str] = frozenset()
    is_state: bool = False
    is_reflexive: bool = False
    has_place: bool = False


_FEELINGS = (
    "hungry:faim",
    "thirsty:soif",
    "cold:froid",
    "hot:chaud",
    "right:raison",
    "wrong:tort",
    "sleepy:sommeil",
    "afraid:peur",
)
_PAINS = {
    "a headache": "à la tête",
    "a sore throat": "à la gorge",
    "a stomach ache": "à le ventre",
    "backache": "à le dos",
    "toothache": "aux dents",
}
_GAMES = """
football: à le football, à le foot
tennis: à le tennis
chess: à les échecs
cards: à les cartes
rugby: à le rugby
the piano: de le piano
the guitar: de la guitare
the violin: de le violon
the flute: de la flûte
the drums: de la batterie
"""
_LANGUAGES = (
    "French:français",
    "English:anglais",
    "German:allemand",
    "Italian:italien",
    "Spanish:espagnol",
    "Japanese:japonais",
)
BE = EnglishVerb(base="be", past="", participle="been")
HAVE = EnglishVerb(base="have", past="had", participle="had")


def transitive(rng: random.Random, owner: str) -> VerbPhrase:
    """Returns an action on an object: "buys a red car". `owner` is the possessive that refers to the subject."""
    return with_object(rng, rng.choice(verb_tables.TRANSITIVE), owner)


def stative(rng: random.Random, owner: str) -> VerbPhrase:
    """Returns a state with an object: "knows this song"."""
    return dataclasses.replace(with_object(rng, rng.choice(verb_tables.STATIVE), owner), is_state=True)


def with_object(rng: random.Random, row: verb_tables.Row, owner: str) -> VerbPhrase:
    """Returns the verb of a table row with a random object that suits it."""
    phrase = random_object(rng, row, owner)

    def render(voice: Voice, subject: Subject, negative: bool) -> list[tuple[FrenchVerb, str]]:
        found = []
        for verb, preposition in row.french:
            # Only a direct object turns its article into "de".
            is_direct = not preposition
            for nominal in phrase.in_french(voice, negative=negative and is_direct):
                found.append((verb, f"{preposition} {nominal.text}"))
        return found

    return VerbPhrase(
        verb=row.verb,
        tail=f"{row.particle} {phrase.in_english()}",
        negative_tail=f"{row.particle} {phrase.in_english(negative=True)}",
        render=render,
        speakers=phrase.speakers,
    )


def random_object(rng: random.Random, row: verb_tables.Row, owner: str) -> NounPhrase:
    """Returns a random noun phrase that the verb of a table row can have as its object."""
    determiners = ("the", "a", "this", "a") + ((owner, owner) if owner else ("the",))
    if "wear" in row.verb.base or row.verb.base in ("lose", "forget"):
        determiners = (owner or "the", "a")
    noun = rng.choice(lexicon.nouns(*row.tags))
    if noun.tags & {"mass"}:
        determiners = ("a", "a", "the")
    return noun_phrase(rng, (noun,), determiners=determiners)


def giving(rng: random.Random, owner: str) -> VerbPhrase:
    """Returns "gives a book to her brother"."""
    row = rng.choice(verb_tables.GIVING)
    gift = random_object(rng, row, owner)
    people = lexicon.nouns("person")
    receiver = noun_phrase(rng, people, determiners=("the", owner or "a"), adjective_rate=0.2)

    def render(voice: Voice, subject: Subject, negative: bool) -> list[tuple[FrenchVerb, str]]:
        return [
            (row.french[0][0], f"{thing.text} à {person.text}")
            for thing in gift.in_french(voice, negative=negative)
            for person in receiver.in_french(voice)
        ]

    return VerbPhrase(
        verb=row.verb,
        tail=f"{gift.in_english()} to {receiver.in_english()}",
        negative_tail=f"{gift.in_english(negative=True)} to {receiver.in_english()}",
        render=render,
        speakers=gift.speakers | receiver.speakers,
    )


def intransitive(rng: random.Random, owner: str) -> VerbPhrase:
    """Returns an action without object, most often with a place: "works in Japan"."""
    row = rng.choice(verb_tables.INTRANSITIVE)
    where = circumstances.location(rng) if rng.random() < 0.75 else settings.TimeExpression(english="", french=("",))
    return _fixed(
        row.verb,
        where.english,
        [(verb, f"{extra} {words}") for verb, extra in row.french for words in where.french],
        is_reflexive=row.is_reflexive,
        has_place=bool(where.english),
    )


def motion(rng: random.Random, owner: str) -> VerbPhrase:
    """Returns a movement to a place: "goes to the United States", "goes to Marie's house"."""
    row = rng.choice(verb_tables.MOTION)
    draw = rng.random()
    preposition = row.particle
    if draw < 0.15:
        friend = rng.choice(lexicon.MEN + lexicon.WOMEN)
        words, place = f"{preposition} {friend}'s house", f"chez {friend}"
    elif draw < 0.55:
        site = noun_phrase(rng, lexicon.nouns("place"), determiners=("the",), adjective_rate=0, plural_rate=0)
        words, place = f"{preposition} {site.in_english()}", f"à {site.in_french(Voice())[0].text}"
    else:
        named = rng.choice(settings.PLACES)
        # One goes "to" a city but arrives and stays "in" it.
        preposition = "in" if preposition == "at" else preposition
        words, place = f"{preposition} {named.english}", named.at
    return _fixed(row.verb, words, [(verb, place) for verb, _ in row.french], has_place=True)


def routine(rng: random.Random, owner: str) -> VerbPhrase:
    """Returns a reflexive action, with the time of day more often than not: "gets up at half past seven"."""
    row = rng.choice(verb_tables.REFLEXIVE)
    when = circumstances.clock(rng) if rng.random() < 0.6 else settings.TimeExpression(english="", french=("",))
    options = [(verb, words) for verb, _ in row.french for words in when.french]
    return _fixed(row.verb, f"{row.particle} {when.english}", options, is_reflexive=True)


def playing(rng: random.Random, owner: str) -> VerbPhrase:
    """Returns "plays the piano" or "plays chess", which take different prepositions in French."""
    name, _, words = rng.choice(_GAMES.strip().splitlines()).partition(": ")
    verb = EnglishVerb(base="play", past="played", participle="played")
    return _fixed(verb, name, [(FrenchVerb(infinitive="jouer"), option) for option in words.split(", ")])


def speaking(rng: random.Random, owner: str) -> VerbPhrase:
    """Returns "learns Japanese", "speaks German"."""
    name, _, language = rng.choice(_LANGUAGES).partition(":")
    past = {"learn": "learned", "speak": "spoke", "teach": "taught"}
    base, infinitive = rng.choice((("learn", "apprendre"), ("speak", "parler"), ("teach", "enseigner")))
    verb = EnglishVerb(base=base, past=past[base], participle="spoken" if base == "speak" else past[base])
    words = [language, f"le {language}"] if base == "speak" else [f"le {language}"]
    return _fixed(verb, name, [(FrenchVerb(infinitive=infinitive), option) for option in words])


def spending(rng: random.Random, owner: str) -> VerbPhrase:
    """Returns "spends 20 euros" or "spends three days in Rome": one English verb, two French ones."""
    verb = EnglishVerb(base="spend", past="spent", participle="spent")
    amount = rng.randint(2, 99)
    if rng.random() < 0.5:
        words = f"{amount} euros" if rng.random() < 0.6 else f"{english.number(amount)} euros"
        in_words = words[0].isdigit()
        shown = french_numbers.price(100 * amount, currency="euro", in_words=in_words)
        return _fixed(verb, words, [(FrenchVerb(infinitive="dépenser"), shown)])
    place, unit = rng.choice(settings.PLACES), rng.choice(("day:jour m", "week:semaine f", "month:mois m"))
    name, _, word = unit.partition(":")
    noun, gender = word.split()
    spent = f"{french_numbers.number(amount, gender=gender)} {french.plural(noun)} {place.at}"
    return _fixed(
        verb, f"{amount} {name}s in {place.english}", [(FrenchVerb(infinitive="passer"), spent)], has_place=True
    )


def being(rng: random.Random, owner: str) -> VerbPhrase:
    """Returns a copula with an adjective: "is tired", "is very polite"."""
    adjective = rng.choice(lexicon.adjectives("person", predicate=True))
    # Nobody is "very French" or "very alone" in a plain statement.
    is_very = rng.random() < 0.25 and "nation" not in adjective.tags and adjective.comparative != ""

    def render(voice: Voice, subject: Subject, negative: bool) -> list[tuple[FrenchVerb, str]]:
        adverb = "très " if is_very else ""
        return [
            (FrenchVerb(infinitive="être"), adverb + option.agree(subject.gender, is_plural=subject.is_plural))
            for option in adjective.french
        ]

    tail = f"{'very ' if is_very else ''}{adjective.english}"
    return VerbPhrase(verb=BE, tail=tail, negative_tail=tail, render=render, is_state=True)


def professing(rng: random.Random, owner: str) -> VerbPhrase:
    """Returns "is a doctor", where French uses no article and picks the word by the subject's gender."""
    noun = rng.choice(lexicon.nouns("job"))

    def render(voice: Voice, subject: Subject, negative: bool) -> list[tuple[FrenchVerb, str]]:
        # English says whether "you are a doctor" is one person, so a plural vous would be wrong.
        is_plural = subject.is_plural and subject.person != 4
        matching = [word for word in noun.french if word.gender == subject.gender] or noun.french
        return [(FrenchVerb(infinitive="être"), word.plural if is_plural else word.singular) for word in matching]

    # The number of the English noun follows its subject, which only the caller knows: "{job}" marks the place.
    tail = "{job:" + noun.english + "}"
    return VerbPhrase(verb=BE, tail=tail, negative_tail=tail, render=render, is_state=True)


def feeling(rng: random.Random, owner: str) -> VerbPhrase:
    """Returns a state that French expresses with avoir: "is hungry", "has a headache", "is 21 years old"."""
    draw, avoir = rng.random(), FrenchVerb(infinitive="avoir")
    if draw < 0.4:
        tail, _, words = rng.choice(_FEELINGS).partition(":")
        return _fixed(BE, tail, [(avoir, words)], is_state=True)
    if draw < 0.6:
        tail, words = rng.choice(list(_PAINS.items()))
        return _fixed(HAVE, tail, [(avoir, f"mal {words}")], is_state=True)
    years = rng.randint(2, 99)
    if rng.random() < 0.6:
        return _fixed(BE, f"{years} years old", [(avoir, f"{french_numbers.number(years)} ans")], is_state=True)
    return _fixed(BE, f"{english.number(years)} years old", [(avoir, f"{years} ans")], is_state=True)


def needing(rng: random.Random, owner: str) -> VerbPhrase:
    """Returns "needs a coat": avoir besoin de, which swallows des and du."""
    nouns = lexicon.nouns("thing", "clothes", "portable", "eaten", "drunk")
    phrase = noun_phrase(rng, nouns, determiners=("a", "a", "the", "this"))

    def render(voice: Voice, subject: Subject, negative: bool) -> list[tuple[FrenchVerb, str]]:
        return [
            (FrenchVerb(infinitive="avoir"), f"besoin de {nominal.text}")
            for nominal in phrase.in_french(voice, after_de=True)
        ]

    verb = EnglishVerb(base="need", past="needed", participle="needed")
    negative_tail = phrase.in_english(negative=True)
    return VerbPhrase(verb=verb, tail=phrase.in_english(), negative_tail=negative_tail, render=render, is_state=True)


def liking(rng: random.Random, owner: str) -> VerbPhrase:
    """Returns a taste for something in general, where French needs the article: "likes cheese", "hates dogs"."""
    noun = rng.choice(lexicon.nouns("eaten", "drunk", "fruit", "animal", "treat"))
    base, past, infinitives = rng.choice(
        (
            ("like", "liked", ("aimer",)),
            ("love", "loved", ("adorer", "aimer")),
            ("hate", "hated", ("détester",)),
            ("prefer", "preferred", ("préférer",)),
        )
    )
    is_mass = "mass" in noun.tags
    words = noun.french[0]
    article = french.definite(words.gender, is_plural=not is_mass)
    liked = f"{article} {words.singular if is_mass else words.plural}"
    options = [verb_tables.french_verb(infinitive) for infinitive in infinitives]
    verb = EnglishVerb(base=base, past=past, participle=past)
    tail = noun.english if is_mass else noun.english_plural
    return _fixed(verb, tail, [(found, f"{extra} {liked}") for found, extra in options], is_state=True)


def _fixed(
    verb: EnglishVerb,
    tail: str,
    options: list[tuple[FrenchVerb, str]],
    *,
    is_state: bool = False,
    is_reflexive: bool = False,
    has_place: bool = False,
) -> VerbPhrase:
    """Returns a verb phrase whose French depends on neither voice, subject nor polarity."""
    return VerbPhrase(
        verb=verb,
        tail=tail,
        negative_tail=tail,
        render=lambda voice, subject, negative: options,
        is_state=is_state,
        is_reflexive=is_reflexive,
        has_place=has_place,
    )


# Kinds of action and of state with the weight of each.
ACTIONS = {transitive: 10, giving: 3, intransitive: 4, motion: 4, routine: 2, playing: 1, speaking: 1, spending: 1}
STATES = {stative: 3, being: 4, professing: 2, feeling: 3, needing: 2, liking: 3}
