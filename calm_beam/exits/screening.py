"""What quantised weights say of every row: a few tokens that may be the largest, and bounds of all others."""

import functools
from typing import NamedTuple, TypeVar

import jax
import jax.numpy as jnp
import numpy as np

from calm_beam.arithmetic import FLOAT32
from calm_beam.model.numerics import einsum, matrix_product, widened

from . import kernels
from .quantised_head import BLOCK, UNIT, CertifiedHead, quantised_head
from .quantised_states import QuantisedStates, norm_of, quantised_states

# Entries that are computed in float32 for a row, looked for in half as many blocks.
_CANDIDATES = 64
# With few rows the product takes as long as reading the weights: twice the rows, for states of twice the bits, cost
# nothing, and so do more candidates.
_FEW_ROWS, _MORE_CANDIDATES = 8, 256

# What is lost of factors and products below the smallest normal float32, 2**-126, is then less than rounding.
_LEAST_NORM, _LEAST_ROUNDING = 2.0**-90, 2.0**-80

# Of what the kernel is tried on: few rows, and more of them, and of blocks, than a tile of it has.
_PROBE_ROWS, _PROBE_ENTRIES = (5, 40, 300), 16 * 1100

_Values = TypeVar("_Values")


class Sums(NamedTuple):
    """Sums over some logits, of what each is below the largest of them: of exp(x), and of -x exp(x)."""

    total: jax.Array
    weighted: jax.Array


class BlockBounds(NamedTuple):
    """What is known of every logit, and of blocks of them.

    Attributes:
      upper: float32, shape (rows, entries of a block, blocks). The upper end of each logit's interval; inf for NaN.
      block_upper: float32, shape (rows, blocks). The largest of a block.
      total: float32, shape (rows, blocks). Sum of exp(upper - block_upper) over a block.
      weighted: float32, shape (rows, blocks). Sum of exp(x) (-x) of the same x.
    """

    upper: jax.Array
    block_upper: jax.Array
    total: jax.Array
    weighted: jax.Array


class Screened(NamedTuple):
    """What is known of the logits of every row, each of shape (rows,).

    Candidates are the tokens whose bounds reach highest.

    Attributes:
      token: int32. The first of the largest candidates.
      largest: float32. Its logit.
      second: float32. The largest logit of the other candidates.
      others: float32. Sums over the other candidates, of what each is below `largest`.
      candidates: How many there are.
      has_all: bool. Whether every other token is counted in what follows, and all candidates are numbers.
      rounding: float32. The most that a candidate's logit is off.
      left: float32. No other token reaches higher.
      rest: Sums over all that are no candidates, of what each is below `left`.
      terms: How many numbers the longest of those sums has added.
    """

    token: jax.Array
    largest: jax.Array
    second: jax.Array
    others: Sums
    candidates: int
    has_all: jax.Array
    rounding: jax.Array
    left: jax.Array
    rest: "Rest"
    terms: int


class Rest(NamedTuple):
    """Bounds of the sums over all that are no candidates, as in `DistributionBounds`."""

    total_low: jax.Array
    total_high: jax.Array
    weighted_low: jax.Array
    weighted_high: jax.Array


