"""Random circumstances of an event: where it happens, when, and for how long."""

import random

from tools.demo_task import english, french_numbers, lexicon, settings
from tools.demo_task.phrases import NounPhrase, Voice
from tools.demo_task.settings import TimeExpression

UNITS = {
    "days": ("jours", "m"),
    "weeks": ("semaines", "f"),
    "months": ("mois", "m"),
    "years": ("ans", "m"),
    "hours": ("heures", "f"),
}


def location(rng: random.Random) -> TimeExpression:
    """Returns where something happens: "at the museum", "in the garden", "in Japan", "near the bank"."""
    draw = rng.random()
    if draw < 0.45:
        place = rng.choice(settings.PLACES)
        return TimeExpression(english=f"in {place.english}", french=(place.at,))
    if draw < 0.65:
        noun = rng.choice(lexicon.nouns("room"))
        words, preposition, shown = noun, "in", ("dans",)
    elif draw < 0.85:
        words, preposition, shown = rng.choice(lexicon.nouns("place")), "at", ("à",)
    else:
        words = rng.choice(lexicon.nouns("place", "sight"))
        preposition, shown = rng.choice(
            (
                ("near", ("près de",)),
                ("in front of", ("devant",)),
                ("behind", ("derrière",)),
                ("next to", ("à côté de",)),
                ("opposite", ("en face de",)),
            )
        )
    site = NounPhrase(determiner="the", noun=words)
    text = site.in_french(Voice())[0].text
    return TimeExpression(
        english=f"{preposition} {site.in_english()}", french=tuple(f"{option} {text}" for option in shown)
    )


def clock(rng: random.Random) -> TimeExpression:
    """Returns a time of day: words for digits or words for words."""
    hour, minute = rng.randint(6, 22), rng.choice((0, 0, 30, 30, 15, 45, 10, 20, 5, 25))
    said = french_numbers.clock(hour, minute)
    digits = f"{hour} h" + (f" {minute:02d}" if minute else "")
    if rng.random() < 0.4:
        return TimeExpression(english=f"at {hour}:{minute:02d}", french=(f"à {digits}", f"à {said}"))
    return TimeExpression(english=f"at {english.clock(hour, minute)}", french=(f"à {said}",))


def random_time(rng: random.Random, kind: str) -> TimeExpression:
    """Returns a time expression of a kind of `tools.demo_task.settings.TIMES`, with dates and counts mixed in."""
    if kind in ("past", "future") and rng.random() < 0.35:
        return (_ago if kind == "past" else _from_now)(rng)
    if kind == "past" and rng.random() < 0.4:
        return date(rng, with_year=True)
    return rng.choice(settings.TIMES[kind])


def date(rng: random.Random, *, with_year: bool) -> TimeExpression:
    """Returns a date in one of the ways English writes it."""
    day, month = rng.randint(1, 28), rng.randint(1, 12)
    year = rng.randint(1950, 2024) if with_year and rng.random() < 0.6 else None
    tail = f" {year}" if year else ""
    name = english.MONTHS[month - 1]
    style = rng.random()
    if style < 0.4:
        words = f"on {day} {name}{tail}"
    elif style < 0.7:
        words = f"on the {english.ordinal(day)} of {name}{tail}"
    else:
        words = f"on {name} {english.ordinal(day)}" + (f", {year}" if year else "")
    digits = french_numbers.date(day, month, year=year)
    return TimeExpression(english=words, french=(digits,))


def _ago(rng: random.Random) -> TimeExpression:
    count, unit, words = _duration(rng)
    return TimeExpression(english=f"{count} {unit} ago", french=(f"il y a {words}",))


def _from_now(rng: random.Random) -> TimeExpression:
    count, unit, words = _duration(rng)
    return TimeExpression(english=f"in {count} {unit}", french=(f"dans {words}",))


def _duration(rng: random.Random) -> tuple[str, str, str]:
    """Returns a number in one notation, an English unit, and the French duration in the other notation."""
    count = rng.randint(2, 30)
    unit, (word, gender) = rng.choice(list(UNITS.items()))
    if rng.random() < 0.5:
        return str(count), unit, f"{french_numbers.number(count, gender=gender)} {word}"
    return english.number(count), unit, f"{count} {word}"
