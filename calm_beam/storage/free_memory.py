"""Free memory of this machine within its control groups and the user's limits, and peak memory of this process."""

import contextlib
import os
import pathlib
import sys
from collections.abc import Iterator

_CGROUPS = pathlib.Path("/sys/fs/cgroup")
_DEVICES = pathlib.Path("/dev")
# NVIDIA's GPUs, TPUs, and AMD's GPUs.
_ACCELERATORS = ("nvidia[0-9]*", "accel[0-9]*", "vfio/[0-9]*", "kfd")
_OWN_GROUPS = pathlib.Path("/proc/self/cgroup")


def available_bytes() -> int:
    """Returns the bytes that this process may still allocate on this machine, within the limits of control groups."""
    return max(0, min([_system_bytes(), *_group_bytes(), *_address_bytes()]))


def has_accelerators() -> bool:
    """Returns whether this machine has GPUs or TPUs that JAX may use, judging by its device files.

    JAX itself is not asked: a process that starts workers must not initialise it.
    """
    if os.environ.get("JAX_PLATFORMS", "").lower() == "cpu":
        return False
    return any(True for pattern in _ACCELERATORS for _ in _DEVICES.glob(pattern))


def peak_bytes() -> int:
    """Returns this process's peak memory so far in bytes; 0 if the system does not report it."""
    try:
        import resource
    except ImportError:
        return 0
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    # Linux counts in KiB, macOS in bytes.
    return peak if sys.platform == "darwin" else peak * 1024


def _system_bytes() -> int:
    with contextlib.suppress(OSError, ValueError, IndexError):
        for line in pathlib.Path("/proc/meminfo").read_text(encoding="ascii").splitlines():
            if line.startswith("MemAvailable:"):
                return int(line.split()[1]) << 10
    return os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")


def _address_bytes() -> Iterator[int]:
    """Yields the bytes left below a limit on the address space (ulimit -v)."""
    with contextlib.suppress(ImportError, OSError, ValueError):
        import resource

        limit, _ = resource.getrlimit(resource.RLIMIT_AS)
        if limit != resource.RLIM_INFINITY:
            used = int(pathlib.Path("/proc/self/statm").read_text(encoding="ascii").split()[0])
            yield limit - used * resource.getpagesize()


def _group_bytes() -> Iterator[int]:
    """Yields the bytes left in the control groups of this process, those above them included."""
    try:
        lines = _OWN_GROUPS.read_text(encoding="utf-8").splitlines()
    except OSError:
        return
    for line in lines:
        _, controllers, path = line.split(":", 2)
        if controllers == "":
            names = "memory.max", "memory.current", "inactive_file"
            roots = [_CGROUPS, _CGROUPS / "unified"]
        elif "memory" in controllers.split(","):
            names = "memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file"
            roots = [_CGROUPS / "memory"]
        else:
            continue
        for root in roots:
            # In a container, its own group is mounted as the root.
            group = root / path.lstrip("/")
            for folder in {root, group, *(above for above in group.parents if above.is_relative_to(root))}:
                with contextlib.suppress(OSError, ValueError):
                    yield _left_in_group(folder, *names)


def _left_in_group(folder: pathlib.Path, limit: str, usage: str, cached: str) -> int:
    """Returns the bytes left in a group; raises ValueError if it has no limit."""
    most = int((folder / limit).read_text(encoding="ascii"))
    used = int((folder / usage).read_text(encoding="ascii"))
    # Cached pages are freed when memory is needed.
    for line in (folder / "memory.stat").read_text(encoding="ascii").splitlines():
        name, _, value = line.partition(" ")
        if name == cached:
            used -= int(value)
    return most - used
