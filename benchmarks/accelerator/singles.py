"""The gain of early exits over the full model where prompts are served one at a time."""

import functools
from collections.abc import Callable, Iterator

from calm_beam.decoding.branches import Branch
from calm_beam.decoding.early_exit import EarlyExitDecoder
from calm_beam.exits.rule import ExitRule

from .models import model_of, prompts_for, thresholds_for
from .part import Case, Clock, Scale, Way, fastest

_MEASURES = ("softmax", "state", "classifier", "static")
# Of eight: where the paper's own figures stand (1.73 layers for a speedup of 3.53), a quarter and a half.
_SHARES = (1.7 / 8, 2 / 8, 4 / 8)


def measure(scale: Scale, clock: Clock) -> Iterator[Case]:
    """Yields the gain of each measure at each share of the layers; the first model only."""
    yield from clock.within(_cases(scale))


def _cases(scale: Scale) -> Iterator[tuple[Case, Callable[[], Case]]]:
    name, _ = scale.models[0]
    for measured in _MEASURES:
        for way in scale.ways:
            case = {"measured": "one prompt at a time", "model": name, "confidence": measured, "in": way.name}
            yield case, functools.partial(_gains, scale, name, measured, way)


def _gains(scale: Scale, name: str, measured: str, way: Way) -> Case:
    # Static confidence is known without computing anything: it is the full model, and nothing else.
    full, _ = _seconds_and_layers(scale, name, "static", None, way=way)
    gains = []
    for threshold in thresholds_for(scale, name, measured, _SHARES):
        ours, layers = _seconds_and_layers(scale, name, measured, threshold, way=way)
        gains.append({"layers": layers, "gain": full / ours})
    return {"full_model_msec_a_token": 1e3 * full, "gains": gains}


def _seconds_and_layers(
    scale: Scale, name: str, measured: str, threshold: float | None, *, way: Way
) -> tuple[float, float]:
    """Returns seconds and layers that a token takes."""
    decoder = EarlyExitDecoder(
        model_of(scale, name),
        Branch.at(ExitRule(confidence=measured), threshold, max_decode_length=scale.steps),
        max_input_length=scale.prompt_tokens,
        exit_head="exact",
        precision=way.precision,
    )
    seconds, tokens, layers = 0.0, 0, 0
    for prompt in prompts_for(scale, name, scale.single_prompts):
        (_, result), *_ = decoder.decode([prompt])
        tokens += result.length
        layers += int(result.exit_layers.sum())
        seconds += fastest(functools.partial(_decoded, decoder, prompt), runs=scale.runs, warm=False)
    return seconds / tokens, layers / tokens


def _decoded(decoder: EarlyExitDecoder, prompt: tuple[int, ...]) -> object:
    return [result.tokens for _, result in decoder.decode([prompt])]
