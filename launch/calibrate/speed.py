"""Speed of proved thresholds, measured in alternation with the full model after the manifest is published.

Of several variants that were proved safe together, the fastest is promised. Before, one was chosen by the cost of a
token, which leaves out the rest of its batch: a layer costs nearly as much for few rows as for many, and only with
static layers do all rows of a batch exit together.
"""

import dataclasses
from collections.abc import Sequence
from typing import Any

from calm_beam.calibration.pareto import PARTS
from calm_beam.calibration.publish import EarlierResult, publish, read_failures, with_positions
from calm_beam.calibration.result import RiskRow, read_risk_table
from calm_beam.calibration.variants import promising, proved_by_variant, with_places_of
from calm_beam.checkpoints import Declared, load_checkpoint
from calm_beam.decoding.compilation import members_by_width, use_compilation_cache
from calm_beam.decoding.settings import DecodeSettings, recorded_rule, settings_of_variant
from calm_beam.decoding.single_prompts import SinglePromptDecoder
from calm_beam.evaluation.serving_speed import Serving, Speedup, measure_speedups
from calm_beam.exits.measures import Need
from calm_beam.exits.rule import ExitRule
from calm_beam.launch.terminal import say
from calm_beam.launch.terminal.progress import shown_progress, timing_in
from calm_beam.manifest import MANIFEST, Calibration, Manifest, PathEntry, SpeedRecord, Variant, write_manifest
from calm_beam.manifest.files import RISK_TABLE
from calm_beam.outputs.prepared import PreparedSweep
from calm_beam.storage import joined
from calm_beam.text import counted

from .auto import first_prompts
from .options import BATCH
from .request import CalibrateRequest
from .run import CalibrationRun
from .sources import DecodedSource

# Most prompts of a measurement; and most seconds, with the batch size of the objective and with another one.
_PROMPTS, _SECONDS, _OTHER_SECONDS = 256, 3.0, 1.5
# At least this many batches, where they are larger.
_BATCHES = 6
# Most rules that are timed where each has to be compiled; thresholds of one rule share its compilation.
_RULES = 3
# Most seconds for each threshold whose speed is compared with that of others: for single prompts, and for batches.
_COMPARED_SECONDS, _COMPARED_IN_BATCHES = 0.25, 1.0
# Standard error, as a share of the factor, above which a speed is measured once more.
_MOST_ERROR = 0.1
# Most thresholds that take turns with the full model, since the decoder of each has the model's weights in memory.
_AT_A_TIME = 4
_Way = tuple[Variant | None, float]


def with_speeds(run: CalibrationRun, manifest: Manifest, request: CalibrateRequest) -> Manifest:
    """Returns the manifest with the speeds of its promises, and publishes it in place of itself.

    Where native code serves, each promise is about the fastest of its variants that were proved safe; other engines
    would compile each of them. A threshold that is not clearly faster than the full model, in the quantity that exits
    should save, is no longer promised: never exiting is safe whatever was proved. Confirmed promises stay.

    Args:
      run: The run that made the manifest, on this machine.
      manifest: A manifest whose exits were chosen by seconds.
      request: The request of the run.

    Raises:
      ManifestError: If another run has published meanwhile.
    """
    assert isinstance(run.source, DecodedSource)
    batch = request.objective_batch
    is_native = Serving.of(run.source.sweep, batch=batch).engine().name == "native"
    rivals = _rivals(manifest) if is_native else []
    most_rules = len(manifest.calibrations) if is_native else _RULES
    if not any(rivals) and not _timed(manifest, most_rules=most_rules):
        return manifest
    use_compilation_cache()
    asked = run.source.sweep.request
    declared = Declared(activation=asked.activation, relative_max_distance=asked.relative_max_distance)
    # Loaded again, since a sweep runs without its arrays (`PreparedSweep` leaves them to workers).
    sweep = dataclasses.replace(run.source.sweep, checkpoint=load_checkpoint(asked.model, declared=declared))
    count = max(_PROMPTS, _BATCHES * batch)
    prompts = _of_one_width(
        first_prompts(request, sweep, count=count, parts=PARTS, selection_share=None), sweep.settings
    )
    found = _with_fastest(sweep, manifest, rivals, prompts, batch=batch) if any(rivals) else manifest
    ways = _timed(found, most_rules=most_rules)
    if not ways:
        return manifest
    speeds = [
        speed
        for size in (batch, *_also(sweep, batch=batch))
        for speed in _speeds(
            sweep, found, prompts, ways=ways, batch=size, most_seconds=_SECONDS if size == batch else _OTHER_SECONDS
        )
    ]
    slow = {
        place
        for speed in speeds
        if speed.batch == batch and not _is_clearly_faster(speed.factor, speed.standard_error)
        for place in speed.calibrations
    }
    entries = tuple(
        _never(entry, layers=manifest.model.layers) if place in slow and entry.confirmation is None else entry
        for place, entry in enumerate(found.calibrations)
    )
    found = dataclasses.replace(found, calibrations=entries, speeds=tuple(speeds))
    _publish_again(run, found, earlier=manifest)
    return found


