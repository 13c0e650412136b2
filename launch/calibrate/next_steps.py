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
    """Returns flags that name an entry, each of which leaves fewer of the entries about the same prompts."""
    left = [each for each in manifest.calibrations if each.group == entry.group]
    named: dict[str, object] = {} if entry.group is None else {"group": entry.group}
    for name in PROMISE:
        value = getattr(entry, name)
        alike = [each for each in left if getattr(each, name) == value]
        if len(alike) < len(left) and value is not None:
            named[name], left = value, alike
    # Code of the user's runs only where it is named.
    own = manifest.decode.confidence not in MEASURES
    return {**named, "confidence": manifest.decode.confidence} if own else named
