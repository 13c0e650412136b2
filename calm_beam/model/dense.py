"""The dense layer of every architecture."""

import jax
from flax import linen as nn

from calm_beam.arithmetic import FLOAT32, Precision

from .numerics import precision_of, product


class Dense(nn.Module):
    """A dense layer whose weights are used in a precision's type; its sums, and its bias, are float32.

    Attributes:
      features: Width of its output.
      precision: Of its products.
      use_bias: Whether it has a bias.
    """

    features: int
    precision: Precision = FLOAT32
    use_bias: bool = False

    @nn.compact
    def __call__(self, inputs: jax.Array) -> jax.Array:
        """Returns the output as float32, (..., features), of inputs in the precision's type."""
        kernel = self.param("kernel", nn.initializers.lecun_normal(), (inputs.shape[-1], self.features))
        sums = product(
            inputs,
            kernel.astype(self.precision.dtype),
            (((inputs.ndim - 1,), (0,)), ((), ())),
            precision=precision_of(self.precision),
        )
        if self.use_bias:
            sums = sums + self.param("bias", nn.initializers.zeros, (self.features,)).reshape(
                (1,) * (inputs.ndim - 1) + (-1,)
            )
        return sums
