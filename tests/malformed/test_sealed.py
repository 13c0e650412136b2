"""Sealed files with every value replaced and the seal renewed."""

import copy
import json
import pathlib
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from calm_beam.errors import CalmBeamError
from calm_beam.launch.cli import main
from calm_beam.manifest import content_digest, read_any_manifest
from calm_beam.outputs import AnswerJob, DecodeJob, FinishedAnswers, FinishedSweep
from calm_beam.outputs.timing import read_run_timing, read_timings
from tests.answers import write_served_folder
from tests.pipelines import SHORT_FLAGS, id_rows, write_model, write_rows

_VALUES: tuple[Any, ...] = (
    *(None, True, 0, -1, 1.5, 10**30, 10**400, 1e308),
    *("", "x", "\0", "../../etc/passwd", "é" * 100_000, [], {}, [[]], {"a": 1}, [None], ["x", 1]),
)


@pytest.fixture(scope="module")
def here(tmp_path_factory: pytest.TempPathFactory) -> pathlib.Path:
    """A folder with a finished calibration and finished answers."""
    here = tmp_path_factory.mktemp("sealed")
    write_served_folder(here / "served", prompts=12)
    write_model(here / "model")
    write_rows(here / "rows.jsonl", id_rows(20))
    paths = [f"--checkpoint={here / 'model'}", f"--data={here / 'rows.jsonl'}", f"--output={here / 'out'}"]
    goal = ["--consistency=textual", "--metric=token_f1", "--delta=0.9", "--epsilon=0.4"]
    assert main(["calibrate", *paths, *SHORT_FLAGS, *goal]) == 0
    served = [f"--manifest={here / 'served'}", f"--checkpoint={here / 'served' / 'model'}"]
    rows = f"--input={here / 'served' / 'rows.jsonl'}"
    assert main(["generate", *served, rows, f"--output={here / 'answers'}/", "--num_shards=2"]) == 0
    return here


def _places(value: Any, at: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """Yields the places of nested values, the outermost first; of a list, only its first and last."""
    if at:
        yield at
    keys = list(value) if isinstance(value, dict) else sorted({0, len(value) - 1} if isinstance(value, list) else ())
    for key in keys:
        if isinstance(value, dict) or value:
            yield from _places(value[key], (*at, key))


def _replaced(content: dict[str, Any], place: tuple[Any, ...], value: Any) -> dict[str, Any]:
    changed = copy.deepcopy(content)
    inner: Any = changed
    for key in place[:-1]:
        inner = inner[key]
    inner[place[-1]] = value
    return changed


def _generations(here: pathlib.Path) -> str:
    (folder,) = (here / "out" / "generations").iterdir()
    return str(folder)


def _sweep(here: pathlib.Path) -> object:
    folder = _generations(here)
    finished = FinishedSweep.read(folder, DecodeJob.read(folder))
    return finished, read_timings(folder, finished.shards), read_run_timing(folder)


def _answers(here: pathlib.Path) -> object:
    folder = str(here / "answers")
    job = AnswerJob.read(folder)
    return job.digest(), FinishedAnswers.read(folder, job).total.in_words()


_KINDS: dict[str, tuple[str, Callable[[pathlib.Path], object]]] = {
    "manifest": ("out/manifest.json", lambda here: read_any_manifest(here / "out" / "manifest.json")),
    "job of a sweep": ("out/generations/*/decode.json", _sweep),
    "mark of a sweep": ("out/generations/*/complete.json", _sweep),
    "timing": ("out/generations/*/timing-00000-of-00003.json", _sweep),
    "timing of a run": ("out/generations/*/timing-run.json", _sweep),
    "job of answers": ("answers/generate.json", _answers),
    "mark of answers": ("answers/complete.json", _answers),
}


@pytest.mark.parametrize("kind", _KINDS)
def test_every_value_is_checked(kind: str, here: pathlib.Path) -> None:
    """With any value replaced, at any depth, the file is read or refused with one of our messages."""
    pattern, read = _KINDS[kind]
    (path,) = here.glob(pattern)
    text = path.read_text()
    content = json.loads(text)
    is_sealed = "digest" in content and "shard" not in content
    read(here)
    refused = tried = 0
    defects = []
    try:
        for place in _places(content):
            for value in _VALUES:
                changed = _replaced(content, place, value)
                if is_sealed and place != ("digest",):
                    changed["digest"] = content_digest(changed)
                path.write_text(json.dumps(changed))
                tried += 1
                try:
                    read(here)
                except CalmBeamError:
                    refused += 1
                except Exception as error:
                    defects.append(f"{'.'.join(map(str, place))} = {str(value)[:30]!r}: {error!r:.200}")
    finally:
        path.write_text(text)
    assert defects == []
    # The replaced value does reach the reader (the twin).
    assert refused > tried / 4
