"""Devices, memory, native code and the user's cache on this machine."""

import dataclasses
import os
import pathlib

import jax

from calm_beam.model.native.library import instruction_set, instruction_sets_here, why_unavailable
from calm_beam.storage import cache_folder
from calm_beam.storage.free_memory import available_bytes


@dataclasses.dataclass(frozen=True, kw_only=True)
class Device:
    """A device that JAX sees.

    Attributes:
      name: JAX's name of the device.
      platform: `cpu`, `gpu` or `tpu`.
      kind: Model of the device.
      total_bytes: Size of its memory; None if it does not report one, such as a CPU.
      free_bytes: Free memory; None if it does not report it.
    """

    name: str
    platform: str
    kind: str
    total_bytes: int | None
    free_bytes: int | None


@dataclasses.dataclass(frozen=True, kw_only=True)
class Cache:
    """The folder of caches.

    Attributes:
      path: The folder, which need not exist.
      files: Number of files in it.
      size_bytes: Size of these files.
      is_writable: Whether it can be written, or created.
    """

    path: str
    files: int
    size_bytes: int
    is_writable: bool


def devices() -> tuple[Device, ...]:
    """Returns the devices of this process; raises RuntimeError if JAX finds none of the configured platform."""
    return tuple(_device(device) for device in jax.local_devices())


def _device(device: jax.Device) -> Device:
    statistics = device.memory_stats() or {}
    limit = statistics.get("bytes_limit")
    return Device(
        name=str(device),
        platform=device.platform,
        kind=device.device_kind,
        total_bytes=limit,
        free_bytes=None if limit is None else limit - statistics.get("bytes_in_use", 0),
    )


def free_memory() -> int:
    """Returns how many bytes this process may still take of the machine's memory."""
    return available_bytes()


def native_code() -> str:
    """Returns what native code does on this machine, or why it is not used."""
    reason = why_unavailable()
    if reason is not None:
        return f"none: {reason}"
    return f"{instruction_set()}, for decoder layers and heads in float32 (here: {', '.join(instruction_sets_here())})"


def cache() -> Cache:
    """Returns the size and state of the cache."""
    folder = cache_folder()
    sizes = []
    for directory, _, names in os.walk(folder):
        for name in names:
            try:
                sizes.append(os.lstat(os.path.join(directory, name)).st_size)
            except FileNotFoundError:
                # Another process has removed it meanwhile.
                continue
    return Cache(path=str(folder), files=len(sizes), size_bytes=sum(sizes), is_writable=_is_writable(folder))


def _is_writable(folder: pathlib.Path) -> bool:
    nearest = next(path for path in (folder, *folder.absolute().parents) if path.exists())
    return nearest.is_dir() and os.access(nearest, os.W_OK | os.X_OK)
