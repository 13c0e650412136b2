"""Builds the report, for `calm-beam report` and at the end of `calibrate`."""

import dataclasses
import os
from collections.abc import Iterable
from typing import TYPE_CHECKING

from calm_beam.calibration.publish import decode_record
from calm_beam.errors import UsageError
from calm_beam.evaluation.flops import DecoderSizes
from calm_beam.exits.measures import MeasureError, check_named
from calm_beam.inputs.vocabularies.vocabulary import Vocabulary, VocabularyError, open_recorded
from calm_beam.launch.flags import naming
from calm_beam.launch.flags.shared_options import declared
from calm_beam.launch.terminal import say, tell
from calm_beam.manifest import MANIFEST, Manifest, ManifestError, SettingManifest, read_any_manifest
from calm_beam.manifest.files import REPORT
from calm_beam.outputs import DecodeJob
from calm_beam.outputs.folder import SweepHome
from calm_beam.report import (
    Calibrated,
    StoredOutputs,
    build_page,
    build_setting_page,
    build_variants_page,
    first_shown,
    read_calibrated,
    read_speedups,
    write_page,
)
from calm_beam.storage import absolute, check_writable, is_file, is_folder, joined, obstacle

from .request import ReportRequest

if TYPE_CHECKING:
    from calm_beam.checkpoints import Checkpoint


@dataclasses.dataclass(frozen=True, kw_only=True)
class ReportedModel:
    """The parts of the model that a report needs.

    Attributes:
      sizes: Sizes to count floating point operations; None if unavailable, so that operations are not counted.
      vocabulary: Vocabulary for texts of tokens; None if there is none or it is unavailable, so that ids are shown.
    """

    sizes: DecoderSizes | None
    vocabulary: Vocabulary | None


def build_report(request: ReportRequest) -> int:
    """Builds the report that is asked for, and returns the exit status of the command."""
    output = _checked_output(request)
    _build(request, output)
    tell(f"Report: {output}")
    return 0


def report_after(request: ReportRequest, *, model: ReportedModel | None = None) -> None:
    """Builds the report of a calibration that has just published its result; says so if that fails.

    Args:
      request: Names its output directory and its generations, and what it was told of model, measure and vocabulary.
      model: Where the calibration has loaded the model, which then is not loaded again.
    """
    output, folder = request.folder, request.generations or ""
    path = joined(output, REPORT)
    elsewhere = "" if not folder or folder.startswith(joined(output, "")) else f" --generations={folder}"
    again = f"calm-beam report --calibration={output}{elsewhere}"
    try:
        _build(request, path, model=model)
    except KeyboardInterrupt as interrupt:
        raise KeyboardInterrupt(f"the result in {output} is whole; only its report is missing: {again}") from interrupt
    # Whatever it is: the calibration succeeded, and must not seem to have failed.
    except Exception as error:
        reason = f"{type(error).__name__}: {error}"
        say(f"caution: no report ({reason}). The result in {output} is whole; try: {again}")
    else:
        tell(f"Report: {path}")


def _checked_output(request: ReportRequest) -> str:
    """Returns the file to write."""
    if request.calibration is None:
        raise UsageError("--calibration is missing: the output directory of a calibration.")
    with naming("--calibration"):
        path = joined(request.folder, MANIFEST)
        if why := obstacle(path):
            raise UsageError(f"--calibration {path}: {why}")
        if not is_file(path):
            raise UsageError(f"--calibration {request.folder}: has no {MANIFEST}, so no calibration finished there.")
    with naming("--output"):
        output = joined(request.folder, REPORT) if request.output is None else os.fspath(request.output)
        if is_folder(output):
            raise UsageError(f"--output {output}: is a directory, expected the name of a file, such as {REPORT}.")
        check_writable(output)
    return output


def _build(request: ReportRequest, output: str, *, model: ReportedModel | None = None) -> None:
    """Reads everything, the model too unless it is given, and writes the page."""
    if isinstance(read_any_manifest(joined(request.folder, MANIFEST)), SettingManifest):
        _build_external(request, output)
        return
    calibrated = read_calibrated(request.folder)
    manifest = calibrated.manifest
    if manifest.plan is not None and manifest.plan.pareto is not None:
        if request.speedup is not None:
            raise UsageError(
                f"--speedup: {request.folder} has several variants, and speedups are of one. Leave it out."
            )
        remarks: list[str] = []
        model = model or _model(request, manifest, remarks=remarks)
        page = build_variants_page(
            calibrated,
            _stored_of_first(request, manifest, remarks=remarks),
            vocabulary=model.vocabulary,
            sizes=model.sizes,
            most_examples=request.max_examples,
            seed=request.seed,
        )
        _say_remarks(remarks)
        write_page(page, output)
        return
    remarks = []
    stored = _stored(request, calibrated, remarks=remarks)
    if not stored:
        model = ReportedModel(sizes=None, vocabulary=None)
    elif model is None:
        model = _model(request, manifest, remarks=remarks)
    # Prompts are texts where there was a vocabulary, whose lengths in tokens nobody knows without it.
    is_counted = model.vocabulary is not None or manifest.vocabulary is None
    page = build_page(
        calibrated,
        stored,
        vocabulary=model.vocabulary,
        sizes=model.sizes if is_counted else None,
        speedups=read_speedups(request.speedup, manifest) if request.speedup else None,
        most_examples=request.max_examples,
        seed=request.seed,
        remarks=remarks,
    )
    _say_remarks(remarks)
    write_page(page, output)


