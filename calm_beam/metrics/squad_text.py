"""The text normalisation of the SQuAD evaluation, under which its two metrics compare answers."""

import re
import string

_ARTICLES = re.compile(r"\b(?:a|an|the)\b")
_DROP_PUNCTUATION = str.maketrans("", "", string.punctuation)


def normalize_squad_text(text: str) -> str:
    """Returns the text in lower case, without ASCII punctuation and English articles, single-spaced.

    Punctuation goes before articles and leaves no space behind ("a.m." becomes "am"), as in the official script.

    Args:
      text: Any text.

    Returns:
      Words separated by single spaces; may be empty.

    Source: Rajpurkar et al. (2016), "SQuAD", the official evaluation script's `normalize_answer`.

    >>> normalize_squad_text("The  U.S.A., a country")
    'usa country'
    """
    bare = text.lower().translate(_DROP_PUNCTUATION)
    return " ".join(_ARTICLES.sub(" ", bare).split())
