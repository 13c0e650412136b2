"""English morphology: articles, verb forms, auxiliaries, number words, clock times."""

import dataclasses
import re

_SMALL = (
    "zero",
    "one",
    "two",
    "three",
    "four",
    "five",
    "six",
    "seven",
    "eight",
    "nine",
    "ten",
    "eleven",
    "twelve",
    "thirteen",
    "fourteen",
    "fifteen",
    "sixteen",
    "seventeen",
    "eighteen",
    "nineteen",
)
_TENS = ("_", "_", "twenty", "thirty", "forty", "fifty", "sixty", "seventy", "eighty", "ninety")
_DOUBLED = frozenset(("swim", "run", "get", "forget"))
_BE = (("am", "are", "is", "are", "are", "are"), ("was", "were", "was", "were", "were", "were"))
MONTHS = (
    "January",
    "February",
    "March",
    "April",
    "May",
    "June",
    "July",
    "August",
    "September",
    "October",
    "November",
    "December",
)

# How a tense of this module puts its auxiliary and its words: "{base}" and so on name forms of the verb.
_PERIPHRASTIC = {
    "progressive": ("be", "{ing}"),
    "past progressive": ("were", "{ing}"),
    "perfect": ("have", "{participle}"),
    "near": ("be", "going to {base}"),
    "future": ("will", "{base}"),
    "can": ("can", "{base}"),
    "must": ("must", "{base}"),
    "should": ("should", "{base}"),
    "would like": ("would", "like to {base}"),
}
_SHORT = (
    (re.compile(r"\b(do|does|did|is|are|was|were|has|have|had|should) not\b"), r"\1n't"),
    (re.compile(r"\bwill not\b"), "won't"),
    (re.compile(r"\b(I) am\b"), r"\1'm"),
    (re.compile(r"\b(he|she|it) is\b", re.IGNORECASE), r"\1's"),
    (re.compile(r"\b(we|you|they) are\b", re.IGNORECASE), r"\1're"),
)


@dataclasses.dataclass(frozen=True, kw_only=True)
class EnglishVerb:
    """The forms of an English verb that are not regular; "be" conjugates itself."""

    base: str
    past: str
    participle: str

    @property
    def third(self) -> str:
        """Third person singular of the present."""
        if self.base == "have":
            return "has"
        if re.search(r"(s|sh|ch|x|z|o)$", self.base):
            return self.base + "es"
        return re.sub(r"([^aeiou])y$", r"\1ie", self.base) + "s"

    @property
    def ing(self) -> str:
        """Present participle."""
        if self.base in _DOUBLED:
            return self.base + self.base[-1] + "ing"
        if self.base == "travel":
            return "travelling"
        if self.base != "be" and re.search(r"[^e]e$", self.base):
            return self.base[:-1] + "ing"
        return self.base + "ing"


def conjugate(verb: EnglishVerb, tense: str, person: int, *, needs_auxiliary: bool) -> tuple[str, str]:
    """Returns the auxiliary (empty where none is used) and the rest of the verb.

    Args:
      verb: The verb.
      tense: "present", "past", "want", "have to", or one of the tenses built with an auxiliary.
      person: 0 to 5: I, you, he, we, you, they.
      needs_auxiliary: Whether a negation or a question asks for "do".
    """
    if tense in ("want", "have to"):
        helper = EnglishVerb(base=tense.split()[0], past="", participle="")
        auxiliary, rest = conjugate(helper, "present", person, needs_auxiliary=needs_auxiliary)
        return auxiliary, f"{rest} to {verb.base}"
    if tense in ("present", "past"):
        is_past, is_third = tense == "past", person == 2
        if verb.base == "be":
            return _BE[is_past][person], ""
        if needs_auxiliary:
            return ("did" if is_past else "does" if is_third else "do"), verb.base
        return "", (verb.past if is_past else verb.third if is_third else verb.base)
    helper_name, pattern = _PERIPHRASTIC[tense]
    rest = pattern.format(base=verb.base, ing=verb.ing, participle=verb.participle)
    if helper_name in ("be", "were"):
        return _BE[helper_name == "were"][person], rest
    if helper_name == "have":
        return ("has" if person == 2 else "have"), rest
    return helper_name, rest


def contract(text: str) -> str:
    """Returns `text` with the short forms of speech: don't, won't, I'm."""
    for pattern, replacement in _SHORT:
        text = pattern.sub(replacement, text)
    return text


def an(words: str) -> str:
    """Returns `words` with "a" or "an" before them."""
    if words.lower().startswith(("uni", "use", "eu")):
        return f"a {words}"
    return f"an {words}" if words[0].lower() in "aeiou" else f"a {words}"


def number(value: int) -> str:
    """Returns a number from 0 to 999, spelled out."""
    if value < 20:
        return _SMALL[value]
    if value < 100:
        tens, rest = divmod(value, 10)
        return _TENS[tens] + (f"-{_SMALL[rest]}" if rest else "")
    hundreds, rest = divmod(value, 100)
    return f"{_SMALL[hundreds]} hundred" + (f" and {number(rest)}" if rest else "")


def ordinal(day: int) -> str:
    """Returns 1st, 2nd, 3rd, 4th …."""
    suffix = "th" if 11 <= day <= 13 else {1: "st", 2: "nd", 3: "rd"}.get(day % 10, "th")
    return f"{day}{suffix}"


def clock(hour: int, minute: int) -> str:
    """Returns the time as people say it: "half past eight", "a quarter to ten", "noon"."""
    if minute == 45:
        return f"a quarter to {_hour(hour + 1)}"
    if minute == 0:
        return _hour(hour) if hour in (0, 12) else f"{_hour(hour)} o'clock"
    return {15: "a quarter", 30: "half"}.get(minute, f"{number(minute)}") + f" past {_hour(hour)}"


def _hour(hour: int) -> str:
    if hour in (0, 12):
        return "noon" if hour else "midnight"
    return number(hour % 12)
