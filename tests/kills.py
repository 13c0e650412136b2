"""Runs of `calm-beam calibrate` and `generate` that are killed at random moments, and resumed.

    python -m tests.kills --target=worker --kills=20 [--sequential]
    python -m tests.kills --target=worker --kills=20 --command=generate

A run is killed with SIGKILL, which no process can answer: the launcher, or one of two worker processes. By itself or
with `--resume` on the second call, it has to write the files of an uninterrupted run, to the byte but for its time. In
between there is no manifest or mark of success, or a complete one.
"""

import abc
import argparse
import contextlib
import dataclasses
import gzip
import itertools
import json
import os
import pathlib
import random
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence

from calm_beam.inputs.demo import embedded
from calm_beam.manifest import read_manifest
from calm_beam.outputs import read_answers
from tests.answers import write_embedded_manifest
from tests.pipelines import id_rows, without_time, write_model, write_rows

_ENTRY = "from calm_beam.launch.cli import entry_point; entry_point()"
_EXAMPLES = 60
_PROMPTS = 96
SHARDS = 12
# Slow enough that a kill meets decoding, and that shards are finished one by one.
_DECODING = ("--thresholds=0.9,0.5,0.2,0", "--max_input_length=32", "--max_decode_length=48", "--batch_size=1")
_ASKED = ("--consistency=textual,risk", "--metric=token_f1", "--delta=0.3,0.6", "--epsilon=0.1")
# Stops before the end, after some rounds.
_SEQUENTIAL = ("--sequential", "--round_examples=8", "--stop_at_threshold=0.9", "--sweep=lazy")
_PROCESSES = ("--direct_num_workers=2", "--direct_running_mode=multi_processing")
# Far more than a run takes: a runner that hangs is a separate outcome.
_LONGEST = 400.0


@dataclasses.dataclass(frozen=True)
class Outcome:
    """The result of a run that was killed.

    Attributes:
      after: Finished shards that the kill waited for, and then how many seconds.
      first: Exit status of the killed run; None if it hung and had to be killed altogether.
      shards: Finished shards that it left.
      had_result: Whether it had written its manifest.
      second: Exit status of the same call with `--resume`.
    """

    after: tuple[int, float]
    first: int | None
    shards: int
    had_result: bool
    second: int


class KillBench(abc.ABC):
    """A command, its input, and the output of an uninterrupted run.

    Attributes:
      parts: Glob of the shards that a run has finished, below its output.
      begun: Glob of the files that exist once a run loads its model.
      result: File that exists once a run has a result.
    """

    parts: str
    begun: str
    result: str

    def __init__(self, folder: pathlib.Path, target: str) -> None:
        """Runs once without a kill; `target` is `launcher` or `worker`."""
        self._folder, self._target = folder, target
        self._whole = folder / f"whole-{target}"
        assert self._start(self._whole).wait(_LONGEST) == 0, (folder / f"{self._whole.name}.log").read_text()

    @abc.abstractmethod
    def command(self, output: pathlib.Path) -> list[str]:
        """Returns the command that writes to a folder."""

    @abc.abstractmethod
    def check(self, output: pathlib.Path) -> None:
        """Checks that a result equals that of the uninterrupted run."""

    def kill(self, name: str, *, shards: int, seconds: float) -> Outcome:
        """Kills a run so many seconds after it has finished so many shards, resumes it, and checks the result."""
        output = self._folder / name
        process = self._start(output)
        while process.poll() is None and len(list(output.glob(self.parts))) < shards:
            time.sleep(0.005)
        if not shards:
            # The folder then exists, and the model is being loaded.
            while process.poll() is None and not list(output.glob(self.begun)):
                time.sleep(0.005)
        time.sleep(seconds)
        # Beam starts workers through a shell, whose end they would survive.
        workers = [pid for pid in children(process.pid) if not children(pid)]
        victims = [process.pid] if self._target == "launcher" else workers
        if victims:
            _kill(random.Random(name).choice(victims))
        first: int | None
        try:
            first = process.wait(_LONGEST)
        except subprocess.TimeoutExpired:
            first = None
        for pid in [*children(process.pid), process.pid] if first is None else []:
            _kill(pid)
        process.wait()
        left = len(list(output.glob(self.parts)))
        had_result = (output / self.result).exists()
        if had_result:
            self.check(output)
        second = self._start(output, "--resume").wait(_LONGEST)
        assert second == 0, (output.parent / f"{name}.log").read_text()
        self.check(output)
        return Outcome((shards, round(seconds, 2)), first, left, had_result, second)

    def _start(self, output: pathlib.Path, *flags: str) -> subprocess.Popen[bytes]:
        processes = _PROCESSES if self._target == "worker" else ()
        # Compilation is most of the time, and not tested here.
        cache = {
            "JAX_COMPILATION_CACHE_DIR": str(self._folder / "compiled"),
            "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0",
        }
        with open(self._folder / f"{output.name}.log", "ab") as log:
            return subprocess.Popen(
                [sys.executable, "-c", _ENTRY, *self.command(output), *processes, *flags],
                stdout=log,
                stderr=log,
                env={**os.environ, **cache},
            )


