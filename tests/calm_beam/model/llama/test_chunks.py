"""The division of long prompts into chunks."""

import pytest

from calm_beam.model import architecture_of
from calm_beam.model.llama.config import chunk_numbers, chunk_positions
from tests.calm_beam.model.llama.builders import build_llama_config

# Llama 3.2 1B.
_CONFIG = build_llama_config(
    vocab_size=128256, emb_dim=2048, num_heads=32, num_kv_heads=8, head_dim=64, mlp_dim=8192, max_positions=131072
)


@pytest.mark.parametrize("source", [1, 31, 512, 4095, 4096, 8192])
@pytest.mark.parametrize("rows", [1, 3, 64])
def test_chunks_are_equal_and_no_more_than_are_needed(rows: int, source: int) -> None:
    """Chunks are equal, cover the prompt's positions with less padding than there are chunks, and none is empty."""
    chunk = chunk_positions(_CONFIG, rows=rows, source=source)
    assert 1 <= chunk <= source
    count = -(-source // chunk)
    assert 0 <= count * chunk - source < count


def test_what_a_chunk_takes_is_bounded() -> None:
    """A chunk takes 256 MiB at most, or 16 positions of each of many long prompts; short prompts stay whole."""
    assert chunk_positions(_CONFIG, rows=1, source=512) == 512
    for source in (1000, 2048, 8192, 60_000):
        assert chunk_numbers(_CONFIG, rows=1, source=source) <= 1 << 26
        assert chunk_numbers(_CONFIG, rows=1, source=source) > 1 << 25
    assert chunk_positions(_CONFIG, rows=64, source=8192) == 16


def test_the_estimate_of_memory_is_of_a_chunk() -> None:
    """The memory estimate grows linearly with the prompt's length, not with its square."""
    architecture = architecture_of(_CONFIG)
    short, long = (architecture.prefill_numbers(_CONFIG, rows=1, source=source) for source in (4096, 65536))
    assert long < 2 * short
