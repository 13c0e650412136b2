"""What `screening` does, by native code: `native/screen.c`, which takes one call for all of it."""

import jax
import jax.numpy as jnp

from calm_beam.native import library

from .packed_head import BLOCK
from .quantised_head import CertifiedHead
from .screening import Rest, Screened, Sums, rounding_of

FEW_ROWS = 8
"""With no more, a call quantises states in two parts, and leaves less open: `kFewRows`."""

# Entries that are computed in float32 for a row: as many blocks are looked through for them.
_CANDIDATES, _MORE_CANDIDATES = 64, 512
# A vector of sums, and what adds up its numbers.
_LANES, _REDUCTION = 16, 8
# Numbers that are known of each row.
_FACTS = 11


def candidates_of(vocab_size: int, *, is_thorough: bool) -> int:
    """Returns how many tokens of each row are computed in float32."""
    return min(_MORE_CANDIDATES if is_thorough else _CANDIDATES, vocab_size // 2)


def screened(states: jax.Array, head: CertifiedHead, *, is_thorough: bool = False) -> Screened:
    """Returns what a head for native code proves of states, float32 of shape (rows, width).

    Args:
      states: What the head is asked about.
      head: One that is packed.
      is_thorough: Whether eight times as many candidates are computed, so that less is left to bounds.
    """
    (rows, width), (vocab_size, _) = states.shape, head.weights.shape
    count = candidates_of(vocab_size, is_thorough=is_thorough)
    screen = jax.ffi.ffi_call(
        library.screen_target(),
        (
            jax.ShapeDtypeStruct((rows,), jnp.int32),
            jax.ShapeDtypeStruct((rows, _FACTS), jnp.float32),
            # Room for the candidates: how many there are to be, it takes from here.
            jax.ShapeDtypeStruct((rows, count), jnp.int32),
        ),
    )
    token, facts, _ = screen(
        states,
        head.kept,
        head.quantised,
        head.scales,
        head.errors,
        head.norms,
        head.kept_norms,
        head.kept_weights,
        head.weights,
    )
    largest, second, others_total, others_weighted, left, *rest, norm, head_norm = facts.T
    return Screened(
        token=token,
        largest=largest,
        second=second,
        others=Sums(others_total, others_weighted),
        candidates=count,
        # Of several that reach as high, all that are not chosen are left. It is NaN if a candidate is no number.
        has_all=jnp.isfinite(largest),
        rounding=rounding_of(norm, head_norm, additions=-(-width // _LANES) + _REDUCTION),
        left=left,
        rest=Rest(*rest),
        # Block by block, of several vectors each.
        terms=len(head.scales) // BLOCK + 2 * _LANES,
    )
