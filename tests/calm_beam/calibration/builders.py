"""Examples and generations with known texts and layers, for tests of what is made of them."""

from collections.abc import Sequence
from typing import Any

from calm_beam.examples import Example
from calm_beam.generations import Generation, Output


def build_example(**changes: Any) -> Example:
    """Returns an example with one reference, with the given fields changed."""
    values: dict[str, Any] = {
        "id": "a",
        "has_own_id": True,
        "input": "the cat",
        "input_ids": None,
        "references": ("cat",),
        "file_index": 0,
        "line": 1,
    }
    return Example(**{**values, **changes})


def build_output(text: str, *, exit_layers: Sequence[int] = (4,)) -> Output:
    """Returns an output whose tokens exited at the given layers."""
    return Output(
        text=text,
        tokens=tuple(range(2, 2 + len(exit_layers))),
        exit_layers=tuple(exit_layers),
        confidences=(0.5,) * len(exit_layers),
    )


def build_generation(texts: Sequence[str] = ("cat", "cat", "dog"), **changes: Any) -> Generation:
    """Returns a generation with these texts, the full model's first, with the given fields changed."""
    values: dict[str, Any] = {
        "example": build_example(),
        "truncated": False,
        "duplicate": False,
        "failure": None,
        "outputs": tuple(build_output(text) for text in texts),
    }
    return Generation(**{**values, **changes})
