"""Wall-clock speedup of early exits where they are served: one prompt at a time, or in batches, encoder included.

Source: CALM, "FLOPs and speedup computations" (batch size one, first execution ignored, times averaged).
"""

import dataclasses
import math
import time
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from typing import Protocol, TypeVar

from calm_beam.decoding.padding import bucket_width
from calm_beam.evaluation.sample import Estimate, estimated_ratio

_Key = TypeVar("_Key", bound=Hashable)


class Decoder(Protocol):
    """What is timed, such as `EarlyExitDecoder` with a batch size of 1."""

    def decode(self, prompts: Sequence[Sequence[int]]) -> Iterable[object]:
        """Returns the outputs of the prompts, one by one."""
        ...


@dataclasses.dataclass(frozen=True, kw_only=True)
class Speedup:
    """How much faster a decoder is than the full model.

    Attributes:
      factor: Time of the full model over that of the decoder, both summed over the prompts.
      seconds: Mean time of the decoder for one prompt.
      full_seconds: Mean time of the full model, measured in turns with it.
      prompts: Prompts that both have decoded.
    """

    factor: Estimate
    seconds: float
    full_seconds: float
    prompts: int


def measure_speedups(
    full: Decoder,
    early: Mapping[_Key, Decoder],
    *,
    prompts: Sequence[Sequence[int]],
    max_input_length: int,
    together: int = 1,
    most_seconds: float = math.inf,
    clock: Callable[[], float] = time.perf_counter,
) -> dict[_Key, Speedup]:
    """Returns the speedup of every decoder.

    All decoders take turns, prompt by prompt or batch by batch, and each turn begins with another of them, so that what
    else the machine does falls on all alike. Decoders compile at the first prompt of each width, or at the first batch:
    such runs are not timed.

    Args:
      full: Decoder of the full model.
      early: Decoders of what it is compared with.
      prompts: Token ids of each prompt, at least one.
      max_input_length: Of the decoders: it decides the widths.
      together: Prompts that are decoded together.
      most_seconds: Turns begin no later; there is at least one.
      clock: Returns seconds.

    Raises:
      ValueError: If there are no prompts.
    """
    if not prompts:
        raise ValueError("a speedup needs at least one prompt, got none.")
    decoders = [full, *early.values()]
    parts = [prompts[start : start + together] for start in range(0, len(prompts), together)]
    for part in [[each] for each in _first_of_each_width(prompts, max_input_length)] if together == 1 else parts[:1]:
        for decoder in decoders:
            _run(decoder, part)
    seconds: list[list[float]] = [[] for _ in decoders]
    began, count = clock(), 0
    for turn, part in enumerate(parts):
        if turn and clock() - began > most_seconds:
            break
        count += len(part)
        for place in range(len(decoders)):
            index = (turn + place) % len(decoders)
            start = clock()
            _run(decoders[index], part)
            seconds[index].append(clock() - start)
    return {
        key: Speedup(
            factor=estimated_ratio(seconds[0], times),
            seconds=sum(times) / count,
            full_seconds=sum(seconds[0]) / count,
            prompts=count,
        )
        for key, times in zip(early, seconds[1:], strict=True)
    }


def _first_of_each_width(prompts: Sequence[Sequence[int]], max_input_length: int) -> list[Sequence[int]]:
    first: dict[int, Sequence[int]] = {}
    for prompt in prompts:
        first.setdefault(bucket_width(len(prompt), max_input_length), prompt)
    return list(first.values())


def _run(decoder: Decoder, prompts: Sequence[Sequence[int]]) -> None:
    # The decoder is lazy; its outputs are on the host when they come.
    for _ in decoder.decode(prompts):
        pass