def _is_clearly_faster(factor: float, standard_error: float | None) -> bool:
    """Returns whether a threshold is faster than the full model by at least the standard error."""
    return factor - (standard_error or 0.0) >= 1


def _publish_again(run: CalibrationRun, manifest: Manifest, *, earlier: Manifest) -> None:
    """Publishes a manifest in place of an earlier one of the same run, and its risk table if paths have changed."""
    if [entry.path for entry in manifest.calibrations] == [entry.path for entry in earlier.calibrations]:
        write_manifest(manifest, joined(run.output, MANIFEST), overwrite=True)
        return
    rows = read_risk_table(joined(run.output, RISK_TABLE), RiskRow)
    publish(
        run.output,
        manifest,
        rows=with_places_of(rows, manifest.calibrations),
        failures=read_failures(run.output),
        earlier=EarlierResult.found_in(run.output),
    )


def _rivals(manifest: Manifest) -> list[tuple[PathEntry, ...]]:
    """Returns for each promise the thresholds whose speeds are compared: the last proved one of each variant.

    Empty where there is nothing to choose. Thresholds that no token reaches are the full model.
    """
    assert manifest.plan is not None, "a run has a plan"
    # A holdout confirms the choices that were made before it. And where clusters are units, the manifest has the mean
    # loss over examples of the chosen variant alone.
    if manifest.plan.confirm_share is not None or manifest.data.clusters is not None:
        return [() for _ in manifest.calibrations]
    proved = [
        tuple(step for step in proved_by_variant(entry) if step.layers < manifest.model.layers)
        for entry in manifest.calibrations
    ]
    return [
        steps if len(steps) > 1 or entry.threshold is None else ()
        for entry, steps in zip(manifest.calibrations, proved, strict=True)
    ]


def _with_fastest(
    sweep: PreparedSweep,
    manifest: Manifest,
    rivals: Sequence[Sequence[PathEntry]],
    prompts: Sequence[Sequence[int]],
    *,
    batch: int,
) -> Manifest:
    """Returns the manifest with every promise about the fastest of its rivals.

    A promise that gave up exits by the cost of a token gets them back if one of its rivals is clearly faster.
    """
    ways = list(dict.fromkeys(_way(step) for steps in rivals for step in steps))
    say(f"speed: comparing {counted(len(ways), 'threshold')} proved safe")
    serving = Serving.of(sweep, batch=batch)
    each = _COMPARED_SECONDS if batch == 1 else _COMPARED_IN_BATCHES
    found = _measured(sweep, serving, prompts, ways=ways, most_seconds=each * len(ways))
    entries = []
    for entry, steps in zip(manifest.calibrations, rivals, strict=True):
        if steps:
            fastest = max(steps, key=lambda step: found[_way(step)].factor.mean)
            variant, gain = fastest.variant, found[_way(fastest)].factor
            assert variant is not None, "variants were tested"
            pays = entry.threshold is not None or _is_clearly_faster(gain.mean, gain.standard_error)
            if pays and variant != entry.variant:
                entry = with_positions(promising(entry, variant), settings_of_variant(sweep.settings, variant))
        entries.append(entry)
    return dataclasses.replace(manifest, calibrations=tuple(entries))


