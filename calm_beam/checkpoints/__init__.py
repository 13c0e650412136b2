"""Reading and writing model weights, in T5X's layout and in the native one."""

from .checkpoint import Checkpoint as Checkpoint
from .checkpoint import CheckpointError as CheckpointError
from .checkpoint import FloatArrays as FloatArrays
from .checkpoint import fingerprint as fingerprint
from .load import load_checkpoint as load_checkpoint
from .native import write_native as write_native
