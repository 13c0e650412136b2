"""Where arrays are: on one device, or divided among those that share a model."""

import contextlib
from collections.abc import Sequence
from typing import Any

import flax.traverse_util
import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec, SingleDeviceSharding

from calm_beam.model import ModelConfig, parameter_shapes
from calm_beam.model.partitioning import PARTS
from calm_beam.model.sharding import Division
from calm_beam.precision import Precision, held_type


class Placement:
    """Devices, which may be described only, and arrays on them that have no numbers.

    Attributes:
      division: How a model is divided among them.
    """

    def __init__(self, devices: Sequence[Any], config: ModelConfig) -> None:
        """Takes one device, or as many as share a model of such sizes."""
        self.division = Division.of(config, len(devices))
        self._config = config
        self._first = devices[0]
        self._mesh = Mesh(np.array(devices), (PARTS,)) if len(devices) > 1 else None

    @property
    def parts(self) -> int:
        """Devices that share the model."""
        return self.division.parts

    def running(self) -> contextlib.AbstractContextManager[Any]:
        """Has what is traced within the block know of the devices, as `DeviceGroup.running` does."""
        return contextlib.nullcontext() if self._mesh is None else jax.set_mesh(self._mesh)

    def array(self, *shape: int, dtype: Any = "int32", axis: int | None = None, of: int | None = None) -> Any:
        """Returns an array without numbers.

        Args:
          shape: Its shape.
          dtype: Of its numbers.
          axis: What is divided, as by `partitioning.divided`; None if every device has all of it.
          of: What lies along that axis, such as heads; None for its entries.
        """
        if axis is not None and (shape[axis] if of is None else of) % self.parts:
            axis = None
        return jax.ShapeDtypeStruct(shape, dtype, sharding=self._sharding(axis))

    def spread(self, *shape: int, dtype: Any) -> Any:
        """Returns an array that is divided as by `partitioning.spread`."""
        axes = [axis for axis, size in enumerate(shape) if size % self.parts == 0]
        return self.array(*shape, dtype=dtype, axis=max(axes, key=lambda axis: (shape[axis], axis), default=None))

    def parameters(self, precision: Precision) -> dict[str, Any]:
        """Returns a model's parameters by name, as decoders hold them."""
        return {
            name: self.array(*shape, dtype=held_type(name, precision), axis=self.division.axis(name, len(shape)))
            for name, shape in parameter_shapes(self._config).items()
        }

    def tree(self, precision: Precision) -> Any:
        """Returns them as a tree."""
        return flax.traverse_util.unflatten_dict(self.parameters(precision), sep="/")

    def _sharding(self, axis: int | None) -> Any:
        if self._mesh is None:
            return SingleDeviceSharding(self._first)
        return NamedSharding(self._mesh, PartitionSpec(*() if axis is None else (*(None,) * axis, PARTS)))
