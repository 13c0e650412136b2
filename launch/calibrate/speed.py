"""Speed of promised thresholds, measured in alternation with the full model after the manifest is published."""

import dataclasses
from collections.abc import Sequence
from typing import Any

from calm_beam.calibration.pareto import PARTS
from calm_beam.checkpoints import Declared, load_checkpoint
from calm_beam.decoding.compilation import members_by_width, use_compilation_cache
from calm_beam.decoding.settings import DecodeSettings, recorded_rule, settings_of_variant
from calm_beam.evaluation.serving_speed import Serving, Speedup, measure_speedups
from calm_beam.exits.measures import Need
from calm_beam.exits.rule import ExitRule
from calm_beam.launch.terminal import say
from calm_beam.launch.terminal.progress import shown_progress, timing_in
from calm_beam.manifest import MANIFEST, Calibration, Manifest, SpeedRecord, Variant, write_manifest
from calm_beam.outputs.prepared import PreparedSweep
from calm_beam.storage import joined
from calm_beam.text import counted

from .auto import first_prompts
from .options import BATCH
from .request import CalibrateRequest
from .run import CalibrationRun
from .sources import DecodedSource

# Most prompts and seconds of a measurement, for each batch size.
_PROMPTS, _SECONDS = 256, 3.0
# Most rules that are timed, since each has to be compiled; thresholds of one rule share its compilation.
_RULES = 3
_Way = tuple[Variant | None, float]


def with_speeds(run: CalibrationRun, manifest: Manifest, request: CalibrateRequest) -> Manifest:
    """Returns the manifest with the speeds of its promises, and publishes it in place of itself.

    A threshold that is slower than the full model, in the quantity that exits should save, is no longer promised: never
    exiting is safe whatever was proved. Confirmed promises stay.

    Args:
      run: The run that made the manifest, on this machine.
      manifest: A manifest whose exits were chosen by seconds.
      request: The request of the run.
    """
    ways = _timed(manifest)
    if not ways:
        return manifest
    assert isinstance(run.source, DecodedSource)
    use_compilation_cache()
    asked = run.source.sweep.request
    declared = Declared(activation=asked.activation, relative_max_distance=asked.relative_max_distance)
    # Loaded again, since a sweep runs without its arrays (`PreparedSweep` leaves them to workers).
    sweep = dataclasses.replace(run.source.sweep, checkpoint=load_checkpoint(asked.model, declared=declared))
    prompts = _of_one_width(
        first_prompts(request, sweep, count=_PROMPTS, parts=PARTS, selection_share=None), sweep.settings
    )
    batch = request.objective_batch
    speeds = [
        speed
        for size in (batch, *_also(sweep, batch=batch))
        for speed in _speeds(sweep, manifest, prompts, ways=ways, batch=size)
    ]
    slow = {place for speed in speeds if speed.batch == batch and speed.factor < 1 for place in speed.calibrations}
    entries = tuple(
        _never(entry, layers=manifest.model.layers) if place in slow and entry.confirmation is None else entry
        for place, entry in enumerate(manifest.calibrations)
    )
    found = dataclasses.replace(manifest, calibrations=entries, speeds=tuple(speeds))
    write_manifest(found, joined(run.output, MANIFEST), overwrite=True)
    return found


def _of_one_width(prompts: Sequence[Sequence[int]], settings: DecodeSettings) -> list[Sequence[int]]:
    """Returns the prompts with the most common padded width, since each width needs its own compilation."""
    by_width = members_by_width(prompts, settings.max_input_length)
    return [prompts[index] for index in max(by_width.values(), key=len)]


def _timed(manifest: Manifest) -> list[_Way]:
    """Returns promised exit rules and thresholds, of at most `_RULES` rules: the served one first, then in order."""
    ways: dict[_Way, None] = {}
    rules: set[object] = set()
    served = () if manifest.served is None else (manifest.served,)
    for entry in (*served, *manifest.calibrations):
        if entry.threshold is None:
            continue
        variant, threshold = _way(entry)
        # Each static layer needs its own compilation.
        is_static = recorded_rule(manifest.decode_of(entry)).measure().needs is Need.LAYER
        rule = (variant, threshold if is_static else None)
        if rule in rules or len(rules) < _RULES:
            rules.add(rule)
            ways[variant, threshold] = None
    return list(ways)


def _also(sweep: PreparedSweep, *, batch: int) -> tuple[int, ...]:
    """Returns another batch size to time, if nothing has to be compiled for it; else nothing."""
    if batch == 1 and Serving.of(sweep, batch=BATCH).engine().name == "native":
        return (BATCH,)
    return ()


def _speeds(
    sweep: PreparedSweep, manifest: Manifest, prompts: Sequence[Sequence[int]], *, ways: list[_Way], batch: int
) -> list[SpeedRecord]:
    """Returns the speed of each way of exiting at a batch size."""
    serving = Serving.of(sweep, batch=batch)
    say(
        f"speed: up to {counted(len(prompts), 'prompt')} by the full model and by {counted(len(ways), 'threshold')}, "
        f"{'one at a time' if batch == 1 else f'in batches of {batch}'}"
    )

    def rule(variant: Variant | None) -> ExitRule:
        return (sweep.settings if variant is None else settings_of_variant(sweep.settings, variant)).rule

    with shown_progress(enabled=True) as progress:
        found = measure_speedups(
            serving.decoder(ExitRule(confidence="static"), None),
            {(variant, threshold): serving.decoder(rule(variant), threshold) for variant, threshold in ways},
            prompts=prompts,
            max_input_length=sweep.settings.max_input_length,
            together=batch,
            most_seconds=_SECONDS,
            on_decoded=timing_in(progress),
        )
    return [_record(manifest, way, speedup, serving=serving) for way, speedup in found.items()]


def _record(manifest: Manifest, way: _Way, speedup: Speedup, *, serving: Serving) -> SpeedRecord:
    return SpeedRecord(
        calibrations=tuple(
            place
            for place, entry in enumerate(manifest.calibrations)
            if entry.threshold is not None and _way(entry) == way
        ),
        factor=speedup.factor.mean,
        standard_error=speedup.factor.standard_error,
        prompts=speedup.prompts,
        batch=serving.batch,
        seconds=speedup.seconds,
        full_seconds=speedup.full_seconds,
        device=serving.device,
        cores=serving.cores,
        engine=serving.engine(),
    )


def _way(entry: Calibration) -> _Way:
    """Returns how an entry with a threshold exits."""
    assert entry.threshold is not None, "an entry that never exits has no way of exiting"
    return entry.variant, entry.threshold


def _never(entry: Calibration, *, layers: int) -> Calibration:
    """Returns the entry with no exits, since its proved threshold does not pay off."""
    of_none: dict[str, Any] = dict.fromkeys(("threshold", "variant", "threshold_by_position", "rule", "example_risk"))
    return dataclasses.replace(entry, pays=False, layers=layers, risk=0.0, **of_none)
