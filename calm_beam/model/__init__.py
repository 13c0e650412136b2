"""Networks whose decoders can predict after any layer, with one package for each architecture.

Sizes and names of parameters need no JAX: a network is loaded when it is first used.
"""

from typing import TYPE_CHECKING, Any

from .architecture import Architecture as Architecture
from .architecture import ArrayType as ArrayType
from .architecture import ModelConfig as ModelConfig
from .registry import ARCHITECTURES as ARCHITECTURES
from .registry import architecture_of as architecture_of
from .registry import network_of as network_of
from .registry import packed_layer_of as packed_layer_of
from .registry import parameter_shapes as parameter_shapes
from .t5.config import ACTIVATIONS as ACTIVATIONS
from .t5.config import MOST_LAYERS as MOST_LAYERS
from .t5.config import T5Config as T5Config
from .t5.config import check_dimensions as check_dimensions
from .t5.config import default_activation as default_activation
from .t5.config import infer_config as infer_config

if TYPE_CHECKING:
    from .t5.network import EarlyExitT5 as EarlyExitT5


def __getattr__(name: str) -> Any:
    if name != "EarlyExitT5":
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from .t5.network import EarlyExitT5

    return EarlyExitT5
