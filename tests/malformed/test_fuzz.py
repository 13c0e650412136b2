"""Three thousand files with random damage: each is read, or refused with one of our messages."""

import json
import pathlib
import shutil

import pytest

from .forks import run_forked
from .fuzz import KINDS, add_files, read_damaged
from .fuzz_templates import render_made
from .place import build_place

pytestmark = pytest.mark.slow

_DAMAGES_OF_A_KIND = 134
_LIMIT = 280


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> pathlib.Path:
    """A valid folder, to be copied."""
    here = build_place(tmp_path_factory.mktemp("place"))
    add_files(here)
    return here


@pytest.mark.parametrize("kind", KINDS)
def test_damaged_files(kind: str, place: pathlib.Path, tmp_path: pathlib.Path) -> None:
    """No damage raises an exception other than ours, ends the process, hangs, or takes 2 GiB."""
    shutil.copytree(place, tmp_path / "here")
    count = _DAMAGES_OF_A_KIND
    ended = run_forked(read_damaged, kind, count, 0, folder=tmp_path, limit=_LIMIT)
    lines = [json.loads(line) for line in ended.out.splitlines() if line.startswith("{")]
    assert [line for line in lines if "defect" in line] == [], ended.err[-3000:]
    assert ended.status == 0, f"died at {lines[-1:]}: {ended.err[-3000:]}"
    counts = lines[-1]
    assert counts["accepted"] + counts["refused"] == count
    # Damage does reach the reader (the twin).
    assert counts["refused"] > count / 10
    assert ended.peak_mib < 2048


_TEMPLATES = 200


@pytest.mark.parametrize("seed", range(2))
def test_chat_templates(seed: int, tmp_path: pathlib.Path) -> None:
    """No chat template raises an exception other than ours, takes long or 2 GiB, or ends the process."""
    (tmp_path / "here").mkdir()
    ended = run_forked(render_made, _TEMPLATES, seed, folder=tmp_path, limit=_LIMIT)
    lines = [json.loads(line) for line in ended.out.splitlines() if line.startswith("{")]
    assert [line for line in lines if "defect" in line] == [], ended.err[-3000:]
    assert ended.status == 0, ended.err[-3000:]
    counts = lines[-1]
    assert counts["accepted"] + counts["refused"] == _TEMPLATES
    # There are many of both (the twin).
    assert min(counts["accepted"], counts["refused"]) > _TEMPLATES / 10
    assert ended.peak_mib < 2048
