"""Tutorials and how-to pages: all their commands and code run, on the models that they name or on tiny ones."""

import contextlib
import csv
import gzip
import io
import json
import pathlib
import re
import shutil
import sys
from collections.abc import Iterator
from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest

from calm_beam.exits.measures import measure_named
from calm_beam.inputs.demo import embedded
from calm_beam.metrics.registry import get_metric
from calm_beam.serving import Generator, LossProbe
from tests.builders import build_arrays, write_hugging_face
from tests.calm_beam.checkpoints.decoder_only_folders import write_decoder_only
from tests.calm_beam.model.llama.builders import write_word_tokenizer
from tests.page_runs import CONFIG, run, run_shortened, shortened, write_checkpoint, write_place
from tests.snippets import ROOT, blocks, commands, own_commands

_DOCS = ROOT / "docs"


def _is_what_was_found(page: pathlib.Path, demo: pathlib.Path, *, entries: int) -> None:
    """Checks that a page shows the head of the printed text, and its result for the given number of entries."""
    printed = (demo / "printed.txt").read_text(encoding="utf-8")
    start = printed.index("Lowest threshold")
    head = printed[start : printed.index("─", start)]
    assert "(probability 95 %)" in head
    assert "".join(f"{line.rstrip()}\n" for line in head.splitlines()[:-1]) in _text(page)
    content = json.loads((demo / "demo" / "manifest.json").read_text(encoding="utf-8"))
    found = content["calibrations"][:entries]
    row = (
        r"^ (textual|risk) +([\d.]+) +(never exit|[\d.]+) +([\d.]+) +\d+% +[+-]?\d+% +([\d.]+) +[\d.]+ \(p = [\d.]+\)$"
    )
    shown = re.findall(row, _text(page), re.MULTILINE)
    assert len(shown) == entries
    for entry, (consistency, delta, threshold, layers, risk) in zip(found, shown, strict=True):
        assert (entry["consistency"], entry["delta"], entry["epsilon"]) == (consistency, float(delta), 0.05)
        assert entry["threshold"] == (None if threshold == "never exit" else float(threshold))
        # Confidences differ in their last digits between processors.
        assert (entry["layers"], entry["risk"]) == (
            pytest.approx(float(layers), abs=0.02),
            pytest.approx(float(risk), abs=0.002),
        )


@pytest.fixture(scope="module")
def demo(tmp_path_factory: pytest.TempPathFactory) -> pathlib.Path:
    """A folder with the calibration of the demo model in `demo`, and the output of the tutorial's first command."""
    folder = tmp_path_factory.mktemp("tutorial")
    first = own_commands(_DOCS / "tutorials" / "demo.md")[0]
    assert first == ["calibrate", "--confidence=softmax", "--output=demo"]
    with pytest.MonkeyPatch.context() as patch, contextlib.redirect_stdout(io.StringIO()) as printed:
        patch.setenv("COLUMNS", "80")
        run(["calibrate", "--confidence=softmax", f"--output={folder / 'demo'}"])
    (folder / "printed.txt").write_text(printed.getvalue(), encoding="utf-8")
    return folder


