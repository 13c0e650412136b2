"""Where this user's caches are, on this machine."""

import os
import pathlib


def cache_folder() -> pathlib.Path:
    """Returns `$CALM_BEAM_CACHE`, else `calm-beam` in `$XDG_CACHE_HOME` or `~/.cache`; it need not exist."""
    named = os.environ.get("CALM_BEAM_CACHE")
    base = os.environ.get("XDG_CACHE_HOME") or os.path.join(os.path.expanduser("~"), ".cache")
    return pathlib.Path(named or os.path.join(base, "calm-beam"))
