"""The public names, and the main job called from Python."""

import ast
import json
import pathlib
import re
import subprocess
import sys
from typing import Any

import apache_beam as beam
import pytest
from apache_beam.runners.portability.fn_api_runner import FnApiRunner

import calm_beam as calm
from calm_beam import transforms
from calm_beam.errors import UsageError
from calm_beam.launch.cli import main
from tests.calm_beam.exits.measures import own_measures
from tests.pipelines import SHORT_FLAGS, id_rows, text_rows, write_model, write_rows, write_vocabulary

_NAMES = {
    "Answer",
    "CalmBeamError",
    "ContinuousGenerator",
    "ExitRule",
    "Generator",
    "Guarantee",
    "LossProbe",
    "LossSums",
    "Manifest",
    "RiskMonitor",
    "RiskTest",
    "__version__",
    "calibrate",
    "certify",
    "control_risk",
    "generate",
    "grid",
    "load_checkpoint",
    "open_vocabulary",
    "read_manifest",
    "suitability",
    "verify",
}
_TRANSFORMS = {
    "Calibrate",
    "ControlRisk",
    "EarlyExitModelHandler",
    "Generate",
    "MonitorRisk",
    "NamedPrompt",
    "ReadExamples",
    "ReadGenerations",
    "ReadPrompts",
    "SampledLosses",
    "SettingOutput",
    "ShardPrompts",
    "SumLosses",
    "Sweep",
    "SweepWith",
    "WriteManifest",
    "require_answer",
}
_STUB = pathlib.Path(calm.__file__).with_suffix(".pyi")
_THRESHOLDS = (0.9, 0.5, 0.2, 0.05, 0.0)
# The same as in SHORT_FLAGS.
_SMALL: dict[str, Any] = {"max_input_length": 32, "max_decode_length": 6, "batch_size": 4, "num_shards": 3}


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> pathlib.Path:
    """A folder with a model without a vocabulary, and rows of ids for it."""
    folder = tmp_path_factory.mktemp("public")
    write_model(folder / "model")
    write_rows(folder / "rows.jsonl", id_rows(20))
    return folder


def test_the_names_are_these() -> None:
    """The package's public names are exactly these, since users see every change."""
    assert set(dir(calm)) == _NAMES
    assert all(getattr(calm, name).__doc__ for name in _NAMES - {"__version__"})
    assert all(hasattr(transforms, name) for name in _TRANSFORMS)
    assert all(getattr(transforms, name).__doc__ for name in _TRANSFORMS)
    with pytest.raises(AttributeError, match="no attribute 'calibrat'"):
        getattr(calm, "calibrat")  # noqa: B009 - so that type checkers do not find it first


def test_the_document_lists_all() -> None:
    """docs/python.md has every public name, and all their methods."""
    text = (pathlib.Path(__file__).parents[1] / "docs" / "python.md").read_text(encoding="utf-8")
    rows = [line.split("|")[1] for line in text.splitlines() if line.startswith("| `")]
    named = {name for row in rows for name in re.findall(r"`(\w+)", row)}
    assert named == _NAMES | _TRANSFORMS


def test_type_checkers_see_the_same() -> None:
    """The stub has the package's names, from the modules that define them."""
    imports = {
        alias.asname: (node.module, alias.name)
        for node in ast.walk(ast.parse(_STUB.read_text()))
        if isinstance(node, ast.ImportFrom)
        for alias in node.names
    }
    places = {name: tuple(place.split(":")) for name, place in vars(calm)["_PUBLIC"].items()}
    assert {name: (f"calm_beam.{module}", attribute) for name, (module, attribute) in imports.items()} == places


def test_names_are_loaded_when_they_are_used() -> None:
    """Reading a manifest by the package's own name loads the standard library only."""
    code = "import sys, calm_beam; calm_beam.read_manifest; print({'numpy', 'jax', 'apache_beam'} & set(sys.modules))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == "set()\n"


def test_the_function_does_what_the_command_does(place: pathlib.Path, tmp_path: pathlib.Path) -> None:
    """From Python, the main job writes the command's manifest and risk table, byte for byte but for the date."""
    model, data = place / "model", place / "rows.jsonl"
    asked = ["--consistency=textual,risk", "--metric=token_f1", "--delta=0.3,0.6", "--epsilon=0.1"]
    where = [f"--checkpoint={model}", f"--data={data}", f"--output={tmp_path / 'command'}"]
    assert main(["calibrate", *where, *SHORT_FLAGS, *asked]) == 0
    manifest = calm.calibrate(
        model=model,
        data=str(data),
        guarantees=[
            calm.Guarantee(consistency, "token_f1", delta=delta, epsilon=0.1)
            for consistency in ("textual", "risk")
            for delta in (0.3, 0.6)
        ],
        thresholds=_THRESHOLDS,
        output=tmp_path / "call",
        **_SMALL,
    )
    assert manifest == calm.read_manifest(tmp_path / "call" / "manifest.json")
    tables = [(tmp_path / name / "risk_table.csv").read_bytes() for name in ("command", "call")]
    assert tables[0] == tables[1]
    assert _undated(tmp_path / "command") == _undated(tmp_path / "call")


def _undated(output: pathlib.Path) -> dict[str, object]:
    content = json.loads((output / "manifest.json").read_text())
    del content["created"], content["digest"]
    return content


