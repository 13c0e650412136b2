"""Weights in memory, whatever layout they came from."""

import dataclasses
import hashlib
import pathlib
from collections.abc import Mapping
from typing import Any, Self

# For the name bfloat16, which numpy does not know otherwise.
import ml_dtypes  # noqa: F401
import numpy as np

from calm_beam.arithmetic import FLOAT32, Arithmetic, is_held_in_float32
from calm_beam.errors import CalmBeamError
from calm_beam.model import T5Config, default_activation

FloatArrays = Mapping[str, np.ndarray]


class CheckpointError(CalmBeamError, ValueError):
    """A checkpoint that cannot be read, or is not one."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Checkpoint:
    """A model's weights and where they were found.

    Attributes:
      config: Sizes of the model.
      arrays: float32 arrays by name (names as in `calm_beam.model.parameter_shapes`).
      directory: The local folder that holds the weights themselves.
      vocabulary_path: `sentencepiece.model` or `spiece.model` in or beside that folder, or None.
      layout: `native`, `hugging_face`, `t5x` or `orbax`.
      step: The training step that the folder is named by, or None.
      cloud_directory: The folder on Cloud Storage that `directory` is a copy of, or None.
      cloud_vocabulary: The file on Cloud Storage that `vocabulary_path` is a copy of, or None.
      stated: Sentences on what no array shows, and where it is said.
      assumed: Sentences on what no array shows and nobody says, and why it is taken for true.
      dropped: Names of stored arrays that were left out on demand.
      rounded: For what the arrays were rounded, and the fingerprint of those that were read; None if they are these.
    """

    config: T5Config
    arrays: FloatArrays
    directory: pathlib.Path
    vocabulary_path: pathlib.Path | None
    layout: str
    step: int | None = None
    cloud_directory: str | None = None
    cloud_vocabulary: str | None = None
    stated: tuple[str, ...] = ()
    assumed: tuple[str, ...] = ()
    dropped: tuple[str, ...] = ()
    rounded: tuple[Arithmetic, str] | None = None

    @property
    def uri(self) -> str:
        """Where other machines, too, find the model, if it is anywhere that they can see."""
        return self.cloud_directory or str(self.directory)

    @property
    def vocabulary_uri(self) -> str | None:
        """Where they find its vocabulary; None if there is none."""
        return self.cloud_vocabulary or (str(self.vocabulary_path) if self.vocabulary_path else None)

    def parameters(self, arithmetic: Arithmetic = FLOAT32) -> dict[str, Any]:
        """Returns the tree that `EarlyExitT5.apply` takes as `{"params": tree}`, as an arithmetic has weights."""
        import flax.traverse_util

        tree: dict[str, Any] = flax.traverse_util.unflatten_dict(self._held_arrays(arithmetic), sep="/")
        return tree

    def held_in(self, arithmetic: Arithmetic) -> Self:
        """Returns the model with its arrays as an arithmetic has them; its fingerprint stays that of those read."""
        arrays = self._held_arrays(arithmetic)
        return dataclasses.replace(self, arrays=arrays, rounded=self.rounded or (arithmetic, self.fingerprint()))

    def _held_arrays(self, arithmetic: Arithmetic) -> dict[str, Any]:
        assert self.rounded is None or self.rounded[0] == arithmetic, "rounded weights would be taken for the model's"
        return {name: _held(name, array, arithmetic) for name, array in self.arrays.items()}

    def fingerprint(self) -> str:
        """Returns the content fingerprint of the weights as read, and of what they do not show of the model."""
        if self.rounded is not None:
            return self.rounded[1]
        config = self.config
        # Of T5's own nothing is said: their fingerprints are older than other activations.
        is_t5 = config.activation == default_activation(gated_mlp=config.gated_mlp)
        return fingerprint(
            self.arrays,
            relative_max_distance=config.relative_max_distance,
            activation="" if is_t5 else config.activation,
        )


def _held(name: str, array: Any, arithmetic: Arithmetic) -> Any:
    """Returns an array of a model, given its name, in the type that an arithmetic has it in; itself if it has that."""
    dtype = np.dtype(np.float32 if is_held_in_float32(name) else arithmetic.dtype)
    return array if array.dtype == dtype else array.astype(dtype)


def fingerprint(arrays: FloatArrays, *, relative_max_distance: int = 128, activation: str = "") -> str:
    """Returns a digest of names, shapes and float32 values, which does not depend on layout or stored precision.

    Args:
      arrays: Arrays by name. Values are compared as float32, so weights that float16 can hold exactly have the same
        fingerprint stored as float16 or as float32.
      relative_max_distance: The one size of a model that no shape shows.
      activation: That of the feed-forward layers, if it is not T5's for such arrays.

    Returns:
      `sha256:` followed by 64 hexadecimal digits.
    """
    computed = f", {activation}" if activation else ""
    digest = hashlib.sha256(f"calm-beam model v1, {relative_max_distance}{computed}\n".encode())
    for name in sorted(arrays):
        values = np.ascontiguousarray(arrays[name], dtype="<f4")
        digest.update(f"{name} {','.join(map(str, values.shape))}\n".encode())
        # Through a memory view: a large model is not copied to be hashed.
        digest.update(values.data)
    return f"sha256:{digest.hexdigest()}"
