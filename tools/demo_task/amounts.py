"""Templates with numbers, dates, times and prices, in digits in one language and often spelled out in the other."""

import random

from tools.demo_task import (
    circumstances,
    clauses,
    english,
    french,
    french_numbers,
    french_verbs,
    lexicon,
    settings,
    verb_phrases,
)
from tools.demo_task.clauses import Draft
from tools.demo_task.french_verbs import FrenchVerb
from tools.demo_task.phrases import NounPhrase, Voice, noun_phrase, random_subject

_SCHEDULED = ("meeting:la réunion", "lesson:la leçon", "film:le film", "concert:le concert", "match:le match")
_QUANTITIES = (
    ("kilo", "kilo", "m"),
    ("bottle", "bouteille", "f"),
    ("litre", "litre", "m"),
    ("box", "boîte", "f"),
    ("glass", "verre", "m"),
    ("cup", "tasse", "f"),
)


def there_is(rng: random.Random) -> Draft:
    """Returns "There are 12 chairs in the kitchen", "There is no milk"."""
    where = circumstances.location(rng)
    nouns = lexicon.nouns("thing", "animal", "person", "fruit", "eaten", "drunk")
    nouns = tuple(noun for noun in nouns if "family" not in noun.tags)
    phrase = noun_phrase(rng, nouns, determiners=("a",), adjective_rate=0.3, plural_rate=0.4)
    if phrase.is_plural and rng.random() < 0.7:
        count = rng.randint(2, 120)
        shown = str(count) if rng.random() < 0.6 else english.number(count)
        phrase = NounPhrase(
            determiner=shown, noun=phrase.noun, adjective=phrase.adjective, is_plural=True, quantity=count
        )
    is_past, is_negative = rng.random() < 0.25, rng.random() < 0.25 and not phrase.quantity
    be = ("were" if is_past else "are") if phrase.is_plural else ("was" if is_past else "is")
    words = phrase.in_english(negative=is_negative)
    if is_negative:
        words = "no " + words.removeprefix("any ").removeprefix("an ").removeprefix("a ")
    there = (
        ("il n'y avait pas" if is_negative else "il y avait")
        if is_past
        else "il n'y a pas"
        if is_negative
        else "il y a"
    )

    def render(voice: Voice) -> list[str]:
        texts = [nominal.text for nominal in phrase.in_french(voice, negative=is_negative)]
        return [f"{there} {text} {place}" for text in texts for place in where.french]

    return Draft(english=f"there {be} {words} {where.english}", render=render, speakers=phrase.speakers)


def born(rng: random.Random) -> Draft:
    """Returns "My sister was born on 3 May 1994 in Lyon"."""
    subject = random_subject(rng)
    when = circumstances.date(rng, with_year=True)
    place = rng.choice(settings.PLACES) if rng.random() < 0.6 else None
    was = "was" if subject.person in (0, 2) else "were"

    def render(voice: Voice) -> list[str]:
        place_text = place.at if place else ""
        born_text = [
            f"{who.text} {french_verbs.predicate(FrenchVerb(infinitive='naître'), 'past', who)}"
            for who in subject.render(voice)
        ]
        return [f"{text} {when.french[0]} {place_text}" for text in born_text] + [
            f"{text} {place_text} {when.french[0]}" for text in born_text
        ]

    words = f"{subject.english} {was} born {when.english}" + (f" in {place.english}" if place else "")
    return Draft(english=words, render=render, speakers=subject.speakers)


def schedule(rng: random.Random) -> Draft:
    """Returns "The meeting starts at a quarter past ten"."""
    name, _, event = rng.choice(_SCHEDULED).partition(":")
    when = circumstances.clock(rng)
    verb, verbs = rng.choice((("starts", ("commence", "débute")), ("ends", ("finit", "se termine"))))
    day = rng.choice((*settings.TIMES["future"], clauses.NO_TIME, circumstances.date(rng, with_year=False)))

    def render(voice: Voice) -> list[str]:
        base = [f"{event} {option} {shown}" for option in verbs for shown in when.french]
        if not day.english:
            return base
        return [f"{text} {day.french[0]}" for text in base] + [f"{day.french[0]}, {text}" for text in base]

    return Draft(english=f"the {name} {verb} {when.english} {day.english}".rstrip(), render=render)


