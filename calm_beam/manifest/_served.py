"""Which of several entries is served, as the plan settled it, in words."""

from ._checks import shown
from ._manifest import Manifest


def served_in_words(manifest: Manifest) -> str:
    """Returns which entry the plan says will be served; empty where it does not say."""
    entry = manifest.served
    if entry is None:
        return ""
    group = "" if entry.group is None else f"group {shown(entry.group)}, "
    return f"The plan named the entry that is served before any loss was seen: {group}{entry.promise_in_words()}."
