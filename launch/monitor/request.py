"""What `calm-beam monitor` is asked for."""

import dataclasses

from calm_beam.errors import UsageError
from calm_beam.options import Options, option
from calm_beam.options.entries import Entry, NamedManifest, OfSettings
from calm_beam.options.kinds import number

STREAM = "-"
"""Names standard input."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Losses(Options):
    """Which losses are watched, and how."""

    losses: str = option(
        dataclasses.MISSING, "file with one loss per line: a number, `missing`, or a row of a loss probe; - for stdin"
    )
    alpha: float = option(0.05, "chance of ever raising a false alarm, in (0, 1)", kind=number)
    state: str | None = option(None, "file that keeps the state between calls; made if there is none")

    def __post_init__(self) -> None:
        super().__post_init__()
        if not 0 < self.alpha < 1:
            raise UsageError(f"--alpha must be in (0, 1), got {self.alpha:g}. It is a probability: for 5 % pass 0.05.")


@dataclasses.dataclass(frozen=True, kw_only=True)
class MonitorRequest(NamedManifest, Losses, Entry, OfSettings):
    """Losses of a model in service, held against a promise."""
