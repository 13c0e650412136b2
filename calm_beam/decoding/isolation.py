"""Isolation of failing prompts from their batch, so that a crash does not lose the prompts that did not cause it."""

from collections.abc import Callable, Iterator, Sequence
from typing import Protocol, TypeVar

from calm_beam.errors import CalmBeamError


class DecodeError(CalmBeamError, RuntimeError):
    """An example that could not be decoded, or a device that cannot go on."""


class _Result(Protocol):
    @property
    def is_finite(self) -> bool:
        """Whether all logits were finite."""
        ...


_R = TypeVar("_R", bound=_Result)

NOT_FINITE = "the model gave logits that are not finite"
"""The reason why a prompt has no output if its logits are not finite."""
# People read reasons; some errors repeat whole programs.
_LONGEST_REASON = 300


def results_or_reasons(
    decode: Callable[[Sequence[int]], Iterator[tuple[int, _R]]], members: Sequence[int]
) -> Iterator[tuple[int, _R | str]]:
    """Yields the index of every prompt with its result, or with the reason why it has none, in the order they end.

    After a crash, the prompts without a result are decoded again by bisection, until the failing prompt is isolated. A
    prompt whose logits are not finite is also decoded again alone before it counts as failed.

    Args:
      decode: Decodes the prompts at given indices, and yields the position of each among these with its result.
      members: Indices of all prompts.

    Raises:
      DecodeError: If the device runs out of memory, which no single prompt causes, or the decoder gives too few
        results.
      Exception: Any error that the decoder raises after every prompt has its result.
    """
    yield from _results(decode, members, is_retry=False)


def reason_of(error: Exception) -> str:
    """Returns the type and the beginning of an error's message, in one line."""
    return " ".join(f"{type(error).__name__}: {error}".split())[:_LONGEST_REASON]


def _results(
    decode: Callable[[Sequence[int]], Iterator[tuple[int, _R]]], members: Sequence[int], *, is_retry: bool
) -> Iterator[tuple[int, _R | str]]:
    waiting = dict.fromkeys(members)
    not_finite: list[int] = []
    crash: Exception | None = None
    try:
        for place, result in decode(members):
            member = members[place]
            del waiting[member]
            if result.is_finite:
                yield member, result
            else:
                not_finite.append(member)
    except Exception as error:
        _check_memory(error)
        crash = error
    if crash and not waiting:
        # Every prompt has its result, so no prompt caused this error.
        raise crash
    if waiting and not crash:
        raise DecodeError(f"the decoder gave no result for {len(waiting)} of {len(members)} prompts.")
    if is_retry and len(members) == 1:
        yield from ((member, NOT_FINITE) for member in not_finite)
        yield from ((member, reason_of(crash)) for member in waiting if crash)
        return
    left = list(waiting)
    middle = (len(left) + 1) // 2
    for again in (*([member] for member in not_finite), left[:middle], left[middle:]):
        if again:
            yield from _results(decode, again, is_retry=True)


def _check_memory(error: Exception) -> None:
    """Raises `DecodeError` for an error that reports a lack of memory: decoding the next prompts would fail as well."""
    import jax

    if isinstance(error, MemoryError) or (
        isinstance(error, jax.errors.JaxRuntimeError) and "RESOURCE_EXHAUSTED" in str(error)
    ):
        raise DecodeError(
            f"out of memory while decoding ({reason_of(error)}). Take a smaller --max_cache_tokens, a coarser grid or "
            "a larger machine; commands that keep finished shards go on from there with --resume."
        ) from error
