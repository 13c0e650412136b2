"""A T5 encoder-decoder in Flax whose decoder can predict after any layer.

Sizes and names of parameters need no JAX: the network is loaded when it is first used.
"""

from typing import TYPE_CHECKING, Any

from .config import ACTIVATIONS as ACTIVATIONS
from .config import MOST_LAYERS as MOST_LAYERS
from .config import T5Config as T5Config
from .config import check_dimensions as check_dimensions
from .config import default_activation as default_activation
from .config import infer_config as infer_config
from .config import parameter_shapes as parameter_shapes

if TYPE_CHECKING:
    from .network import EarlyExitT5 as EarlyExitT5


def __getattr__(name: str) -> Any:
    if name != "EarlyExitT5":
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from .network import EarlyExitT5

    return EarlyExitT5
