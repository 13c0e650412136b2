"""Tests that need the accelerators' compilers are run by `make accelerators`, and skipped elsewhere."""

import os
from collections.abc import Sequence

import pytest

_NEEDS = "compilers"


def pytest_configure(config: pytest.Config) -> None:
    """Registers the mark of tests that need compilers."""
    config.addinivalue_line("markers", f"{_NEEDS}: needs the accelerators' compilers; run by `make accelerators`")


def pytest_collection_modifyitems(items: Sequence[pytest.Item]) -> None:
    """Skips tests that need compilers if there are none."""
    if os.environ.get("CALM_BEAM_ACCELERATORS"):
        return
    for item in items:
        if item.get_closest_marker(_NEEDS):
            item.add_marker(pytest.mark.skip(reason="needs the accelerators' compilers: make accelerators"))
