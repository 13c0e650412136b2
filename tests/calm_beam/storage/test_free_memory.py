"""The amount of free memory."""

import os
import pathlib

import pytest

from calm_beam.storage import free_memory
from calm_beam.storage.free_memory import available_bytes


def test_free_memory_is_of_this_machine() -> None:
    """Free memory is above 0, and at most the machine's."""
    assert 0 < available_bytes() <= os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")


@pytest.mark.parametrize(
    ("line", "folder", "names"),
    [
        ("0::/a/b", "", ("memory.max", "memory.current", "inactive_file")),
        ("4:memory:/a/b", "memory", ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file")),
    ],
    ids=["second version", "first version"],
)
@pytest.mark.parametrize("place", ["a/b", "a", ""], ids=["own", "above", "mounted as the root"])
def test_limits_of_control_groups_count(
    line: str,
    folder: str,
    names: tuple[str, str, str],
    place: str,
    tmp_path: pathlib.Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The least that a control group or one above it leaves is free; its cache counts as free, too."""
    group = tmp_path / "cgroup" / folder / place
    group.mkdir(parents=True)
    for name, content in zip((*names[:2], "memory.stat"), ("1000", "700", f"anon 9\n{names[2]} 300\n"), strict=True):
        (group / name).write_text(f"{content}\n")
    own = tmp_path / "own"
    own.write_text(f"9:pids:/x\n{line}\n")
    monkeypatch.setattr(free_memory, "_CGROUPS", tmp_path / "cgroup")
    monkeypatch.setattr(free_memory, "_OWN_GROUPS", own)
    assert available_bytes() == 600
    (group / names[0]).write_text("max\n")
    assert available_bytes() > 1000


def test_a_limit_on_the_address_space_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    """A limit by `ulimit -v` bounds the free memory."""
    import resource

    monkeypatch.setattr(resource, "getrlimit", lambda _: (1, 1))
    assert available_bytes() == 0


def test_accelerators_are_seen_by_their_files(tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A device file shows a GPU or TPU, unless JAX is kept to the CPU."""
    monkeypatch.setattr(free_memory, "_DEVICES", tmp_path)
    monkeypatch.delenv("JAX_PLATFORMS", raising=False)
    (tmp_path / "nvidiactl").touch()
    assert not free_memory.has_accelerators()
    (tmp_path / "nvidia0").touch()
    assert free_memory.has_accelerators()
    monkeypatch.setenv("JAX_PLATFORMS", "cpu")
    assert not free_memory.has_accelerators()
