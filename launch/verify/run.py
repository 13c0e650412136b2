"""The test itself on fresh data of a model, which `calm-beam verify` and `calm_beam.verify` both run."""

from collections.abc import Collection, Sequence

import numpy as np
from apache_beam.options.pipeline_options import PipelineOptions

from calm_beam.calibration.verification import FreshLosses, verify_each
from calm_beam.launch.flags import as_usage
from calm_beam.launch.flags.metrics import metric_settings
from calm_beam.launch.run_sweep import run_sweep
from calm_beam.launch.runners.shared_folder import passing_folder
from calm_beam.launch.terminal import say
from calm_beam.manifest import Calibration, Manifest
from calm_beam.metrics.registry import get_metric
from calm_beam.metrics.settings import MetricSettings
from calm_beam.outputs import DecodeJob, read_generations
from calm_beam.outputs.prepared import PreparedSweep
from calm_beam.text import printable_line

from .prepare import Prepared, find_promises, on_error_of, prepare
from .request import VerifyRequest
from .verified import VerifiedThresholds

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
