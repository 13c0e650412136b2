"""What a decision of the output head costs: by all logits, by what decides here, and by a certified head."""

import functools
from collections.abc import Callable, Iterator

import jax
import numpy as np

from calm_beam.arithmetic import FLOAT32
from calm_beam.exits.certified_head import Certificate, certify
from calm_beam.exits.decision import decide, decide_by_logits
from calm_beam.exits.measures import measure_named
from calm_beam.exits.quantised_head import quantised_head

from .part import Case, Clock, Scale, fastest

_THRESHOLD = 0.9
# Logits then have about this standard deviation, with which the two largest are as far apart as they can be.
_LOGIT_SCALE = 9.0
_FORMS = ("int8", "bfloat16")


def measure(scale: Scale, clock: Clock) -> Iterator[Case]:
    """Yields the seconds of a decision and the gains of certified heads, for every head and number of rows."""
    yield from clock.within(_cases(scale))


def _cases(scale: Scale) -> Iterator[tuple[Case, Callable[[], Case]]]:
    sizes = [(vocabulary, width) for vocabulary in scale.vocabularies for width in scale.widths]
    # The small ones first: what takes longest is left out, if anything.
    for vocabulary, width in sorted(sizes, key=lambda size: size[0] * size[1]):
        made = functools.cache(functools.partial(_made, vocabulary, width))
        for rows in scale.rows:
            case = {"measured": "decision", "vocabulary": vocabulary, "width": width, "rows": rows}
            yield case, functools.partial(_compared, scale, made, rows)


def _made(vocabulary: int, width: int) -> tuple[jax.Array, dict[str, object]]:
    weights = jax.random.normal(jax.random.key(0), (vocabulary, width)) * (_LOGIT_SCALE * width**-0.5)
    return weights, {form: quantised_head(weights, form) for form in _FORMS}


def _compared(scale: Scale, made: Callable[[], tuple[jax.Array, dict[str, object]]], rows: int) -> Case:
    weights, heads = made()
    states = jax.random.normal(jax.random.key(rows), (rows, weights.shape[1]))
    measured = measure_named("softmax")
    plain = jax.jit(functools.partial(decide_by_logits, vocab_axis=0, measure=measured, arithmetic=FLOAT32))
    used = jax.jit(functools.partial(decide, vocab_axis=0, measure=measured, arithmetic=FLOAT32))
    token, confidence, _ = map(np.asarray, plain(states, weights))
    used_token, used_confidence, _ = map(np.asarray, used(states, weights))
    seconds = fastest(lambda: used(states, weights), runs=scale.runs)
    case: Case = {
        "seconds": seconds,
        "gain_over_logits": fastest(lambda: plain(states, weights), runs=scale.runs) / seconds,
        "decided_by_kernel": "pallas" in str(jax.make_jaxpr(used)(states, weights)),
        "other_tokens": int((used_token != token).sum()),
        "largest_difference": float(np.abs(used_confidence - confidence).max()),
        "operations": 2 * rows * weights.size,
        "bytes_read": 4 * (weights.size + states.size),
    }
    for form, head in heads.items():
        certified = jax.jit(functools.partial(certify, measure=measured))
        found: Certificate = jax.tree.map(np.asarray, certified(states, head))
        is_open = (found.low < np.float32(_THRESHOLD)) & (found.high >= np.float32(_THRESHOLD))
        call = functools.partial(certified, states, head)
        case[f"{form}_gain"] = seconds / fastest(call, runs=scale.runs)
        case[f"{form}_decided"] = float((found.is_certain & ~is_open).mean())
        case[f"{form}_other_tokens"] = int((found.token != token)[found.is_certain].sum())
        case[f"{form}_outside"] = int(
            ((confidence < found.low - 1e-5) | (confidence > found.high + 1e-5))[found.is_certain].sum()
        )
    return case
