"""What a worker decodes on."""

import jax
import pytest

from calm_beam.transforms.devices import require_accelerator


def test_a_cpu_is_no_accelerator(monkeypatch: pytest.MonkeyPatch) -> None:
    """A worker on which JAX falls back to the CPU stops and says so; one with a device goes on."""
    monkeypatch.setattr(jax, "default_backend", lambda: "cpu")
    with pytest.raises(RuntimeError, match="JAX finds only its CPU"):
        require_accelerator()
    for backend in ("gpu", "tpu"):
        monkeypatch.setattr(jax, "default_backend", lambda backend=backend: backend)
        require_accelerator()
