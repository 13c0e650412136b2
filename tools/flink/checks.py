"""Runs of every command on the same data, in one process and on another runner, and their comparison."""

import dataclasses
import gzip
import itertools
import json
import os
import pathlib
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from pyarrow import parquet

from calm_beam.inputs.demo import embedded
from calm_beam.model.native import library

from . import sweep

ENTRY = "from calm_beam.launch.cli import entry_point; entry_point()"
"""The code that runs the command line, given its words."""
PROCESSES = ("--direct_num_workers=2", "--direct_running_mode=multi_processing")
"""The flags of two worker processes on this machine."""
_DECODING = ("--thresholds=0.9,0.5,0.2,0", "--max_decode_length=24", "--batch_size=4", "--num_shards=4")
_ASKED = ("--consistency=textual,risk", "--metric=token_f1", "--delta=0.1,0.3")
_SERVED = ("--consistency=textual", "--delta=0.3")
# Keys that may differ: times, the processor's instructions, which are unknown for remote workers, and hashes of both.
_NAMES = ("created", "time", "instructions", "digest", "outputs", "job", "tests", "previous")
# Keys that may differ if their values are only a word or a hash.
_WORDS = ("engine", "plan")
# Files that may differ because they depend on time.
_NOT_COMPARED = ("report.html", "timing-*.json", "*.log")


@dataclasses.dataclass(frozen=True)
class Outcome:
    """The outcome of a command on a runner.

    Attributes:
      status: Its exit status.
      seconds: How long it took.
      differing: Files that differ from those of one process, apart from times; None in one process.
    """

    status: int
    seconds: float
    differing: tuple[str, ...] | None = None

    @property
    def in_words(self) -> str:
        """The cell of a table."""
        seconds = f"{self.seconds:.0f} s"
        if self.status:
            return f"status {self.status}, {seconds}"
        if self.differing is None:
            return seconds
        return f"{'not equal: ' + ', '.join(self.differing) if self.differing else 'equal'}, {seconds}"


class Checks:
    """Commands on the demo model and some of its examples.

    Attributes:
      commands: Their names, in an order in which each finds its inputs.
      rows: The file of the examples.
    """

    commands = ("calibrate", "calibrate --sequential", "generate", "decode", "certify")

    def __init__(self, folder: pathlib.Path, *, examples: int = 40) -> None:
        """Writes the data: demo examples, and if there are not enough, numbered copies of them."""
        self._folder = folder
        folder.mkdir(parents=True, exist_ok=True)
        self.rows = folder / "rows.jsonl"
        with open(self.rows, "w", encoding="utf-8") as file:
            file.writelines(itertools.islice(_rows(), examples))
        # Named, since other runners have another default engine, whose numbers cannot be compared with these.
        self._engine = "native" if library.is_available() else "xla"

    def run(self, command: str, *, runner: str, flags: Sequence[str]) -> Outcome:
        """Runs a command; on another runner, compares its files with those of one process."""
        output, one = self.output(command, runner=runner), self.output(command, runner="one process")
        return outcome_of((*self._words(command, output), *flags), output, one=one)

    def start(self, command: str, output: pathlib.Path, flags: Sequence[str]) -> subprocess.Popen[bytes]:
        """Starts a command; its log is next to its output."""
        return started((*self._words(command, output), *flags), output)

    def output(self, command: str, *, runner: str) -> pathlib.Path:
        """Returns the folder that a command writes to on a runner."""
        return self._folder / runner.replace(" ", "-") / command.replace(" --", "-")

    def _words(self, command: str, output: pathlib.Path) -> list[str]:
        model, rows = f"--checkpoint={embedded.MODEL}", self.rows
        if command == "certify":
            # The command has no pipeline, but the sweep that it certifies has.
            return ["-m", sweep.__name__, str(rows), str(output)]
        words = ["-c", ENTRY, command.split()[0]]
        if command == "generate":
            manifest = self.output("calibrate", runner="one process")
            prompts = (f"--manifest={manifest}", model, f"--input={rows}", f"--output={output}/")
            return [*words, *prompts, *_SERVED, "--batch_size=4", "--num_shards=4"]
        data = (model, f"--data={rows}", f"--engine={self._engine}", *_DECODING)
        if command == "decode":
            return [*words, *data, f"--output={output}/rows.jsonl"]
        rounds = ("--sequential", "--round_examples=8", "--stop_at_threshold=0.9")
        return [*words, *data, f"--output={output}", *_ASKED, *(rounds if command != "calibrate" else ())]


def outcome_of(words: Sequence[str], output: pathlib.Path, *, one: pathlib.Path) -> Outcome:
    """Runs this Python with these arguments, and compares its output folder, which is emptied first, with another.

    Args:
      words: The arguments.
      output: The folder that they name.
      one: The folder of one process; if that is `output`, nothing is compared.
    """
    shutil.rmtree(output, ignore_errors=True)
    began = time.monotonic()
    status = started(words, output).wait()
    seconds = time.monotonic() - began
    return Outcome(status, seconds, differing_files(one, output) if output != one and not status else None)


def started(words: Sequence[str], output: pathlib.Path) -> subprocess.Popen[bytes]:
    """Returns a new process of this Python with these arguments; its log is next to its output folder."""
    output.mkdir(parents=True, exist_ok=True)
    with open(output.parent / f"{output.name}.log", "ab") as log:
        return subprocess.Popen([sys.executable, *words], stdout=log, stderr=log, env=dict(os.environ))


def _rows() -> Iterator[str]:
    """Yields lines of examples, endlessly; their ids and prompts are all different."""
    with gzip.open(embedded.CALIBRATION_SET, "rt", encoding="utf-8") as file:
        lines = list(file)
    yield from lines
    rows = [json.loads(line) for line in lines]
    for again in itertools.count(1):
        for row in rows:
            changed = {"id": f"{row['id']}-{again}", "input": f"{row['input']} {again}"}
            yield f"{json.dumps({**row, **changed})}\n"


def differing_files(one: pathlib.Path, other: pathlib.Path) -> tuple[str, ...]:
    """Returns the files of two folders that differ in more than times and processor."""
    here, there = _contents(one), _contents(other)
    return tuple(sorted(name for name in here.keys() | there.keys() if here.get(name) != there.get(name)))


def _contents(folder: pathlib.Path) -> Mapping[str, object]:
    files = [path for path in folder.rglob("*") if path.is_file() and not any(map(path.match, _NOT_COMPARED))]
    return {_name(path.relative_to(folder)): _content(path) for path in files}


def _name(path: pathlib.Path) -> str:
    """Returns a path without the name of a folder of outputs, which depends on the engine."""
    parts = list(path.parts)
    if parts[0] == "generations":
        parts[1] = "*"
    return "/".join(parts)


def _content(path: pathlib.Path) -> object:
    if path.suffix == ".json":
        return _without_names(json.loads(path.read_bytes()))
    return parquet.read_table(path).to_pydict() if path.suffix == ".parquet" else path.read_bytes()


def _without_names(value: Any) -> Any:
    if isinstance(value, dict):
        named = {key for key in value if key in _NAMES or (key in _WORDS and isinstance(value[key], str))}
        return {key: _without_names(inner) for key, inner in value.items() if key not in named}
    return [_without_names(inner) for inner in value] if isinstance(value, list) else value