def _of_one_width(prompts: Sequence[Sequence[int]], settings: DecodeSettings) -> list[Sequence[int]]:
    """Returns the prompts with the most common padded width, since each width needs its own compilation."""
    by_width = members_by_width(prompts, settings.max_input_length)
    return [prompts[index] for index in max(by_width.values(), key=len)]


def _timed(manifest: Manifest, *, most_rules: int) -> list[_Way]:
    """Returns promised exit rules and thresholds, of at most so many rules: the served one first, then in order."""
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
        if rule in rules or len(rules) < most_rules:
            rules.add(rule)
            ways[variant, threshold] = None
    return list(ways)


def _also(sweep: PreparedSweep, *, batch: int) -> tuple[int, ...]:
    """Returns another batch size to time, if nothing has to be compiled for it; else nothing."""
    if batch == 1 and Serving.of(sweep, batch=BATCH).engine().name == "native":
        return (BATCH,)
    return ()


def _speeds(
    sweep: PreparedSweep,
    manifest: Manifest,
    prompts: Sequence[Sequence[int]],
    *,
    ways: list[_Way],
    batch: int,
    most_seconds: float,
) -> list[SpeedRecord]:
    """Returns the speed of each way of exiting at a batch size."""
    serving = Serving.of(sweep, batch=batch)
    say(
        f"speed: up to {counted(len(prompts), 'prompt')} by the full model and by {counted(len(ways), 'threshold')}, "
        f"{'one at a time' if batch == 1 else f'in batches of {batch}'}"
    )
    found = _measured(sweep, serving, prompts, ways=ways, most_seconds=most_seconds)
    return [_record(manifest, way, speedup, serving=serving) for way, speedup in found.items()]


def _measured(
    sweep: PreparedSweep,
    serving: Serving,
    prompts: Sequence[Sequence[int]],
    *,
    ways: Sequence[_Way],
    most_seconds: float,
) -> dict[_Way, Speedup]:
    """Returns the speedup of each way of exiting over the full model; `most_seconds` is for all together.

    A speed that is uncertain is measured once more, since the machine may stall while one decoder has its turn.
    """
    full = serving.decoder(ExitRule(confidence="static"), None)

    def decoder(variant: Variant | None, threshold: float) -> SinglePromptDecoder:
        settings = sweep.settings if variant is None else settings_of_variant(sweep.settings, variant)
        return serving.decoder(settings.rule, threshold)

    def speedups(asked: Sequence[_Way]) -> dict[_Way, Speedup]:
        found: dict[_Way, Speedup] = {}
        for start in range(0, len(asked), _AT_A_TIME):
            some = asked[start : start + _AT_A_TIME]
            found |= measure_speedups(
                full,
                {way: decoder(*way) for way in some},
                prompts=prompts,
                max_input_length=sweep.settings.max_input_length,
                together=serving.batch,
                most_seconds=most_seconds * len(some) / len(ways),
                on_decoded=timing_in(progress),
            )
        return found

    with shown_progress(enabled=True) as progress:
        found = speedups(ways)
        for way, again in speedups([way for way in ways if _error(found[way]) > _MOST_ERROR]).items():
            if _error(again) < _error(found[way]):
                found[way] = again
    return found


def _error(speedup: Speedup) -> float:
    """Returns the standard error of a factor, as a share of it; 0 if it is not known."""
    return (speedup.factor.standard_error or 0.0) / speedup.factor.mean


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


def _way(exits: Calibration | PathEntry) -> _Way:
    """Returns how an entry with a threshold exits, or a threshold that was tested."""
    assert exits.threshold is not None, "an entry that never exits has no way of exiting"
    return exits.variant, exits.threshold


def _never(entry: Calibration, *, layers: int) -> Calibration:
    """Returns the entry with no exits, since its proved threshold does not pay off."""
    of_none: dict[str, Any] = dict.fromkeys(("threshold", "variant", "threshold_by_position", "rule", "example_risk"))
    return dataclasses.replace(entry, pays=False, layers=layers, risk=0.0, **of_none)