@pytest.fixture
def place(tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> pathlib.Path:
    """The current folder, with data and a vocabulary."""
    monkeypatch.chdir(tmp_path)
    write_place(tmp_path)
    return tmp_path


@pytest.mark.slow
def test_the_demo_model(
    demo: pathlib.Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """All that the tutorial shows after its first command runs, and its table is the result."""
    monkeypatch.chdir(demo)
    page = _DOCS / "tutorials" / "demo.md"
    for command in own_commands(page)[1:]:
        run(command)
    _is_what_was_found(page, demo, entries=8)
    capsys.readouterr()
    for code in blocks(page, "python"):
        exec(compile(code, str(page), "exec"), {})
    assert "voiture" in capsys.readouterr().out


@pytest.mark.slow
def test_layers_against_quality(demo: pathlib.Path, tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The tutorial about the paper's figure runs; its calibration is that of the first tutorial, under another name."""
    monkeypatch.chdir(tmp_path)
    for command in own_commands(_DOCS / "tutorial.md"):
        if command == ["calibrate", "--confidence=softmax", "--output=tutorial/calibration"]:
            shutil.copytree(demo / "demo", "tutorial/calibration")
        else:
            run(shortened(command) if "--experiment=tradeoff" in command else command)
    assert pathlib.Path("tutorial/tradeoff.svg").is_file()


@pytest.mark.slow
def test_the_readme(place: pathlib.Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    """README's commands run in order, in one folder, and its example output is the first command's."""
    (place / "data").mkdir()
    (place / "calibration-0.jsonl.gz").rename(place / "data" / "rows.jsonl.gz")
    write_checkpoint(place / "checkpoints" / "my_t5")
    page = ROOT / "README.md"
    first, *others = own_commands(page)
    assert first == ["calibrate", "--output=calibration"]
    monkeypatch.setenv("COLUMNS", "80")
    run(first)
    _is_of_the_risk_table(_text(page), place / "calibration", printed=capsys.readouterr().out)
    for command in others:
        run(shortened(command))


def _is_of_the_risk_table(page: str, output: pathlib.Path, *, printed: str) -> None:
    """Checks that a page has the printed head, and a swept row, whichever is the fastest on this machine."""
    lines = [line.rstrip() for line in printed.splitlines()]
    start = next(place for place, line in enumerate(lines) if line.startswith("Cheapest variant and threshold"))
    rule = next(place for place, line in enumerate(lines) if place > start and "───" in line)
    # The width of the last column depends on what was the fastest here.
    head = [word for line in lines[start:rule] for word in line.split()]
    assert " ".join(head) in " ".join(page.split())
    (shown,) = re.findall(
        r"^ (textual) +([\d.]+) +([\d.]+) ([a-z]) +([\d.]+) +\d+% +[-+]\d+% +([\d.]+) +[\d.]+(?: [a-z])? "
        r"\(p = [\d.]+\)$",
        page,
        re.MULTILINE,
    )
    consistency, delta, threshold, letter, layers, loss = shown
    (exits,) = re.findall(rf"^Exits: .*\b{letter} (\w+), from layer (\d) in steps of (\d)", page, re.MULTILINE)
    measure, lowest, interval = exits
    with open(output / "risk_table.csv", encoding="utf-8", newline="") as file:
        (row,) = [
            row
            for row in csv.DictReader(file)
            if (row["consistency"], row["confidence"], row["min_exit_layer"], row["exit_interval"])
            == (consistency, measure, lowest, interval)
            and (float(row["delta"]), float(row["threshold"])) == (float(delta), float(threshold))
        ]
    # Confidences differ in their last digits between processors.
    assert float(row["layers"]) == pytest.approx(float(layers), abs=0.02)
    assert float(row["risk"]) == pytest.approx(float(loss), abs=0.002)
    assert float(row["risk"]) < float(delta)


@pytest.mark.slow
def test_a_t5x_checkpoint(place: pathlib.Path) -> None:
    """The tutorial's commands lead from a T5X checkpoint to answers and back."""
    write_checkpoint(place / "checkpoints" / "my_t5")
    run_shortened(_DOCS / "tutorials" / "t5x.md")
    assert pathlib.Path("t5x_model/checkpoint_5000/checkpoint").is_file()


@pytest.mark.slow
def test_a_hugging_face_checkpoint(place: pathlib.Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The commands for Hugging Face folders, a T5's and a Llama's, run except the downloads."""
    page = _DOCS / "tutorials" / "hugging-face.md"
    write_decoder_only(place / "my_llama", vocab_size=40, eos_token_id=2)
    write_word_tokenizer(place / "my_llama" / "tokenizer.json", 40, ends=(2,))
    write_hugging_face(place / "my_t5", CONFIG, build_arrays(CONFIG, 0))
    shutil.copy("sentencepiece.model", "my_t5/spiece.model")
    others = [words[:2] for words in commands(page) if words[0] != "calm-beam"]
    assert others == [["hf", "download"], ["hf", "download"], ["pip", "install"]]
    run_shortened(page)
    capsys.readouterr()
    for code in blocks(page, "python"):
        exec(compile(code, str(page), "exec"), {})
    assert capsys.readouterr().out


@pytest.mark.slow
def test_serving_in_a_pipeline(
    demo: pathlib.Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The command answers prompts of files, and the page's pipeline answers one."""
    monkeypatch.chdir(demo)
    (demo / "prompts").mkdir()
    (demo / "prompts" / "some.jsonl.gz").write_bytes(gzip.compress(b'{"input": "Do they want to repair their car?"}\n'))
    page = _DOCS / "how-to" / "serve-in-a-pipeline.md"
    for command in own_commands(page):
        run(command)
    (code,) = blocks(page, "python")
    exec(compile(code, str(page), "exec"), {})
    assert "voiture" in capsys.readouterr().out


@pytest.mark.slow
def test_the_page_about_serving(
    demo: pathlib.Path, tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The serving page answers a prompt and prompts of files, and monitors their losses."""
    monkeypatch.chdir(tmp_path)
    shutil.copytree(demo / "demo", "demo")
    (tmp_path / "prompts").mkdir()
    text = "Do they want to repair their car?"
    (tmp_path / "prompts" / "some.jsonl.gz").write_bytes(gzip.compress(f'{{"input": "{text}"}}\n'.encode()))
    generator = Generator.from_manifest("demo/manifest.json", str(embedded.MODEL), consistency="textual", delta=0.05)
    LossProbe(generator, "losses.jsonl", share=1.0, salt="").observe("1", text, answer=generator.generate(text))
    for command in own_commands(_DOCS / "serving.md"):
        run(command)
    assert capsys.readouterr().out.count("voiture") >= 1
    assert (tmp_path / "answers" / "complete.json").is_file()
    assert (tmp_path / "monitor.json").is_file()


@pytest.fixture
def module_folder(tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[pathlib.Path]:
    """A folder whose modules can be imported, and are forgotten afterwards."""
    monkeypatch.syspath_prepend(str(tmp_path))
    yield tmp_path
    for name in ("my_measures", "my_metrics"):
        sys.modules.pop(name, None)


def _written(page: str, folder: pathlib.Path) -> None:
    """Writes a page's module under the name in its first line."""
    (code,) = blocks(_DOCS / "how-to" / page, "python")
    (folder / code.splitlines()[0].removeprefix("# ")).write_text(code)


def test_a_measure_of_ones_own(module_folder: pathlib.Path) -> None:
    """The page's measure is accepted, and its confidence grows with the margin."""
    _written("add-a-measure.md", module_folder)
    confidences = measure_named("my_measures:margin").confidence(jnp.array([[1.0, 0.9, 0.0], [9.0, 0.0, 1.0]]))
    assert 0 <= confidences[0] < confidences[1] <= 1


def test_measures_of_the_page_about_them(module_folder: pathlib.Path) -> None:
    """Both measures of docs/measures.md, of logits and of states, are accepted."""
    _written("../measures.md", module_folder)
    of_logits, of_states = (measure_named(f"my_measures:{name}") for name in ("margin", "small_change"))
    confidences = of_logits.confidence(jnp.array([[1.0, 0.9, 0.0], [9.0, 0.0, 1.0]]))
    assert 0 <= confidences[0] < confidences[1] <= 1
    below = jnp.array([[1.0, 1.0], [1.0, 1.0]])
    confidences = of_states.confidence(jnp.array([[3.0, 0.0], [1.0, 1.1]]), below)
    assert 0 <= confidences[0] < confidences[1] <= 1


def test_a_metric_of_ones_own(module_folder: pathlib.Path) -> None:
    """The page's metric is accepted, and gives the stated scores."""
    _written("add-a-metric.md", module_folder)
    metric = get_metric("my_metrics:same_first_word")
    assert [metric("a cat", [text]) for text in ("a dog", "the cat", "a cat")] == [1, 0, 1]


@pytest.mark.parametrize(
    ("page", "printed"),
    [
        ("how-to/add-a-p-value.md", "wsr"),
        ("how-to/add-a-checkpoint-format.md", "T5Config"),
        ("explanation/integer-sums.md", ""),
    ],
)
def test_code_of_pages(page: str, printed: str, place: pathlib.Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Code blocks that need no context run unchanged."""
    names: dict[str, Any] = {"np": np}
    for code in blocks(_DOCS / page, "python"):
        exec(compile(code, page, "exec"), names)
    assert printed in capsys.readouterr().out


def _text(page: pathlib.Path) -> str:
    return page.read_text(encoding="utf-8")
