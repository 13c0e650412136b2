"""Texts that others wrote, as a page shows them: nothing in them hides, turns words around or tells where it was made.

A page stands for itself and is passed on. Ids, prompts, names and messages come from data, models and machines: what
cannot be seen in them is written out, and of local paths the last names are kept.
"""

import re
import unicodedata

from calm_beam.storage import is_cloud_path

# Embeddings, overrides and isolates reach beyond the words they stand in; marks for one place do not.
_TURNING = frozenset("\u202a\u202b\u202c\u202d\u202e\u2066\u2067\u2068\u2069")
_UNSEEN = frozenset(("Cc", "Cs", "Zl", "Zp"))
_FIRST_STRONG_ISOLATE, _POP_ISOLATE = "\u2068", "\u2069"

_NAMES_KEPT = 2
# A path from the root with at least one folder, which no word, scheme or other path precedes.
_LOCAL_PATH = re.compile(r"(?<![\w:/.~\\])(?:file://)?/(?:[^\s/'\"`,;:<>|()\[\]{}]+/)+[^\s/'\"`,;:<>|()\[\]{}]*")


def visible_text(text: str) -> str:
    r"""Returns a text of several lines in which no character is unseen, or turns around what follows it.

    Marks and joiners that a script is written with stay.

    >>> visible_text("one\r\ntwo \u202ethree\x07")
    'one\ntwo \\u202ethree\\x07'
    """
    lines = text.replace("\r\n", "\n")
    return "".join(character if character in "\n\t" else _written_out(character) for character in lines)


def visible_name(text: str) -> str:
    r"""Returns a name, which is one line and has no unseen character at all.

    >>> visible_name("row\n1\u200f")
    'row\\n1\\u200f'
    """
    return "".join(
        _escaped(character) if unicodedata.category(character) == "Cf" else _written_out(character)
        for character in text
    )


def isolated(text: str) -> str:
    """Returns a name for where there are no elements, such as a title: its direction ends with it.

    >>> isolated("plain")
    'plain'
    """
    name = visible_name(text)
    return name if name.isascii() else f"{_FIRST_STRONG_ISOLATE}{name}{_POP_ISOLATE}"


def short_place(place: str) -> str:
    """Returns where something lies: of a local path from the root the last names, anything else as it is.

    >>> short_place("/home/ada/models/t5/checkpoint_1000"), short_place("gs://bucket/models/t5")
    ('…/t5/checkpoint_1000', 'gs://bucket/models/t5')
    """
    local = place.removeprefix("file://")
    if is_cloud_path(place) or not local.startswith("/"):
        return place
    names = [name for name in local.split("/") if name]
    # Never all of them: the first may be somebody's.
    kept = min(_NAMES_KEPT, max(1, len(names) - 1))
    return "/".join(["…", *names[-kept:]])


def with_short_places(text: str) -> str:
    """Returns a message in which every local path from the root is short.

    >>> with_short_places("checkpoint /home/ada/models/t5: no such folder; see gs://bucket/a/b/c.")
    'checkpoint …/models/t5: no such folder; see gs://bucket/a/b/c.'
    """
    return _LOCAL_PATH.sub(lambda found: short_place(found[0]), text)


def _written_out(character: str) -> str:
    is_seen = character not in _TURNING and unicodedata.category(character) not in _UNSEEN
    return character if is_seen else _escaped(character)


def _escaped(character: str) -> str:
    return character.encode("unicode_escape").decode("ascii")
