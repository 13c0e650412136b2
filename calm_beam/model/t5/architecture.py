"""The `Architecture` of T5."""

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from calm_beam.model.architecture import Architecture
from calm_beam.precision import Precision
from calm_beam.text import counted

from .config import PAD_ID, T5Config, parameter_shapes

if TYPE_CHECKING:
    from calm_beam.model.native_decoder import NativeDecoder

    from .network import DecoderLayer, EarlyExitT5

# T5 starts its embedding at 1, which suits Adafactor's relative steps; under Adam's absolute ones, a new model would
# keep most of that noise for the whole of a short run.
_EMBEDDING_STD = 0.3
_RELATIVE_POSITION_STD = 0.1


class T5Architecture(Architecture):
    """Encoder-decoders, whose decoder starts from a start token and attends to the encoder's output."""

    shares_prefixes = False
    first_kept_step = 0
    pad_id = PAD_ID
    usual_dropout = 0.1
    scales_tied_head = True

    def parameter_shapes(self, config: T5Config) -> Mapping[str, tuple[int, ...]]:
        """Returns name and shape of every parameter, as the T5X trees name them."""
        return parameter_shapes(config)

    def network(
        self, config: T5Config, *, precision: Precision, dropout_rate: float = 0.0, layer_dropout: float = 0.0
    ) -> "EarlyExitT5":
        """Returns the network."""
        from .network import EarlyExitT5

        return EarlyExitT5(config, dropout_rate=dropout_rate, precision=precision, layer_dropout=layer_dropout)

    def packed_layer(self, config: T5Config, *, precision: Precision) -> "DecoderLayer":
        """Returns a decoder layer."""
        from .network import DecoderLayer

        return DecoderLayer(config, precision=precision)

    def native_decoder(
        self, config: T5Config, parameters: Mapping[str, Any], *, terms: Sequence[Any]
    ) -> "NativeDecoder":
        """Returns the decoder."""
        from .network import native_decoder

        return native_decoder(config, parameters, biases=terms)

    def encoder_width(self, config: T5Config) -> int:
        """Returns the model's width, which is also that of the encoder's output."""
        return config.emb_dim

    def first_input(self, config: T5Config, prompt: Sequence[int]) -> int:
        """Returns the model's start token, for any prompt."""
        return config.start_id

    def room_for_prompts(self, config: T5Config, *, steps: int) -> int | None:
        """Returns None: distances beyond the last bucket share it."""
        return None

    def check_positions(self, config: T5Config, *, source: int, steps: int) -> None:
        """Does nothing: distances beyond the last bucket share it, so that any length is possible."""

    def taught_source(self, prompt: Sequence[int], target: Sequence[int]) -> Sequence[int]:
        """Returns the prompt."""
        return prompt

    def initial_distribution(self, config: T5Config, name: str, *, shape: Sequence[int]) -> tuple[float, float]:
        """Returns T5's own distributions, except for the embedding and relative positions.

        Kernels have the standard deviation fan_in ** -0.5; query kernels (d * head_dim) ** -0.5, since T5 does not
        scale attention logits. Norms start at 1, an exit classifier at 0, so that it scores every state 1/2.
        """
        if name.endswith("/scale"):
            return 1.0, 0.0
        if name.startswith("decoder/meta_cls/"):
            return 0.0, 0.0
        if name == "token_embedder/embedding":
            return 0.0, _EMBEDDING_STD
        if name.endswith("/rel_embedding"):
            return 0.0, _RELATIVE_POSITION_STD
        if name.endswith("/query/kernel"):
            return 0.0, float((config.emb_dim * config.head_dim) ** -0.5)
        return 0.0, float(shape[0] ** -0.5)

    def layers_in_words(self, config: T5Config) -> str:
        """Returns text with the layers of the encoder and of the decoder."""
        return f"{config.num_encoder_layers} + {counted(config.num_decoder_layers, 'layer')}"

    def position_numbers(self, config: T5Config, *, steps: int) -> int:
        """Returns how many numbers the biases between all positions take, and the indices they are looked up by."""
        tables = config.num_decoder_layers if config.relative_bias_per_layer else 1
        return (tables * config.num_heads + 2) * steps**2

    def prefill_numbers(self, config: T5Config, *, rows: int, source: int) -> int:
        """Returns how many numbers an encoder layer takes: attention before and after the softmax, and MLP."""
        return rows * (2 * config.num_heads * source**2 + source * config.mlp_dim)
