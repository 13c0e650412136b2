"""The least time of a decoding step on an accelerator, forecast from bytes and operations without running anything.

To generate a token, a device reads the weights of every layer that the token uses, the keys and values of the
earlier positions, and the output head once per evaluation; of a skipped layer, it reads the weights
for keys and values of the propagated state. None of it can be read faster than the memory allows, nor multiplied
faster than the units can:

    seconds = sum over layers and heads of max(bytes / bandwidth, operations / rate)

When few prompts are decoded together, bytes decide, and the output head is the most expensive part of a small model: a
measure that evaluates the head at a layer costs as much as several layers. So the forecast shows which measures can pay
off on a device, and at which exit layers. It is a lower bound of each time, not a measurement: launch overhead,
repeated reads and communication between devices are left out. Ratios of two forecasts are not bounds.

A prompt's prefill and the encoder are not part of a step and not counted.
"""

import dataclasses
import math
import re
from typing import Self

from calm_beam.exits.measures import Need
from calm_beam.exits.rule import ExitRule
from calm_beam.exits.token_cost import TokenCost
from calm_beam.model import ModelConfig, parameter_shapes
from calm_beam.precision import Precision, held_type

# bfloat16 passes of a TPU for one float32 product of the highest precision.
_TPU_PASSES = 6
# The parameters of a decoder layer that a step reads; keys and values of the source are read, not computed.
_LAYER = r"decoder/layers_0/.*"
_OF_SOURCE = r"decoder/layers_0/encoder_decoder_attention/(key|value)/.*"
_KEPT = r"decoder/layers_0/self_attention/(key|value)/(kernel|bias)"


@dataclasses.dataclass(frozen=True, kw_only=True)
class Device:
    """An accelerator, as its data sheet describes it.

    Attributes:
      name: Display name.
      bandwidth: Bytes per second between its memory and its units.
      bfloat16_rate: Operations per second with bfloat16 factors, dense.
      float32_rate: Operations per second with float32 factors that are not rounded.
    """

    name: str
    bandwidth: float
    bfloat16_rate: float
    float32_rate: float

    def rate(self, precision: Precision) -> float:
        """Returns the operations per second in a precision."""
        return self.bfloat16_rate if precision.dtype == "bfloat16" else self.float32_rate


def _tpu(name: str, *, bandwidth: float, rate: float) -> Device:
    return Device(
        name=name,
        bandwidth=bandwidth * 1e9,
        bfloat16_rate=rate * 1e12,
        float32_rate=rate * 1e12 / _TPU_PASSES,
    )


def _gpu(name: str, *, bandwidth: float, rate: float, float32: float) -> Device:
    return Device(
        name=name,
        bandwidth=bandwidth * 1e9,
        bfloat16_rate=rate * 1e12,
        float32_rate=float32 * 1e12,
    )


