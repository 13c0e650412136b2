"""What a reader of a layout finds in a folder."""

import dataclasses

from .architectures import Config
from .stored_array import StoredArrays


@dataclasses.dataclass(frozen=True, kw_only=True)
class StoredModel:
    """A model as a layout stores it, not yet held against its arrays.

    Attributes:
      config: What the files say that it is.
      arrays: Arrays by name, to be read as float32 (names as in the architecture's `parameter_shapes`).
      stated: Sentences on what no array shows, and where it is said.
      assumed: Sentences on what no array shows and nobody says, and why it is taken for true.
    """

    config: Config
    arrays: StoredArrays
    stated: tuple[str, ...] = ()
    assumed: tuple[str, ...] = ()
