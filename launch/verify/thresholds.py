"""Testing promises about thresholds by a model on fresh data, for `calm-beam verify` and `calm_beam.verify`.

All that can be checked is checked before anything is decoded. `calm_beam.verify` also tests manifests of kind
settings.
"""

import dataclasses
import glob
import os
import sys
from collections.abc import Collection, Mapping, Sequence

import numpy as np
from apache_beam.options.pipeline_options import PipelineOptions

from calm_beam.calibration.anytime import CarriedState
from calm_beam.calibration.verification import (
    FreshLosses,
    count_known_prompts,
    is_calibration_set,
    promised_thresholds,
    verify_each,
)
from calm_beam.decoding.settings import DecodeSettings, recorded_settings
from calm_beam.errors import UsageError
from calm_beam.exits.measures import check_named
from calm_beam.inputs import Reading, read_examples
from calm_beam.inputs.examples import Example
from calm_beam.inputs.prompts import ONE_TURN
from calm_beam.inputs.vocabularies.chat_templates import NO_TEMPLATE
from calm_beam.launch.flags import as_usage
from calm_beam.launch.flags.requests import calling
from calm_beam.launch.flags.shared_options import (
    check_precision,
    checked_metrics,
    find_data,
    find_manifest,
    metric_settings,
)
from calm_beam.launch.run_sweep import prepare_request, run_sweep
from calm_beam.launch.runners import Workers
from calm_beam.launch.runners.dataflow import paths_by_flag
from calm_beam.launch.runners.workers import passing_folder, shared_place
from calm_beam.launch.terminal import say
from calm_beam.manifest import Calibration, Manifest, ManifestError, Variant, read_manifest
from calm_beam.metrics import MetricSettings
from calm_beam.metrics.registry import BLEURT, check_may_run, check_source, full_name, get_metric
from calm_beam.options.option import shared
from calm_beam.outputs import DecodeJob, read_generations
from calm_beam.outputs.prepared import PreparedSweep
from calm_beam.outputs.request import BATCH, SweepRequest
from calm_beam.outputs.sharding import default_shards, with_unique_ids
from calm_beam.risk.pvalues import P_VALUES
from calm_beam.serving.agreement import check_model, check_vocabulary
from calm_beam.storage import joined, list_files, parent
from calm_beam.text import counted, printable_line

from .report import Verified, VerifiedThresholds, take_up
from .request import VerifyRequest
from .settings import verify_certified


@dataclasses.dataclass(frozen=True, kw_only=True)
class Promised:
    """A manifest, and which of its entries are tested.

    Attributes:
      path: Of the manifest.
      manifest: The manifest.
      promised: Its entries that promise something.
      entries: Those of the metrics that are asked for.
    """

    path: str
    manifest: Manifest
    promised: tuple[Calibration, ...]
    entries: tuple[Calibration, ...]

    @property
    def by_variant(self) -> Mapping[Variant | None, Sequence[Calibration]]:
        """The entries that are tested, by what is decoded alike."""
        found: dict[Variant | None, list[Calibration]] = {}
        for entry in self.entries:
            found.setdefault(entry.variant, []).append(entry)
        return found


@dataclasses.dataclass(frozen=True, kw_only=True)
class Prepared:
    """A test of thresholds that has been checked.

    Attributes:
      runs: What is decoded, for each variant of the entries.
      workers: What decodes.
      place: Where outputs wait for this process.
      names: Of the independent units: examples, or clusters of them.
      state: What earlier runs have found; None for a run by itself.
    """

    runs: Mapping[Variant | None, PreparedSweep]
    workers: Workers
    place: str
    names: frozenset[str]
    state: CarriedState | None


def find_promises(request: VerifyRequest) -> Promised:
    """Returns the manifest, and which of its entries are tested: that is settled before any loss is seen.

    Raises:
      ManifestError: If the manifest cannot be trusted, or is of the other kind.
      UsageError: If it cannot be found, or has nothing of what is asked for.
    """
    path = find_manifest(os.fspath(request.manifest))
    manifest = read_manifest(path)
    check_precision(request, manifest.decode)
    promised = tuple(entry for entry in manifest.calibrations if entry.threshold is not None)
    entries = promised if request.metrics is None else _with_metrics(promised, request, manifest=manifest)
    return Promised(path=path, manifest=manifest, promised=promised, entries=entries)


