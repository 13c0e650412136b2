"""Decoder-only models of Llama's family: Llama, Mistral, Qwen, Gemma and others of this architecture.

Sizes and names of parameters need no JAX.
"""

from .config import ACTIVATIONS as ACTIVATIONS
from .config import MOST_LAYERS as MOST_LAYERS
from .config import ROPE_SCALINGS as ROPE_SCALINGS
from .config import LlamaConfig as LlamaConfig
from .config import RopeScaling as RopeScaling
from .config import check_parameters as check_parameters
from .config import config_of as config_of
from .config import layer_shapes as layer_shapes
from .config import parameter_shapes as parameter_shapes
from .config import stored_fields as stored_fields
from .config import unseen as unseen
