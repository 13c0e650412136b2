"""Reading and writing model weights: the native layout, T5X's, Orbax's and Hugging Face's."""

from .architectures import stored_architecture as stored_architecture
from .checkpoint import Arrays as Arrays
from .checkpoint import Checkpoint as Checkpoint
from .checkpoint import FloatArrays as FloatArrays
from .checkpoint import fingerprint as fingerprint
from .checkpoint import held as held
from .cloud import store_model as store_model
from .declared import Declared as Declared
from .error import CheckpointError as CheckpointError
from .load import find_model as find_model
from .load import load_checkpoint as load_checkpoint
from .load import missing_folder as missing_folder
from .native import write_native as write_native
from .stored_array import Array as Array
from .stored_array import StoredArray as StoredArray
from .stored_array import StoredArrays as StoredArrays
from .stored_array import pieces as pieces
from .t5x import write_t5x as write_t5x
