"""The test of a manifest of kind settings on fresh losses, scores or outputs, without a model."""

import os

from calm_beam.calibration.certification import (
    check_fresh,
    promised,
    unit_names,
    verify_settings,
    why_not_fresh,
    with_settings,
)
from calm_beam.inputs.losses import LOWER
from calm_beam.launch.certify.sources import Source, read_losses, read_outputs, read_scores
from calm_beam.launch.flags import UsageError
from calm_beam.launch.flags.shared_options import find_manifest
from calm_beam.launch.terminal import say
from calm_beam.manifest import SettingManifest, SettingPlan, read_any_manifest
from calm_beam.metrics.registry import check_may_run, check_source

from .report import VerifiedSettings, take_up
from .request import VerifyRequest


def verify_certified(request: VerifyRequest) -> VerifiedSettings:
    """Tests a manifest of kind settings on the losses, scores or outputs that are named, and returns what they say.

    Raises:
      ManifestError: If the manifest cannot be trusted.
      UsageError: If anything that was asked for is wrong, or the losses are none that can test it.
      LossesError: If losses or scores are not whole; names them.
      DataError: If a pattern matches no file, or one is damaged.
    """
    path = find_manifest(os.fspath(request.manifest))
    manifest = read_any_manifest(path)
    if not isinstance(manifest, SettingManifest):
        raise UsageError(
            f"--manifest {request.manifest}: is one of calibrate, which is tested by decoding fresh data: pass --data. "
            "Losses test manifests of certify."
        )
    promises = promised(manifest)
    if not promises:
        return VerifiedSettings(manifest=manifest, alpha=request.alpha)
    source = _checked_source(request, manifest)
    state = take_up(request, path, manifest=manifest.digest, promises=len(promises))
    if state is None:
        verdicts = verify_settings(source.sweep, manifest, alpha=request.alpha)
    else:
        names, unit = unit_names(source.sweep)
        state.check_new(names, are_own=True, unit=unit)
        state.keep(with_settings(state.evidence, names, sweep=source.sweep, manifest=manifest))
        verdicts = state.evidence.verdicts(promises)
    return VerifiedSettings(
        manifest=manifest,
        alpha=request.alpha,
        verdicts=tuple(verdicts),
        evidence=None if state is None else state.evidence,
        examples=len(source.sweep.ids),
    )


def _checked_source(request: VerifyRequest, manifest: SettingManifest) -> Source:
    """Returns the fresh losses, which can test the manifest."""
    plan = manifest.plan
    _check_kind(request, plan)
    source = _source(request, manifest)
    if plan.metric is not None and plan.direction is None and source.direction == LOWER:
        raise UsageError(
            f"a lower {plan.metric} is better, and the manifest is of an earlier calm-beam, which took higher ones for "
            "better: it promises the opposite of what it says. Certify again."
        )
    if plan.task is not None and source.task != plan.task:
        raise UsageError(f"the fresh runs are of task {source.task!r}, and the manifest is about {plan.task!r}.")
    check_fresh(source.sweep, manifest)
    if (caution := why_not_fresh(source.sweep, manifest)) is not None:
        say(f"caution: {caution}")
    return source


def _check_kind(request: VerifyRequest, plan: SettingPlan) -> None:
    """Refuses losses where the manifest was made of scores, other scores, and so on."""
    kind, is_named = "scores (--baseline and --candidates)", request.baseline is not None
    if plan.metric is None:
        kind, is_named = "losses (--losses)", bool(request.losses)
    if plan.consistency is not None:
        kind, is_named = "outputs (--outputs)", request.outputs is not None
    if not is_named:
        raise UsageError(f"the manifest was made of {kind}: name fresh ones.")
    metric = request.metric_of_scores
    if metric not in (None, plan.metric):
        raise UsageError(f"--metric={metric}: the manifest is about {plan.metric}.")
    if request.direction is not None and plan.direction not in (None, request.direction):
        raise UsageError(f"--direction={request.direction}: the manifest says that a {plan.direction} score is better.")


def _source(request: VerifyRequest, manifest: SettingManifest) -> Source:
    """Returns the fresh losses, read as those of the manifest were."""
    loss, plan = manifest.calibrations[0].loss, manifest.plan
    if request.outputs is not None:
        return _fresh_outputs(request, manifest)
    if request.baseline is None:
        return read_losses(request, loss=loss, group_key=plan.group_key, cluster_key=plan.cluster_key)
    return read_scores(
        request,
        loss=loss,
        task=request.task,
        metric=plan.metric,
        direction=plan.direction if request.direction is None else request.direction,
        cluster_key=plan.cluster_key,
    )


def _fresh_outputs(request: VerifyRequest, manifest: SettingManifest) -> Source:
    """Returns the losses of fresh outputs of the same decoder, made as those of the manifest were."""
    plan, decoder = manifest.plan, manifest.decoder
    assert plan.consistency is not None
    assert plan.metric is not None
    assert decoder is not None, "it was made of outputs"
    # Looking it up might import it.
    check_may_run(plan.metric, named=request.metrics or (), how=f"pass --metric={plan.metric}")
    check_source(plan.metric, manifest.software)
    source = read_outputs(
        request,
        loss=manifest.calibrations[0].loss,
        consistency=plan.consistency,
        metric=plan.metric,
        group_key=plan.group_key,
        cluster_key=plan.cluster_key,
    )
    fresh = source.sweep.decoder
    assert fresh is not None, "it was read of outputs"
    if fresh.name != decoder.name:
        raise UsageError(
            f"--outputs={request.outputs}: were decoded by {fresh.name}, and the manifest is about "
            f"{decoder.name}. Outputs of one decoder say nothing about another."
        )
    if source.baseline != plan.baseline:
        raise UsageError(
            f"--outputs={request.outputs}: the first setting is {source.baseline}, and the manifest compares with "
            f"{plan.baseline}."
        )
    return source
