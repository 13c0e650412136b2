"""How fast what was promised is, measured in turns with the full model once the manifest stands."""

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
from calm_beam.manifest import MANIFEST, Calibration, Manifest, SpeedRecord, Variant, write_manifest
from calm_beam.outputs.prepared import PreparedSweep
from calm_beam.storage import joined
from calm_beam.text import counted

from .auto import first_prompts
from .options import BATCH
from .request import CalibrateRequest
from .run import CalibrationRun
from .sources import DecodedSource

# Prompts and seconds that a measurement takes at most, of each number of prompts at a time.
_PROMPTS, _SECONDS = 256, 3.0
# Rules that are timed at most, since each has to be compiled; their thresholds share that.
_RULES = 3
_Way = tuple[Variant | None, float]


def with_speeds(run: CalibrationRun, manifest: Manifest, request: CalibrateRequest) -> Manifest:
    """Returns the manifest with the speeds of its promises, and publishes it in place of itself.

    What turns out to be slower than the full model by what exits were to save is promised no more: never to exit is
    safe whatever was proved. Promises that were confirmed stay.

    Args:
      run: Has found it, on this machine.
      manifest: Of which exits were chosen by seconds.
      request: Asked for them.
    """
    ways = _timed(manifest)
    if not ways:
        return manifest
    assert isinstance(run.source, DecodedSource)
    use_compilation_cache()
    asked = run.source.sweep.request
    declared = Declared(activation=asked.activation, relative_max_distance=asked.relative_max_distance)
    # Once more, since a sweep is run without its arrays (`PreparedSweep` leaves them to workers).
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
    """Returns the prompts that are padded to the commonest width, since each width is compiled for by itself."""
    by_width = members_by_width(prompts, settings.max_input_length)
    return [prompts[index] for index in max(by_width.values(), key=len)]


def _timed(manifest: Manifest) -> list[_Way]:
    """Returns ways of exiting that are promised, of few rules: that which is served first, and then in their order."""
    ways: dict[_Way, None] = {}
    rules: set[object] = set()
    served = () if manifest.served is None else (manifest.served,)
    for entry in (*served, *manifest.calibrations):
        if entry.threshold is None:
            continue
        variant, threshold = _way(entry)
        # Static layers are compiled for each of them.
        is_static = recorded_rule(manifest.decode_of(entry)).measure().needs is Need.LAYER
        rule = (variant, threshold if is_static else None)
        if rule in rules or len(rules) < _RULES:
            rules.add(rule)
            ways[variant, threshold] = None
    return list(ways)


def _also(sweep: PreparedSweep, *, batch: int) -> tuple[int, ...]:
    """Returns another number of prompts at a time, which is timed too where nothing has to be compiled for it."""
    if batch == 1 and Serving.of(sweep, batch=BATCH).engine().name == "native":
        return (BATCH,)
    return ()


def _speeds(
    sweep: PreparedSweep, manifest: Manifest, prompts: Sequence[Sequence[int]], *, ways: list[_Way], batch: int
) -> list[SpeedRecord]:
    """Returns how fast each way of exiting is, of so many prompts at a time."""
    serving = Serving.of(sweep, batch=batch)
    say(
        f"speed: up to {counted(len(prompts), 'prompt')} by the full model and by {counted(len(ways), 'threshold')}, "
        f"{'one at a time' if batch == 1 else f'in batches of {batch}'}"
    )

    def rule(variant: Variant | None) -> ExitRule:
        return (sweep.settings if variant is None else settings_of_variant(sweep.settings, variant)).rule

    found = measure_speedups(
        serving.decoder(ExitRule(confidence="static"), None),
        {(variant, threshold): serving.decoder(rule(variant), threshold) for variant, threshold in ways},
        prompts=prompts,
        max_input_length=sweep.settings.max_input_length,
        together=batch,
        most_seconds=_SECONDS,
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
    """Returns an entry that never exits, since what was proved does not pay."""
    of_none: dict[str, Any] = dict.fromkeys(("threshold", "variant", "threshold_by_position", "rule", "example_risk"))
    return dataclasses.replace(entry, pays=False, layers=layers, risk=0.0, **of_none)
