"""The number types in which a model computes. They are part of what a promise is about, since rounding moves exits."""

import dataclasses
from typing import Self

DTYPES = ("float32", "bfloat16")
MATMUL_PRECISIONS = ("highest", "high", "default")
"""Precisions of float32 products, by JAX's names (`jax.lax.Precision`)."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Precision:
    """The dtype of weights, states, keys and values, and the precision of matrix products.

    Sums, norms, softmax, logits, confidences and the values compared with a threshold are always float32.

    Attributes:
      dtype: One of `DTYPES`.
      matmul_precision: One of `MATMUL_PRECISIONS`, for float32. On GPUs and TPUs, `highest` gives float32 products;
        `high` gives TF32 or three passes in bfloat16; `default` gives TF32 or one pass in bfloat16. CPUs have float32
        products only. Products of bfloat16 numbers are exact, so there is nothing to choose.
    """

    dtype: str = "float32"
    matmul_precision: str = "highest"

    def __post_init__(self) -> None:
        for name, choices in (("dtype", DTYPES), ("matmul_precision", MATMUL_PRECISIONS)):
            if getattr(self, name) not in choices:
                raise ValueError(f"{name} must be one of {', '.join(choices)}; got {getattr(self, name)!r}.")
        if self.dtype != "float32" and self.matmul_precision != "highest":
            raise ValueError(
                f"matmul_precision is for float32, got {self.matmul_precision!r} with dtype {self.dtype}, whose "
                "products are exact: leave it out."
            )

    @classmethod
    def of(cls, dtype: str, matmul_precision: str | None = None) -> Self:
        """Returns the precision that a record names; a `matmul_precision` of None means `highest`.

        Raises:
          ValueError: If the dtype or the precision is unknown.
        """
        return cls(dtype=dtype, matmul_precision=matmul_precision or "highest")

    @property
    def number_bytes(self) -> int:
        """Bytes per number of weights, states, keys and values."""
        return 4 if self.dtype == "float32" else 2

    def recorded_matmul_precision(self) -> str | None:
        """Returns the precision of matrix products as records write it; None where they leave it out."""
        return None if self.matmul_precision == "highest" else self.matmul_precision


FLOAT32 = Precision()
"""The precision of the released code, and the default."""


def held_type(name: str, precision: Precision) -> str:
    """Returns the dtype in which a precision stores a parameter.

    Scales of norms, biases, relative position biases and the exit classifier stay float32: no large product uses them.

    >>> precision = Precision(dtype="bfloat16")
    >>> held_type("decoder/decoder_norm/scale", precision), held_type("decoder/layers_0/mlp/wo/kernel", precision)
    ('float32', 'bfloat16')
    """
    *_, room, kind = name.split("/")
    is_wide = kind in ("scale", "bias", "rel_embedding") or room == "meta_cls"
    return "float32" if is_wide else precision.dtype
