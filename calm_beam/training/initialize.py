"""Random weights for a new model."""

import numpy as np

from calm_beam.model import ModelConfig, architecture_of, parameter_shapes


def initialize_parameters(config: ModelConfig, *, generator: np.random.Generator) -> dict[str, np.ndarray]:
    """Returns random weights, normal with the scales of `Architecture.initial_distribution`.

    Args:
      config: Sizes of the model. Its exit classifier, if any, starts at 0, which scores every state 1/2.
      generator: Source of the draws.

    Returns:
      float32 arrays by name, names and shapes as in `parameter_shapes`.
    """
    architecture, arrays = architecture_of(config), {}
    for name, shape in parameter_shapes(config).items():
        mean, deviation = architecture.initial_distribution(config, name, shape=shape)
        drawn = mean + generator.standard_normal(shape) * deviation if deviation else np.full(shape, mean)
        arrays[name] = drawn.astype(np.float32)
    return arrays
