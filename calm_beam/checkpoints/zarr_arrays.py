"""Arrays that TensorStore reads from folders or files on a local disk."""

from collections.abc import Mapping
from typing import Any

import numpy as np
import tensorstore


def read_arrays(places: Mapping[str, np.ndarray | dict[str, Any]]) -> dict[str, np.ndarray]:
    """Returns float32 arrays by name.

    Args:
      places: Where each array is, by name: itself, or as a TensorStore spec with driver and absolute path.

    Raises:
      ValueError: If an array is missing or broken.
    """
    # All reads are started before the first is waited for: a checkpoint has hundreds of small files.
    pending = {name: place if isinstance(place, np.ndarray) else _open(place) for name, place in places.items()}
    return {name: _finish(place) for name, place in pending.items()}


def _open(spec: dict[str, Any]) -> Any:
    # A chunk that was not copied would be read as zeros.
    return tensorstore.open({**spec, "fill_missing_data_reads": False}, open=True, read=True)


def _finish(place: Any) -> np.ndarray:
    values = place if isinstance(place, np.ndarray) else place.result().read().result()
    return np.asarray(values, dtype=np.float32)
