"""Groups of options about a manifest: which it is, which of its entries, its model, and answers under it."""

import dataclasses
import os
from typing import ClassVar

from calm_beam.arithmetic import DTYPES, MATMUL_PRECISIONS
from calm_beam.manifest import Manifest

from .groups import FactsOfAny, ModelSource
from .kinds import confidence, number, share, whole_number
from .option import Options, again, option, switch

# As `calm_beam.outputs.job.FORMATS`.
_FORMATS = ("parquet", "jsonl")


@dataclasses.dataclass(frozen=True, kw_only=True)
class RecordedModel(FactsOfAny):
    """The model of a manifest, which says where it was."""

    SECTION: ClassVar[str | None] = ModelSource.SECTION

    checkpoint: str | os.PathLike[str] | None = again(
        ModelSource, "checkpoint", sentence="model folder; default: where the manifest says that it was"
    )
    vocabulary: str | None = again(ModelSource, "vocabulary", belongs_to=())

    @property
    def named_model(self) -> str | None:
        """Folder of the model, where one was named."""
        return None if self.checkpoint is None else os.fspath(self.checkpoint)

    def model_of(self, manifest: Manifest) -> str:
        """Returns the folder of the model, which the manifest says where nobody else does."""
        return self.named_model or manifest.model.uri


@dataclasses.dataclass(frozen=True, kw_only=True)
class NamedManifest(Options):
    """Which manifest is meant."""

    manifest: str = option(dataclasses.MISSING, "a manifest, or the calibration directory that holds one")


@dataclasses.dataclass(frozen=True, kw_only=True)
class Entry(Options):
    """Which entry of a manifest is meant; options are called as the entry's own fields."""

    SECTION: ClassVar[str | None] = "which entry of the manifest, where it has several"

    consistency: str | None = option(None, "textual or risk")
    metric: str | None = option(None, "name of the metric")
    loss: str | None = option(None, "what is made of its scores, such as signed or dissimilarity>0.3")
    delta: float | None = option(None, "risk tolerance, as calibrated", kind=number)
    epsilon: float | None = option(None, "allowed probability of error, as calibrated", kind=number)
    group: str | None = option(None, "group that the entry is about; default: the entry about all prompts")


@dataclasses.dataclass(frozen=True, kw_only=True)
class OfSettings(Options):
    """Which entry about settings is meant, next to `Entry`."""

    SECTION: ClassVar[str | None] = "and of a manifest of kind settings, next to --delta, --epsilon and --group"

    tail: float | None = option(None, "the loss that an example may have; default: that of the mean", kind=number)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Trusted(Options):
    """Code of a manifest that a user trusts."""

    confidence: str | None = option(
        None,
        "confidence measure of the manifest; needed where that is module:function of your own, which is imported only "
        "if it is named here",
        kind=confidence,
    )


_SURE = "of the manifest, whose thresholds hold for no other; given only to be sure of it"


@dataclasses.dataclass(frozen=True, kw_only=True)
class RecordedPrecision(Options):
    """In which numbers the model is to compute, which the manifest decides."""

    dtype: str | None = option(None, f"type of weights and states, {_SURE}", choices=DTYPES)
    matmul_precision: str | None = option(None, f"precision of products, {_SURE}", choices=MATMUL_PRECISIONS)


@dataclasses.dataclass(frozen=True, kw_only=True)
class ExactEngine(Options):
    """Whether another engine may serve than was calibrated."""

    exact_engine: bool = switch("refuse to serve by another engine than the manifest was made by")


@dataclasses.dataclass(frozen=True, kw_only=True)
class Answers(Options):
    """How answers in shards are stored, what becomes of prompts without one, and whose losses are measured."""

    SECTION: ClassVar[str | None] = (
        "with --output=FOLDER/, answers in shards (Beam's own flags, such as --runner, may be added)"
    )

    output_format: str = option(
        "parquet", "of the files of answers: parquet, or jsonl, packed by gzip", choices=_FORMATS
    )
    on_error: str = option(
        "fail",
        "for prompts that have no answer, also when tried again alone: end the run, or list them in failures.jsonl",
        choices=("fail", "list"),
    )
    max_failures: int | None = option(
        None,
        "with --on_error=list, end the run if more prompts fail; default: 1 %% of them, at least 10",
        kind=whole_number(0),
        belongs_to=("on_error=list",),
    )
    probe_share: float | None = option(
        None,
        "answer this share of the prompts, such as 1%%, by the full model too, and write their losses to losses.jsonl, "
        "for calm-beam monitor",
        kind=share,
        metavar="SHARE",
    )
    probe_salt: str | None = option(
        None,
        "decides which prompts those are, by a hash of their ids; keep it secret if others choose the ids; default: "
        "the manifest's digest",
        belongs_to=("probe_share",),
    )
