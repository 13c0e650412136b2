"""A T5 encoder-decoder in Flax whose decoder can predict after any layer."""

from .config import T5Config as T5Config
from .config import infer_config as infer_config
from .config import parameter_shapes as parameter_shapes
from .network import EarlyExitT5 as EarlyExitT5
