"""Serving reads manifests, so reading them must cost nothing: no numpy, JAX or Beam."""

import os
import subprocess
import sys

import pytest

_HEAVY = ("numpy", "jax", "apache_beam", "scipy")


def _run(code: str, **environment: str) -> str:
    done = subprocess.run(
        [sys.executable, "-c", code],
        capture_output=True,
        text=True,
        check=True,
        timeout=120,
        env={**os.environ, **environment},
    )
    return done.stdout.strip()


def _heavy_modules_loaded_by(module: str) -> list[str]:
    return _run(f"import sys, {module}; print(*[m for m in {_HEAVY} if m in sys.modules])").split()


@pytest.mark.parametrize("module", ["calm_beam.manifest", "calm_beam.manifest.files"])
def test_import_loads_the_standard_library_only(module: str) -> None:
    """Importing the manifest loads none of the numerical packages."""
    assert _heavy_modules_loaded_by(module) == []


def test_the_check_sees_numpy() -> None:
    """The check above fails for a module that loads numpy."""
    assert _heavy_modules_loaded_by("numpy.linalg") == ["numpy"]


def test_import_loads_nothing_from_site_packages() -> None:
    """Every module that the import loads belongs to Python or to calm_beam."""
    code = (
        "import sys; before = set(sys.modules); import calm_beam.manifest\n"
        "print(*{name.partition('.')[0] for name in set(sys.modules) - before})"
    )
    assert set(_run(code).split()) - sys.stdlib_module_names == {"calm_beam"}
