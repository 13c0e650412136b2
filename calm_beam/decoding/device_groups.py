"""Groups of devices that share one model, and the placement of its weights on them.

A group of one device holds the whole model. In a larger group each device has a part (`model/sharding.py`); XLA divides
the work by where the weights are, and adds up the partial results.
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
        """Whether the group is JAX's default device."""
        return self.devices == tuple(jax.local_devices()[:1])

    @contextlib.contextmanager
    def running(self) -> Iterator[None]:
        """Makes JAX compute on the group within the block.

        Threads take turns on a group of several devices: programs that communicate must start in the same order on all
        of them.
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
        """Returns an array on the group; of a stored array, each device's part is read separately.

        Args:
          name: The parameter's name.
          array: Its values.
          precision: Decides the array's type.
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
            # The host holds the array until it is on the group.
            read: jax.Array = jax.block_until_ready(self.place(name, np.asarray(array), precision))
            return read
        size = array.shape[axis] // parts
        shards = []
        for part, device in enumerate(self.devices):
            values = array[(slice(None),) * axis + (slice(part * size, (part + 1) * size),)]
            # One part after the other, so that the host holds no more than one.
            shards.append(jax.block_until_ready(jax.device_put(held(name, values, precision), device)))
        return jax.make_array_from_single_device_arrays(array.shape, self._sharding(axis), shards)

    def _sharding(self, axis: int | None) -> NamedSharding:
        """Returns the layout of an array that is divided along an axis; None for one that every device has whole."""
        assert self._mesh is not None
        spec = PartitionSpec() if axis is None else PartitionSpec(*(None,) * axis, PARTS)
        return NamedSharding(self._mesh, spec)


@functools.cache
def _lock_of(devices: tuple[jax.Device, ...]) -> "threading.RLock":
    """Returns the lock of some devices, one for all their users."""
    return threading.RLock()


def device_groups(
    config: ModelConfig, *, model_parallelism: int = 1, devices: Sequence[jax.Device] | None = None
) -> list[DeviceGroup]:
    """Returns the devices of this process in groups, each of which holds a copy of the model.

    Args:
      config: Sizes of the model.
      model_parallelism: Devices of a group.
      devices: Devices of JAX's default platform; None for all of this process.

    Raises:
      UsageError: If the model cannot be divided into so many parts, or devices would be left over.
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
    """Returns the model with its weights on a group's devices, in the type of a precision, read array by array.

    Raises:
      CheckpointError: If the weights cannot be read, or the model's files have changed since it was loaded.
    """
    checkpoint.check_rounding(precision)
    arrays: Any = {name: group.place(name, array, precision) for name, array in sorted(checkpoint.arrays.items())}
    checkpoint.check_unchanged()
    if precision.dtype != "float32":
        # Rounded weights would have another fingerprint than the model: keep the model's.
        return dataclasses.replace(checkpoint, arrays=arrays, rounded=(precision, checkpoint.fingerprint()))
    if isinstance(checkpoint.arrays, StoredArrays):
        arrays = checkpoint.arrays.moved(arrays)
    return dataclasses.replace(checkpoint, arrays=arrays)