DEVICES = {
    # Cloud TPU documentation, pages "TPU v4" to "TPU v6e": peak compute per chip (bf16), and HBM bandwidth per chip.
    "v4": _tpu("TPU v4", bandwidth=1200, rate=275),
    "v5e": _tpu("TPU v5e", bandwidth=819, rate=197),
    "v5p": _tpu("TPU v5p", bandwidth=2765, rate=459),
    "v6e": _tpu("TPU v6e", bandwidth=1638, rate=918),
    # NVIDIA's data sheets of each, dense rates; the T4 has units for float16, but none for bfloat16.
    "h100": _gpu("NVIDIA H100 SXM", bandwidth=3350, rate=989, float32=67),
    "a100": _gpu("NVIDIA A100 40GB", bandwidth=1555, rate=312, float32=19.5),
    "a100-80gb": _gpu("NVIDIA A100 80GB SXM", bandwidth=2039, rate=312, float32=19.5),
    "l4": _gpu("NVIDIA L4", bandwidth=300, rate=121, float32=30.3),
    "t4": _gpu("NVIDIA T4", bandwidth=320, rate=8.1, float32=8.1),
}
"""Accelerators with forecasts, by the names that flags use."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Part:
    """The resources that a layer, or a head, needs in a step.

    Attributes:
      bytes: Bytes read.
      operations: Operations; a multiply-add counts as two.
    """

    bytes: int
    operations: int

    def seconds(self, device: Device, precision: Precision) -> float:
        """Returns the least time in seconds."""
        return max(self.bytes / device.bandwidth, self.operations / device.rate(precision))


@dataclasses.dataclass(frozen=True, kw_only=True)
class StepParts:
    """The parts of a decoding step, for all its rows together.

    Attributes:
      layers: Decoder depth L.
      layer: A layer that rows use.
      skipped: A layer that rows skip.
      head: The output head, evaluated once.
    """

    layers: int
    layer: Part
    skipped: Part
    head: Part

    @classmethod
    def of(cls, config: ModelConfig, precision: Precision, *, positions: int, rows: int = 1) -> Self:
        """Returns the parts of a model's step.

        Args:
          config: Sizes of the model.
          precision: Precision whose type weights, keys and values have.
          positions: Tokens that each row attends to, in its prompt and its output so far. Attention windows are
            ignored: a model with windows reads less if there are more positions.
          rows: Prompts in the step, all in the same layers.

        Raises:
          ValueError: If `positions` or `rows` is below 1.
        """
        for name, value in (("positions", positions), ("rows", rows)):
            if value < 1:
                raise ValueError(f"{name} must be at least 1, got {value}.")
        shapes = parameter_shapes(config)

        def weights(pattern: str, but: str = r"(?!)") -> tuple[int, int]:
            """Returns the number of matching weights, and their bytes."""
            chosen = {
                name: math.prod(shape)
                for name, shape in shapes.items()
                if re.fullmatch(pattern, name) and not re.fullmatch(but, name)
            }
            sizes = {name: Precision(dtype=held_type(name, precision)).number_bytes for name in chosen}
            return sum(chosen.values()), sum(chosen[name] * sizes[name] for name in chosen)

        def part(count: int, size: int, *, read: int = 0, attended: int = 0) -> Part:
            return Part(bytes=size + rows * read * precision.number_bytes, operations=rows * (2 * count + attended))

        keys_values = 2 * positions * config.num_kv_heads * config.head_dim
        attended = 4 * positions * config.num_heads * config.head_dim
        head = config.vocab_size * config.emb_dim
        return cls(
            layers=config.num_decoder_layers,
            layer=part(*weights(_LAYER, but=_OF_SOURCE), read=keys_values, attended=attended),
            skipped=part(*weights(_KEPT)),
            head=part(head, head * precision.number_bytes),
        )


@dataclasses.dataclass(frozen=True, kw_only=True)
class DeviceForecast:
    """The least time of a model's steps on a device.

    Attributes:
      device: The device.
      precision: The precision in which the model computes.
      parts: The parts of a step.
    """

    device: Device
    precision: Precision
    parts: StepParts

    def full_seconds(self) -> float:
        """Returns the least seconds of a step of the full model, which evaluates the head once."""
        return self.cost().full()

    def head_share(self) -> float:
        """Returns the head's share of the full model's least time."""
        return self.parts.head.seconds(self.device, self.precision) / self.full_seconds()

    def exit_seconds(self, layer: int, rule: ExitRule) -> float:
        """Returns the least seconds of a step whose rows all exit at a layer.

        A measure that needs logits evaluates the head at every exit layer up to there; the last evaluation gives the
        token.

        Args:
          layer: From 1 to L.
          rule: The exit rule.

        Raises:
          ValueError: If rows cannot exit there.
        """
        exits = rule.exit_layers(self.parts.layers)
        if layer not in exits:
            raise ValueError(f"layer must be one that may exit, of {', '.join(map(str, exits))}; got {layer}.")
        return self.cost().at(layer, rule)

    def mean_seconds(self, layers: float, rule: ExitRule) -> float:
        """Returns the least mean seconds of steps whose rows exit at a mean layer, as in `TokenCost.at_mean`."""
        return self.cost().at_mean(layers, rule)

    def cost(self) -> TokenCost:
        """Returns the token cost in least seconds of a step whose rows all use the same layers."""
        layer, skipped, head = (
            part.seconds(self.device, self.precision)
            for part in (self.parts.layer, self.parts.skipped, self.parts.head)
        )
        return TokenCost(
            layers=self.parts.layers,
            layer=layer,
            skipped=skipped,
            output=head,
            tests={need: head for need in Need if need.asks_head},
        )

    def gain(self, layer: int, rule: ExitRule) -> float:
        """Returns the full model's least time over that of steps whose rows all exit at a layer."""
        return self.full_seconds() / self.exit_seconds(layer, rule)

    def pays_up_to(self, rule: ExitRule) -> int | None:
        """Returns the highest layer at which exits are forecast to beat the full model; None if there is none."""
        paying = [layer for layer in rule.exit_layers(self.parts.layers) if self.gain(layer, rule) > 1]
        return max(paying, default=None)

    def needed_share(self, layer: int, rule: ExitRule) -> float:
        """Returns the share of steps that must exit at a layer for exits to pay, if only it and the last may exit.

        Args:
          layer: Below L.
          rule: The rule with the measure; its own exit layers are ignored.

        Returns:
          At least 0; above 1 where exits at that layer cannot pay.
        """
        alone = dataclasses.replace(rule, min_exit_layer=layer, exit_interval=self.parts.layers)
        leaving, going_on = (self.exit_seconds(each, alone) for each in (layer, self.parts.layers))
        return (going_on - self.full_seconds()) / (going_on - leaving)


def device_forecast(
    config: ModelConfig, device: str, precision: Precision, *, positions: int, rows: int = 1
) -> DeviceForecast:
    """Returns the least times of a model's steps on a device.

    Args:
      config: Sizes of the model.
      device: One of `DEVICES`.
      precision: The precision in which it computes.
      positions: Tokens that each row attends to.
      rows: Prompts in a step.

    Raises:
      ValueError: If there is no such device, or a number is below 1.
    """
    if device not in DEVICES:
        raise ValueError(f"device must be one of {', '.join(DEVICES)}; got {device!r}.")
    parts = StepParts.of(config, precision, positions=positions, rows=rows)
    return DeviceForecast(device=DEVICES[device], precision=precision, parts=parts)