def _say_remarks(remarks: Iterable[str]) -> None:
    for remark in remarks:
        say(f"calm-beam report: {remark}")


def _build_external(request: ReportRequest, output: str) -> None:
    of_models = ("checkpoint", "vocabulary", "activation", "relative_max_distance", "confidence")
    for name in ("generations", *of_models, "speedup"):
        if getattr(request, name) is not None:
            raise UsageError(f"--{name}: {request.folder} is a certification, which has no model. Leave it out.")
    write_external_report(request.folder, output)


def write_external_report(directory: str, output: str) -> None:
    """Writes the page of a certification to a file atomically."""
    write_page(build_setting_page(directory), output)


def _stored(request: ReportRequest, calibrated: Calibrated, *, remarks: list[str]) -> StoredOutputs | None:
    """Returns the generations; None if nobody named them and there are none."""
    if request.generations is not None:
        with naming("--generations"):
            folder = SweepHome(absolute(request.generations)).only_folder()
        return StoredOutputs.read(folder, calibrated.manifest)
    try:
        folder = SweepHome(request.folder).only_folder()
    except UsageError:
        remarks.append(_NOT_SHOWN)
        return None
    return StoredOutputs.read(folder, calibrated.manifest)


_NOT_SHOWN = (
    "Exit layers and outputs are not shown: the generations are not next to the manifest (calm-beam report "
    "--generations=DIR)."
)


def _stored_of_first(request: ReportRequest, manifest: Manifest, *, remarks: list[str]) -> StoredOutputs | None:
    """Returns the outputs of the variant that the first promise chose; None if it chose none, or they are not there."""
    entry = first_shown(manifest)
    if entry.variant is None:
        return None
    decode = manifest.decode_of(entry)
    named = request.folder if request.generations is None else absolute(request.generations)
    for folder in SweepHome(named).folders():
        if decode_record(DecodeJob.read(folder).settings) == decode:
            return StoredOutputs.read(folder, manifest, entry=entry)
    if request.generations is not None:
        raise UsageError(f"--generations {named}: holds no outputs of {entry.variant.in_words()}, which was chosen.")
    remarks.append(_NOT_SHOWN)
    return None


def _checkpoint(
    request: ReportRequest, manifest: Manifest, *, remarks: list[str]
) -> tuple["Checkpoint | None", DecoderSizes | None]:
    """Returns the model and its sizes, as far as they are available; a model that is named and wrong is an error."""
    # Here, since it needs JAX, which a calibration of stored generations does without.
    from calm_beam.checkpoints import CheckpointError, load_checkpoint
    from calm_beam.serving.agreement import check_model

    checkpoint = sizes = None
    try:
        checkpoint = load_checkpoint(request.named_model or manifest.model.uri, declared=declared(request))
        check_model(manifest.model, checkpoint)
        # Which operations a test takes, its measure says.
        check_named(manifest.decode.confidence, request.confidence)
        sizes = DecoderSizes.of(checkpoint.config)
    except MeasureError as error:
        remarks.append(f"Floating point operations are not counted: {error}")
    except (CheckpointError, ManifestError, OSError) as error:
        if request.named_model is not None:
            raise UsageError(f"--checkpoint: {error}") from error
        remarks.append(f"Floating point operations are not counted, since the model is not available: {error}")
    return checkpoint, sizes


def _model(request: ReportRequest, manifest: Manifest, *, remarks: list[str]) -> ReportedModel:
    """Returns the available parts of the model; a named part that is wrong is an error."""
    # Here, as above.
    from calm_beam.serving.agreement import check_vocabulary

    checkpoint, sizes = _checkpoint(request, manifest, remarks=remarks)
    vocabulary_path = request.vocabulary
    if sizes is not None and checkpoint is not None:
        vocabulary_path = vocabulary_path or checkpoint.vocabulary_uri
    if manifest.vocabulary is None and request.vocabulary is None:
        return ReportedModel(sizes=sizes, vocabulary=None)
    try:
        vocabulary = None
        if vocabulary_path is not None:
            vocabulary = open_recorded(vocabulary_path, manifest.vocabulary)
        check_vocabulary(manifest.vocabulary, vocabulary, checkpoint=checkpoint)
    except (VocabularyError, ManifestError) as error:
        if request.vocabulary is not None:
            raise UsageError(f"--vocabulary: {error}") from error
        remarks.append(f"Tokens are shown as ids, since the vocabulary is not available: {error}")
        return ReportedModel(sizes=sizes, vocabulary=None)
    return ReportedModel(sizes=sizes, vocabulary=vocabulary)
