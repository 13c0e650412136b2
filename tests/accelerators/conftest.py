"""What needs the accelerators' compilers is run by `make accelerators`, which has them; else it is skipped."""

import os
from collections.abc import Sequence

import pytest

_NEEDS = "compilers"


def pytest_configure(config: pytest.Config) -> None:
    """Names the mark of what needs compilers."""
    config.addinivalue_line("markers", f"{_NEEDS}: needs the accelerators' compilers; run by `make accelerators`")


def pytest_collection_modifyitems(items: Sequence[pytest.Item]) -> None:
    """Skips what needs them where they are not."""
    if os.environ.get("CALM_BEAM_ACCELERATORS"):
        return
    for item in items:
        if item.get_closest_marker(_NEEDS):
            item.add_marker(pytest.mark.skip(reason="needs the accelerators' compilers: make accelerators"))
