"""New models that `train` can make, by architecture: sizes, and the kind of vocabulary. Needs no JAX."""

import dataclasses
import types
from collections.abc import Mapping
from typing import Any

from calm_beam.model import ModelConfig, T5Config
from calm_beam.model.llama import LlamaConfig

# Of a tokenizer that is made for a new decoder-only model, in the order of their ids: the first ends every prompt, so
# that the model can tell where the answer begins, and the second every output.
ANSWER, END = "<|answer|>", "<|end|>"


@dataclasses.dataclass(frozen=True, kw_only=True)
class NewModel:
    """How a new model of one architecture begins.

    Attributes:
      kind: Of its config.
      sizes: Sizes that may be chosen, with their defaults.
      options: Further fields of the config that may be given, and are else the config's own.
      fixed: Fields that cannot be chosen.
      vocabulary: Name of the file of its vocabulary, which says of which kind that is.
    """

    kind: type
    sizes: Mapping[str, int]
    options: tuple[str, ...]
    fixed: Mapping[str, Any]
    vocabulary: str

    def config(self, given: Mapping[str, Any]) -> ModelConfig:
        """Returns the config, given some of the sizes and options.

        Raises:
          ValueError: If one is out of range.
        """
        made: ModelConfig = self.kind(**{**self.sizes, **self.fixed, **given})
        return made


_SIZES = {"vocab_size": 2048, "emb_dim": 128, "num_heads": 4, "head_dim": 32, "mlp_dim": 256, "num_decoder_layers": 8}

NEW_MODELS: Mapping[str, NewModel] = types.MappingProxyType(
    {
        "t5": NewModel(
            kind=T5Config,
            sizes=_SIZES | {"num_encoder_layers": 3},
            options=("activation", "relative_max_distance"),
            fixed={},
            vocabulary="sentencepiece.model",
        ),
        "llama": NewModel(
            kind=LlamaConfig,
            sizes=_SIZES | {"num_kv_heads": 4, "max_positions": 512},
            options=("activation",),
            fixed={"norm_epsilon": 1e-5, "rope_theta": 10_000.0, "end_ids": (1,)},
            vocabulary="tokenizer.json",
        ),
    }
)
