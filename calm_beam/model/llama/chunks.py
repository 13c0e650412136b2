"""How prompts are cut, so that going through them takes little memory however long they are. Needs no JAX."""

from .config import LlamaConfig

# What is held at a time beside keys and values: 256 MiB. With less, products have too few rows to be fast.
_MOST_NUMBERS = 1 << 26
_FEWEST_POSITIONS = 16


def chunk_positions(config: LlamaConfig, *, rows: int, source: int) -> int:
    """Returns how many positions of each prompt go through the layers at a time: all, or equal parts.

    Args:
      config: Of the model.
      rows: Prompts that go through it together.
      source: Positions of each.
    """
    most = max(_FEWEST_POSITIONS, _MOST_NUMBERS // (rows * _position_numbers(config, source=source)))
    count = -(-source // most)
    return -(-source // count)


def chunk_numbers(config: LlamaConfig, *, rows: int, source: int) -> int:
    """Returns how many numbers a layer makes of a chunk: attention before and after the softmax, and MLP."""
    return rows * chunk_positions(config, rows=rows, source=source) * _position_numbers(config, source=source)


def _position_numbers(config: LlamaConfig, *, source: int) -> int:
    return 2 * config.num_heads * source + 2 * config.mlp_dim
