"""What `calm-beam generate` says of entries and groups, wherever prompts are answered."""

from collections.abc import Iterable

from calm_beam.launch.flags.manifest import entry_in_words
from calm_beam.manifest import Calibration
from calm_beam.text import printable_line


def entry_with_layers(entry: Calibration, *, num_layers: int) -> str:
    """Returns by what prompts are answered, and how many of the model's layers that took in the calibration."""
    return f"{entry_in_words(entry)}, calibrated at {entry.layers:.2f} of {num_layers} layers per token"


def unknown_groups(names: Iterable[str]) -> str:
    """Returns a caution about groups that no entry is about."""
    return (
        f"caution: the manifest knows no group {', '.join(map(printable_line, sorted(names)))}. Their prompts are "
        "answered by its safest entry, which promises nothing about them."
    )
