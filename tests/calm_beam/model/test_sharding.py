"""The division of a model among devices."""

import math

import pytest

from calm_beam.errors import UsageError
from calm_beam.model import parameter_shapes
from calm_beam.model.llama import parameter_shapes as llama_shapes
from calm_beam.model.sharding import Division, values_per_device
from tests.builders import build_config
from tests.calm_beam.model.llama.builders import build_llama_config

_CONFIG = build_config(num_heads=4, exit_classifier=2, exit_norms=True, exit_heads=True)


@pytest.mark.parametrize("parts", [1, 2, 4])
def test_every_kernel_is_divided_and_nothing_else(parts: int) -> None:
    """Heads, feed-forward width and vocabulary are divided; norms and the exit classifier are whole."""
    division = Division.of(_CONFIG, parts)
    shapes = parameter_shapes(_CONFIG)
    whole = {name for name, shape in shapes.items() if division.axis(name, len(shape)) is None}
    assert whole == {name for name in shapes if parts == 1 or name.endswith("/scale") or "meta_cls" in name}
    for name, shape in shapes.items():
        axis = division.axis(name, len(shape))
        if axis is not None:
            divided = {_CONFIG.num_heads * _CONFIG.head_dim, _CONFIG.num_heads, _CONFIG.mlp_dim, _CONFIG.vocab_size}
            assert shape[axis] in divided, name
    assert division.whole_in_words() == ""
    values = {name: math.prod(shape) for name, shape in shapes.items()}
    expected = sum(size if name in whole else size // parts for name, size in values.items())
    assert values_per_device(shapes, division) == expected


def test_two_layers_meet_where_they_are_divided() -> None:
    """The output that one kernel leaves divided is the next one's input: nothing is exchanged between them."""
    division = Division.of(_CONFIG, 2)
    for first, second in (("attention/value", "attention/out"), ("mlp/wi_0", "mlp/wo"), ("mlp/wi_1", "mlp/wo")):
        layer = "encoder/layers_0"
        assert division.axis(f"{layer}/{first}/kernel", 2) == 1
        assert division.axis(f"{layer}/{second}/kernel", 2) == 0


@pytest.mark.parametrize(
    ("changes", "parts", "message"),
    [
        ({}, 3, "model_parallelism is 3, but 4 attention heads cannot be divided by 3"),
        ({}, 8, "model_parallelism is 8, but 4 attention heads"),
        ({"mlp_dim": 30}, 4, "model_parallelism is 4, but 30 values of the feed-forward layer"),
        ({}, 0, "model_parallelism must be at least 1, got 0"),
    ],
)
def test_what_cannot_be_divided_is_refused(changes: dict[str, int], parts: int, message: str) -> None:
    """Heads and feed-forward widths that cannot be divided evenly are named with their number."""
    with pytest.raises(UsageError, match=message):
        Division.of(build_config(**{"num_heads": 4, **changes}), parts)


def test_a_vocabulary_that_cannot_be_divided_stays_whole() -> None:
    """A vocabulary that cannot be divided is on every device, with a message."""
    division = Division.of(build_config(num_heads=4, vocab_size=63), 2)
    assert division.axis("token_embedder/embedding", 2) is None
    assert division.axis("decoder/logits_dense/kernel", 2) is None
    assert division.axis("decoder/layers_0/mlp/wo/kernel", 2) == 0
    assert division.whole_in_words() == "the vocabulary"


def test_every_device_routes() -> None:
    """Experts are divided as any feed-forward layer is, and every device has the whole router."""
    config = build_llama_config(mlp_dim=8, num_experts=2)
    four = Division.of(config, 4)
    axes = {name: four.axis(f"decoder/layers_0/mlp/{name}/kernel", 2) for name in ("router", "wi_0", "wi_1", "wo")}
    assert axes == {"router": None, "wi_0": 1, "wi_1": 1, "wo": 0}


def test_heads_that_queries_share() -> None:
    """A Llama's keys and values are divided by their own heads, or kept whole if these are too few."""
    config = build_llama_config(mlp_dim=8, attention_bias=True)
    two, four = Division.of(config, 2), Division.of(config, 4)
    for name, shape in llama_shapes(config).items():
        if "/key/" in name or "/value/" in name:
            assert two.axis(name, len(shape)) == len(shape) - 1
            assert four.axis(name, len(shape)) is None
        elif "/query/" in name:
            assert four.axis(name, len(shape)) == len(shape) - 1
    assert two.whole_in_words() == ""
    assert four.whole_in_words() == "the heads of keys and values and the vocabulary"