def test_transforms_in_a_pipeline_of_ones_own(place: pathlib.Path, tmp_path: pathlib.Path) -> None:
    """A user's pipeline runs the steps of the main job, and its sweep is calibrated again without them."""
    output = str(tmp_path / "out")
    with beam.Pipeline(runner=FnApiRunner()) as pipeline:
        _ = (
            pipeline
            | transforms.ReadExamples(str(place / "rows.jsonl"), num_shards=3)
            | transforms.Sweep(
                model=str(place / "model"),
                exits=calm.ExitRule(confidence="softmax"),
                thresholds=calm.grid(0.25),
                output=output,
                max_input_length=32,
                max_decode_length=6,
                batch_size=4,
            )
            | transforms.Calibrate([calm.Guarantee("textual", "token_f1", delta=0.5, epsilon=0.1)])
            | transforms.WriteManifest(output)
        )
    first = calm.read_manifest(f"{output}/manifest.json")
    again = tmp_path / "again"
    with beam.Pipeline(runner=FnApiRunner()) as pipeline:
        _ = (
            pipeline
            | transforms.ReadGenerations(output)
            | transforms.Calibrate([calm.Guarantee("textual", "edit_distance", delta=0.5, epsilon=0.1)], joint=True)
            | transforms.WriteManifest(str(again))
        )
    second = calm.read_manifest(again / "manifest.json")
    assert first.data == second.data
    assert [entry.metric for entry in (*first.calibrations, *second.calibrations)] == ["token_f1", "edit_distance"]
    assert second.plan is not None
    assert second.plan.joint_epsilon == 0.1


def test_steps_say_what_they_need(place: pathlib.Path, tmp_path: pathlib.Path) -> None:
    """A step after a wrong one, or into a folder with a result, is refused before anything runs."""
    sweep = transforms.Sweep(model=str(place / "model"), output=str(tmp_path / "out"))
    guarantee = calm.Guarantee("textual", "token_f1", delta=0.5)
    pipeline = beam.Pipeline(runner=FnApiRunner())
    numbers = pipeline | beam.Create([1])
    with pytest.raises(UsageError, match="Sweep takes what ReadExamples gives"):
        _ = (numbers, numbers) | sweep
    with pytest.raises(UsageError, match="Calibrate takes what Sweep or ReadGenerations gives"):
        _ = numbers | transforms.Calibrate([guarantee])
    with pytest.raises(UsageError, match=r"^data is missing: files with the examples, or seqio_task\.$"):
        calm.calibrate(model=place / "model", output=tmp_path / "out")
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "manifest.json").write_text("{}")
    with pytest.raises(UsageError, match="holds a manifest already"):
        _ = pipeline | transforms.ReadExamples(str(place / "rows.jsonl")) | "SweepAgain" >> sweep
    assert {path.name for path in (tmp_path / "out").iterdir()} == {"manifest.json"}


def test_a_limit_of_failures_belongs_to_counting_them(tmp_path: pathlib.Path) -> None:
    """A failure limit is refused if the first failure ends the run, not silently dropped."""
    with pytest.raises(UsageError, match=r"^max_failures belongs to on_error='worst_case', which is missing\.$"):
        calm.calibrate(max_failures=3, output=tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_a_guarantee_is_checked_when_it_is_made() -> None:
    """An invalid guarantee is refused when it is made."""
    with pytest.raises(ValueError, match="delta must be in"):
        calm.Guarantee("textual", "rouge_l", delta=5)
    with pytest.raises(ValueError, match="consistency must be one of textual, risk"):
        calm.Guarantee("textal", "rouge_l", delta=0.1)
    with pytest.raises(ValueError, match="is for losses in"):
        calm.Guarantee("risk", "rouge_l", delta=0.1, loss="signed", p_value="hoeffding_bentkus")
    assert calm.Guarantee("risk", "rouge_l", delta=0.1, p_value="hoeffding_bentkus").planned().objective.loss == "relu"


def test_a_measure_of_ones_own_all_the_way(tmp_path: pathlib.Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A user's confidence measure in a file is swept, calibrated, reported and served; no other code names it."""
    vocabulary = write_vocabulary(tmp_path / "vocabulary.model")
    model = write_model(tmp_path / "model", vocabulary=vocabulary)
    data = write_rows(tmp_path / "rows.jsonl", text_rows(20))
    name = f"{own_measures.__name__}:largest_logit"
    manifest = calm.calibrate(
        model=model,
        data=str(data),
        guarantees=[calm.Guarantee("textual", "token_f1", delta=0.9, epsilon=0.5)],
        exits=calm.ExitRule(confidence=name),
        thresholds=_THRESHOLDS,
        output=tmp_path / "out",
        **_SMALL,
    )
    assert manifest.decode.confidence == name
    assert manifest.decode.engine is not None
    assert (f"{name} is computed by JAX" in capsys.readouterr().err) == (manifest.decode.engine.name == "native")
    assert main(["report", f"--calibration={tmp_path / 'out'}", f"--confidence={name}"]) == 0
    assert name in (tmp_path / "out" / "report.html").read_text()
    generator = calm.Generator.from_manifest(tmp_path / "out" / "manifest.json", model, confidence=name)
    answer = generator.generate("the cat sees 0")
    assert answer.exit_layers
