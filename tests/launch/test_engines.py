"""Two engines on the command line: refusals and messages."""

import pathlib

import pytest

from calm_beam.launch.cli import main
from calm_beam.manifest import read_manifest
from tests.instruction_sets import TUNED, forced
from tests.pipelines import SHORT_FLAGS, id_rows, write_model, write_rows

pytestmark = pytest.mark.skipif(not TUNED, reason="this machine has no native code")


def test_calibrated_by_one_engine_resumed_and_served_by_another(
    tmp_path: pathlib.Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The engine is recorded; --resume needs it, inspect and generate print it, and --exact_engine refuses another."""
    model, output = write_model(tmp_path / "model"), tmp_path / "output"
    data = write_rows(tmp_path / "rows.jsonl", id_rows(30))
    asked = [f"--checkpoint={model}", f"--data={data}", f"--output={output}", *SHORT_FLAGS, "--metric=token_f1"]
    assert main(["calibrate", *asked, "--delta=0.9", "--verbose"]) == 0
    printed = capsys.readouterr()
    engine = read_manifest(output / "manifest.json").engine
    assert engine is not None
    assert (engine.name, engine.instructions) == ("native", TUNED[0])
    assert f"Engine: {engine.in_words()}." in printed.out
    assert "Near ties, of" in printed.out
    assert f"engine: {engine.in_words()}" in printed.err
    served = ["generate", f"--manifest={output}", f"--checkpoint={model}", f"--input={data}"]
    with forced("none"):
        assert main(["inspect", str(output), f"--checkpoint={model}"]) == 0
        said = " ".join(capsys.readouterr().out.split())
        assert f"but {engine.in_words()} was calibrated: outputs differ at near ties" in said
        assert main(served) == 0
        assert f"but {engine.in_words()} was calibrated" in capsys.readouterr().err
        assert main([*served, "--exact_engine"]) == 2
        assert "exact_engine is asked for" in capsys.readouterr().err
    assert main([*served, "--exact_engine"]) == 0
    assert "was calibrated: outputs differ" not in capsys.readouterr().err
    (output / "manifest.json").unlink()
    with forced("none"):
        assert main(["calibrate", *asked, "--delta=0.9", "--resume"]) == 2
        error = capsys.readouterr().err
        assert f"the engine is {engine.in_words()} there, xla (cpu" in error
        assert "--engine=native takes the other" in error
    assert main(["calibrate", *asked, "--delta=0.9", "--resume"]) == 0
