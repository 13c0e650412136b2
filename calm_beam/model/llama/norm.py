"""The norm of Llama's family."""

import jax
import jax.numpy as jnp
import numpy as np
from flax import linen as nn

from calm_beam.arithmetic import FLOAT32, Precision
from calm_beam.model.numerics import rounded, widened

from .config import LlamaConfig


class RMSNorm(nn.Module):
    """Scales every vector to unit root mean square; no mean is subtracted and no bias added.

    Attributes:
      config: Of the model: what is added to the mean square, and whether 1 is to the scale.
      precision: In whose type the normed inputs come; they are float32 until then.
    """

    config: LlamaConfig
    precision: Precision = FLOAT32

    @nn.compact
    def __call__(self, inputs: jax.Array) -> jax.Array:
        """Returns the normed inputs, shape (..., width)."""
        scale = self.param("scale", nn.initializers.ones, (inputs.shape[-1],))
        if self.config.unit_offset_norms:
            scale = scale + np.float32(1)
        wide = widened(inputs)
        mean_square = jnp.mean(jnp.square(wide), axis=-1, keepdims=True)
        normed = wide * jax.lax.rsqrt(mean_square + np.float32(self.config.norm_epsilon))
        return rounded(normed * scale.reshape((1,) * (inputs.ndim - 1) + (-1,)), self.precision)
