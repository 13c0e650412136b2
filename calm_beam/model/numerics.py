"""Numerics of all architectures: products, rounding, masks, and the dense layer.

bfloat16 follows T5X with `dtype=bfloat16`: weights and the factors of every product are bfloat16, and so is the
residual stream; norms and the softmax are float32. It differs from T5X where a float32 number is available anyway. A
product's float32 sums stay float32 through the elementwise operations that follow (the bias and the softmax, the
activation and its gate, the residual, a norm's scale), and are rounded once, where they become a factor or a state;
T5X rounds after each of these. Relative and rotary positions and masks are float32, T5X's are bfloat16. The head
multiplies bfloat16 states by bfloat16 weights, T5X's multiplies float32 states by float32 weights.

So two decoders differ only in the order of float32 sums, in bfloat16 as in float32.
"""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import linen as nn

from calm_beam.precision import FLOAT32, Precision

# Added to the logits of masked positions: its exp() is exactly 0 relative to any real logit.
MASKED = np.float32(-1e10)

# The highest keeps products float32 on accelerators, too: otherwise they compute in another precision, with other
# confidences, for which a calibrated threshold is meaningless.
_PRECISIONS = {
    "highest": jax.lax.Precision.HIGHEST,
    "high": jax.lax.Precision.HIGH,
    "default": jax.lax.Precision.DEFAULT,
}
_BFLOAT16_EXPONENT, _BFLOAT16_MANTISSA = 8, 7


def precision_of(precision: Precision) -> jax.lax.Precision:
    """Returns JAX's precision of products."""
    return _PRECISIONS[precision.matmul_precision]


def product(left: jax.Array, right: jax.Array, dimensions: Any, *, precision: Any) -> jax.Array:
    """Returns `jax.lax.dot_general` of float32 or bfloat16 factors, with float32 sums."""
    return jax.lax.dot_general(left, right, dimensions, precision=precision, preferred_element_type=jnp.float32)


def matrix_product(left: jax.Array, right: jax.Array, precision: Precision) -> jax.Array:
    """Returns `jnp.matmul`, as float32."""
    return jnp.matmul(left, right, precision=precision_of(precision), preferred_element_type=jnp.float32)


def einsum(subscripts: str, left: jax.Array, right: jax.Array, precision: Precision) -> jax.Array:
    """Returns `jnp.einsum`, as float32."""
    sums: jax.Array = jnp.einsum(
        subscripts, left, right, precision=precision_of(precision), preferred_element_type=jnp.float32
    )
    return sums


def capped(values: jax.Array, cap: float | None) -> jax.Array:
    """Returns float32 logits unchanged or, given a cap, within it by a hyperbolic tangent (Gemma 2, section 2)."""
    return values if cap is None else jnp.tanh(values / np.float32(cap)) * np.float32(cap)


def rounded(values: jax.Array, precision: Precision) -> jax.Array:
    """Returns float32 values in the type that states and factors are stored in."""
    if precision.dtype == "float32":
        return values
    # Not a cast alone: XLA may remove a cast that is followed by one back, in one program and not in another.
    narrow = jax.lax.reduce_precision(values, _BFLOAT16_EXPONENT, _BFLOAT16_MANTISSA)
    return narrow.astype(jnp.bfloat16)


def widened(values: jax.Array) -> jax.Array:
    """Returns values as float32."""
    return values.astype(jnp.float32)


def added(stream: jax.Array, values: jax.Array, precision: Precision) -> jax.Array:
    """Returns the residual stream with float32 values added to it, rounded once."""
    return rounded(widened(stream) + values, precision)


def parameter(
    module: nn.Module, name: str, initializer: jax.nn.initializers.Initializer, shape: tuple[int, ...]
) -> jax.Array:
    """Returns a parameter of a module, as `module.param` does, without tracing its initializer where it exists.

    Flax traces the initializer of each parameter that it reads, only to compare shapes: a third of the time that
    it takes to trace a layer.

    Args:
      module: The module, in `setup` or in a compact method.
      name: Name of the parameter.
      initializer: Draws its first values.
      shape: Shape of the parameter.

    Raises:
      ValueError: If the parameter has another shape.
    """
    if not module.has_variable("params", name):
        made: jax.Array = module.param(name, initializer, shape)
        return made
    found: jax.Array = module.get_variable("params", name)
    if found.shape != shape:
        raise ValueError(f"parameter {'/'.join((*module.path, name))} must have shape {shape}, got {found.shape}.")
    return found


class Dense(nn.Module):
    """A dense layer whose weights are used in a precision's type; its sums, and its bias, are float32.

    Attributes:
      features: Width of its output.
      precision: Precision of its products.
      use_bias: Whether it has a bias.
    """

    features: int
    precision: Precision = FLOAT32
    use_bias: bool = False

    @nn.compact
    def __call__(self, inputs: jax.Array) -> jax.Array:
        """Returns the output as float32, (..., features), of inputs in the precision's type."""
        kernel = parameter(self, "kernel", nn.initializers.lecun_normal(), (inputs.shape[-1], self.features))
        sums = product(
            inputs,
            kernel.astype(self.precision.dtype),
            (((inputs.ndim - 1,), (0,)), ((), ())),
            precision=precision_of(self.precision),
        )
        if self.use_bias:
            bias = parameter(self, "bias", nn.initializers.zeros, (self.features,))
            sums = sums + bias.reshape((1,) * (inputs.ndim - 1) + (-1,))
        return sums
