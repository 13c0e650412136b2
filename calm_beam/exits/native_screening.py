"""What `screening` does, by native code: `screen.c`, which takes one call for all of it."""

import jax
import jax.numpy as jnp

from .native_library import BLOCK, CALL
from .quantised_head import CertifiedHead
from .quantised_states import quantised_states
from .screening import Rest, Screened, rounding_of

# Entries that are computed in float32 for a row: as many blocks are looked through for them.
_CANDIDATES = 64
# With so few rows, states of twice the bits cost next to nothing.
_FEW_ROWS = 8
# A vector of sums, and what adds up its numbers.
_LANES, _REDUCTION = 16, 8


def screened(states: jax.Array, head: CertifiedHead) -> Screened:
    """Returns what a head for native code proves of states, float32 of shape (rows, width)."""
    (rows, width), (vocab_size, _) = states.shape, head.weights.shape
    coarse = quantised_states(states, head, parts=2 if rows <= _FEW_ROWS else 1)
    count = min(_CANDIDATES, vocab_size // 2)
    of_candidates, of_rows = (rows, count), (rows,)
    # [parts, rows, width], padded as the weights are
    parts = jnp.stack([values for values, _ in coarse.parts])
    parts = jnp.pad(parts, ((0, 0), (0, 0), (0, -width % 4)))
    screen = jax.ffi.ffi_call(
        CALL,
        (
            jax.ShapeDtypeStruct(of_candidates, jnp.int32),
            jax.ShapeDtypeStruct(of_candidates, jnp.float32),
            jax.ShapeDtypeStruct(of_rows, jnp.float32),
            jax.ShapeDtypeStruct((rows, 4), jnp.float32),
        ),
    )
    candidates, logits, left, sums = screen(
        parts,
        jnp.stack([step[:, 0] for _, step in coarse.parts]),
        jnp.concatenate([coarse.norm, coarse.missing_norm, coarse.kept_norm], axis=1),
        coarse.kept,
        states,
        head.quantised,
        head.scales,
        head.errors,
        head.norms,
        head.kept_norms,
        head.kept_weights,
        head.weights,
    )
    additions = -(-width // _LANES) + _REDUCTION
    return Screened(
        candidates=candidates,
        # Of several that reach as high, all that are not chosen are left.
        has_all=jnp.ones(of_rows, bool),
        logits=logits,
        rounding=rounding_of(states, head, candidates=candidates, additions=additions),
        left=left,
        rest=Rest(*sums.T),
        # Block by block, of several vectors each.
        terms=len(head.scales) // BLOCK + 2 * _LANES,
    )