def candidates_of(rows: int, vocab_size: int) -> int:
    """Returns how many tokens of each row are computed in float32."""
    return min(_MORE_CANDIDATES if rows <= _FEW_ROWS else _CANDIDATES, vocab_size // 2)


def screened(states: jax.Array, head: CertifiedHead) -> Screened:
    """Returns what a head proves of states, float32 of shape (rows, width)."""
    rows, vocab_size = states.shape[0], head.weights.shape[0]
    count = candidates_of(rows, vocab_size)
    coarse = quantised_states(states, head, parts=2 if rows <= _FEW_ROWS else 1)
    upper, block_upper, *of_blocks = _block_bounds(coarse, head)
    reach = _reach(coarse, *(jnp.max(each.reshape(BLOCK, -1), axis=0) for each in _norms(head)))
    highest, chosen = _stored(jax.lax.top_k(block_upper, min(count // 2, block_upper.shape[1] - 1)))
    is_block_left = block_upper < highest[:, -1:]
    # The entries of the chosen blocks, by their place in the vocabulary: [rows, entries of a block * chosen]
    firsts = np.arange(BLOCK, dtype=np.int32)[None, :, None] * block_upper.shape[1]
    entries = (firsts + chosen[:, None]).reshape(rows, -1)
    entry_upper = _stored(jnp.take_along_axis(upper.reshape(rows, -1), entries, axis=1))
    highest_entries, places = _stored(jax.lax.top_k(entry_upper, count))
    is_entry_left = entry_upper < highest_entries[:, -1:]
    candidates = jnp.take_along_axis(entries, places, axis=1)
    # If several reach as high as the lowest that was chosen, some of them are neither chosen nor left.
    has_all = (jnp.sum(~is_block_left, axis=1) == chosen.shape[1]) & (jnp.sum(~is_entry_left, axis=1) == count)
    logits, rounding = _exact_logits(states, head, candidates=candidates)
    largest = jnp.max(logits, axis=1)
    token = jnp.min(jnp.where(logits == largest[:, None], candidates, vocab_size - 1), axis=1)
    is_token = candidates == token[:, None]
    left = jnp.maximum(
        jnp.max(jnp.where(is_block_left, block_upper, -jnp.inf), axis=1),
        jnp.max(jnp.where(is_entry_left, entry_upper, -jnp.inf), axis=1),
    )
    of_one = Sums(jnp.ones(()), jnp.zeros(()))
    rests = (
        _rest_of(block_upper, reach, sums=Sums(*of_blocks), is_left=is_block_left, left=left),
        _rest_of(entry_upper, jnp.max(reach, axis=1, keepdims=True), sums=of_one, is_left=is_entry_left, left=left),
    )
    # The kernel's sums over a block are rounded three times an entry.
    terms = block_upper.shape[1] + 3 * BLOCK + entry_upper.shape[1]
    return Screened(
        token=token,
        largest=largest,
        second=jnp.max(jnp.where(is_token, -jnp.inf, logits), axis=1),
        others=sums_below(jnp.where(is_token, -jnp.inf, logits - largest[:, None])),
        candidates=count,
        has_all=has_all & jnp.all(jnp.isfinite(logits), axis=1),
        rounding=rounding,
        left=left,
        rest=Rest(*map(jnp.add, *rests)),
        terms=terms,
    )


def _stored(values: _Values) -> _Values:
    """Returns the same values, which XLA is kept from computing again wherever they are read."""
    stored: _Values = jax.lax.optimization_barrier(values)
    return stored


def _block_bounds(coarse: QuantisedStates, head: CertifiedHead) -> BlockBounds:
    """Returns the bounds that a head has of quantised states.

    On GPU and TPU, of a head of bfloat16, by `screening_kernel`, if it gives there what the code for CPU does; else,
    with a warning, by that.
    """
    platform = jax.default_backend()
    is_kernels = platform in kernels.PLATFORMS and head.quantised.dtype == jnp.bfloat16
    if is_kernels and _kernel_agrees(platform, head.quantised.shape[1], len(head.kept)):
        from .screening_kernel import block_bounds

        return block_bounds(coarse, head, platform=platform)
    return _plain_bounds(coarse, head)


def _plain_bounds(coarse: QuantisedStates, head: CertifiedHead) -> BlockBounds:
    upper = _logit_bounds(coarse, head)
    block_upper = _stored(jnp.max(upper, axis=1))
    return BlockBounds(upper, block_upper, *sums_below(upper - block_upper[:, None]))


@functools.cache
def _kernel_agrees(platform: str, width: int, columns: int) -> bool:
    """Returns whether the kernel, for heads of a width with so many kept columns, compiles here and gives these bounds.

    Compared on more rows and blocks than a tile has.
    """
    compare = functools.partial(_compare_with_kernel, platform, width, columns)
    return kernels.agrees(compare, kernel="The kernel of certified heads", platform=platform, width=width)


def _compare_with_kernel(platform: str, width: int, columns: int) -> None:
    """Raises an error where the kernel's numbers are not those of the plain code."""
    from .screening_kernel import block_bounds

    generator = np.random.default_rng(0)
    weights = generator.standard_normal((_PROBE_ENTRIES, width)).astype(np.float32)
    weights[:, :columns] *= 100
    with jax.ensure_compile_time_eval():
        head = jax.tree.map(np.asarray, quantised_head(jnp.asarray(weights), "bfloat16"))
    states = generator.standard_normal((max(_PROBE_ROWS), width)).astype(np.float32)
    for rows, parts in zip(_PROBE_ROWS, (2, 1, 1), strict=True):
        coarse = kernels.run_now(quantised_states, states[:rows], head, parts=parts)
        made = kernels.run_now(block_bounds, coarse, head, platform=platform)
        plain = kernels.run_now(_plain_bounds, coarse, head)
        scale = np.abs(plain.upper, where=np.isfinite(plain.upper), out=np.zeros_like(plain.upper)).max()
        for values, expected in zip(made, plain, strict=True):
            np.testing.assert_allclose(values, expected, rtol=1e-4, atol=1e-5 * scale)


def _logit_bounds(coarse: QuantisedStates, head: CertifiedHead) -> jax.Array:
    product = jax.lax.dot_general(
        jnp.concatenate([values for values, _ in coarse.parts]),
        head.quantised,
        (((1,), (1,)), ((), ())),
        preferred_element_type=jnp.int32 if head.quantised.dtype == jnp.int8 else jnp.float32,
    )
    logits = sum(
        values.astype(jnp.float32) * (step * head.scales[None])
        for values, (_, step) in zip(jnp.split(product, len(coarse.parts)), coarse.parts, strict=True)
    )
    if head.kept.size:
        logits += matrix_product(coarse.kept, head.kept_weights, FLOAT32)
    upper = logits + _reach(coarse, *_norms(head))
    # A maximum passes over a NaN among numbers on CPU (jaxlib 0.10.2), and what overflows could be anything.
    upper = _stored(jnp.where(jnp.isnan(upper), jnp.inf, upper))
    return upper.reshape(len(upper), BLOCK, -1)


def _norms(head: CertifiedHead) -> tuple[jax.Array, jax.Array, jax.Array]:
    return head.errors, head.norms, head.kept_norms


def _reach(coarse: QuantisedStates, errors: jax.Array, norms: jax.Array, kept_norms: jax.Array) -> jax.Array:
    """Returns half the widths of logits' intervals, (rows, ...), given norms of entries, or the most of each block."""
    terms = errors[None] * coarse.norm + norms[None] * coarse.missing_norm + kept_norms[None] * coarse.kept_norm
    return terms * (1 + 16 * UNIT)


def _exact_logits(states: jax.Array, head: CertifiedHead, *, candidates: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Returns the logits of the candidates, (rows, candidates), in float32, and the most that rounding did, (rows,)."""
    rows, width = states.shape
    # Sums of shorter sums: the error grows with the longest of them, in whatever order their numbers are added.
    chunk = next(size for size in (64, 32, 16, 8, 4, 2, 1) if width % size == 0)
    weights = widened(head.weights[candidates]).reshape(rows, candidates.shape[1], -1, chunk)
    products = einsum("rnkc,rnc->rnk", jnp.swapaxes(weights, 1, 2), states.reshape(rows, -1, chunk), FLOAT32)
    logits = _stored(jnp.sum(products, axis=1))
    head_norm = jnp.max((head.errors + head.norms + head.kept_norms)[candidates], axis=1)
    norm = norm_of(states, jnp.max(jnp.abs(states), axis=1, keepdims=True))[:, 0]
    return logits, rounding_of(norm, head_norm, additions=chunk + width // chunk + 4)


def rounding_of(norm: jax.Array, head_norm: jax.Array, *, additions: int) -> jax.Array:
    """Returns the most that logits are off, (rows,), given how many numbers the longest sum has added.

    It is inf where numbers are so small that what processors take for 0 is more than rounding.

    Args:
      norm: shape (rows,). Of the states.
      head_norm: shape (rows,). The largest of the weights that they are multiplied by.
      additions: Numbers.
    """
    rounding = additions * UNIT * head_norm * norm
    is_large = (head_norm >= _LEAST_NORM) & (norm >= _LEAST_NORM) & (rounding >= _LEAST_ROUNDING)
    return jnp.where(is_large & (norm <= 1 / _LEAST_NORM), rounding, jnp.inf)


def sums_below(below: jax.Array) -> Sums:
    """Returns the sums along axis 1."""
    weights = jnp.exp(below)
    # 0 times -inf is NaN, and stands for 0: what is no logit.
    weighted = jnp.where(weights > 0, -below * weights, 0)
    return Sums(_stored(jnp.sum(weights, axis=1)), _stored(jnp.sum(weighted, axis=1)))


def _rest_of(upper: jax.Array, reach: jax.Array, *, sums: Sums, is_left: jax.Array, left: jax.Array) -> Rest:
    """Returns the bounds of what is left, (rows,), of blocks or entries, (rows, number).

    Args:
      upper: Largest upper end in each.
      reach: Largest half-width in each, or in all of a row.
      sums: Of each, relative to `upper`.
      is_left: Whether it is no candidate.
      left: shape (rows,). The largest of them all.
    """
    weight = jnp.where(is_left, jnp.exp(upper - left[:, None]), 0)
    shift = jnp.where(weight > 0, left[:, None] - upper, 0)
    lower_weight = weight * jnp.exp(-2 * reach)
    return Rest(
        total_low=jnp.sum(lower_weight * sums.total, axis=1),
        total_high=jnp.sum(weight * sums.total, axis=1),
        weighted_low=jnp.sum(lower_weight * (sums.weighted + shift * sums.total), axis=1),
        weighted_high=jnp.sum(weight * (sums.weighted + (shift + 2 * reach) * sums.total), axis=1),
    )
