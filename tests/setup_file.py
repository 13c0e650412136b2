"""Reads setup.py without installing anything."""

import pathlib
import runpy
from typing import Any
from unittest import mock

import setuptools

_SETUP = pathlib.Path(__file__).parents[1] / "setup.py"


def read_setup() -> dict[str, Any]:
    """Returns the arguments with which setup.py calls setuptools."""
    with mock.patch.object(setuptools, "setup") as setup:
        runpy.run_path(str(_SETUP))
    return dict(setup.call_args.kwargs)
