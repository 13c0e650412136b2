"""The risk modules, and the monitor of served promises, need numpy alone."""

import subprocess
import sys

_MODULES = ", ".join(
    f"calm_beam.risk.{name}"
    for name in (
        "evidence",
        "monitor",
        "pvalues",
        "fwer",
        "losses",
        "sample_size",
        "counts",
    )
)
_ABSENT = ("jax", "flax", "apache_beam", "rouge_score", "scipy")


def _loaded_by(modules: str) -> set[str]:
    code = f"import sys, {modules}; print(*[name for name in {_ABSENT} if name in sys.modules])"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=120)
    return set(done.stdout.split())


def test_import_is_light() -> None:
    """No model, pipeline or metric package is loaded, nor scipy, whose functions differ between processors."""
    assert _loaded_by(_MODULES) == set()


def test_the_check_sees_a_package() -> None:
    """The check above fails for a module that loads one of them."""
    assert _loaded_by("rouge_score") == {"rouge_score"}
