"""A whole sweep, against a pass for each threshold with prompts side by side, and against one prompt at a time."""

import functools
from collections.abc import Callable, Iterator

from benchmarks import multiply_adds
from calm_beam.decoding.branches import Branch, sweep_branches
from calm_beam.decoding.compilation import CompileTime
from calm_beam.decoding.decoder import Decoder
from calm_beam.decoding.early_exit import EarlyExitDecoder
from calm_beam.exits.rule import ExitRule

from .models import model_of, prompts_for
from .part import Case, Clock, Scale, Way, fastest, peak_device_bytes

_RULE = ExitRule(confidence="softmax")
# Thresholds at which the rivals decode: what they take in between is taken for the same.
_RIVALS_THRESHOLDS = (0.75, 0.25)


def measure(scale: Scale, clock: Clock) -> Iterator[Case]:
    """Yields prompts times thresholds a second of the sweep and of its rivals, for each model."""
    yield from clock.within(_cases(scale))


def _cases(scale: Scale) -> Iterator[tuple[Case, Callable[[], Case]]]:
    for name, _ in scale.models:
        for thresholds in scale.thresholds:
            for way in scale.ways:
                case = {"measured": "sweep", "model": name, "thresholds": thresholds, "in": way.name}
                yield case, functools.partial(_sweep, scale, name, way, thresholds)
        yield {"measured": "once a threshold", "model": name}, functools.partial(_side_by_side, scale, name)
        yield {"measured": "one prompt at a time", "model": name}, functools.partial(_one_by_one, scale, name)


def _sweep(scale: Scale, name: str, way: Way, count: int) -> Case:
    checkpoint = model_of(scale, name)
    decoder = Decoder(
        checkpoint,
        sweep_branches(_RULE, tuple((place + 0.5) / count for place in range(count)), max_decode_length=scale.steps),
        max_input_length=scale.prompt_tokens,
        exit_head="exact",
        precision=way.precision,
    )
    prompts = prompts_for(scale, name, scale.prompts)
    with CompileTime() as compiling:
        list(decoder.decode(prompts))
    before = decoder.work
    seconds = _seconds(decoder, prompts, runs=scale.runs)
    work = decoder.work - before
    return {
        "seconds": seconds,
        # The full model is a branch too.
        "outputs_per_second": len(prompts) * (count + 1) / seconds,
        # Of layers, projections by the exact head and keys and values of skipped layers; padding does not count.
        "operations": 2 * multiply_adds.large_steps(checkpoint.config, work) // scale.runs,
        "compile_seconds": compiling.seconds(),
        "prompts_side_by_side": decoder.slots,
        "padded_share": work.padded_rows / (work.padded_rows + work.layer_rows),
        "peak_device_bytes": peak_device_bytes(),
    }


def _side_by_side(scale: Scale, name: str) -> Case:
    prompts, seconds = prompts_for(scale, name, scale.prompts), 0.0
    for threshold in _RIVALS_THRESHOLDS:
        decoder = Decoder(
            model_of(scale, name),
            [Branch.at(_RULE, threshold, max_decode_length=scale.steps)],
            max_input_length=scale.prompt_tokens,
        )
        list(decoder.decode(prompts))
        seconds += _seconds(decoder, prompts, runs=scale.runs)
    return {"outputs_per_second": len(prompts) * len(_RIVALS_THRESHOLDS) / seconds}


def _one_by_one(scale: Scale, name: str) -> Case:
    prompts, seconds = prompts_for(scale, name, scale.single_prompts), 0.0
    for threshold in _RIVALS_THRESHOLDS:
        decoder = EarlyExitDecoder(
            model_of(scale, name),
            Branch.at(_RULE, threshold, max_decode_length=scale.steps),
            max_input_length=scale.prompt_tokens,
        )
        list(decoder.decode(prompts))
        seconds += _seconds(decoder, prompts, runs=scale.runs)
    return {"outputs_per_second": len(prompts) * len(_RIVALS_THRESHOLDS) / seconds}


def _seconds(decoder: Decoder | Decoder | EarlyExitDecoder, prompts: list[tuple[int, ...]], *, runs: int) -> float:
    return fastest(lambda: [result.tokens for _, result in decoder.decode(prompts)], runs=runs, warm=False)
