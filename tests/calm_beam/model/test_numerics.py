"""Tests of what all architectures compute with."""

import re

import jax
import numpy as np
import pytest
from flax import linen as nn

from calm_beam.model.numerics import Dense, parameter


class _Scale(nn.Module):
    """A module with one parameter, in `setup`."""

    size: int
    initializer: nn.initializers.Initializer

    def setup(self) -> None:
        """Declares the parameter."""
        self.scale = parameter(self, "scale", self.initializer, (self.size,))

    def __call__(self) -> jax.Array:
        """Returns the parameter."""
        return self.scale


def test_a_parameter_is_drawn_by_its_initializer() -> None:
    """`init` makes it."""
    drawn = _Scale(3, nn.initializers.constant(2.0)).init(jax.random.key(0))

    np.testing.assert_array_equal(drawn["params"]["scale"], np.full(3, 2.0))


def test_a_parameter_that_exists_is_read_without_its_initializer() -> None:
    """`apply` only reads it."""

    def draw(*_: object) -> jax.Array:
        raise AssertionError("must not be traced")

    given = np.arange(3, dtype=np.float32)

    np.testing.assert_array_equal(_Scale(3, draw).apply({"params": {"scale": given}}), given)


def test_another_shape_is_refused_with_the_path_of_the_parameter() -> None:
    """A checkpoint of another size must not be broadcast."""

    class Model(nn.Module):
        @nn.compact
        def __call__(self, inputs: jax.Array) -> jax.Array:
            return Dense(4, name="wide")(inputs)

    kernel = np.zeros((3, 5), np.float32)
    with pytest.raises(ValueError, match=re.escape("parameter wide/kernel must have shape (3, 4), got (3, 5).")):
        Model().apply({"params": {"wide": {"kernel": kernel}}}, np.zeros((2, 3), np.float32))
