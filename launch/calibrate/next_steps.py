"""What to do with a manifest next, as commands that run as they are printed."""

import shlex
from collections.abc import Iterator

from calm_beam.exits.measures import MEASURES
from calm_beam.manifest import PROMISE, Calibration, Manifest

_OWN_PROMPT = "Your prompt"


def next_commands(manifest: Manifest, output: str, *, prompt: str = _OWN_PROMPT) -> Iterator[str]:
    """Yields commands that show what a manifest promises, and answer a prompt under it where something was proved.

    Args:
      manifest: The result.
      output: Directory that holds it.
      prompt: What is answered.
    """
    yield f"calm-beam inspect {shlex.quote(output)}"
    entry = manifest.served or next((each for each in manifest.calibrations if each.threshold is not None), None)
    if entry is not None:
        flags = {"manifest": output, **_naming(entry, manifest), "prompt": prompt}
        words = (f"--{name}={shlex.quote(str(value))}" for name, value in flags.items())
        yield f"calm-beam generate {' '.join(words)} --show_layers"


def _naming(entry: Calibration, manifest: Manifest) -> dict[str, object]:
    """Returns the flags that name an entry: what some other entry about the same prompts has otherwise."""
    names = ("group", *PROMISE)
    others = [each for each in manifest.calibrations if each.group == entry.group]
    named = {
        name: value
        for name in names
        if (value := getattr(entry, name)) is not None
        and (name == "group" or len({getattr(each, name) for each in others}) > 1)
    }
    # Code of the user's runs only where it is named.
    own = manifest.decode.confidence not in MEASURES
    return {**named, "confidence": manifest.decode.confidence} if own else named
