"""The request of `calm-beam generate` in its three forms: a prompt, whole files, and answers in shards.

All three print the same lines about entries and groups.
"""

import dataclasses
from collections.abc import Collection, Iterable
from typing import ClassVar

from calm_beam.errors import UsageError
from calm_beam.inputs import Reading
from calm_beam.launch.flags import naming
from calm_beam.launch.flags.shared_options import Job, MetricFiles, entry_in_words
from calm_beam.manifest import Calibration
from calm_beam.options import Options, again, option, options_of, switch
from calm_beam.options.groups import (
    Answers,
    DataSource,
    Decoding,
    Entry,
    ExactEngine,
    NamedManifest,
    RecordedModel,
    RecordedPrecision,
    Spread,
    Telling,
    Trusted,
)
from calm_beam.options.kinds import utf8_text
from calm_beam.storage import is_folder
from calm_beam.text import printable_line

SHOWS_WHAT_IS_PRINTED = "--show_layers colours what is printed: rows of --output have exit_layers of themselves."


@dataclasses.dataclass(frozen=True, kw_only=True)
class Prompts(Options):
    """The prompts, and the destination of answers."""

    SECTION: ClassVar[str | None] = None

    manifest: str = again(NamedManifest, "manifest")
    prompt: str | None = option(None, "the prompt; default: --input, or standard input")
    input: str | None = option(None, "files of prompts: a path or a glob")
    data_format: str | None = option(
        None,
        "format of --input; default: by suffix (.jsonl, .txt, .tfrecord, each also with .gz; .parquet)",
        choices=("jsonl", "text", "parquet", "tfrecord"),
        belongs_to=("input",),
    )
    inputs_field: str | None = again(
        DataSource,
        "inputs_field",
        sentence="field of a row with the prompt; default: input, in TFRecord inputs",
        belongs_to=("input",),
    )
    group_key: str | None = option(
        None,
        "field of a row of --input with the prompt's group, under a manifest with groups",
        kind=utf8_text,
        belongs_to=("input",),
    )
    output: str | None = option(
        None,
        "JSONL file to write, or a folder with a slash at its end, for answers in shards; default: texts, to standard "
        "output",
    )
    overwrite: bool = switch("replace an earlier --output", belongs_to=("output",))
    show_layers: bool = switch("colour every token by the layer at which it left")
    exact_engine: bool = again(ExactEngine, "exact_engine")


@dataclasses.dataclass(frozen=True, kw_only=True)
class Shards(Options):
    """Answers in shards."""

    SECTION: ClassVar[str | None] = Answers.SECTION

    bleurt_checkpoint: str | None = again(
        MetricFiles,
        "bleurt_checkpoint",
        sentence="with --probe_share, for the metric bleurt: its folder",
        belongs_to=("probe_share",),
    )
    num_shards: int | None = again(
        Spread,
        "num_shards",
        sentence="parts of the prompts, answered independently, several per worker; default: parts of about five "
        "thousand prompts, at least 4; with --resume, as begun",
    )
    model_copies: int = again(Spread, "model_copies")
    resume: bool = switch("go on with a run that was killed or failed: answer the missing prompts only")


@dataclasses.dataclass(frozen=True, kw_only=True)
class GenerateRequest(
    Prompts, Trusted, RecordedPrecision, RecordedModel, Decoding, Entry, Answers, Shards, MetricFiles, Job, Telling
):
    """Answers under a manifest."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.group is not None and self.group_key is not None:
            raise UsageError("--group names the group of all prompts, --group_key that of each: leave one of them out.")

    @property
    def is_in_shards(self) -> bool:
        """Whether answers go to a folder: `--output` ends in a slash, or is one already."""
        if self.output is None:
            return False
        with naming("--output"):
            return self.output.endswith("/") or is_folder(self.output)

    @property
    def prompt_reading(self) -> Reading:
        """How the files of `--input` are read."""
        return Reading(data_format=self.data_format, inputs_field=self.inputs_field, group_key=self.group_key)


def option_of_shards(given: Collection[str]) -> str | None:
    """Returns the first option of those given that means something only for answers in shards; None without one."""
    of_groups = (name for group in (Answers, Shards) for name, _ in options_of(group))
    of_shards = {"max_cache_tokens", "accelerator", *of_groups}
    return next((name for name in given if name in of_shards), None)


def entry_with_layers(entry: Calibration, *, num_layers: int) -> str:
    """Returns by what prompts are answered, and how many of the model's layers that took in the calibration."""
    return f"{entry_in_words(entry)}, calibrated at {entry.layers:.2f} of {num_layers} layers per token"


def unknown_groups(names: Iterable[str]) -> str:
    """Returns a caution about groups that no entry is about."""
    return (
        f"caution: the manifest knows no group {', '.join(map(printable_line, sorted(names)))}. Their prompts are "
        "answered by its safest entry, which promises nothing about them."
    )
