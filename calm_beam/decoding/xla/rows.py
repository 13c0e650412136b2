"""What a step of the device is told of its rows: one array of int32, since ten take a device ten times as long.

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

    # Fields that have a number for every row; the others have several.
    _single: ClassVar[int]

    def joined(self) -> np.ndarray:
        """Returns all of it as one array, (rows, columns)."""
        return np.column_stack(list(vars(self).values()))

    @classmethod
    def of(cls, joined: jax.Array) -> Self:
        """Returns what was joined."""
        names = [field.name for field in dataclasses.fields(cls)]
        columns: list[Any] = list(jnp.unstack(joined[:, : cls._single], axis=1))
        if len(names) > cls._single:
            columns.append(joined[:, cls._single :])
        return cls(**dict(zip(names, columns, strict=True)))

    @classmethod
    def num_columns(cls, several: int = 0) -> int:
        """Returns how many columns there are where the last field has `several`."""
        return cls._single + several


@dataclasses.dataclass(frozen=True, kw_only=True)
class EmbeddedRows(ToldRows):
    """Tokens that are looked up.

    Attributes:
      lanes: Where each goes.
      tokens: The newest of each.
    """

    lanes: Column
    tokens: Column
    _single = 2


@dataclasses.dataclass(frozen=True, kw_only=True)
class LayerRows(ToldRows):
    """Rows of a layer, ordered by prompt.

    Attributes:
      lanes: Where the output goes.
      below: Where the layer's input stands in the entry below.
      nodes: Where the keys and values made here go.
      steps: Of `Position`.
      prompt_lengths: Likewise.
      groups: As of `GroupedSources`, for the rows of each tile by themselves; like the next two.
      ranks: As of `GroupedSources`.
      places: As of `GroupedSources`, of as many groups as there are rows.
      paths: shape (rows, steps of an output). The nodes that each attends to, its own included.
    """

    lanes: Column
    below: Column
    nodes: Column
    steps: Column
    prompt_lengths: Column
    groups: Column
    ranks: Column
    places: Column
    paths: Column
    _single = 8

    @property
    def position(self) -> Position:
        """Where their newest tokens stand."""
        return Position(self.steps, self.prompt_lengths)


@dataclasses.dataclass(frozen=True, kw_only=True)
class AskedRows(ToldRows):
    """States that a head is asked about.

    Attributes:
      lanes: Their place in their entry.
      layers: Their entry.
    """

    lanes: Column
    layers: Column
    _single = 2


@dataclasses.dataclass(frozen=True, kw_only=True)
class SkippedRows(ToldRows):
    """States that are passed on to the layers above.

    Attributes:
      lanes: Their place in their entry.
      layers: Their entry.
      steps: Of `Position`.
      prompt_lengths: Likewise.
      nodes: shape (rows, layers - 1). Where their keys and values go in layers 2 to L; beyond the store where a layer
        was not skipped.
    """

    lanes: Column
    layers: Column
    steps: Column
    prompt_lengths: Column
    nodes: Column
    _single = 4

    @property
    def position(self) -> Position:
        """Where their newest tokens stand."""
        return Position(self.steps, self.prompt_lengths)


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
    _single = 2
