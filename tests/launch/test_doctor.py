"""`calm-beam doctor`: its checks, messages and status."""

import dataclasses
import importlib.metadata
import json
import pathlib
import sys
from typing import Any

import numpy as np
import pytest

import calm_beam
from calm_beam.decoding.branches import BranchResult, PromptResult
from calm_beam.errors import CalmBeamError
from calm_beam.inputs import read_examples
from calm_beam.inputs.demo import embedded
from calm_beam.launch.cli import main
from calm_beam.launch.doctor import command, machine, trial
from calm_beam.launch.doctor.command import EXTRAS, Installed
from tests.setup_file import read_setup

_TRIAL = trial.Trial(prompt="A cat.", answer="Un chat.", layers=2.5, num_layers=8, difference=None, seconds=3.0)


@pytest.fixture
def quick(monkeypatch: pytest.MonkeyPatch, tmp_path: pathlib.Path) -> pathlib.Path:
    """A doctor that skips its small run, and the folder of the cache."""
    monkeypatch.setattr(trial, "run_trial", lambda: _TRIAL)
    monkeypatch.setattr(machine, "why_unavailable", lambda: "it is not built in")
    monkeypatch.setattr(command, "_NVIDIA_DRIVER", str(tmp_path / "driver"))
    monkeypatch.setenv("CALM_BEAM_CACHE", str(tmp_path / "cache"))
    # However long the folder's name is, its row is one line.
    monkeypatch.setenv("COLUMNS", "300")
    return tmp_path / "cache"


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> dict[str, list[str]]:
    """The requirements of distributions, which a test may set; others are unchanged."""
    requirements: dict[str, list[str]] = {}
    known = importlib.metadata.requires
    monkeypatch.setattr(importlib.metadata, "requires", lambda name: requirements.get(name, known(name)))
    return requirements


def _doctor(*flags: str) -> int:
    return main(["doctor", *flags])


@pytest.mark.slow
def test_the_small_run_agrees_here() -> None:
    """Serving the demo model gives what the sweep gave, with fewer layers than all."""
    found = trial.run_trial()
    assert found.difference is None
    assert 1 <= found.layers < found.num_layers == 8
    examples = {each.input: each for each in read_examples(str(embedded.CALIBRATION_SET))}
    assert found.answer in examples[found.prompt].references
    assert found.seconds > 0