def prepare(promises: Promised, request: VerifyRequest, options: PipelineOptions) -> Prepared:
    """Returns the test, all of which has been found good that can be before anything is decoded.

    Args:
      promises: What is tested; it has entries.
      request: What is asked for.
      options: Of the pipelines, among them their runner.

    Raises:
      UsageError: If anything is wrong.
      StateError: If what earlier runs have left is not as it was written.
      ValueError: If a value or a combination is wrong.
    """
    manifest = promises.manifest
    _check_entries(promises.entries, request, manifest=manifest)
    reading = _reading(promises, request)
    paths = {
        "checkpoint": request.model_of(manifest),
        "vocabulary": request.vocabulary,
        "data": request.patterns,
    }
    # What workers read: what is scored, and against what, is read here.
    workers = Workers.prepared(
        options,
        accelerator=request.device,
        paths=paths_by_flag(paths),
        num_shards=lambda: request.num_shards or default_shards(find_data(request)),
    )
    workers.refuse_template(command="verify")
    runs = _runs(promises, request, reading=reading, runs_here=workers.are_here)
    place = shared_place(workers)
    state = take_up(request, promises.path, manifest=manifest.digest, promises=len(promises.promised))
    fresh = _checked_data(next(iter(runs.values())), request, promises=promises)
    names = frozenset(example.id if example.cluster is None else example.cluster for example in fresh)
    if state is not None:
        are_own = any(example.has_own_id or example.cluster is not None for example in fresh)
        unit = "example" if reading.cluster_key is None else "cluster"
        if caution := state.check_new(names, are_own=are_own, unit=unit):
            say(caution)
    return Prepared(runs=runs, workers=workers, place=place, names=names, state=state)


def _with_metrics(
    entries: tuple[Calibration, ...], request: VerifyRequest, *, manifest: Manifest
) -> tuple[Calibration, ...]:
    """Returns the entries of the metrics that are named."""
    # Others are taken as they are: to look one up might import it.
    named = {full_name(name, metric_settings(request)) if name == BLEURT else name for name in request.metrics or ()}
    known = dict.fromkeys(entry.metric for entry in manifest.calibrations)
    for name in sorted(named - known.keys()):
        raise UsageError(f"--metric={name}: the manifest has no entry of it, only of {', '.join(known)}.")
    return tuple(entry for entry in entries if entry.metric in named)


def _check_entries(entries: Sequence[Calibration], request: VerifyRequest, *, manifest: Manifest) -> None:
    metrics = sorted({entry.metric for entry in entries})
    for name in metrics:
        how = f"pass --metric={','.join(metrics)}, or name the metrics to test without it"
        check_may_run(name, named=request.metrics or (), how=how)
        check_source(name, manifest.software)
    for entry in entries:
        if entry.p_value not in P_VALUES:
            raise UsageError(
                f"the manifest was made with p-value {entry.p_value!r}, which this calm-beam does not know. Upgrade it."
            )
    checked_metrics(metrics, metric_settings(request))


def _reading(promises: Promised, request: VerifyRequest) -> Reading:
    """Returns how fresh data are read: clustered and grouped as the calibration set was."""
    plan = promises.manifest.plan
    if (plan is None or plan.group_key is None) and promises.manifest.data.groups is not None:
        raise UsageError("the manifest has groups, but no plan that says which field of a row names them.")
    return request.reading(
        cluster_key=None if plan is None else plan.cluster_key,
        group_key=None if plan is None else plan.group_key,
        needs_references=any(entry.consistency == "risk" for entry in promises.entries),
    )


def _asked(request: VerifyRequest, manifest: Manifest, *, settings: DecodeSettings) -> SweepRequest:
    """Returns the sweep of fresh data; what the manifest decides is no matter of the request.

    One without a plan was made with the defaults.
    """
    vocabulary, plan = manifest.vocabulary, manifest.plan
    chat = None if vocabulary is None else vocabulary.chat
    own = {
        "model": request.model_of(manifest),
        "settings": settings,
        "extra_ids": 0 if vocabulary is None else vocabulary.extra_ids,
        "recorded_chat": chat,
        "chat_template": NO_TEMPLATE if chat is None else None,
        "stop_strings": () if vocabulary is None else vocabulary.stop_strings or (),
        "on_error": on_error_of(manifest),
        # However many fail: the verdicts count them.
        "max_failures": sys.maxsize,
        "on_long": "truncate" if plan is None else plan.on_long,
    }
    return SweepRequest(**{**shared(request, SweepRequest), **own})


