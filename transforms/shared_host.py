"""Where a worker finds the host of its model: in its own process, or in one process for all of the machine."""

import functools
import os
import threading
import uuid
import weakref
from typing import TYPE_CHECKING, Protocol

from apache_beam.utils.multi_process_shared import MultiProcessShared

if TYPE_CHECKING:
    from calm_beam.serving.host import ModelHost
    from calm_beam.serving.questions import HostedModel, Question, Reply

# Pickled with what is made here: workers of one launcher share hosts, those of another have their own.
_LAUNCHER = uuid.uuid4().hex

_PREALLOCATE = "XLA_PYTHON_CLIENT_PREALLOCATE"


class _Answers(Protocol):
    """A host, or what stands for one that lives elsewhere."""

    def answer(self, question: "Question") -> "Reply":
        """Returns what becomes of every prompt."""


class HostHandle:
    """Asks the host of a model, which is loaded at the first question.

    Not before, since Beam may make a handle while it holds the lock that a shared object is made under.
    """

    def __init__(self, model: "HostedModel", *, tag: str | None) -> None:
        """Keeps what to load.

        Args:
          model: The model.
          tag: Names the host that all processes of a machine share; None for one of this process's own.
        """
        self._model = model
        self._tag = tag
        self._lock = threading.Lock()
        self._host: _Answers | None = None

    def answer(self, question: "Question") -> "Reply":
        """Returns what becomes of every prompt; errors are those of `ModelHost`."""
        host = self._found(instead_of=None)
        try:
            return host.answer(question)
        except (ConnectionError, EOFError):
            # The process that held the model has ended. Whoever asks next loads it again.
            return self._found(instead_of=host).answer(question)

    def _found(self, *, instead_of: _Answers | None) -> _Answers:
        with self._lock:
            if self._host is None or self._host is instead_of:
                load = functools.partial(load_host, self._model)
                self._host = (
                    _own_host(self._model) if self._tag is None else MultiProcessShared(load, tag=self._tag).acquire()
                )
            return self._host


def machine_tag(model: "HostedModel") -> str:
    """Returns the name under which processes of a machine share a model's host, if this process has launched them."""
    return f"calm-beam-{_LAUNCHER}-{model.digest()}"


def load_host(model: "HostedModel") -> "ModelHost":
    """Returns a host, with the model loaded."""
    keep_memory_free()
    # Imported by whoever computes: JAX must not be initialised in a process that forks or pickles.
    from calm_beam.serving.host import ModelHost

    return ModelHost(model)


def keep_memory_free() -> None:
    """Has JAX take memory of a device as it needs it, unless the environment says otherwise.

    By default it takes three quarters at its start, which other processes of the machine, and whoever measures how
    much a model needs, take for the model's.
    """
    os.environ.setdefault(_PREALLOCATE, "false")


_own_hosts: weakref.WeakValueDictionary[str, "ModelHost"] = weakref.WeakValueDictionary()
_own_lock = threading.Lock()


def _own_host(model: "HostedModel") -> "ModelHost":
    """Returns this process's host of a model, which lives as long as a handle of it."""
    with _own_lock:
        host = _own_hosts.get(model.digest())
        if host is None:
            host = _own_hosts[model.digest()] = load_host(model)
        return host