def costs(rng: random.Random) -> Draft:
    """Returns "These red shoes cost 35.50 euros": digits in one language, words in the other."""
    nouns = lexicon.nouns("thing", "clothes", "vehicle")
    phrase = noun_phrase(rng, nouns, determiners=("this", "the", "my", "your"), adjective_rate=0.4, plural_rate=0.4)
    cents = 100 * rng.randint(2, 200) + rng.choice((0, 0, 50, 20, 75, 99, 90))
    currency = rng.choice(("euro", "euro", "dollar"))
    shows_digits = rng.random() < 0.65
    units, rest = divmod(cents, 100)
    digits = f"{units}.{rest:02d} {currency}s" if rest else f"{units} {currency}s"
    words = f"{english.number(units)} {currency}s" + (f" {english.number(rest)}" if rest else "")
    cost = rng.choice(("cost", "cost" if phrase.is_plural else "costs"))
    is_past = cost == "cost" and not phrase.is_plural
    amount = french_numbers.price(cents, currency=currency, in_words=shows_digits)

    def render(voice: Voice) -> list[str]:
        found = []
        for what in phrase.in_french(voice):
            present = french_verbs.conjugate("coûter", "present", what.person)
            imperfect = french_verbs.conjugate("coûter", "imperfect", what.person)
            past = french_verbs.predicate(FrenchVerb(infinitive="coûter"), "past", what)
            verbs = (imperfect, past) if is_past else (present, imperfect) if what.is_plural else (present,)
            found += [f"{what.text} {verb} {amount}" for verb in verbs]
        return found

    text = f"{phrase.in_english()} {cost} {digits if shows_digits else words}"
    return Draft(english=text, render=render, speakers=phrase.speakers)


def quantity(rng: random.Random) -> Draft:
    """Returns "I would like two kilos of apples": no article after de."""
    subject = random_subject(rng)
    unit, french_unit, gender = rng.choice(_QUANTITIES)
    tags = {"kilo": ("fruit", "eaten"), "box": ("fruit", "eaten"), "bottle": ("drunk",)}.get(unit, ("drunk",))
    noun = rng.choice(lexicon.nouns(*tags))
    count = rng.randint(2, 20)
    shows_digits = rng.random() < 0.5
    is_mass = "mass" in noun.tags
    word = noun.french[0]
    plural_unit = unit + ("es" if unit in ("box", "glass") else "s")
    measured = f"{count if shows_digits else english.number(count)} {plural_unit} of "
    measured += noun.english if is_mass else noun.english_plural
    shown = french_numbers.number(count, gender=gender) if shows_digits else str(count)
    text = f"{shown} {french.plural(french_unit)} de {word.singular if is_mass else word.plural}"
    tense, verbs = rng.choice((("want", "vouloir"), ("would", "vouloir"), ("past", "acheter"), ("near", "acheter")))
    is_or_are, _ = english.conjugate(verb_phrases.BE, "present", subject.person, needs_auxiliary=True)
    start = {
        "want": "wants" if subject.person == 2 else "want",
        "would": "would like",
        "past": "bought",
        "near": f"{is_or_are} going to buy",
    }[tense]
    french_tense = {"want": "present", "would": "conditional", "past": "past", "near": "near"}[tense]

    def render(voice: Voice) -> list[str]:
        return [
            f"{who.text} {french_verbs.predicate(FrenchVerb(infinitive=verbs), french_tense, who)} {text}"
            for who in subject.render(voice)
        ]

    return Draft(english=f"{subject.english} {start} {measured}", render=render, speakers=subject.speakers)


def duration(rng: random.Random) -> Draft:
    """Returns "has lived in Rome for 3 years" (depuis, present) or "lived … for" (pendant, passé composé)."""
    subject = random_subject(rng)
    count, (unit, (word, gender)) = rng.randint(2, 60), rng.choice(list(circumstances.UNITS.items()))
    shows_digits = rng.random() < 0.6
    shown = str(count) if shows_digits else english.number(count)
    french_shown = french_numbers.number(count, gender=gender) if shows_digits else str(count)
    place = rng.choice(settings.PLACES)
    base, participle, verbs = rng.choice(
        (("live", "lived", clauses.TO_LIVE), ("work", "worked", ("travailler",)), ("study", "studied", ("étudier",)))
    )
    lasts = rng.random() < 0.6
    have = "has" if subject.person == 2 else "have"
    ing = english.EnglishVerb(base=base, past=participle, participle=participle).ing
    english_verb = rng.choice((f"{have} {participle}", f"{have} been {ing}")) if lasts else participle
    preposition, tense = ("depuis", "present") if lasts else ("pendant", "past")

    def render(voice: Voice) -> list[str]:
        return [
            f"{who.text} {french_verbs.predicate(FrenchVerb(infinitive=verb), tense, who)} {place.at} "
            f"{preposition} {french_shown} {word}"
            for who in subject.render(voice)
            for verb in verbs
        ]

    words = f"{subject.english} {english_verb} in {place.english} for {shown} {unit}"
    return Draft(english=words, render=render, speakers=subject.speakers)


TEMPLATES: dict[clauses.Template, int] = {
    there_is: 5,
    born: 3,
    schedule: 2,
    costs: 4,
    quantity: 3,
    duration: 4,
}