def on_error_of(manifest: Manifest) -> str:
    """Returns the policy for fresh examples that fail, which is the calibration's."""
    return "fail" if manifest.plan is None else manifest.plan.on_error


def _runs(
    promises: Promised, request: VerifyRequest, *, reading: Reading, runs_here: bool
) -> Mapping[Variant | None, PreparedSweep]:
    """Returns a run for the entries of each variant, whose model and vocabulary are those of the manifest."""
    manifest = promises.manifest
    check_named(manifest.decode.confidence, request.confidence)
    settings = {
        variant: recorded_settings(manifest.decode_of(entries[0]), promised_thresholds(entries))
        for variant, entries in promises.by_variant.items()
    }
    run = prepare_request(
        _asked(request, manifest, settings=next(iter(settings.values()))),
        request.patterns,
        reading=reading,
        # Without one, metrics have compared token ids, and have to do so again.
        finds_vocabulary=manifest.vocabulary is not None,
        runs_here=runs_here,
    )
    try:
        check_model(manifest.model, run.checkpoint)
        check_vocabulary(manifest.vocabulary, run.vocabulary, checkpoint=run.checkpoint)
    except ManifestError as error:
        raise UsageError(f"--checkpoint {request.model_of(manifest)}: {error}") from error
    run = run.without_weights()
    # A confirmed promise is about the serving decoder.
    decoder = None if manifest.confirmation is None else BATCH
    return {
        variant: dataclasses.replace(run, request=dataclasses.replace(run.request, settings=each, decoder=decoder))
        for variant, each in settings.items()
    }


def _checked_data(run: PreparedSweep, request: VerifyRequest, *, promises: Promised) -> list[Example]:
    """Returns the fresh examples; refuses the calibration set itself, and tells how many of its prompts come again."""
    manifest = promises.manifest
    fresh: list[Example] = []
    for index, name in enumerate(run.paths):
        fresh.extend(read_examples(name, run.reading, file_index=index))
    unique = with_unique_ids(fresh)
    if is_calibration_set(unique, manifest):
        raise UsageError(
            f"--data {','.join(request.patterns or ())}: is the calibration set itself. What chose the threshold "
            "cannot test it: take examples that were newly drawn."
        )
    later = next((example for example in unique if example.earlier is not None), None)
    if later is not None and not manifest.takes_several_turns:
        raise UsageError(f"{later.in_words()}: {ONE_TURN}.")
    known = {group.name for group in manifest.data.groups or ()}
    if manifest.data.groups is not None and (unknown := {str(example.group) for example in fresh} - known):
        say(
            f"the manifest knows no group {', '.join(printable_line(name) for name in sorted(unknown))}: such examples "
            "count for the promises about all prompts alone"
        )
    beside = glob.escape(parent(promises.path))
    stored = list_files(joined(beside, "generations", "*", "*.parquet"))
    stored += list_files(joined(beside, "confirmation", "generations", "*", "*.parquet"))
    if not stored:
        say(
            "whether the data share prompts with the calibration set is unknown: its generations are not "
            "next to the manifest"
        )
        return unique
    known_prompts = count_known_prompts(fresh, stored, vocabulary=run.vocabulary, task_prefix=run.settings.task_prefix)
    if known_prompts:
        say(
            f"warning: {known_prompts} of {counted(len(fresh), 'prompt')} {'is' if known_prompts == 1 else 'are'} in "
            "the calibration set too. Unless prompts repeat by themselves, the data are not fresh, and what they seem "
            "to prove again they do not."
        )
    return unique


# Order of bets in manifests that do not say; any that was fixed beforehand will do.
_DEFAULT_SALT = "calm-beam/0"


