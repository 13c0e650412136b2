"""Texts that others wrote, as a page shows them: they turn around nothing, and do not tell where it was made.

A page stands for itself and is passed on. Ids, prompts, names and messages come from data, models and machines. What
has no shape in them is written out (`calm_beam.text.printable`), and of local paths the last names are kept.
"""

import re

from calm_beam.storage import is_cloud_path
from calm_beam.text.printable import printable_line

_FIRST_STRONG_ISOLATE, _POP_ISOLATE = "\u2068", "\u2069"

_NAMES_KEPT = 2
# A path from the root with at least one folder, which no word, scheme or other path precedes.
_LOCAL_PATH = re.compile(r"(?<![\w:/.~\\])(?:file://)?/(?:[^\s/'\"`,;:<>|()\[\]{}]+/)+[^\s/'\"`,;:<>|()\[\]{}]*")


def isolated(text: str) -> str:
    """Returns a name for where there are no elements, such as a title: its direction ends with it.

    >>> isolated("plain")
    'plain'
    """
    name = printable_line(text)
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
