"""French spelling and agreement: elision, contractions, plurals, determiners, adjectives.

Phrases are assembled from whole words ("je", "ai", "de", "le", "hôtel") and `spell` joins them the way French
writes them, so that no other module has to think about vowels.
"""

import dataclasses
import re
from typing import Self

# Words that begin with a vowel letter or h but forbid elision and liaison; compared by their beginning.
_ASPIRATED = ("haut", "héros", "huit", "haricot", "hibou", "hongr", "hollande", "onz", "oui", "hamster", "homard")
_VOWEL_SOUND = rf"(?!(?:{'|'.join(_ASPIRATED)}))(?:[aeiouhàâäéèêëîïôöùûüœæ]|y(?:eux|ves)?\b)"
_STARTS_WITH_VOWEL = re.compile(_VOWEL_SOUND, re.IGNORECASE)
_WORD_START = r"(?<![\w'-])"
_ARTICLE = re.compile(rf"{_WORD_START}(l)[ea] (?={_VOWEL_SOUND})", re.IGNORECASE)
_ELIDED = re.compile(rf"{_WORD_START}(j|m|t|s|n|d|qu|lorsqu|puisqu|jusqu)e (?={_VOWEL_SOUND})", re.IGNORECASE)
_CE_EST = re.compile(rf"{_WORD_START}(c)e (?=e(?:st|tait)\b|était\b)", re.IGNORECASE)
_SI_IL = re.compile(rf"{_WORD_START}(s)i (?=ils?\b)", re.IGNORECASE)
_CONTRACTED = re.compile(rf"{_WORD_START}(de|à) (les?)\b(?!')", re.IGNORECASE)
_CONTRACTIONS = {"de le": "du", "de les": "des", "à le": "au", "à les": "aux"}
_POSSESSIVES = (
    ("mon", "ma", "mes"),
    ("ton", "ta", "tes"),
    ("son", "sa", "ses"),
    ("notre", "notre", "nos"),
    ("votre", "votre", "vos"),
    ("leur", "leur", "leurs"),
)


@dataclasses.dataclass(frozen=True, kw_only=True)
class FrenchAdjective:
    """A French adjective.

    Attributes:
      masculine: Masculine singular.
      feminine: Feminine singular.
      before_vowel: Masculine singular before a vowel sound (`vieil`), most often the same as `masculine`.
      precedes: Whether it stands before its noun.
      invariable: Whether it never changes (`bon marché`, `marron`).
    """

    masculine: str
    feminine: str
    before_vowel: str
    precedes: bool
    invariable: bool

    @classmethod
    def parse(cls, text: str) -> Self:
        """Returns the adjective written as in the tables of `tools.demo_task.lexicon`, e.g. `<beau/belle/bel`."""
        precedes, invariable = text.startswith("<"), text.startswith("=")
        forms = text.lstrip("<=").split("/")
        regular = forms[0] if invariable else feminine(forms[0])
        return cls(
            masculine=forms[0],
            feminine=forms[1] if len(forms) > 1 else regular,
            before_vowel=forms[2] if len(forms) > 2 else forms[0],
            precedes=precedes,
            invariable=invariable,
        )

    def agree(self, gender: str, *, is_plural: bool, before: str = "") -> str:
        """Returns the form for a gender (`m` or `f`), a number, and the word it stands before, if any."""
        if self.invariable:
            return self.masculine
        if gender == "f":
            return plural(self.feminine) if is_plural else self.feminine
        if is_plural:
            return plural(self.masculine)
        return self.before_vowel if before and starts_with_vowel_sound(before) else self.masculine


def starts_with_vowel_sound(word: str) -> bool:
    """Returns whether `word` causes elision: true for "hôtel", false for "hibou" and "onze"."""
    return _STARTS_WITH_VOWEL.match(word) is not None


def spell(text: str) -> str:
    """Returns `text` with the elisions and contractions that French requires.

    Every "le" and "les" after "de" or "à" is taken for an article, so a pronoun there ("de le voir") must not be
    passed in.

    >>> spell("je ai parlé à le directeur de le hôtel parce que il ne a pas de eau")
    "j'ai parlé au directeur de l'hôtel parce qu'il n'a pas d'eau"
    """
    text = _ARTICLE.sub(r"\1'", " ".join(text.split()))
    text = _CONTRACTED.sub(_contraction, text)
    for pattern in (_ELIDED, _CE_EST, _SI_IL):
        text = pattern.sub(r"\1'", text)
    return text.replace(" ,", ",")


def punctuate(text: str, mark: str) -> str:
    """Returns the spelt sentence with a capital and its final mark, after a space where French wants one."""
    text = spell(text)
    space = " " if mark in "?!" else ""
    return f"{text[0].upper()}{text[1:]}{space}{mark}"


def plural(word: str) -> str:
    """Returns the regular plural of a noun or of an adjective of either gender."""
    if word.endswith(("s", "x", "z")):
        return word
    if word.endswith("eau"):
        return word + "x"
    if word.endswith("al"):
        return word[:-2] + "aux"
    return word + "s"


def feminine(adjective: str) -> str:
    """Returns the regular feminine of a masculine singular adjective or participle."""
    for ending, replacement in (("eux", "euse"), ("er", "ère"), ("en", "enne"), ("if", "ive"), ("e", "e")):
        if adjective.endswith(ending):
            return adjective.removesuffix(ending) + replacement
    return adjective + "e"


def agree_participle(participle: str, gender: str, *, is_plural: bool) -> str:
    """Returns a past participle in the given gender and number."""
    # "né" ends like "content", not like "triste": the feminine is always one letter longer.
    agreed = participle + "e" if gender == "f" else participle
    return plural(agreed) if is_plural else agreed


def definite(gender: str, *, is_plural: bool) -> str:
    """Returns le, la or les; `spell` elides it."""
    return "les" if is_plural else {"m": "le", "f": "la"}[gender]


def indefinite(gender: str, *, is_plural: bool, before_adjective: bool = False) -> str:
    """Returns un, une or des; "de" for a plural whose adjective comes first ("de vieilles maisons")."""
    if is_plural:
        return "de" if before_adjective else "des"
    return {"m": "un", "f": "une"}[gender]


def partitive(gender: str) -> str:
    """Returns the partitive article, still to be spelt: "de le" for du, "de la"."""
    return f"de {definite(gender, is_plural=False)}"


def possessive(person: int, gender: str, *, is_plural: bool, before: str) -> str:
    """Returns the possessive of grammatical person 0 to 5 (je … ils) for what comes next ("mon amie")."""
    masculine, feminine_form, plural_form = _POSSESSIVES[person]
    if is_plural:
        return plural_form
    return masculine if gender == "m" or starts_with_vowel_sound(before) else feminine_form


def demonstrative(gender: str, *, is_plural: bool, before: str) -> str:
    """Returns ce, cet, cette or ces."""
    if is_plural:
        return "ces"
    if gender == "f":
        return "cette"
    return "cet" if starts_with_vowel_sound(before) else "ce"


def _contraction(match: re.Match[str]) -> str:
    contracted = _CONTRACTIONS[match[0].lower()]
    return contracted.capitalize() if match[0][0].isupper() else contracted
