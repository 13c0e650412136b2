"""The ports at which the processes of a run listen, as the kernel lists them."""

import contextlib
import ipaddress
import os
import pathlib
import sys

_LISTENING = "0A"


def family(pid: int) -> set[int]:
    """Returns a process and the processes that it has started, directly or indirectly."""
    parents: dict[int, int] = {}
    for stat in pathlib.Path("/proc").glob("[0-9]*/stat"):
        with contextlib.suppress(OSError):
            # The name in parentheses may hold spaces.
            parents[int(stat.parent.name)] = int(stat.read_text().rpartition(")")[2].split()[1])
    found = {pid}
    while more := {child for child, parent in parents.items() if parent in found} - found:
        found |= more
    return found


def listening(pids: set[int]) -> set[str]:
    """Returns the addresses, without ports, at which any of the processes listens for TCP connections."""
    inodes = {inode for pid in pids for inode in _sockets(pid)}
    found = set()
    for table in ("tcp", "tcp6"):
        path = pathlib.Path("/proc/net", table)
        lines = path.read_text().splitlines()[1:] if path.exists() else []
        for line in lines:
            fields = line.split()
            if fields[3] == _LISTENING and fields[9] in inodes:
                found.add(_address(fields[1].partition(":")[0]))
    return found


def open_to_others(addresses: set[str]) -> list[str]:
    """Returns the addresses that other machines can reach."""
    return sorted(address for address in addresses if not _is_loopback(address))


def _is_loopback(text: str) -> bool:
    address = ipaddress.ip_address(text)
    if isinstance(address, ipaddress.IPv6Address) and address.ipv4_mapped:
        address = address.ipv4_mapped
    return address.is_loopback


def _sockets(pid: int) -> list[str]:
    found = []
    for link in pathlib.Path(f"/proc/{pid}/fd").glob("*"):
        with contextlib.suppress(OSError):
            target = os.readlink(link)
            if target.startswith("socket:["):
                found.append(target[8:-1])
    return found


def _address(digits: str) -> str:
    """Returns the address of words of 32 bits, each as this machine stores it."""
    words = [int(digits[start : start + 8], 16).to_bytes(4, sys.byteorder) for start in range(0, len(digits), 8)]
    return str(ipaddress.ip_address(b"".join(words)))
