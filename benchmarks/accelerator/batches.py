"""Tokens a second of many prompts served together, with exits and without, in the same engine."""

import functools
from collections.abc import Callable, Iterator

from calm_beam.decoding.branches import Branch
from calm_beam.decoding.decoder import Decoder
from calm_beam.exits.rule import ExitRule

from .models import model_of, prompts_for, thresholds_for
from .part import Case, Clock, Scale, Way, fastest, peak_device_bytes

_MEASURES = ("softmax", "state")
_SHARES = (0.25, 0.5)
# Of the prompts that are decoded, as many batches.
_BATCHES = 3


def measure(scale: Scale, clock: Clock) -> Iterator[Case]:
    """Yields tokens a second for every model, size of batch, measure and way."""
    yield from clock.within(_cases(scale))


def _cases(scale: Scale) -> Iterator[tuple[Case, Callable[[], Case]]]:
    for name, _ in scale.models:
        for size in scale.batches:
            for measured in _MEASURES:
                for way in scale.ways:
                    case = {
                        "measured": "batch",
                        "model": name,
                        "prompts_at_a_time": size,
                        "confidence": measured,
                        "in": way.name,
                    }
                    yield case, functools.partial(_gains, scale, name, measured, way, size)


def _gains(scale: Scale, name: str, measured: str, way: Way, size: int) -> Case:
    full, _ = _tokens_per_second(scale, name, measured, None, way=way, size=size)
    gains = []
    for threshold in thresholds_for(scale, name, measured, _SHARES):
        ours, layers = _tokens_per_second(scale, name, measured, threshold, way=way, size=size)
        gains.append({"layers": layers, "gain": ours / full})
    return {"full_model_tokens_per_second": full, "gains": gains, "peak_device_bytes": peak_device_bytes()}


def _tokens_per_second(
    scale: Scale, name: str, measured: str, threshold: float | None, *, way: Way, size: int
) -> tuple[float, float]:
    """Returns tokens a second, and the layers that a token takes."""
    rule = ExitRule(confidence=measured)
    decoder = Decoder(
        model_of(scale, name),
        [Branch.at(rule, threshold, max_decode_length=scale.steps)],
        max_input_length=scale.prompt_tokens,
        batch_size=size,
        exit_head="exact",
        precision=way.precision,
    )
    prompts = prompts_for(scale, name, _BATCHES * size)
    results = [result.branch(0) for _, result in decoder.decode(prompts)]
    tokens = sum(result.length for result in results)
    seconds = fastest(lambda: [result.tokens for _, result in decoder.decode(prompts)], runs=scale.runs, warm=False)
    return tokens / seconds, sum(int(result.exit_layers.sum()) for result in results) / tokens