class CalibrationBench(KillBench):
    """Calibrations of a tiny model."""

    parts = "generations/*/*.parquet"
    begun = "generations/*/decode.json"
    result = "manifest.json"

    def __init__(self, folder: pathlib.Path, target: str, *, is_sequential: bool = False) -> None:
        """Writes model and data, and runs once without a kill."""
        self._also = _SEQUENTIAL if is_sequential else ()
        self._model = write_model(folder / "model")
        self._data = write_rows(folder / "rows.jsonl", id_rows(_EXAMPLES))
        super().__init__(folder, target)

    def command(self, output: pathlib.Path) -> list[str]:
        """Returns the command that writes to a folder."""
        paths = [f"--checkpoint={self._model}", f"--data={self._data}", f"--num_shards={SHARDS}"]
        return ["calibrate", f"--output={output}", *paths, *_DECODING, *_ASKED, *self._also]

    def check(self, output: pathlib.Path) -> None:
        """Checks that a result equals the uninterrupted run's, to the byte but for its time."""
        table = "risk_table.csv"
        assert (output / table).read_bytes() == (self._whole / table).read_bytes()
        manifest = read_manifest(output / "manifest.json")
        assert without_time(manifest) == without_time(read_manifest(self._whole / "manifest.json"))
        assert manifest.data.examples == _EXAMPLES or (self._also and 0 < manifest.data.examples < _EXAMPLES)
        names = {path.name for path in output.rglob("*") if path.is_file() and "report.html" not in path.name}
        assert not [name for name in names if name.startswith(".")]
        # Reports are made after results, and are no part of them.
        here = {path.name for path in output.iterdir() if "report.html" not in path.name}
        assert here == {"generations", "manifest.json", "plans", table}


class AnswersBench(KillBench):
    """Answers of the demo model to prompts of the demo calibration set, some of them broken."""

    parts = "**/answers-*.parquet"
    begun = "generate.json"
    result = "complete.json"

    def __init__(self, folder: pathlib.Path, target: str) -> None:
        """Writes manifest and prompts, and runs once without a kill."""
        write_embedded_manifest(folder / "served.json")
        with gzip.open(embedded.CALIBRATION_SET, "rt", encoding="utf-8") as file:
            rows = [json.loads(line) for line in itertools.islice(file, _PROMPTS)]
        self._ids = {row["id"] for row in rows} | {"broken"}
        # The vocabulary does not have this id: listed as failed.
        self._data = write_rows(folder / "prompts.jsonl", [*rows, {"id": "broken", "input_ids": [10**6]}])
        super().__init__(folder, target)

    def command(self, output: pathlib.Path) -> list[str]:
        """Returns the command that writes to a folder."""
        paths = [f"--manifest={self._folder / 'served.json'}", f"--checkpoint={embedded.MODEL}"]
        # One batch size and one form of the head, since both change the last bits of confidences.
        fixed = ["--batch_size=4", "--exit_head=exact", f"--num_shards={SHARDS}"]
        # Of the two forms, the one that is derived from the other.
        form = "jsonl" if self._target == "worker" else "parquet"
        asked = ["--on_error=list", "--probe_share=20%", f"--output_format={form}"]
        return ["generate", *paths, f"--input={self._data}", f"--output={output}/", *fixed, *asked]

    def check(self, output: pathlib.Path) -> None:
        """Checks that every prompt was answered once or has failed, and that all files are the uninterrupted run's."""
        assert _contents(output) == _contents(self._whole)
        failed = [json.loads(line)["id"] for line in (output / "failures.jsonl").read_text().splitlines()]
        answered = [row["id"] for row in read_answers(str(output))]
        assert failed == ["broken"]
        assert len(answered) == len(set(answered))
        assert {*answered, *failed} == self._ids


def _contents(folder: pathlib.Path) -> dict[str, bytes]:
    return {path.relative_to(folder).as_posix(): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def _kill(pid: int) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.kill(pid, signal.SIGKILL)


def children(pid: int) -> list[int]:
    """Returns the processes that a process has started, directly or indirectly."""
    parents: dict[int, int] = {}
    for stat in pathlib.Path("/proc").glob("[0-9]*/stat"):
        try:
            # The name in parentheses may hold spaces.
            parents[int(stat.parent.name)] = int(stat.read_text().rpartition(")")[2].split()[1])
        except OSError:
            continue
    found: list[int] = []
    wanted = [pid]
    while wanted:
        parent = wanted.pop()
        below = [child for child, of in parents.items() if of == parent]
        found += below
        wanted += below
    return sorted(found)


def main(argv: Sequence[str] | None = None) -> None:
    """Kills many runs and prints the result of each."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n\n")[0])
    parser.add_argument("--target", choices=("launcher", "worker"), required=True)
    parser.add_argument("--kills", type=int, default=20)
    parser.add_argument("--command", choices=("calibrate", "generate"), default="calibrate")
    parser.add_argument("--sequential", action="store_true", help="kill calibrations that stop when enough is proved")
    parser.add_argument("--seed", type=int, default=0)
    flags = parser.parse_args(argv)
    generator = random.Random(flags.seed)
    with tempfile.TemporaryDirectory(prefix="calm-beam-kills-") as folder:
        bench = (
            AnswersBench(pathlib.Path(folder), flags.target)
            if flags.command == "generate"
            else CalibrationBench(pathlib.Path(folder), flags.target, is_sequential=flags.sequential)
        )
        for index in range(flags.kills):
            shards, seconds = generator.randint(0, SHARDS - 1), generator.uniform(0, 0.3)
            print(bench.kill(f"run-{index}", shards=shards, seconds=seconds), flush=True)


if __name__ == "__main__":
    main()
