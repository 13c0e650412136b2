"""Readers and writers of model weights: the native layout, T5X, Orbax and Hugging Face; GGUF is only read.

Weights in memory need no reader or writer. Readers, writers and the packages for their formats are loaded on first use.
"""

from typing import TYPE_CHECKING

from calm_beam.extras import on_first_use

from .checkpoint import Arrays as Arrays
from .checkpoint import Checkpoint as Checkpoint
from .checkpoint import Declared as Declared
from .checkpoint import FloatArrays as FloatArrays
from .checkpoint import GenerationFacts as GenerationFacts
from .checkpoint import fingerprint as fingerprint
from .checkpoint import held as held
from .checkpoint import stored_architecture as stored_architecture
from .metadata import CheckpointError as CheckpointError
from .stored_array import Array as Array
from .stored_array import StoredArray as StoredArray
from .stored_array import StoredArrays as StoredArrays
from .stored_array import pieces as pieces

if TYPE_CHECKING:
    from .gguf_tokenizer import write_gguf_tokenizer as write_gguf_tokenizer
    from .hugging_face import write_hugging_face as write_hugging_face
    from .load import find_model as find_model
    from .load import load_checkpoint as load_checkpoint
    from .load import missing_folder as missing_folder
    from .load import store_model as store_model
    from .model_folder import write_native as write_native
    from .t5x import write_t5x as write_t5x

__getattr__ = on_first_use(
    __name__,
    {
        "gguf_tokenizer": ("write_gguf_tokenizer",),
        "hugging_face": ("write_hugging_face",),
        "load": ("find_model", "load_checkpoint", "missing_folder", "store_model"),
        "model_folder": ("write_native",),
        "t5x": ("write_t5x",),
    },
)
