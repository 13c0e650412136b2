"""What decoder layers below the last may have of their own to predict with: a norm, and the kernel of a head.

Where they have none, the final norm and the output head are those of every layer. Layers are counted from 0 here, as in
names of parameters. Needs no JAX.
Source: EE-LLM (Chen et al., 2024), which calls them exit norms and untied exit output weights.
"""

import re
from collections.abc import Mapping
from typing import Any

Shapes = Mapping[str, tuple[int, ...]]

# By field of the config, the array that each layer has.
_ARRAYS = {"exit_norms": "scale", "exit_heads": "kernel"}
_OWN = re.compile(r"decoder/(exit_norms|exit_heads)_\d+/.*")


def exit_shapes(config: Any) -> dict[str, tuple[int, ...]]:
    """Returns name and shape of every parameter that layers have of their own, such as `decoder/exit_norms_0/scale`.

    Args:
      config: Has `exit_norms` and `exit_heads`, which say whether there are any. Kernels are [width, vocabulary].
    """
    shapes = {"exit_norms": (config.emb_dim,), "exit_heads": (config.emb_dim, config.vocab_size)}
    return {
        name: shape
        for field, shape in shapes.items()
        if getattr(config, field)
        for name in _names(field, config.num_decoder_layers)
    }


def exit_fields(shapes: Shapes, num_layers: int) -> dict[str, bool]:
    """Returns which fields of a config are true of a parameter tree.

    Args:
      shapes: Name and shape of every array.
      num_layers: Decoder depth L.

    Raises:
      ValueError: If some of the layers below the last have what others have not, or the last has it.
    """
    found: dict[str, set[str]] = {field: set() for field in _ARRAYS}
    for name in shapes:
        if match := _OWN.fullmatch(name):
            found[match.group(1)].add(name)
    for field, names in found.items():
        expected = set(_names(field, num_layers))
        missing, unknown = sorted(expected - names), sorted(names - expected)
        if names and (missing or unknown):
            wrong = f"{missing[0]} is missing" if missing else f"{unknown[0][:100]} is unknown"
            raise ValueError(
                f"{wrong}: of {num_layers} decoder layers, each below the last has {_singular(field)} of its own "
                f"({field}_0 and on), or none has."
            )
    return {field: bool(names) for field, names in found.items()}


def check_exit_fields(config: Any) -> None:
    """Refuses a config of a single layer whose lower layers have something.

    Raises:
      ValueError: If it is one.
    """
    for field in _ARRAYS:
        if getattr(config, field) and config.num_decoder_layers < 2:
            raise ValueError(f"{field} is true, but needs at least 2 decoder layers: it is about those below the last.")


def _names(field: str, num_layers: int) -> list[str]:
    return [f"decoder/{field}_{index}/{_ARRAYS[field]}" for index in range(num_layers - 1)]


def _singular(field: str) -> str:
    return "a norm" if field == "exit_norms" else "a head"
