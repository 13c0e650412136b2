"""Which form of the output head decides: the exact one, or a certified one that this machine computes faster."""

import functools
import logging
import time
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from calm_beam.arithmetic import Arithmetic
from calm_beam.native import library

from .certified_head import certify
from .head_forms import check_head, may_certify
from .measures import Measure, Need
from .quantised_head import CertifiedHead, quantised_head

_LOGGER = logging.getLogger(__name__)

# How much faster a certified head must be, since some decisions are made twice.
_WORTH = 0.85
_REPETITIONS = 3


ExactFor = Callable[[jax.Array, int], Callable[[jax.Array], Any]]
"""Takes the weights of a head and the axis of the vocabulary; returns what decides states, (rows, width), by them."""


def choose_heads(
    exit_head: str,
    weights: Sequence[tuple[jax.Array, int]],
    *,
    measure: Measure,
    arithmetic: Arithmetic,
    rows: int,
    exact_for: ExactFor,
) -> list[CertifiedHead | None]:
    """Returns the heads that certify decisions, one for each kernel of a model, all of the form that the first takes.

    Args:
      exit_head: As in `choose_head`, like what is not named here.
      weights: Of each head, with the axis of the vocabulary.
      measure: As there.
      arithmetic: As there.
      rows: As there.
      exact_for: As there.

    Raises:
      ValueError: As there.
    """
    (first, vocab_axis), *others = weights
    chosen = choose_head(
        exit_head,
        first,
        vocab_axis=vocab_axis,
        measure=measure,
        arithmetic=arithmetic,
        rows=rows,
        exact_for=exact_for,
    )
    if chosen is None:
        return [None] * len(weights)
    form = str(chosen.quantised.dtype)
    return [chosen, *(quantised_head(jnp.moveaxis(each, axis, 0), form) for each, axis in others)]


def choose_head(
    exit_head: str,
    weights: jax.Array,
    *,
    vocab_axis: int,
    measure: Measure,
    arithmetic: Arithmetic,
    rows: int,
    exact_for: ExactFor,
) -> CertifiedHead | None:
    """Returns the head that certifies decisions, or None if the exact head decides.

    Tokens and exit layers are the same with each; only the time differs, and what is stored as a confidence: of a
    certified head it is the middle of an interval.

    Args:
      exit_head: One of `EXIT_HEADS`. `auto` computes some decisions with each form and takes the fastest.
      weights: shape (width, vocabulary), or its transpose.
      vocab_axis: Axis of the vocabulary in `weights`.
      measure: What decides. For one of the user's own, of logits, nothing can be certified.
      arithmetic: Of the model. Where products are rounded more than float32 does, nothing can be certified: the bounds
        are about the products of real numbers.
      rows: States that are usually decided at a time.
      exact_for: What decides otherwise; compared by time.

    Raises:
      ValueError: If `exit_head` is none of these, or one that certifies what cannot be.
    """
    check_head(exit_head, arithmetic)
    has_no_bounds = measure.needs is Need.LOGITS and measure.bounds is None
    if has_no_bounds or not may_certify(exit_head, arithmetic, size=weights.size):
        return None
    if exit_head != "auto":
        return quantised_head(jnp.moveaxis(weights, vocab_axis, 0), held_as(exit_head))
    if not jnp.isfinite(weights).all():
        return None
    by_entry = jnp.moveaxis(weights, vocab_axis, 0)
    # States as the final norm leaves them.
    states = jnp.asarray(np.random.default_rng(0).standard_normal((rows, weights.shape[1 - vocab_axis])), weights.dtype)
    heads = {form: quantised_head(by_entry, held_as(form)) for form in ("int8", "bfloat16")}
    certified = jax.jit(functools.partial(certify, measure=measure))
    seconds = {
        "exact": _seconds(exact_for(weights, vocab_axis), states),
        **{form: _seconds(certified, states, head) for form, head in heads.items()},
    }
    fastest = min(seconds, key=lambda form: seconds[form] * (_WORTH if form == "exact" else 1))
    _LOGGER.info(
        "exit head: %s; of %d rows, %s",
        fastest,
        rows,
        ", ".join(f"{name} {1e3 * each:.1f} ms" for name, each in seconds.items()),
    )
    return heads.get(fastest)


def compiled(decide: Callable[..., Any], **options: Any) -> ExactFor:
    """Returns what XLA decides by, given a function of states and weights, and its options but `vocab_axis`."""
    run = jax.jit(functools.partial(decide, **options), static_argnames="vocab_axis")
    return lambda weights, vocab_axis: lambda states: run(states, weights, vocab_axis=vocab_axis)


def held_as(form: str) -> str:
    """Returns what a certified form of the head is quantised to: int8 for native code where there is some."""
    return "uint8" if form == "int8" and library.is_available() else form


def _seconds(decided: Any, *args: Any) -> float:
    """Returns how long some decisions take, without compiling."""
    jax.block_until_ready(decided(*args))
    times = []
    for _ in range(_REPETITIONS):
        started = time.perf_counter()
        jax.block_until_ready(decided(*args))
        times.append(time.perf_counter() - started)
    return min(times)