def verify_thresholds(request: VerifyRequest, options: PipelineOptions) -> VerifiedThresholds:
    """Decodes fresh data at the thresholds of a manifest, and returns what that says of its promises.

    Args:
      request: What is asked for.
      options: Of the pipelines, among them their runner; what they leave open is filled in.

    Raises:
      UsageError: If anything that was asked for is wrong; nothing has been decoded.
      ManifestError: If the manifest cannot be trusted.
      PipelineError: If a pipeline fails.
    """
    with as_usage():
        promises = find_promises(request)
        manifest, promised, entries = promises.manifest, promises.promised, promises.entries
        if not entries:
            return VerifiedThresholds(manifest=manifest, alpha=request.alpha, metrics=request.metrics)
        prepared = prepare(promises, request, options)
    settings = metric_settings(request)
    fresh = {
        variant: _losses(prepared, run, manifest=manifest, entries=promises.by_variant[variant], settings=settings)
        for variant, run in prepared.runs.items()
    }
    # Which they are depends on no loss.
    tested = [entry for entry in entries if fresh[entry.variant].has_any(entry)]
    if without := sorted({entry.group or "" for entry in entries} - {entry.group or "" for entry in tested}):
        say(f"the fresh data have no example of group {', '.join(map(printable_line, without))}: not tested")
    state = prepared.state
    if state is None:
        verdicts = verify_each([fresh[entry.variant] for entry in tested], tested, alpha=request.alpha)
    else:
        state.keep(
            state.evidence.after_run(
                prepared.names,
                [_losses_of(fresh.get(entry.variant), entry, entries=entries) for entry in promised],
                entries=promised,
            )
        )
        verdicts = state.evidence.verdicts(promised)
    about = [verdict.entry for verdict in verdicts]
    return VerifiedThresholds(
        manifest=manifest,
        alpha=request.alpha,
        verdicts=tuple(verdicts),
        evidence=None if state is None else state.evidence,
        metrics=request.metrics,
        fresh=tuple(fresh.values()),
        others=sum(entry not in entries and entry not in about for entry in promised),
    )


def _losses(
    prepared: Prepared,
    run: PreparedSweep,
    *,
    manifest: Manifest,
    entries: Sequence[Calibration],
    settings: MetricSettings,
) -> FreshLosses:
    """Returns the losses of the fresh data; the outputs themselves are not kept."""
    metrics = {entry.metric: get_metric(entry.metric, settings) for entry in entries}
    workers = prepared.workers
    pipeline = workers.new_pipeline()
    with (
        passing_folder(prepared.place, name="calm-beam-verify-") as folder,
        workers.shown_progress() as progress,
    ):
        run_sweep(pipeline, run, folder=folder, workers=workers, progress=progress)
        return FreshLosses.of(
            (item for path in DecodeJob.shard_files(folder) for item in read_generations(path)),
            entries,
            metrics=metrics,
            salt=manifest.plan.salt if manifest.plan else _DEFAULT_SALT,
            on_error=on_error_of(manifest),
        )


def _losses_of(
    fresh: FreshLosses | None, entry: Calibration, *, entries: Collection[Calibration]
) -> tuple[np.ndarray, np.ndarray] | None:
    """Returns an entry's losses, and the same as lenient as can be; None if it is not tested or has none."""
    if fresh is None or entry not in entries or not fresh.has_any(entry):
        return None
    return fresh.at(entry), fresh.at(entry, lenient=True)


@dataclasses.dataclass(frozen=True, kw_only=True)
class VerifyCall(VerifyRequest):
    """A test of promises as Python asks for it.

    Attributes:
      options: Of the pipelines that decode, among them their runner; in this process if omitted.
    """

    options: PipelineOptions | None = dataclasses.field(default=None, compare=False)

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.is_of_settings and self.options is not None:
            raise UsageError("options are of pipelines that decode, and losses or scores need none: leave one out.")


@calling(VerifyCall)
def verify(request: VerifyCall) -> Verified:
    """Tests the promises of a manifest on fresh data, and returns what was found out about each.

        found = calm.verify(manifest="calibration", data="fresh/*.jsonl", checkpoint="checkpoints/my_t5")
        assert not found.is_broken

    It is what `calm-beam verify` runs, and takes all of its options, by the same names. A manifest of
    `calm-beam certify` is tested on fresh `losses`, or scores (`baseline` and `candidates`), and needs no model.

    Raises:
      UsageError: If anything that was asked for is wrong; nothing has been decoded.
      ManifestError: If the manifest cannot be trusted, or is of the other kind.
      PipelineError: If a pipeline fails.
    """
    if request.is_of_settings:
        return verify_certified(request)
    return verify_thresholds(request, request.options if request.options is not None else PipelineOptions([]))
