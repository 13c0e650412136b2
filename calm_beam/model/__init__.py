"""A T5 encoder-decoder in Flax whose decoder can predict after any layer."""

from .config import ACTIVATIONS as ACTIVATIONS
from .config import MOST_LAYERS as MOST_LAYERS
from .config import T5Config as T5Config
from .config import check_dimensions as check_dimensions
from .config import default_activation as default_activation
from .config import infer_config as infer_config
from .config import parameter_shapes as parameter_shapes
from .network import EarlyExitT5 as EarlyExitT5
