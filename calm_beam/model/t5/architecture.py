"""T5 as the decoders see it."""

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from calm_beam.arithmetic import Arithmetic
from calm_beam.model.architecture import Architecture, ArrayType

from .config import PAD_ID, T5Config, parameter_shapes

if TYPE_CHECKING:
    from .layers import DecoderLayer
    from .network import EarlyExitT5


class T5Architecture(Architecture):
    """Encoder-decoders, whose decoder begins with the padding id and attends to the encoder's output."""

    shares_prefixes = False
    first_kept_step = 0

    def parameter_shapes(self, config: T5Config) -> Mapping[str, tuple[int, ...]]:
        """Returns name and shape of every parameter, as the T5X trees name them."""
        return parameter_shapes(config)

    def network(self, config: T5Config, *, arithmetic: Arithmetic) -> "EarlyExitT5":
        """Returns the network."""
        from .network import EarlyExitT5

        return EarlyExitT5(config, arithmetic=arithmetic)

    def packed_layer(self, config: T5Config, *, arithmetic: Arithmetic) -> "DecoderLayer":
        """Returns a decoder layer."""
        from .layers import DecoderLayer

        return DecoderLayer(config, arithmetic=arithmetic)

    def pending(self, config: T5Config, arithmetic: Arithmetic) -> Mapping[str, ArrayType]:
        """Returns the states after self-attention."""
        return {"hidden": ArrayType((config.emb_dim,), arithmetic.dtype)}

    def encoder_width(self, config: T5Config) -> int:
        """Returns the model's width, which the encoder's output has, too."""
        return config.emb_dim

    def first_input(self, prompt: Sequence[int]) -> int:
        """Returns T5's start token, whatever the prompt."""
        return PAD_ID

    def check_positions(self, config: T5Config, *, source: int, steps: int) -> None:
        """Refuses nothing: distances beyond the last bucket share it."""

    def check_teaching(self) -> None:
        """Refuses nothing."""

    def position_numbers(self, config: T5Config, *, steps: int) -> int:
        """Returns how many numbers the biases of every position to every other take, and what they are looked up by."""
        tables = config.num_decoder_layers if config.relative_bias_per_layer else 1
        return (tables * config.num_heads + 2) * steps**2

    def prefill_numbers(self, config: T5Config, *, rows: int, source: int) -> int:
        """Returns how many numbers an encoder layer takes: attention before and after the softmax, and MLP."""
        return rows * (2 * config.num_heads * source**2 + source * config.mlp_dim)
