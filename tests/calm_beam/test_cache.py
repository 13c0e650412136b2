"""The folders of caches."""

import pathlib

import pytest

from calm_beam.storage import cache_folder


def test_the_first_name_that_is_set_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    """Caches are in the folder that the user names, else in the system's; empty names do not count."""
    monkeypatch.setenv("HOME", "/home/somebody")
    monkeypatch.delenv("CALM_BEAM_CACHE", raising=False)
    monkeypatch.setenv("XDG_CACHE_HOME", "")
    assert cache_folder() == pathlib.Path("/home/somebody/.cache/calm-beam")
    monkeypatch.setenv("XDG_CACHE_HOME", "/caches")
    assert cache_folder() == pathlib.Path("/caches/calm-beam")
    monkeypatch.setenv("CALM_BEAM_CACHE", "/ours")
    assert cache_folder() == pathlib.Path("/ours")
