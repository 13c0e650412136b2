"""The benchmark of accelerators, which also runs on a CPU."""

import itertools
import json
import pathlib
import subprocess
import sys
from collections.abc import Callable

import pytest

from benchmarks.accelerator import __main__ as accelerator
from benchmarks.accelerator.part import Case, Clock
from benchmarks.programs import MODELS
from calm_beam.precision import DTYPES

_ROOT = pathlib.Path(__file__).resolve().parents[1]


@pytest.mark.slow
def test_every_part_measures_something(tmp_path: pathlib.Path) -> None:
    """No case fails, and every way of deciding gives the tokens of full logits."""
    found = tmp_path / "found.json"
    assert accelerator.main(["--quick", "--seconds=1800", f"--json={found}"]) == 0
    cases = json.loads(found.read_text())
    measured = [case for case in cases if "machine" not in case]
    assert {case["part"] for case in measured} == {"programs", "rates", "decisions", "sweeps", "singles", "batches"}
    assert not [case for case in measured if "failed" in case or "left_out" in case]
    # The list that `make accelerators` compiles, of every model in both types.
    programs = [case for case in measured if case["part"] == "programs"]
    assert {(case["model"], case["in"]) for case in programs} == set(itertools.product(MODELS, DTYPES))
    assert {"embeddings", "decisions, softmax"} < {case["program"] for case in programs}
    assert all(case["compile_seconds"] > 0 for case in programs)
    decisions = [case for case in measured if case["part"] == "decisions"]
    assert decisions
    assert all(case["other_tokens"] == 0 for case in decisions)
    assert all(case["share_of_float32_rate"] > 0 for case in decisions)


# The packages that calm-beam needs in addition to JAX, Flax, NumPy and their requirements.
_MISSING = ("apache_beam", "google.protobuf", "pyarrow", "rouge_score", "safetensors", "sentencepiece", "tokenizers")
_RUN_WITHOUT = (
    "import runpy, sys; sys.modules.update(dict.fromkeys({missing})); sys.argv = ['x', '--part={part}', '--quick', "
    "'--seconds=0']; runpy.run_module('benchmarks.accelerator', run_name='__main__')"
)


@pytest.mark.slow
@pytest.mark.parametrize("part", ["decisions", "sweeps", "singles"])
def test_jax_flax_and_numpy_are_enough(part: str) -> None:
    """The first case of a part, which is measured whatever the time, needs no other package."""
    script = _RUN_WITHOUT.format(missing=_MISSING, part=part)
    done = subprocess.run([sys.executable, "-c", script], cwd=_ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    _, first, *_ = (json.loads(line) for line in done.stdout.splitlines())
    assert "failed" not in first
    assert "left_out" not in first


def _raise() -> Case:
    raise RuntimeError("the device is gone")


def test_a_case_that_fails_leaves_the_others() -> None:
    """A case that fails is reported with its reason, and the others run."""
    cases: list[tuple[Case, Callable[[], Case]]] = [({"measured": "a"}, _raise), ({"measured": "b"}, lambda: {"is": 1})]
    assert list(Clock(60).within(iter(cases))) == [
        {"measured": "a", "failed": "RuntimeError: the device is gone"},
        {"measured": "b", "is": 1},
    ]


def test_what_there_is_no_time_for_is_told() -> None:
    """The first case is always measured; cases for which there is no time are listed."""
    cases: list[tuple[Case, Callable[[], Case]]] = [({"measured": name}, lambda: {"is": 1}) for name in "ab"]
    assert list(Clock(0).within(iter(cases))) == [
        {"measured": "a", "is": 1},
        {"measured": "b", "left_out": "no time was left"},
    ]


def test_a_part_that_breaks_down_is_told_and_the_next_one_runs(
    tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """A part that crashes is reported with the results so far, the next one runs, and the status is a failure."""
    stand_in = tmp_path / "python"
    stand_in.write_text(
        f"#!{sys.executable}\n"
        "import os, sys\n"
        "part = next(each for each in sys.argv if each.startswith('--part='))[7:]\n"
        """print('{"measured": "%s", "seconds": 0.5}' % part, flush=True)\n"""
        "if part == 'rates':\n"
        "    print('out of memory', end='', file=sys.stderr, flush=True)\n"
        "    os._exit(3)\n"
    )
    stand_in.chmod(0o755)
    monkeypatch.setattr(sys, "executable", str(stand_in))
    found = tmp_path / "found.json"
    assert accelerator.main(["--quick", "--parts=rates,decisions", f"--json={found}"]) == 1
    assert json.loads(found.read_text()) == [
        {"part": "rates", "measured": "rates", "seconds": 0.5},
        {"part": "rates", "measured": "rates", "failed": "ended with 3: out of memory"},
        {"part": "decisions", "measured": "decisions", "seconds": 0.5},
    ]
    assert "1 failed" in capsys.readouterr().out


def test_a_part_that_hangs_is_stopped(
    tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """A part that hangs is stopped and reported after one and a half times its time."""
    stand_in = tmp_path / "python"
    stand_in.write_text(f"#!{sys.executable}\nimport time\ntime.sleep(600)\n")
    stand_in.chmod(0o755)
    monkeypatch.setattr(sys, "executable", str(stand_in))
    assert accelerator.main(["--parts=rates", "--seconds=0.5"]) == 1
    assert "killed after 1 s" in capsys.readouterr().out


def test_unknown_parts_are_refused(capsys: pytest.CaptureFixture[str]) -> None:
    """An unknown part is refused with the names of the known ones."""
    with pytest.raises(SystemExit):
        accelerator.main(["--parts=rates,speed"])
    assert "speed is none of programs, rates, decisions, sweeps, singles, batches" in capsys.readouterr().err
