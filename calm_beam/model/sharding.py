"""How one model is divided among several devices: by attention heads, feed-forward width and vocabulary.

Each device has a part of the kernels, and computes its part of the heads or of the feed-forward layer; their results
are added up once a block (Megatron-LM: Shoeybi et al. 2019, section 3). Norms and other small parameters are on every
device. The rules match names of parameters, which all architectures share.
"""

import dataclasses
import math
import re
from collections.abc import Mapping
from typing import Self

from calm_beam.errors import UsageError

from .architecture import ModelConfig

_ATTENTION = r".*attention/"
# Pattern of a parameter's name, by what it is divided, and on which axis; the first match counts.
_RULES: tuple[tuple[str, str, int], ...] = (
    (_ATTENTION + r"query/(kernel|bias)", "heads", -1),
    (_ATTENTION + r"(key|value)/(kernel|bias)", "keys_values", -1),
    (_ATTENTION + r"out/kernel", "heads", 0),
    (r".*/rel_embedding", "heads", 0),
    (r".*mlp/(wi|wi_0|wi_1)/kernel", "width", -1),
    (r".*mlp/wo/kernel", "width", 0),
    (r"token_embedder/embedding", "vocabulary", 0),
    (r"decoder/(logits_dense|exit_heads_\d+)/kernel", "vocabulary", -1),
)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Division:
    """How a model is divided.

    Attributes:
      parts: Devices that share the model; 1 if it is not divided.
      whole: Which of `keys_values` and `vocabulary` every device has whole, since they cannot be divided evenly.
    """

    parts: int = 1
    whole: frozenset[str] = frozenset()

    @classmethod
    def of(cls, config: ModelConfig, parts: int) -> Self:
        """Returns the division of a model among a number of devices.

        Args:
          config: Sizes of the model.
          parts: Devices that share the model.

        Raises:
          UsageError: If its heads or its feed-forward width cannot be divided evenly.
        """
        if parts < 1:
            raise UsageError(f"model_parallelism must be at least 1, got {parts}.")
        for value, name in (
            (config.num_heads, "attention heads"),
            (config.mlp_dim, "values of the feed-forward layer"),
        ):
            if value % parts:
                raise UsageError(
                    f"model_parallelism is {parts}, but {value} {name} cannot be divided by {parts}: take a divisor of "
                    "both the heads and the feed-forward width."
                )
        sizes = {"keys_values": config.num_kv_heads, "vocabulary": config.vocab_size}
        return cls(parts=parts, whole=frozenset(name for name, size in sizes.items() if size % parts))

    def axis(self, name: str, ndim: int) -> int | None:
        """Returns the axis that a parameter is divided on; None if every device has all of it.

        Args:
          name: Name in `parameter_shapes`.
          ndim: The parameter's number of axes.
        """
        if self.parts == 1:
            return None
        for pattern, by, axis in _RULES:
            if re.fullmatch(pattern, name):
                return None if by in self.whole else axis % ndim
        return None

    def whole_in_words(self) -> str:
        """Returns text that names what every device has whole."""
        named = {"keys_values": "the heads of keys and values", "vocabulary": "the vocabulary"}
        return " and ".join(named[each] for each in sorted(self.whole))


def values_per_device(shapes: Mapping[str, tuple[int, ...]], division: Division) -> int:
    """Returns how many weights each device has, of parameters whose shapes are given by name."""
    return sum(
        math.prod(shape) // (1 if division.axis(name, len(shape)) is None else division.parts)
        for name, shape in shapes.items()
    )
