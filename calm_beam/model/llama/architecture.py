"""The `Architecture` of Llama's family."""

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from calm_beam.errors import UsageError
from calm_beam.model.architecture import Architecture
from calm_beam.precision import Precision
from calm_beam.text import counted

from .config import NOT_NATIVE, LlamaConfig, chunk_numbers, parameter_shapes

if TYPE_CHECKING:
    from calm_beam.model.native_decoder import NativeDecoder

    from .network import DecoderLayer, EarlyExitLlama

_EMBEDDING_STD = 0.3


class LlamaArchitecture(Architecture):
    """Decoder-only models, whose first step reads the last token of the prompt."""

    shares_prefixes = True
    first_kept_step = 1
    pad_id = None
    usual_dropout = 0.0
    scales_tied_head = False

    def parameter_shapes(self, config: LlamaConfig) -> Mapping[str, tuple[int, ...]]:
        """Returns name and shape of every parameter."""
        return parameter_shapes(config)

    def network(
        self, config: LlamaConfig, *, precision: Precision, dropout_rate: float = 0.0, layer_dropout: float = 0.0
    ) -> "EarlyExitLlama":
        """Returns the network.

        Raises:
          UsageError: If dropout is requested, which these models do not have.
        """
        from .network import EarlyExitLlama

        if dropout_rate:
            raise UsageError(f"dropout is {dropout_rate}, but decoder-only models have none. Leave it out.")
        return EarlyExitLlama(config, precision, layer_dropout)

    def packed_layer(self, config: LlamaConfig, *, precision: Precision) -> "DecoderLayer":
        """Returns a decoder layer."""
        from .network import DecoderLayer

        return DecoderLayer(config, precision)

    def native_decoder(
        self, config: LlamaConfig, parameters: Mapping[str, Any], *, terms: Sequence[Any]
    ) -> "NativeDecoder":
        """Returns the decoder."""
        from .network import native_decoder

        return native_decoder(config, parameters, terms=terms)

    def why_not_native(self, config: LlamaConfig) -> str | None:
        """Returns the config fields that native code does not compute; None if there are none."""
        differing = [
            f"{name}={getattr(config, name)}"
            for name in NOT_NATIVE
            if getattr(config, name) != getattr(LlamaConfig, name)
        ]
        return f"it does not compute models with {', '.join(differing)}" if differing else None

    def logits_cap(self, config: LlamaConfig) -> float | None:
        """Returns the config's cap."""
        return config.logits_cap

    def encoder_width(self, config: LlamaConfig) -> int:
        """Returns 0: there is no encoder."""
        return 0

    def first_input(self, config: LlamaConfig, prompt: Sequence[int]) -> int:
        """Returns the prompt's last token."""
        return prompt[-1]

    def room_for_prompts(self, config: LlamaConfig, *, steps: int) -> int | None:
        """Returns how many positions an output leaves for the prompt, at least 1."""
        return max(1, config.max_positions - steps)

    def check_positions(self, config: LlamaConfig, *, source: int, steps: int) -> None:
        """Checks that a model was trained for so many tokens: its behaviour beyond is unknown.

        Raises:
          ValueError: If there may be more.
        """
        if source + steps > config.max_positions:
            raise ValueError(
                f"the model has {config.max_positions} positions, but prompts of up to {source} tokens and outputs of "
                f"up to {steps} need {source + steps}. Lower --max_input_length or --max_decode_length "
                "(--max_target_length where it learns)."
            )

    def taught_source(self, prompt: Sequence[int], target: Sequence[int]) -> Sequence[int]:
        """Returns the prompt, directly followed by the output without its last token, which is not read."""
        return [*prompt, *target[:-1]]

    def initial_distribution(self, config: LlamaConfig, name: str, *, shape: Sequence[int]) -> tuple[float, float]:
        """Returns a deviation of fan_in ** -0.5 for kernels, and a constant for norms that makes their factor 1.

        The embedding's deviation is below 1 for the same reason as T5's; a tied one has that of a head. Biases and exit
        classifiers start at 0; such a classifier scores every state 1/2.
        """
        if name.endswith("/scale"):
            return (0.0 if config.unit_offset_norms else 1.0), 0.0
        if name.endswith("/bias") or name.startswith("decoder/meta_cls/"):
            return 0.0, 0.0
        if name == "token_embedder/embedding":
            return 0.0, float(config.emb_dim**-0.5) if config.tied_head else _EMBEDDING_STD
        return 0.0, float(shape[0] ** -0.5)

    def layers_in_words(self, config: LlamaConfig) -> str:
        """Returns text with the number of layers."""
        return counted(config.num_decoder_layers, "layer")

    def position_numbers(self, config: LlamaConfig, *, steps: int) -> int:
        """Returns how many numbers the masks of every step to every other take at all layers."""
        return config.num_decoder_layers * steps**2

    def prefill_numbers(self, config: LlamaConfig, *, rows: int, source: int) -> int:
        """Returns how many numbers a layer computes for a chunk of prompts."""
        return chunk_numbers(config, rows=rows, source=source)
