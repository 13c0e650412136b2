"""Wall-clock speedup of early exits where they are served: one prompt at a time, encoder included.

Source: CALM, "FLOPs and speedup computations" (batch size one, first execution ignored, times averaged).
"""

import dataclasses
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
    """

    factor: Estimate
    seconds: float
    full_seconds: float


def measure_speedups(
    full: Decoder,
    early: Mapping[_Key, Decoder],
    *,
    prompts: Sequence[Sequence[int]],
    max_input_length: int,
    clock: Callable[[], float] = time.perf_counter,
) -> dict[_Key, Speedup]:
    """Returns the speedup of every decoder.

    All decoders take turns, prompt by prompt, and each prompt begins with another of them, so that what else the
    machine does falls on all alike. Decoders compile at the first prompt of each width: such runs are not timed.

    Args:
      full: Decoder of the full model.
      early: Decoders of what it is compared with.
      prompts: Token ids of each prompt, at least one.
      max_input_length: Of the decoders: it decides the widths.
      clock: Returns seconds.

    Raises:
      ValueError: If there are no prompts.
    """
    if not prompts:
        raise ValueError("a speedup needs at least one prompt, got none.")
    decoders = [full, *early.values()]
    for prompt in _first_of_each_width(prompts, max_input_length):
        for decoder in decoders:
            _run(decoder, prompt)
    seconds: list[list[float]] = [[] for _ in decoders]
    for turn, prompt in enumerate(prompts):
        for place in range(len(decoders)):
            index = (turn + place) % len(decoders)
            start = clock()
            _run(decoders[index], prompt)
            seconds[index].append(clock() - start)
    count = len(prompts)
    return {
        key: Speedup(
            factor=estimated_ratio(seconds[0], times),
            seconds=sum(times) / count,
            full_seconds=sum(seconds[0]) / count,
        )
        for key, times in zip(early, seconds[1:], strict=True)
    }


def _first_of_each_width(prompts: Sequence[Sequence[int]], max_input_length: int) -> list[Sequence[int]]:
    first: dict[int, Sequence[int]] = {}
    for prompt in prompts:
        first.setdefault(bucket_width(len(prompt), max_input_length), prompt)
    return list(first.values())


def _run(decoder: Decoder, prompt: Sequence[int]) -> None:
    # The decoder is lazy; its outputs are on the host when they come.
    for _ in decoder.decode([prompt]):
        pass
