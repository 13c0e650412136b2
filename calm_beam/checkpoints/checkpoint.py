"""A model's weights, whatever layout they came from, and what names them."""

import dataclasses
import hashlib
import pathlib
from collections.abc import Callable, Mapping
from typing import Any

# For the name bfloat16, which numpy does not know otherwise.
import ml_dtypes  # noqa: F401
import numpy as np

from calm_beam.arithmetic import FLOAT32, Precision, held_type

from .architectures import Config, stored_architecture
from .stored_array import Array, StoredArray, StoredArrays, pieces

FloatArrays = Mapping[str, np.ndarray]
Arrays = Mapping[str, Array]
Watch = Callable[[str, np.ndarray], None]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Checkpoint:
    """A model's weights and where they were found.

    Attributes:
      config: Sizes of the model.
      arrays: float32 arrays by name, in memory or read on demand (names as in `calm_beam.model.parameter_shapes`).
      directory: The local folder that holds the weights themselves; of GGUF, the file.
      vocabulary_path: `sentencepiece.model`, `spiece.model` or `tokenizer.json` in or beside that folder, or None; the
        last comes first in a folder of transformers.
      layout: `native`, `hugging_face`, `gguf`, `t5x` or `orbax`.
      step: The training step that the folder is named by, or None.
      cloud_directory: The folder on Cloud Storage that `directory` is a copy of, or None.
      cloud_vocabulary: The file on Cloud Storage that `vocabulary_path` is a copy of, or None.
      stated: Sentences on what no array shows, and where it is said.
      assumed: Sentences on what no array shows and nobody says, and why it is taken for true.
      dropped: Names of stored arrays that were left out on demand.
      rounded: For what the arrays were rounded, and the fingerprint of those that were read; None if they are these.
    """

    config: Config
    arrays: Arrays
    directory: pathlib.Path
    vocabulary_path: pathlib.Path | None
    layout: str
    step: int | None = None
    cloud_directory: str | None = None
    cloud_vocabulary: str | None = None
    stated: tuple[str, ...] = ()
    assumed: tuple[str, ...] = ()
    dropped: tuple[str, ...] = ()
    rounded: tuple[Precision, str] | None = None

    @property
    def uri(self) -> str:
        """Where other machines, too, find the model, if it is anywhere that they can see."""
        return self.cloud_directory or str(self.directory)

    @property
    def vocabulary_uri(self) -> str | None:
        """Where they find its vocabulary; None if there is none."""
        return self.cloud_vocabulary or (str(self.vocabulary_path) if self.vocabulary_path else None)

    def parameters(self, precision: Precision = FLOAT32) -> dict[str, Any]:
        """Returns the tree that a network's `apply` takes as `{"params": tree}`, all of it read into memory.

        Args:
          precision: In whose types the arrays come, each rounded once.
        """
        import flax.traverse_util

        self.check_rounding(precision)
        arrays = {name: held(name, array, precision) for name, array in self.arrays.items()}
        self.check_unchanged()
        tree: dict[str, Any] = flax.traverse_util.unflatten_dict(arrays, sep="/")
        return tree

    def check_rounding(self, precision: Precision) -> None:
        """Checks that the arrays were rounded for no other precision, whose weights are not the model's."""
        assert self.rounded is None or self.rounded[0] == precision, f"weights are those of {self.rounded}"

    def check_unchanged(self) -> None:
        """Raises `CheckpointError` if the files of the weights have changed since the model was loaded."""
        if isinstance(self.arrays, StoredArrays):
            self.arrays.check_unchanged()

    def fingerprint(self, watch: Watch | None = None) -> str:
        """Returns the content fingerprint of the weights as read, and of what they do not show of the model.

        Args:
          watch: Is shown every piece of every array, with its name, if they have to be read for it.

        Raises:
          CheckpointError: If the weights cannot be read, or their files have changed since the model was loaded.
        """
        if self.rounded is not None:
            return self.rounded[1]
        unseen = stored_architecture(self.config).unseen(self.config)
        known = self.arrays.known if isinstance(self.arrays, StoredArrays) else {}
        if unseen not in known:
            known[unseen] = fingerprint(self.arrays, unseen=unseen, watch=watch)
        self.check_unchanged()
        return known[unseen]


def held(name: str, array: Any, precision: Precision) -> Any:
    """Returns an array of a model, of numpy or JAX, in the type in which a precision holds it; itself if it has that.

    Args:
      name: Of the parameter.
      array: Its values; what is stored is read.
      precision: Decides the type.
    """
    values = np.asarray(array) if isinstance(array, StoredArray) else array
    dtype = np.dtype(held_type(name, precision))
    return values if values.dtype == dtype else values.astype(dtype)


def fingerprint(arrays: Arrays, *, unseen: str = "128", watch: Watch | None = None) -> str:
    """Returns a digest of names, shapes and float32 values, which does not depend on layout or stored precision.

    Args:
      arrays: Arrays by name. Values are compared as float32, so weights that float16 can hold exactly have the same
        fingerprint stored as float16 or as float32.
      unseen: What else decides what the model computes; by default, that it is a T5 like most.
      watch: Is shown every piece of every array, with its name.

    Returns:
      `sha256:` followed by 64 hexadecimal digits.
    """
    digest = hashlib.sha256(f"calm-beam model v1, {unseen}\n".encode())
    for name in sorted(arrays):
        shape = arrays[name].shape or (1,)
        digest.update(f"{name} {','.join(map(str, shape))}\n".encode())
        # By pieces, through memory views: a large model is neither held nor copied to be hashed.
        for values in pieces(arrays[name]):
            digest.update(values.data)
            if watch is not None:
                watch(name, values)
    return f"sha256:{digest.hexdigest()}"
