"""The request of `calm-beam serve`, the limits of the service, and all that is known before its model is loaded.

The manifest, its entry and missing packages are checked before the port opens.
"""

import dataclasses
from typing import ClassVar

from calm_beam.errors import UsageError
from calm_beam.extras import imported
from calm_beam.launch.flags import as_usage
from calm_beam.launch.flags.shared_options import MetricFiles, check_precision, find_manifest, one_entry
from calm_beam.manifest import Calibration, Manifest, ManifestError, read_manifest
from calm_beam.options import Options, again, option, switch
from calm_beam.options.groups import (
    Answers,
    Decoding,
    Entry,
    ExactEngine,
    NamedManifest,
    RecordedModel,
    RecordedPrecision,
    Trusted,
)
from calm_beam.options.kinds import utf8_text, whole_number
from calm_beam.serving.watched import check_exits, check_sampled
from calm_beam.storage import open_input

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
        "prompts that may wait while others are decoded; more are turned away with status 503",
        kind=whole_number(1),
    )
    lazy: bool = switch("be ready once the model is loaded, and compile what a prompt needs when the first one comes")
    full_model: bool = switch("run all layers for every token, such as after an alarm: the promise then holds anyway")
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


# Of a letter in JSON: two halves of a surrogate pair, escaped.
_MOST_BYTES_PER_CHARACTER = 12
_MOST_BYTES_BESIDES = 1000


@dataclasses.dataclass(frozen=True, kw_only=True)
class Limits:
    """Limits of the service.

    Attributes:
      prompt_characters: Longest prompt, or all prompts of a request together: characters, or token ids. Longer ones are
        refused before tokenization.
      prompts: Most prompts of a request.
      waiting: Prompts that may queue, in addition to those that the batch has room for; more are rejected.
      measuring: Sampled requests that wait to be decoded by the full model too, or are still being answered.
      arrival_seconds: How long a request may take to arrive, from the connection or its first byte to its last.
      ending_seconds: How long what was taken may take once the service is told to end; then connections are closed.
    """

    prompt_characters: int = 4000
    prompts: int = 16
    waiting: int = 64
    measuring: int = 32
    arrival_seconds: float = 10.0
    ending_seconds: int = 20

    def __post_init__(self) -> None:
        """Refuses limits under which some requests would never find room."""
        if not 1 <= self.prompts <= self.waiting:
            raise ValueError(f"prompts must be from 1 to waiting, {self.waiting}, got {self.prompts}.")

    @property
    def body_bytes(self) -> int:
        """Longest body of a request."""
        return _MOST_BYTES_PER_CHARACTER * self.prompt_characters + _MOST_BYTES_BESIDES


_USUAL_LIMITS = Limits()


@dataclasses.dataclass(frozen=True, kw_only=True)
class Served:
    """The promise of a service, and its limits.

    Attributes:
      manifest: What was promised.
      entry: Of it, by which prompts of no group are answered.
      content: The manifest's file, as `/manifest` shows it.
      name: What clients call the model.
      limits: Limits of the service.
      is_lazy: Whether what prompts need is compiled when the first of them comes.
      is_full_model: Whether every token runs all layers, whatever the entry says.
    """

    manifest: Manifest
    entry: Calibration
    content: bytes
    name: str = "calm-beam"
    limits: Limits = _USUAL_LIMITS
    is_lazy: bool = False
    is_full_model: bool = False

    @property
    def threshold(self) -> float | None:
        """By which prompts of no group are answered; None for the full model."""
        return None if self.is_full_model else self.entry.threshold


# A letter of a prompt is a token at most, and words have some; what is longer is cut anyway, or refused.
_CHARACTERS_PER_TOKEN = 32
_LEAST_CHARACTERS = 4000
_PROMPTS_OF_A_REQUEST = 16


def prepare(request: ServeRequest) -> Served:
    """Returns what is promised, having refused what can be refused without the model.

    Raises:
      UsageError: If the manifest has no such entry, or another precision was asked for; with `--losses`, if prompts
        alone tell nothing about the entry's promise.
      MissingExtraError: If a package is missing by which it is served.
    """
    for module in ("fastapi", "uvicorn", "prometheus_client"):
        imported(module, extra="serve", needed_for="calm-beam serve")
    path = find_manifest(request.manifest)
    manifest = read_manifest(path)
    check_precision(request, manifest.decode)
    try:
        with as_usage():
            entry = manifest.calibration(one_entry(request, manifest))
        if request.losses is not None:
            if request.full_model:
                raise UsageError("--losses: with --full_model no answer loses anything. Leave one of them out.")
            check_exits(entry)
            check_sampled(manifest, entry)
    except ManifestError as error:
        # The manifest is sound; what was asked for is not in it, or cannot be measured.
        raise UsageError(str(error)) from error
    with open_input(path) as file:
        content = file.read()
    characters = max(_LEAST_CHARACTERS, _CHARACTERS_PER_TOKEN * manifest.decode.max_input_length)
    limits = Limits(
        prompt_characters=characters,
        prompts=min(_PROMPTS_OF_A_REQUEST, request.max_waiting),
        waiting=request.max_waiting,
    )
    return Served(
        manifest=manifest,
        entry=entry,
        content=content,
        name=request.name,
        limits=limits,
        is_lazy=request.lazy,
        is_full_model=request.full_model,
    )
