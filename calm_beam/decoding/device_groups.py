"""Devices that share one model, and how its weights come to them.

A group of one device holds a model as it always was. In a larger one each device has a part (`model/sharding.py`); XLA
divides the work by where the weights are, and adds up what the parts give.
"""

import contextlib
import dataclasses
import functools
import threading
from collections.abc import Iterator, Sequence
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from calm_beam.checkpoints import Array, Checkpoint, StoredArray, StoredArrays, held
from calm_beam.errors import UsageError
from calm_beam.model import ModelConfig
from calm_beam.model.partitioning import PARTS
from calm_beam.model.sharding import Division
from calm_beam.precision import FLOAT32, Precision
from calm_beam.text import counted


class DeviceGroup:
    """Devices that hold one model together.

    Attributes:
      devices: At least one.
      division: How the model is divided among them.
    """

    def __init__(self, devices: Sequence[jax.Device], division: Division) -> None:
        """Takes as many devices as the model has parts."""
        assert len(devices) == division.parts
        self.devices = tuple(devices)
        self.division = division
        self._mesh = Mesh(np.array(self.devices), (PARTS,)) if len(self.devices) > 1 else None
        self._lock = _lock_of(self.devices)

    @property
    def is_default(self) -> bool:
        """Whether it is the device that JAX computes on if nobody says anything."""
        return self.devices == tuple(jax.local_devices()[:1])

    @contextlib.contextmanager
    def running(self) -> Iterator[None]:
        """Has JAX compute on the group within the block.

        Threads take turns with a group of several devices: programs that exchange numbers must begin in one order on
        all of them.
        """
        if self._mesh is not None:
            with self._lock, jax.set_mesh(self._mesh):
                yield
        elif self.is_default:
            yield
        else:
            with jax.default_device(self.devices[0]):
                yield

    def place(self, name: str, array: Array | jax.Array, precision: Precision = FLOAT32) -> jax.Array:
        """Returns an array on the group; of one that is stored, each device's part is read by itself.

        Args:
          name: Of the parameter.
          array: Its values.
          precision: Decides the type that it comes in.
        """
        if isinstance(array, StoredArray):
            return self._read(name, array, precision)
        array = held(name, array, precision)
        placed: jax.Array
        if self._mesh is not None:
            placed = jax.device_put(array, self._sharding(self.division.axis(name, array.ndim)))
        elif isinstance(array, jax.Array) and array.devices() != set(self.devices):
            placed = jax.device_put(array, self.devices[0])
        else:
            with self.running():
                placed = jax.device_put(array)
        return placed

    def _read(self, name: str, array: StoredArray, precision: Precision) -> jax.Array:
        axis, parts = self.division.axis(name, array.ndim), self.division.parts
        if axis is None or not array.divides(axis, parts):
            # Until it is there, the host holds it.
            read: jax.Array = jax.block_until_ready(self.place(name, np.asarray(array), precision))
            return read
        size = array.shape[axis] // parts
        shards = []
        for part, device in enumerate(self.devices):
            values = array[(slice(None),) * axis + (slice(part * size, (part + 1) * size),)]
            # One after the other, so that the host holds no more than one.
            shards.append(jax.block_until_ready(jax.device_put(held(name, values, precision), device)))
        return jax.make_array_from_single_device_arrays(array.shape, self._sharding(axis), shards)

    def _sharding(self, axis: int | None) -> NamedSharding:
        """Returns the layout of an array whose axis is divided; of one that all devices have whole, for None."""
        assert self._mesh is not None
        spec = PartitionSpec() if axis is None else PartitionSpec(*(None,) * axis, PARTS)
        return NamedSharding(self._mesh, spec)


@functools.cache
def _lock_of(devices: tuple[jax.Device, ...]) -> "threading.RLock":
    """Returns the one lock of some devices, whoever uses them."""
    return threading.RLock()


def device_groups(
    config: ModelConfig, *, model_parallelism: int = 1, devices: Sequence[jax.Device] | None = None
) -> list[DeviceGroup]:
    """Returns the devices of this process in groups of which each holds a model.

    Args:
      config: Sizes of the model.
      model_parallelism: Devices of a group.
      devices: Of JAX's default platform; None for all of this process.

    Raises:
      UsageError: If the model cannot be divided so, or devices would be left over.
      ValueError: If a device is of another platform.
    """
    found = list(devices or jax.local_devices())
    for device in found:
        if device.platform != jax.default_backend():
            raise ValueError(
                f"device {device} is not a {jax.default_backend()} device: set JAX_PLATFORMS to choose another."
            )
    division = Division.of(config, model_parallelism)
    if len(found) % model_parallelism:
        raise UsageError(
            f"model_parallelism is {model_parallelism}, but this process has {counted(len(found), 'device')}: that "
            "many must be a multiple of it, so that each holds a part of one model."
        )
    return [
        DeviceGroup(found[first : first + model_parallelism], division)
        for first in range(0, len(found), model_parallelism)
    ]


def placed(checkpoint: Checkpoint, group: DeviceGroup, precision: Precision = FLOAT32) -> Checkpoint:
    """Returns the model with its weights on a group's devices, as a precision has them, read array by array.

    Raises:
      CheckpointError: If they cannot be read, or the files of the model have changed since it was loaded.
    """
    checkpoint.check_rounding(precision)
    arrays: Any = {name: group.place(name, array, precision) for name, array in sorted(checkpoint.arrays.items())}
    checkpoint.check_unchanged()
    if precision.dtype != "float32":
        # What is rounded has another fingerprint than the model.
        return dataclasses.replace(checkpoint, arrays=arrays, rounded=(precision, checkpoint.fingerprint()))
    if isinstance(checkpoint.arrays, StoredArrays):
        arrays = checkpoint.arrays.moved(arrays)
    return dataclasses.replace(checkpoint, arrays=arrays)
