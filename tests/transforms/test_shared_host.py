"""Clients find their model's host, in their own process or in another, and a new one when that has ended."""

import dataclasses
import os
import subprocess
import sys
import uuid
from typing import Any, cast

import pytest

from calm_beam.checkpoints import Declared
from calm_beam.serving.questions import HostedModel
from calm_beam.transforms import early_exit
from calm_beam.transforms.early_exit import HostHandle, keep_memory_free, machine_tag

_MODEL = HostedModel(
    checkpoint="model",
    fingerprint="sha256:0",
    declared=Declared(),
    vocabulary=None,
    batch_size=None,
    max_cache_tokens=None,
    exit_head="exact",
)


def _asked(handle: HostHandle, question: str) -> Any:
    """Returns the host's response to a question that is not a real one."""
    return handle.answer(cast(Any, question))


class _Host:
    """Answers with the number of the host's start."""

    made = 0

    def __init__(self, model: HostedModel) -> None:
        type(self).made += 1
        self._number = self.made
        self._lives = 2

    def answer(self, question: Any) -> Any:
        """Returns its number and the question."""
        if not self._lives:
            raise EOFError
        self._lives -= 1
        return self._number, question


def test_a_lost_host_is_found_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """If the process that held the model has ended, the question goes to the next host."""
    monkeypatch.setattr(early_exit, "_own_host", _Host)
    handle = HostHandle(_MODEL, tag=None)
    assert [_asked(handle, question) for question in "abc"] == [(1, "a"), (1, "b"), (2, "c")]


def test_handles_of_a_process_share_its_host(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without sharing between processes, all handles of a process use one host, which ends with the last of them."""
    monkeypatch.setattr(early_exit, "load_host", _Host)
    handles = [HostHandle(_MODEL, tag=None) for _ in range(2)]
    numbers = {_asked(handle, "")[0] for handle in handles}
    assert len(numbers) == 1
    del handles
    assert _asked(HostHandle(_MODEL, tag=None), "")[0] not in numbers


def test_other_models_have_other_hosts() -> None:
    """Names of hosts differ if anything about the model does, and between launchers."""
    other = dataclasses.replace(_MODEL, fingerprint="sha256:1")
    assert machine_tag(_MODEL) == machine_tag(dataclasses.replace(_MODEL))
    assert machine_tag(_MODEL) != machine_tag(other)
    assert uuid.UUID(early_exit._LAUNCHER).hex in machine_tag(_MODEL)


@pytest.mark.parametrize(("before", "after"), [(None, "false"), ("true", "true")])
def test_memory_is_taken_as_it_is_needed(before: str | None, after: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """JAX allocates memory as needed unless the environment sets it otherwise."""
    name = "XLA_PYTHON_CLIENT_PREALLOCATE"
    monkeypatch.delenv(name, raising=False)
    if before is not None:
        monkeypatch.setenv(name, before)
    keep_memory_free()
    assert os.environ[name] == after


def test_asking_loads_no_jax() -> None:
    """A process that gets its answers from another can be a client without loading JAX."""
    code = (
        "import sys; from calm_beam.transforms.early_exit import HostHandle; HostHandle(None, tag='a'); "
        "print('jax' in sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=120)
    assert done.stdout == "False\n"
