"""The code in README and the examples does what the text says."""

import gzip
import json
import pathlib
import re
import runpy
import textwrap
from typing import Any

import pytest

import calm_beam as calm
from calm_beam.inputs.demo import embedded
from calm_beam.inputs.vocabularies.vocabulary import Vocabulary, open_vocabulary
from calm_beam.manifest import write_manifest
from tests.calm_beam.serving.builders import build_entry, build_served_manifest
from tests.pipelines import text_rows, write_model, write_vocabulary

_ROOT = pathlib.Path(__file__).parents[1]


def _snippets(page: str) -> list[str]:
    return re.findall(r"^```python\n(.*?)^```$", (_ROOT / page).read_text(encoding="utf-8"), re.M | re.S)


_WAYS = (
    ("README.md", "calm.calibrate(", "my_calibration", "rouge_l_unicode"),
    ("docs/python.md", "transforms.WriteManifest(", "calibration", "rouge_l_unicode"),
)


@pytest.mark.parametrize(("page", "way", "output", "metric"), _WAYS, ids=["function", "pipeline"])
def test_ways_to_calibrate(
    page: str, way: str, output: str, metric: str, tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """README's function and docs' pipeline run unchanged and write what they promise, as does the one with progress."""
    (snippet,) = (each for each in _snippets(page) if way in each)
    monkeypatch.chdir(tmp_path)
    (tmp_path / "data").mkdir()
    rows = "".join(json.dumps(row) + "\n" for row in text_rows(6))
    (tmp_path / "data" / "rows.jsonl.gz").write_bytes(gzip.compress(rows.encode()))
    (tmp_path / "checkpoints").mkdir()
    vocabulary = write_vocabulary(tmp_path / "vocabulary.model")
    write_model(tmp_path / "checkpoints" / "my_t5", vocabulary=vocabulary)
    # Pages whose code names the demo's files run as well, in less time.
    monkeypatch.setattr(embedded, "MODEL", tmp_path / "checkpoints" / "my_t5")
    monkeypatch.setattr(embedded, "CALIBRATION_SET", tmp_path / "data" / "rows.jsonl.gz")
    names: dict[str, Any] = {}
    exec(compile(snippet, page, "exec"), names)
    manifest = calm.read_manifest(f"{output}/manifest.json")
    assert [(entry.consistency, entry.metric, entry.delta) for entry in manifest.calibrations] == [
        ("textual", metric, 0.1)
    ]
    assert manifest.data.examples == 6
    for goes_on in (each for each in _snippets(page) if "shown_progress(" in each):
        exec(compile(goes_on, page, "exec"), names)
        assert list(tmp_path.glob("watched/generations/*/complete.json"))


def test_certify_losses(capsys: pytest.CaptureFixture[str]) -> None:
    """The example about losses of any kind proves the safe settings, and no other."""
    runpy.run_path(str(_ROOT / "examples" / "certify_losses.py"), run_name="__main__")
    proved = re.findall(r"delta ([\d.]+) +(\d bits) .* proved safe", capsys.readouterr().out)
    assert proved == [("0.05", "8 bits"), ("0.05", "6 bits"), ("0.1", "8 bits"), ("0.1", "6 bits"), ("0.1", "4 bits")]


def test_batch_inference(tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The example of a pipeline answers every line as the generator does."""
    model = write_model(tmp_path / "model", vocabulary=write_vocabulary(tmp_path / "vocabulary.model"))
    checkpoint = calm.load_checkpoint(str(model))
    vocabulary = Vocabulary(model / "sentencepiece.model", extra_ids=0)
    entries = [build_entry(0.5, delta=delta) for delta in (0.05, 0.1)]
    write_manifest(build_served_manifest(checkpoint, entries, vocabulary=vocabulary), tmp_path / "manifest.json")
    prompts = [row["input"] for row in text_rows(10)]
    (tmp_path / "prompts.txt").write_text("".join(f"{prompt}\n" for prompt in prompts))
    names = {"manifest": "manifest.json", "model": "model", "prompts": "prompts.txt", "answers": "answers"}
    flags = [*(f"--{name}={tmp_path / value}" for name, value in names.items()), "--metric=token_f1", "--delta=0.05"]
    monkeypatch.setattr("sys.argv", ["batch_inference.py", *flags])
    runpy.run_path(str(_ROOT / "examples" / "batch_inference.py"), run_name="__main__")
    lines = [line for path in tmp_path.glob("answers*.jsonl") for line in path.read_text().splitlines()]
    generator = calm.Generator.from_manifest(tmp_path / "manifest.json", model, delta=0.05)
    answers = {prompt: generator.generate(prompt) for prompt in prompts}
    assert sorted(lines) == sorted(
        json.dumps({"prompt": prompt, "answer": answers[prompt].text, "layers_saved": answers[prompt].layers_saved})
        for prompt in prompts
    )


@pytest.mark.slow
def test_the_notebook_runs() -> None:
    """The notebook's cells run from top to bottom, and it is committed without outputs."""
    cells = json.loads((_ROOT / "examples" / "calibrate.ipynb").read_text(encoding="utf-8"))["cells"]
    code = [cell for cell in cells if cell["cell_type"] == "code"]
    assert all(cell["outputs"] == [] for cell in code)
    names: dict[str, Any] = {}
    for cell in code:
        exec(compile(textwrap.dedent("".join(cell["source"])), cell["id"], "exec"), names)
    assert names["manifest"].data.examples == 40
    assert names["answer"].text


def test_streaming(tmp_path: pathlib.Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The example of a stream answers every prompt of it and tells the state of the promise after each window."""
    checkpoint = calm.load_checkpoint(str(embedded.MODEL))
    assert checkpoint.vocabulary_path is not None
    vocabulary = open_vocabulary(checkpoint.vocabulary_path)
    entries = [build_entry(0.5, delta=delta) for delta in (0.05, 0.1)]
    decode = {"max_input_length": 48}
    manifest = build_served_manifest(checkpoint, entries, vocabulary=vocabulary, decode=decode)
    write_manifest(manifest, tmp_path / "manifest.json")
    example = runpy.run_path(str(_ROOT / "examples" / "streaming.py"))
    example["main"]([f"--manifest={tmp_path / 'manifest.json'}", f"--model={embedded.MODEL}", "--delta=0.05"])
    printed = capsys.readouterr().out.splitlines()
    assert sum(line.startswith("answer: ") for line in printed) == 24
    assert [line.partition("losses")[0] for line in printed if line.startswith("window: ")] == [
        "window: delta 0.05, 12 ",
        "window: delta 0.05, 24 ",
    ]
