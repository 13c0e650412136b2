"""Random weights for a new model."""

import numpy as np

from calm_beam.model import T5Config, parameter_shapes

# T5 starts its embedding at 1, which suits Adafactor's relative steps; under Adam's absolute ones, a new model would
# keep most of that noise for the whole of a short run.
_EMBEDDING_STD = 0.3
_RELATIVE_POSITION_STD = 0.1


def initialize_parameters(config: T5Config, *, generator: np.random.Generator) -> dict[str, np.ndarray]:
    """Returns random weights, normal with T5's scales except for the embedding and relative positions.

    Kernels start with standard deviation fan_in ** -0.5; query kernels with (d * head_dim) ** -0.5, since T5 does not
    scale attention logits. Norms start at 1.

    Args:
      config: Sizes of the model. Its exit classifier, if any, starts at 0, which scores every state 1/2.
      generator: Source of the draws.

    Returns:
      float32 arrays by name, names and shapes as in `parameter_shapes`.
    """
    return {
        name: _draw(name, shape, config=config, generator=generator).astype(np.float32)
        for name, shape in parameter_shapes(config).items()
    }


def _draw(name: str, shape: tuple[int, ...], *, config: T5Config, generator: np.random.Generator) -> np.ndarray:
    if name.endswith("/scale"):
        return np.ones(shape)
    if name.startswith("decoder/meta_cls/"):
        return np.zeros(shape)
    return generator.standard_normal(shape) * _standard_deviation(name, shape, config=config)


def _standard_deviation(name: str, shape: tuple[int, ...], *, config: T5Config) -> float:
    if name == "token_embedder/embedding":
        return _EMBEDDING_STD
    if name.endswith("/rel_embedding"):
        return _RELATIVE_POSITION_STD
    if name.endswith("/query/kernel"):
        return float((config.emb_dim * config.head_dim) ** -0.5)
    return float(shape[0] ** -0.5)
