"""Answers to questions: exact match, and token-F1, the overlap of two answers as bags of words.

Answers are compared under SQuAD's text normalisation, which ignores case, punctuation and articles, except that numbers
keep signs and decimal points.
"""

import collections
import itertools
import re
import string
from collections.abc import Iterator, Sequence

from calm_beam.metrics import Sight, best_over_references

_PUNCTUATION = frozenset(string.punctuation)
_MINUS = "\N{MINUS SIGN}"
_OPERATORS = rf"[-{_MINUS}+*/^=<>!]*[-{_MINUS}+*/^=<>][-{_MINUS}+*/^=<>!]*"
_LETTER = r"[^\W\d]"
# The sides of an operator: numbers, and letters outside words, as in x, 2x, (x), $5, .5 and -3.
_LEFT = rf"(?:\d|(?<!{_LETTER})[a-z\u03b1-\u03c9])[)\]}}%]*"
_RIGHT = rf"[(\[{{]*[-{_MINUS}]?[$€£¥]?(?:\.?\d|[a-z\u03b1-\u03c9](?!{_LETTER}|[\u0300-\u036f]))"

_KEPT = (
    # 3.14, 3,14, 3:14
    re.compile(r"(?<=\d)(?P<kept>[.,:])(?=\d)"),
    # .5
    re.compile(r"(?<![\w.])(?P<kept>\.)(?=\d)"),
    # -5, -$5, -x
    re.compile(rf"(?<![\w.)\]}}%])(?P<kept>[-{_MINUS}])(?={_RIGHT})"),
    # x-y, 3-5, 5 * 3, x<=2
    re.compile(rf"{_LEFT}(?P<kept>{_OPERATORS}| {_OPERATORS} )(?={_RIGHT})"),
    # tax+tip; words do not contain these.
    re.compile(r"(?<=[^\W_])(?P<kept>[+*^=<>]+)(?=[^\W_])"),
)
# 1,000 and 1,00,000, which are 1000 and 100000.
_GROUPED = re.compile(r"(?<![\d.,])\d{1,3}(?:,\d{2,3})*,\d{3}(?![\d,]*\d)")

# In a formula, an article is a variable: a+b, x - a. Every remaining mark belongs to a number or a formula.
_MARK = r"[-+*/^=<>!.,:]"
_ARTICLES = re.compile(rf"(?<!{_MARK})(?<!{_MARK} )\b(?:a|an|the)\b(?!{_MARK}| {_MARK}+ )")


def normalize_squad_text(text: str) -> str:
    """Returns the text in lower case, without most ASCII punctuation and without English articles, single-spaced.

    Punctuation is removed before articles and leaves no space ("a.m." becomes "am"), as in the official script. This
    keeps some characters that the script removes, since they distinguish numbers and formulas:

    * separators between digits: "3.14" does not become "314", nor "3-5" "35"; but "1,000" becomes "1000";
    * a minus, or a point, in front of a number: "-5" and ".5" do not become "5"; "+5" does;
    * operators between numbers and single letters: "x+y" and "x-y" stay different; "well-known" becomes "wellknown".

    The Unicode minus sign is a minus there. Currency and per cent signs are removed, as in the official script.

    Args:
      text: Any text.

    Returns:
      Words separated by single spaces; may be empty.

    Source: Rajpurkar et al. (2016), "SQuAD", the official evaluation script's `normalize_answer`; numbers are our own.

    >>> normalize_squad_text("The  U.S.A., a country"), normalize_squad_text("-$3.50.")
    ('usa country', '-3.50')
    """
    spaced = " ".join(text.lower().split())
    kept = set(_places_kept(spaced)) - set(_places_of_grouping(spaced))
    bare = "".join(
        character.replace(_MINUS, "-") if place in kept else character
        for place, character in enumerate(spaced)
        if place in kept or character not in _PUNCTUATION
    )
    return " ".join(_ARTICLES.sub(" ", bare).split())


def _places_kept(text: str) -> Iterator[int]:
    found = itertools.chain.from_iterable(pattern.finditer(text) for pattern in _KEPT)
    return itertools.chain.from_iterable(range(*match.span("kept")) for match in found)


def _places_of_grouping(text: str) -> Iterator[int]:
    return (place for match in _GROUPED.finditer(text) for place in range(*match.span()) if text[place] == ",")


def _tokens(text: str) -> Iterator[str]:
    return iter(normalize_squad_text(text).split())


# The normalisation drops no letters except those of articles, which is intended.
SQUAD_SIGHT = Sight(tokens=_tokens, read=str.split)
"""Words, without articles and most punctuation."""


def exact_match(candidate: str, references: Sequence[str]) -> float:
    """Returns 1 if the candidate equals any reference under SQuAD's normalisation, else 0.

    Official SQuAD differs only in numbers and formulas, where it drops signs and points, so that -5 equals 5, 3.14
    equals 314 and x+y equals x-y (`normalize_squad_text`), and in texts without any word, which it takes for equal.
    Here those are equal if they are so apart from white space around them.

    Args:
      candidate: The text to score.
      references: At least one text.

    Returns:
      0.0 or 1.0.

    Raises:
      TypeError: If `references` is a single string.
      ValueError: If `references` is empty.

    Source: Rajpurkar et al. (2016), "SQuAD", the official evaluation script's `exact_match_score`.

    >>> exact_match("the Cat!", ["dog", "cat"])
    1.0
    """
    return best_over_references(_is_match, candidate, references=references, sight=SQUAD_SIGHT)


def _is_match(candidate: str, reference: str) -> float:
    return float(normalize_squad_text(candidate) == normalize_squad_text(reference))


def token_f1(candidate: str, references: Sequence[str]) -> float:
    """Returns the F1 of precision and recall over words, best over references, under SQuAD's normalisation.

    It differs from official SQuAD where `exact_match` does: in numbers, in formulas, and in texts without any word.

    Args:
      candidate: The text to score.
      references: At least one text.

    Returns:
      A score in [0, 1]. A text without any word scores 0 against one with words.

    Raises:
      TypeError: If `references` is a single string.
      ValueError: If `references` is empty.

    Source: Rajpurkar et al. (2016), "SQuAD", the official evaluation script's `f1_score`; the metric of CALM for
    question answering.

    >>> token_f1("the black cat", ["dog", "a cat"])
    0.6666666666666666
    """
    return best_over_references(_f1, candidate, references=references, sight=SQUAD_SIGHT)


def _f1(candidate: str, reference: str) -> float:
    ours = normalize_squad_text(candidate).split()
    theirs = normalize_squad_text(reference).split()
    overlap = (collections.Counter(ours) & collections.Counter(theirs)).total()
    # 2 P R / (P + R) with P = overlap / ours and R = overlap / theirs, rounded once.
    return 2 * overlap / (len(ours) + len(theirs))
