"""Llama's family as the decoders see it."""

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from calm_beam.arithmetic import Arithmetic
from calm_beam.errors import UsageError
from calm_beam.model.architecture import Architecture, ArrayType

from .chunks import chunk_numbers
from .config import LlamaConfig, parameter_shapes

if TYPE_CHECKING:
    from .layers import DecoderLayer
    from .network import EarlyExitLlama


class LlamaArchitecture(Architecture):
    """Decoder-only models, which go on from the last token of the prompt."""

    shares_prefixes = True
    first_kept_step = 1

    def parameter_shapes(self, config: LlamaConfig) -> Mapping[str, tuple[int, ...]]:
        """Returns name and shape of every parameter."""
        return parameter_shapes(config)

    def network(self, config: LlamaConfig, *, arithmetic: Arithmetic) -> "EarlyExitLlama":
        """Returns the network."""
        from .network import EarlyExitLlama

        return EarlyExitLlama(config, arithmetic)

    def packed_layer(self, config: LlamaConfig, *, arithmetic: Arithmetic) -> "DecoderLayer":
        """Returns a decoder layer."""
        from .layers import DecoderLayer

        return DecoderLayer(config, arithmetic)

    def pending(self, config: LlamaConfig, arithmetic: Arithmetic) -> Mapping[str, ArrayType]:
        """Returns a layer's input, its queries, and what these have of the path, which is float32."""
        by_head = (config.num_heads, config.head_dim)
        return {
            "hidden": ArrayType((config.emb_dim,), arithmetic.dtype),
            "queries": ArrayType(by_head, arithmetic.dtype),
            "mixed": ArrayType(by_head),
            "largest": ArrayType((config.num_heads,)),
            "total": ArrayType((config.num_heads,)),
        }

    def encoder_width(self, config: LlamaConfig) -> int:
        """Returns 0: there is no encoder."""
        return 0

    def first_input(self, prompt: Sequence[int]) -> int:
        """Returns the prompt's last token."""
        return prompt[-1]

    def check_positions(self, config: LlamaConfig, *, source: int, steps: int) -> None:
        """Refuses more tokens than the model was trained for: nobody knows what it does beyond.

        Raises:
          ValueError: If there may be more.
        """
        if source + steps > config.max_positions:
            raise ValueError(
                f"the model has {config.max_positions} positions, but prompts of up to {source} tokens and outputs of "
                f"up to {steps} need {source + steps}. Lower --max_input_length or --max_decode_length."
            )

    def check_teaching(self) -> None:
        """Refuses these models: batches of pairs are T5's.

        Raises:
          UsageError: Always.
        """
        raise UsageError(
            "--checkpoint: is a decoder-only model. Such models can be calibrated and served; train and suitability "
            "take T5 models only."
        )

    def position_numbers(self, config: LlamaConfig, *, steps: int) -> int:
        """Returns how many numbers the masks of every step to every other take at all layers."""
        return config.num_decoder_layers * steps**2

    def prefill_numbers(self, config: LlamaConfig, *, rows: int, source: int) -> int:
        """Returns how many numbers a layer makes of a chunk of prompts."""
        return chunk_numbers(config, rows=rows, source=source)
