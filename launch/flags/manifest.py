"""Finding the manifest that `--manifest` names, its model, and one of its entries."""

import dataclasses
import os
from typing import ClassVar

from calm_beam.arithmetic import DTYPES, MATMUL_PRECISIONS
from calm_beam.manifest import (
    MANIFEST,
    Calibration,
    DecodeRecord,
    EntryChoice,
    Manifest,
    ManifestError,
    SettingManifest,
)
from calm_beam.options import Options, again, option
from calm_beam.options.groups import FactsOfAny, ModelSource
from calm_beam.options.kinds import confidence, number
from calm_beam.storage import is_file, is_folder, joined, why_no_file
from calm_beam.text import printable_line

from . import UsageError, naming


def find_manifest(name: str) -> str:
    """Returns the path of a manifest, given it or the calibration directory that holds it.

    Raises:
      UsageError: If there is none, or Cloud Storage does not say.
    """
    with naming("--manifest"):
        path = joined(name, MANIFEST) if is_folder(name) else name
        if not is_file(path):
            raise UsageError(f"--manifest {path}: {why_no_file(path)}")
    return path


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
class SurePrecision(Options):
    """In which numbers the model is to compute, which the manifest decides."""

    dtype: str | None = option(None, f"type of weights and states, {_SURE}", choices=DTYPES)
    matmul_precision: str | None = option(None, f"precision of products, {_SURE}", choices=MATMUL_PRECISIONS)


def entry_choice(request: Entry, manifest: Manifest | SettingManifest) -> EntryChoice:
    """Returns which entry of a manifest a request names.

    Raises:
      UsageError: If it names what no entry of its kind has.
    """
    choice = EntryChoice.named_by(request)
    try:
        choice.check_for(manifest.KIND, sign="--")
    except ManifestError as error:
        raise UsageError(str(error)) from error
    return choice


def check_precision(request: SurePrecision, decode: DecodeRecord) -> None:
    """Refuses another precision than the manifest's.

    Raises:
      UsageError: If one is asked for.
    """
    recorded = {"dtype": decode.dtype, "matmul_precision": decode.matmul_precision or "highest"}
    for name, calibrated in recorded.items():
        asked = getattr(request, name)
        if asked not in (None, calibrated):
            raise UsageError(
                f"--{name}={asked}: the manifest was calibrated with {calibrated}, and its thresholds hold for no "
                f"other. Leave --{name} out, or calibrate with {asked}."
            )


def entry_in_words(entry: Calibration) -> str:
    """Returns what an entry is about, and its threshold."""
    threshold = "never exit" if entry.threshold is None else f"threshold {entry.threshold:g}"
    if entry.variant is not None:
        threshold += f", {entry.variant.in_words()}"
    group = "" if entry.group is None else f"group {printable_line(entry.group)}: "
    return f"{group}{entry.promise_in_words()} ({threshold})"
