"""What a step of the device is told of its rows: one array of int32, since each takes a device some time to take in.

Rows are padded to whole tiles (see `tiles`); those of padding come last, and have lanes beyond the last.
"""

import dataclasses
from typing import Any, ClassVar, Self

import jax
import jax.numpy as jnp
import numpy as np

from calm_beam.model.interface import Position

# NumPy's on the host, JAX's within a step.
Column = Any


@dataclasses.dataclass(frozen=True, kw_only=True)
class ToldRows:
    """Rows of a step; fields are arrays of int32 of shape (rows,), but for the last one of some kinds."""

    # Whether the last field has several numbers for every row.
    _ends_in_several: ClassVar[bool] = False

    def joined(self) -> np.ndarray:
        """Returns all of it as one array, (rows, columns)."""
        return np.column_stack(list(vars(self).values()))

    @classmethod
    def of(cls, joined: jax.Array) -> Self:
        """Returns what was joined."""
        single = cls.num_columns()
        columns: list[Any] = list(jnp.unstack(joined[:, :single], axis=1))
        if cls._ends_in_several:
            columns.append(joined[:, single:])
        return cls(**dict(zip((field.name for field in dataclasses.fields(cls)), columns, strict=True)))

    @classmethod
    def num_columns(cls, several: int = 0) -> int:
        """Returns how many columns there are where the last field has `several`."""
        return len(dataclasses.fields(cls)) - cls._ends_in_several + several


@dataclasses.dataclass(frozen=True, kw_only=True)
class EmbeddedRows(ToldRows):
    """Tokens that are looked up.

    Attributes:
      lanes: Where each goes.
      tokens: The newest of each.
    """

    lanes: Column
    tokens: Column


@dataclasses.dataclass(frozen=True, kw_only=True)
class _PlacedRows(ToldRows):
    """Rows of which is told where their newest tokens stand.

    Attributes:
      lanes: Of the state that is read, or made.
      steps: Of `Position`.
      prompt_lengths: Likewise.
    """

    lanes: Column
    steps: Column
    prompt_lengths: Column

    @property
    def position(self) -> Position:
        """Where their newest tokens stand."""
        return Position(self.steps, self.prompt_lengths)


@dataclasses.dataclass(frozen=True, kw_only=True)
class LayerRows(_PlacedRows):
    """Rows of a layer, ordered by prompt, by the lanes where the output goes.

    Attributes:
      below: Where the layer's input stands in the entry below.
      nodes: Where the keys and values made here go.
      groups: As of `GroupedSources`, for the rows of each tile by themselves; like the next two.
      ranks: As of `GroupedSources`.
      places: As of `GroupedSources`, of as many groups as there are rows.
      paths: shape (rows, steps of an output). The nodes that each attends to, its own included.
    """

    below: Column
    nodes: Column
    groups: Column
    ranks: Column
    places: Column
    paths: Column
    _ends_in_several = True


@dataclasses.dataclass(frozen=True, kw_only=True)
class AskedRows(ToldRows):
    """States that a head is asked about.

    Attributes:
      lanes: Their place in their entry.
      layers: Their entry.
    """

    lanes: Column
    layers: Column


@dataclasses.dataclass(frozen=True, kw_only=True)
class SkippedRows(_PlacedRows):
    """States that are passed on to the layers above, by the lanes where they stand.

    Attributes:
      layers: Their entry.
      nodes: shape (rows, layers - 1). Where their keys and values go in layers 2 to L; beyond the store where a layer
        was not skipped.
    """

    layers: Column
    nodes: Column
    _ends_in_several = True


@dataclasses.dataclass(frozen=True, kw_only=True)
class CopiedRows(ToldRows):
    """Keys and values that are passed on to the layers above.

    Attributes:
      layers: That have made them.
      source_nodes: Where they stand there.
      nodes: As of `SkippedRows`.
    """

    layers: Column
    source_nodes: Column
    nodes: Column
    _ends_in_several = True