def test_all_is_well(quick: pathlib.Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Tables show versions, extras, devices, memory, cache and the small run; the status is 0."""
    quick.mkdir()
    (quick / "kept").write_bytes(b"x" * (3 << 20))
    assert _doctor() == 0
    printed = capsys.readouterr().out
    assert printed.startswith(f"calm-beam {calm_beam.__version__}, Python {sys.version.split()[0]}, ")
    for text in ("apache-beam", importlib.metadata.version("jax"), "paths that begin with gs://", "cpu", "free memory"):
        assert text in printed
    assert "1 file, 3.0 MiB" in printed
    assert "none: it is not built in" in printed
    assert "served as it was swept, 2.5 of 8 layers a token, 3 s" in printed
    assert printed.endswith("Everything is as it should be.\n")


def test_native_code_is_named(
    quick: pathlib.Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The engine is shown with its instruction set, and all that this machine supports."""
    monkeypatch.setattr(machine, "why_unavailable", lambda: None)
    monkeypatch.setattr(machine, "instruction_set", lambda: "avx2")
    monkeypatch.setattr(machine, "instruction_sets_here", lambda: ("avx2", "portable"))
    assert _doctor("--json") == 0
    found = json.loads(capsys.readouterr().out)["native_code"]
    assert found == "avx2, for decoder layers and heads in float32 (here: avx2, portable)"


def test_the_same_for_programs(
    quick: pathlib.Path, asked: dict[str, list[str]], capsys: pytest.CaptureFixture[str]
) -> None:
    """With --json, one object holds the same."""
    asked["calm-beam"] = ["jax>=0.1"]
    assert _doctor("--json") == 0
    found = json.loads(capsys.readouterr().out)
    assert found["calm_beam"] == calm_beam.__version__
    assert found["problems"] == []
    assert found["trial"] == dataclasses.asdict(_TRIAL)
    assert found["installed"]["packages"] == [
        {"name": "jax", "version": importlib.metadata.version("jax"), "asked": ">=0.1", "is_good": True}
    ]
    assert found["cache"] == {"path": str(quick), "files": 0, "size_bytes": 0, "is_writable": True}
    assert [device["platform"] for device in found["devices"]] == ["cpu"] * len(found["devices"])
    assert found["free_bytes"] > 0


def test_packages_that_are_not_as_asked(
    quick: pathlib.Path, asked: dict[str, list[str]], capsys: pytest.CaptureFixture[str]
) -> None:
    """A missing package, or another version, is a problem that says what to install; the status is 1."""
    asked["calm-beam"] = ["numpy<2,>=1", "no-such-package>=3"]
    assert _doctor() == 1
    printed = capsys.readouterr().out
    assert "problem: numpy: another version is installed: pip install 'numpy<2,>=1'." in printed
    assert "problem: no-such-package: it is missing: pip install 'no-such-package>=3'." in printed
    assert "Everything is as it should be." not in printed


def test_extras_name_what_they_lack(asked: dict[str, list[str]]) -> None:
    """An extra without its packages is no problem; nested extras count, and markers are respected."""
    asked["calm-beam"] = [
        'numpy>=1; extra == "plots"',
        'no-such-package; extra == "plots"',
        'other; extra == "plots" and python_version < "3"',
        'rich[gone]; extra == "gguf"',
        "rich",
    ]
    asked["rich"] = ['vanished>=2; extra == "gone"', "pygments"]
    found = Installed.here()
    missing = {extra.name: extra.missing for extra in found.extras}
    assert missing == {"gguf": ("vanished",), "plots": ("no-such-package",)}
    assert [package.name for package in found.packages] == ["rich"]


def test_what_is_not_possible_is_said(
    quick: pathlib.Path, asked: dict[str, list[str]], capsys: pytest.CaptureFixture[str]
) -> None:
    """Purposes of missing extras are listed, although nothing is wrong; with all extras there is no list."""
    for package, is_missing in (("no-such-package", True), ("numpy", False)):
        asked["calm-beam"] = [f'{package}; extra == "tokenizers"', "rich"]
        assert _doctor() == 0
        printed = capsys.readouterr().out
        words = "is installed: vocabularies in a tokenizer.json, --chat_template (tokenizers)."
        assert (words in printed) == is_missing
        assert printed.endswith("Everything is as it should be.\n")


def test_each_package_of_an_extra_is_judged_by_itself(
    quick: pathlib.Path, asked: dict[str, list[str]], capsys: pytest.CaptureFixture[str]
) -> None:
    """Where one package of the extra `metrics` is missing, only its metrics are listed as not possible."""
    asked["calm-beam"] = ['sacrebleu>=999; extra == "metrics"', 'rich; extra == "metrics"', "rich"]
    assert _doctor() == 0
    printed = capsys.readouterr().out
    assert "is installed: the metrics chrf and sentence_bleu, BLEU in evaluate (metrics)." in printed
    asked["calm-beam"] = ['rapidfuzz>=999; extra == "metrics"', "rich"]
    assert _doctor() == 0
    assert "is installed: the metric edit_distance (metrics)." in capsys.readouterr().out


def test_packages_are_printed_before_the_small_run(
    quick: pathlib.Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The small run begins after the tables of packages are printed, and a message says that it does."""
    before: list[str] = []

    def run_trial() -> trial.Trial:
        printed = capsys.readouterr()
        before.extend((printed.out, printed.err))
        return _TRIAL

    monkeypatch.setattr(trial, "run_trial", run_trial)
    assert _doctor() == 0
    out, err = before
    assert "apache-beam" in out
    assert "running the demo model" in err
    assert "JAX device" in capsys.readouterr().out


def test_of_many_packages_that_an_extra_lacks_some_are_named(
    asked: dict[str, list[str]], quick: pathlib.Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Three missing packages of an extra are named, with the number of others; JSON has all of them."""
    asked["calm-beam"] = [f'absent-{letter}; extra == "gguf"' for letter in "abcde"]
    assert _doctor() == 0
    assert "without absent-a, absent-b, absent-c and 2 others" in " ".join(capsys.readouterr().out.split())
    assert _doctor("--json") == 0
    (extra,) = json.loads(capsys.readouterr().out)["installed"]["extras"]
    assert len(extra["missing"]) == 5


def test_every_extra_is_explained() -> None:
    """The doctor explains every extra in setup.py except those for developers."""
    assert EXTRAS.keys() == {name for name in read_setup()["extras_require"] if name not in ("dev", "docs")}


@pytest.mark.parametrize(
    ("error", "message"),
    [
        (CalmBeamError("the model is damaged."), "the small run failed: CalmBeamError: the model is damaged."),
        (RuntimeError("device is gone"), "the small run failed: RuntimeError: device is gone"),
        (ModuleNotFoundError("No module named 'x'", name="x"), "the small run failed: No module named 'x'."),
    ],
)
def test_a_small_run_that_fails(
    error: Exception,
    message: str,
    quick: pathlib.Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """An error in the small run is a problem with the error's message."""

    def fail() -> Any:
        raise error

    monkeypatch.setattr(trial, "run_trial", fail)
    assert _doctor() == 1
    assert f"problem: {message}\n" in capsys.readouterr().out


def test_a_small_run_that_differs(
    quick: pathlib.Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """A difference between serving and the sweep is a problem."""
    monkeypatch.setattr(trial, "run_trial", lambda: dataclasses.replace(_TRIAL, difference="tokens differ"))
    assert _doctor() == 1
    assert "problem: the small run came out wrong: tokens differ.\n" in capsys.readouterr().out


def test_serving_has_no_small_run(
    quick: pathlib.Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """In calm-beam-serving there is no demo model, which is reported and is no problem."""

    def fail() -> Any:
        raise ModuleNotFoundError("No module named 'calm_beam.inputs.demo'", name="calm_beam.inputs.demo")

    monkeypatch.setattr(trial, "run_trial", fail)
    serving = Installed(distribution="calm-beam-serving", packages=(), extras=())
    monkeypatch.setattr(Installed, "here", classmethod(lambda cls: serving))
    assert _doctor() == 0
    assert "none: calm-beam-serving has no model of its own" in capsys.readouterr().out


def test_jax_that_cannot_be_used(
    quick: pathlib.Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """If JAX finds no device, packages are still listed, and the reason is a problem."""

    def fail() -> Any:
        raise RuntimeError("Unable to initialize backend 'tpu'")

    monkeypatch.setattr(machine, "devices", fail)
    assert _doctor() == 1
    printed = capsys.readouterr().out
    assert "apache-beam" in printed
    assert "problem: JAX cannot be used: Unable to initialize backend 'tpu'\n" in printed


def test_a_gpu_that_jax_does_not_see(
    quick: pathlib.Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """A driver without a device is a problem, unless the user chose the CPU."""
    pathlib.Path(command._NVIDIA_DRIVER).touch()
    monkeypatch.setenv("JAX_PLATFORMS", "")
    assert _doctor() == 1
    assert "problem: this machine has an NVIDIA GPU, which JAX does not see" in capsys.readouterr().out
    monkeypatch.setenv("JAX_PLATFORMS", "cpu")
    assert _doctor() == 0


def test_a_cache_that_cannot_be_written(
    quick: pathlib.Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """A cache whose folder cannot be made is a problem, with advice."""
    quick.touch()
    monkeypatch.setenv("CALM_BEAM_CACHE", str(quick / "below"))
    assert _doctor() == 1
    assert f"problem: {quick / 'below'}: cannot be written. Set CALM_BEAM_CACHE" in capsys.readouterr().out


def _result(tokens: list[int], layers: list[int], *, is_finite: bool = True) -> BranchResult:
    return BranchResult(
        tokens=np.array(tokens), exit_layers=np.array(layers), confidences=np.zeros(3), length=3, is_finite=is_finite
    )


def test_differences_in_words() -> None:
    """The first step at which tokens or exit layers differ is named with both values; the branch decides."""
    swept = PromptResult(
        tokens=np.array([[9, 9, 9], [4, 5, 1]]),
        exit_layers=np.array([[8, 8, 8], [2, 3, 8]]),
        confidences=np.zeros((2, 3)),
        lengths=np.array([3, 3]),
        is_finite=True,
    )
    assert trial.difference(swept, _result([4, 5, 1], [2, 3, 8]), lane=1) is None
    assert trial.difference(swept, _result([4, 6, 1], [2, 3, 8]), lane=1) == (
        "tokens differ from step 2 on: 5 swept, 6 served"
    )
    assert trial.difference(swept, _result([4, 5, 1], [2, 3, 4]), lane=1) == (
        "exit_layers differ from step 3 on: 8 swept, 4 served"
    )
    assert trial.difference(swept, _result([4, 5, 1], [2, 3, 8], is_finite=False), lane=1) == (
        "logits are not finite numbers"
    )
