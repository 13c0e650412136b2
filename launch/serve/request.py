"""What `calm-beam serve` is asked for."""

import dataclasses
from typing import ClassVar

from calm_beam.errors import UsageError
from calm_beam.launch.flags.metrics import MetricFiles
from calm_beam.options import Options, again, option, switch
from calm_beam.options.entries import (
    Answers,
    Entry,
    ExactEngine,
    NamedManifest,
    RecordedModel,
    RecordedPrecision,
    Trusted,
)
from calm_beam.options.groups import Decoding
from calm_beam.options.kinds import utf8_text, whole_number

_LAST_PORT = 65535


@dataclasses.dataclass(frozen=True, kw_only=True)
class Address(Options):
    """Where the service is found, and what it takes upon itself."""

    SECTION: ClassVar[str | None] = None

    manifest: str = again(NamedManifest, "manifest")
    host: str = option("127.0.0.1", "address to listen at; 0.0.0.0 for other machines too (default: %(default)s)")
    port: int = option(8000, "to listen at (default: %(default)s)", kind=whole_number(1))
    name: str = option("calm-beam", "what clients call the model (default: %(default)s)", kind=utf8_text)
    max_waiting: int = option(
        64,
        "prompts that may wait beside those that are being decoded; more are turned away with status 503",
        kind=whole_number(1),
    )
    lazy: bool = switch("be ready once the model is loaded, and compile what a prompt needs when the first one comes")
    exact_engine: bool = again(ExactEngine, "exact_engine")

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.port > _LAST_PORT:
            raise UsageError(f"--port must be at most {_LAST_PORT}, got {self.port}.")


@dataclasses.dataclass(frozen=True, kw_only=True)
class Measured(Options):
    """Losses of what is served."""

    SECTION: ClassVar[str | None] = "losses of a sample of the requests, for calm-beam monitor and for /metrics"

    losses: str | None = option(None, "file to add losses to: the full model answers sampled prompts too")
    probe_share: float = again(
        Answers, "probe_share", default=0.01, sentence="of the requests, such as 1%%", belongs_to=("losses",)
    )
    bleurt_checkpoint: str | None = again(
        MetricFiles,
        "bleurt_checkpoint",
        sentence="with --losses, for the metric bleurt: its folder",
        belongs_to=("losses",),
    )


@dataclasses.dataclass(frozen=True, kw_only=True)
class ServeRequest(Address, Trusted, RecordedPrecision, RecordedModel, Decoding, Entry, Measured, MetricFiles):
    """A service under a manifest."""
