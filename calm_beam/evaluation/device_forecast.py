"""What a step of decoding takes on an accelerator at the least, forecast from bytes and operations: nothing is run.

To generate a token, a device reads the weights of every layer that the token goes through, the keys and values of the
positions before it, and the output head once for every time that it is asked; of a layer that is skipped, the weights
that make keys and values of the propagated state. None of it can be read faster than the memory allows, nor multiplied
faster than the units can:

    seconds = sum over layers and heads of max(bytes / bandwidth, operations / rate)

Where few prompts are decoded together, bytes decide, and the output head is the dearest part of a small model: a
measure that asks it at a layer costs as much as several layers. So the forecast tells which measures can pay on a
device, and at which exit layers. It is a lower bound of each time, not a measurement: what starting a program costs,
what is read twice, and what devices say to each other are left out. Ratios of two forecasts are no bounds.

A prompt's prefill, and the encoder, are not of a step, and not counted.
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

# Passes of bfloat16 products that a TPU makes for float32 ones of the highest precision.
_TPU_PASSES = 6
# Of those that a step reads of a decoder layer, in every architecture; what is made of the source is read, not made.
_LAYER = r"decoder/layers_0/.*"
_OF_SOURCE = r"decoder/layers_0/encoder_decoder_attention/(key|value)/.*"
_KEPT = r"decoder/layers_0/self_attention/(key|value)/(kernel|bias)"


@dataclasses.dataclass(frozen=True, kw_only=True)
class Device:
    """An accelerator, as its maker describes it.

    Attributes:
      name: In words.
      bandwidth: Bytes a second between its memory and its units.
      bfloat16_rate: Operations a second with bfloat16 factors, dense.
      float32_rate: Operations a second with float32 factors that are not rounded.
    """

    name: str
    bandwidth: float
    bfloat16_rate: float
    float32_rate: float

    def rate(self, precision: Precision) -> float:
        """Returns operations a second in a precision."""
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
"""Accelerators whose times are forecast, by the names of flags."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Part:
    """What a layer, or a head, takes of a device.

    Attributes:
      bytes: Read.
      operations: A multiply-add is two.
    """

    bytes: int
    operations: int

    def seconds(self, device: Device, precision: Precision) -> float:
        """Returns what it takes at the least."""
        return max(self.bytes / device.bandwidth, self.operations / device.rate(precision))


@dataclasses.dataclass(frozen=True, kw_only=True)
class StepParts:
    """What a step of decoding is made of, for all its rows together.

    Attributes:
      layers: Decoder depth L.
      layer: A layer that rows go through.
      skipped: A layer that they skip.
      head: The output head, asked once.
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
          precision: In whose type weights, keys and values are held.
          positions: Tokens that each row attends to: of its prompt, and of its output so far. Windows are not looked
            at: a model that has them reads less where there are more positions.
          rows: Prompts that take the step together, all in the same layers.

        Raises:
          ValueError: If `positions` or `rows` is below 1.
        """
        for name, value in (("positions", positions), ("rows", rows)):
            if value < 1:
                raise ValueError(f"{name} must be at least 1, got {value}.")
        shapes = parameter_shapes(config)

        def weights(pattern: str, but: str = r"(?!)") -> tuple[int, int]:
            """Returns how many weights match, and their bytes."""
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
      device: Which.
      precision: In which the model computes.
      parts: What a step is made of.
    """

    device: Device
    precision: Precision
    parts: StepParts

    def full_seconds(self) -> float:
        """Returns what a step of the full model takes at the least, which asks the head once."""
        return self.cost().full()

    def head_share(self) -> float:
        """Returns the head's share of that."""
        return self.parts.head.seconds(self.device, self.precision) / self.full_seconds()

    def exit_seconds(self, layer: int, rule: ExitRule) -> float:
        """Returns what a step takes at the least whose rows all leave at a layer.

        A measure that asks the head does so at every layer that may exit, up to there; the last answer gives the token.

        Args:
          layer: From 1 to L.
          rule: How exits are decided.

        Raises:
          ValueError: If rows cannot leave there.
        """
        exits = rule.exit_layers(self.parts.layers)
        if layer not in exits:
            raise ValueError(f"layer must be one that may exit, of {', '.join(map(str, exits))}; got {layer}.")
        return self.cost().at(layer, rule)

    def mean_seconds(self, layers: float, rule: ExitRule) -> float:
        """Returns what steps take at the least on average whose rows leave at a mean layer, as `TokenCost.at_mean`."""
        return self.cost().at_mean(layers, rule)

    def cost(self) -> TokenCost:
        """Returns the least seconds of a step, whose rows all go through the same layers."""
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
        """Returns the full model's least time over that of steps whose rows all leave at a layer."""
        return self.full_seconds() / self.exit_seconds(layer, rule)

    def pays_up_to(self, rule: ExitRule) -> int | None:
        """Returns the highest layer at which leaving is forecast to take less than the full model; None if none is."""
        paying = [layer for layer in rule.exit_layers(self.parts.layers) if self.gain(layer, rule) > 1]
        return max(paying, default=None)

    def needed_share(self, layer: int, rule: ExitRule) -> float:
        """Returns the share of steps that must leave at a layer, if only it and the last may exit, for exits to pay.

        Args:
          layer: Below L.
          rule: Says which measure; its own exit layers are not looked at.

        Returns:
          At least 0; above 1 where exits at that layer cannot pay.
        """
        alone = dataclasses.replace(rule, min_exit_layer=layer, exit_interval=self.parts.layers)
        leaving, going_on = (self.exit_seconds(each, alone) for each in (layer, self.parts.layers))
        return (going_on - self.full_seconds()) / (going_on - leaving)


def device_forecast(
    config: ModelConfig, device: str, precision: Precision, *, positions: int, rows: int = 1
) -> DeviceForecast:
    """Returns the least times of a model's steps on a device; arguments as of `StepParts.of`.

    Args:
      config: Sizes of the model.
      device: One of `DEVICES`.
      precision: In which it computes.
      positions: Tokens that each row attends to.
      rows: Prompts that take a step together.

    Raises:
      ValueError: If there is no such device, or a number is below 1.
    """
    if device not in DEVICES:
        raise ValueError(f"device must be one of {', '.join(DEVICES)}; got {device!r}.")
    parts = StepParts.of(config, precision, positions=positions, rows=rows)
    return DeviceForecast(device=DEVICES[device], precision=precision, parts=parts)
