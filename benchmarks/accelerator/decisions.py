"""What a decision of the output head costs: by all logits, and by what decides in batches."""

import functools
from collections.abc import Callable, Iterator

import jax
import numpy as np

from calm_beam.decoding.compilation import compiled
from calm_beam.exits.decision import decide, decide_by_logits
from calm_beam.exits.measures import measure_named
from calm_beam.precision import FLOAT32

from .part import Case, Clock, Scale, fastest

# Logits then have about this standard deviation, with which the two largest are as far apart as they can be.
_LOGIT_SCALE = 9.0


def measure(scale: Scale, clock: Clock) -> Iterator[Case]:
    """Yields the seconds of a decision, for every head and number of rows."""
    yield from clock.within(_cases(scale))


def _cases(scale: Scale) -> Iterator[tuple[Case, Callable[[], Case]]]:
    sizes = [(vocabulary, width) for vocabulary in scale.vocabularies for width in scale.widths]
    # The small ones first: what takes longest is left out, if anything.
    for vocabulary, width in sorted(sizes, key=lambda size: size[0] * size[1]):
        made = functools.cache(functools.partial(_made, vocabulary, width))
        for rows in scale.rows:
            case = {"measured": "decision", "vocabulary": vocabulary, "width": width, "rows": rows}
            yield case, functools.partial(_compared, scale, made, rows)


def _made(vocabulary: int, width: int) -> jax.Array:
    return jax.random.normal(jax.random.key(0), (vocabulary, width)) * (_LOGIT_SCALE * width**-0.5)


def _compared(scale: Scale, made: Callable[[], jax.Array], rows: int) -> Case:
    weights = made()
    states = jax.random.normal(jax.random.key(rows), (rows, weights.shape[1]))
    measured = measure_named("softmax")
    plain = compiled(functools.partial(decide_by_logits, vocab_axis=0, measure=measured, precision=FLOAT32))
    used = compiled(functools.partial(decide, vocab_axis=0, measure=measured, precision=FLOAT32))
    token, confidence, _ = map(np.asarray, plain(states, weights))
    used_token, used_confidence, _ = map(np.asarray, used(states, weights))
    seconds = fastest(lambda: used(states, weights), runs=scale.runs)
    return {
        "seconds": seconds,
        "gain_over_logits": fastest(lambda: plain(states, weights), runs=scale.runs) / seconds,
        "other_tokens": int((used_token != token).sum()),
        "largest_difference": float(np.abs(used_confidence - confidence).max()),
        "operations": 2 * rows * weights.size,
        "bytes_read": 4 * (weights.size + states.size),
    }
