"""Finding out what an earlier transform of a pipeline was told, so that users say it once."""

from typing import TypeVar

import apache_beam as beam

_T = TypeVar("_T", bound=beam.PTransform)


def maker_of(collection: beam.PCollection, kind: type[_T]) -> _T | None:
    """Returns the transform of a kind that made a collection, whatever it consists of; None if another one did."""
    applied = collection.producer
    while applied is not None:
        if isinstance(applied.transform, kind):
            return applied.transform
        applied = applied.parent
    return None
