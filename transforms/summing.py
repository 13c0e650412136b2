"""Adding up what merges: totals of examples, losses of clusters, sums of anybody's losses. The arithmetic is theirs."""

from collections.abc import Callable, Iterable
from typing import Any

import apache_beam as beam


class SumMerged(beam.CombineFn):
    """Adds up sums, each over some elements, by their `merge`, which is associative and commutative."""

    def __init__(self, zero: Callable[[], Any] | None = None) -> None:
        """Keeps what there is where nothing is to be added up.

        Args:
          zero: Makes the sums over no elements; None where there are always some, as there are for every key.
        """
        super().__init__()
        self._zero = zero

    def create_accumulator(self) -> Any:
        """Returns the sums over no elements; None where nobody says what they are."""
        return None if self._zero is None else self._zero()

    def add_input(self, accumulator: Any, element: Any) -> Any:
        """Adds the sums over more elements."""
        return element if accumulator is None else accumulator.merge(element)

    def merge_accumulators(self, accumulators: Iterable[Any]) -> Any:
        """Adds all sums."""
        merged = self.create_accumulator()
        for accumulator in accumulators:
            if accumulator is not None:
                merged = accumulator if merged is None else merged.merge(accumulator)
        return merged

    def extract_output(self, accumulator: Any) -> Any:
        """Returns the sums."""
        return accumulator
